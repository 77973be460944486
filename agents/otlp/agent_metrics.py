"""The agent's metrics of itself, through OpenTelemetry's SDK: sent as OTLP, or shown to Prometheus on loopback.

The SDK keeps the instruments; `requests` encodes what it collects with our own few lines of protobuf, since the SDK's
OTLP exporter would add requests, urllib3 and the generated classes: 4 MiB of memory for three kinds of message.

What the SDK collected in Prometheus' text format 0.0.4, on a port of loopback.

Names as the OpenTelemetry specification maps them: dots become underscores, the unit and `_total` are added.

What the SDK collected as an ExportMetricsServiceRequest: gauges, sums and histograms with explicit bounds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricsData,
    NumberDataPoint,
    Sum,
)
from opentelemetry.sdk.resources import Resource

from agents.node.snapshot import Snapshot
from agents.otlp import messages
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND
from pipeline.model.signals.otel import SCHEMA

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_UNITS = {"s": "seconds", "By": "bytes"}


class Exposition:
    """Serves `/metrics` on 127.0.0.1. Raises ConfigError if the port cannot be had."""

    def __init__(self, port: int, collect: Callable[[], MetricsData | None]) -> None:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, status = (render(collect()).encode(), 200) if self.path == "/metrics" else (b"/metrics\n", 404)
                self.send_response(status)
                self.send_header("Content-Type", MEDIA_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing: a scrape is no news."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Page)
        except OSError as error:
            raise ConfigError(
                f"[opentelemetry] prometheus_port = {port}: {error.strerror}; wanted a port that is free on 127.0.0.1"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def render(data: MetricsData | None) -> str:
    """All metrics, each with HELP and TYPE."""
    lines: list[str] = []
    for found in data.resource_metrics if data else ():
        for scope in found.scope_metrics:
            for metric in scope.metrics:
                lines += _family(metric)
    return "\n".join(lines) + "\n"


def _family(metric: Metric) -> Iterator[str]:
    data, unit = metric.data, _UNITS.get(metric.unit or "", "")
    name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name) + (f"_{unit}" if unit else "")
    monotonic = isinstance(data, Sum) and data.is_monotonic
    name += "_total" if monotonic else ""
    kind = "counter" if monotonic else "histogram" if isinstance(data, Histogram) else "gauge"
    yield f"# HELP {name} {metric.description}"
    yield f"# TYPE {name} {kind}"
    for point in data.data_points:
        if isinstance(point, HistogramDataPoint):
            yield from _buckets(name, point)
        elif isinstance(point, NumberDataPoint):
            yield f"{name}{_labels(point.attributes)} {_format_number(point.value)}"


def _buckets(name: str, point: HistogramDataPoint) -> Iterator[str]:
    below = 0
    for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
        below += count
        label = "+Inf" if bound == float("inf") else _format_number(bound)
        yield f"{name}_bucket{_labels(point.attributes, le=label)} {below}"
    yield f"{name}_sum{_labels(point.attributes)} {_format_number(point.sum)}"
    yield f"{name}_count{_labels(point.attributes)} {point.count}"


def _labels(attributes: Mapping[str, object] | None, **more: str) -> str:
    pairs = {**{key.replace(".", "_"): str(value) for key, value in (attributes or {}).items()}, **more}
    texts = (f'{key}="{_escaped(value)}"' for key, value in pairs.items())
    return "{" + ",".join(texts) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value).removesuffix(".0")


def encode_metrics(data: MetricsData | None, resource: Mapping[str, str | bool], version: str) -> bytes:
    """The request; `resource` stands in place of the SDK's."""
    metrics = [
        messages.metric(metric.name, metric.description or "", metric.unit or "", _encode_data(metric))
        for found in (data.resource_metrics if data else ())
        for scope in found.scope_metrics
        for metric in scope.metrics
    ]
    return messages.request(messages.attributes(1, resource), "fleetpulse", version, SCHEMA, metrics)


def _encode_data(metric: Metric) -> bytes:
    data = metric.data
    if isinstance(data, Gauge):
        return messages.gauge(b"".join(messages.nested(1, _encode_number_point(point)) for point in data.data_points))
    if isinstance(data, Sum):
        points = b"".join(messages.nested(1, _encode_number_point(point)) for point in data.data_points)
        return messages.total(points, data.is_monotonic)
    if isinstance(data, Histogram):
        return messages.histogram(
            b"".join(messages.nested(1, _encode_histogram_point(point)) for point in data.data_points)
        )
    raise TypeError(f"{metric.name}: {type(data).__name__}: wanted Gauge, Sum or Histogram")


def _encode_number_point(point: NumberDataPoint) -> bytes:
    """A NumberDataPoint; whole numbers as such, which all of ours that are have no sign."""
    value = point.value
    body = messages.fixed(6, value) if isinstance(value, int) else messages.double(4, value)
    times = messages.fixed(2, point.start_time_unix_nano or 0) + messages.fixed(3, point.time_unix_nano)
    return times + body + messages.attributes(7, _texts(point.attributes))


def _encode_histogram_point(point: HistogramDataPoint) -> bytes:
    """A HistogramDataPoint."""
    return b"".join(
        (
            messages.fixed(2, point.start_time_unix_nano or 0),
            messages.fixed(3, point.time_unix_nano),
            messages.fixed(4, point.count),
            messages.double(5, point.sum),
            messages.packed_fixed(6, point.bucket_counts),
            messages.packed_doubles(7, point.explicit_bounds),
            messages.double(11, point.min),
            messages.double(12, point.max),
            messages.attributes(9, _texts(point.attributes)),
        )
    )


def _texts(attributes: Mapping[str, object] | None) -> dict[str, str | bool]:
    return {key: str(value) for key, value in (attributes or {}).items()}


BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Of the histogram of looks, in s; chosen: two to a decade, from a file in /proc to a hung driver's deadline."""
Told = Iterable[tuple[Mapping[str, str], float | int | None]]
"""Attributes and value of each point of an instrument."""


class Metrics:
    """Instruments over the newest Snapshot. `send` gets a request per interval; a port of 0 shows nothing."""

    def __init__(
        self,
        resource: Mapping[str, str | bool],
        version: str,
        interval: float,
        send: Callable[[bytes], object] | None,
        prometheus_port: int = 0,
    ) -> None:
        self._resource, self._version, self._send = resource, version, send
        self._interval, self._beat = round(interval * SECOND), -1
        self._now = Snapshot(0)
        self._requests: Mapping[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._reader = InMemoryMetricReader()
        # an empty resource: ours is told in full by `encoded`, and the SDK's would look into the environment again
        self._provider = MeterProvider([self._reader], Resource({}), shutdown_on_exit=False)
        self._instruments()
        self._exposition = Exposition(prometheus_port, self.collect) if prometheus_port else None

    def observe(self, snapshot: Snapshot, requests: Mapping[str, tuple[int, int]] = {}) -> None:
        """The agent after one tick, and each outbox's requests (sent, dropped)."""
        for look in snapshot.results:
            about = {"collector": look.collector}
            self._looks.add(1, {**about, "result": look.result})
            self._took.record(look.took, about)
        self._now, self._requests = snapshot, requests
        if self._send is not None and snapshot.time // self._interval != self._beat:
            self._beat = snapshot.time // self._interval
            self._send(encode_metrics(self.collect(), self._resource, self._version))

    def collect(self) -> MetricsData | None:
        """What the instruments hold now; None before there is anything."""
        with self._lock:
            return self._reader.get_metrics_data()

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()
        self._provider.shutdown()

    def _instruments(self) -> None:
        meter = self._provider.get_meter("fleetpulse", self._version)
        self._looks = meter.create_counter("fleetpulse.agent.results", "{look}", "Looks of the collectors by result")
        self._took = meter.create_histogram(
            "fleetpulse.agent.look.duration",
            "s",
            "How long the collectors' looks took",
            explicit_bucket_boundaries_advisory=BOUNDS,
        )

        def counter(name: str, unit: str, help: str, told: Callable[[], Told]) -> None:
            meter.create_observable_counter(f"fleetpulse.agent.{name}", [_callback(told)], unit, help)

        def gauge(name: str, unit: str, help: str, told: Callable[[], Told]) -> None:
            meter.create_observable_gauge(f"fleetpulse.agent.{name}", [_callback(told)], unit, help)

        counter(
            "restarts",
            "{restart}",
            "Collectors given up and started anew",
            lambda: _by("collector", self._now.restarts),
        )
        gauge("spool.size", "By", "Bytes of the spools on disk", lambda: [({}, self._now.spool_bytes)])
        gauge("spool.wait", "s", "Longest wait for the spool's disk in 10 s", lambda: [({}, self._now.spool_wait)])
        counter("spool.dropped", "{message}", "Messages that the spools lost", lambda: [({}, self._now.dropped)])
        counter("gaps", "{message}", "Messages lost before they were sent", lambda: [({}, self._now.gaps)])
        gauge("sender.unsent", "{message}", "Messages not yet acknowledged", lambda: [({}, self._now.unsent)])
        gauge("sender.lag", "s", "Age of the oldest message not yet acknowledged", lambda: [({}, self._now.lag)])
        counter("ticks.late", "{tick}", "Ticks that began late or were left out", lambda: [({}, self._now.late_ticks)])
        counter("cpu.time", "s", "Processor time of all its processes", lambda: [({}, self._now.cpu_time)])
        gauge("memory.usage", "By", "Proportional set size of all its processes", lambda: [({}, self._now.memory)])
        counter("otlp.sent", "{request}", "OTLP requests delivered", lambda: _requests(self._requests, 0))
        counter("otlp.dropped", "{request}", "OTLP requests lost", lambda: _requests(self._requests, 1))


def _callback(told: Callable[[], Told]) -> Callable[[CallbackOptions], Iterator[Observation]]:
    """For the SDK: one Observation per point that is known."""

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        return (Observation(value, attributes) for attributes, value in told() if value is not None)

    return observe


def _by(key: str, values: Mapping[str, float]) -> Told:
    return [({key: name}, value) for name, value in values.items()]


def _requests(outboxes: Mapping[str, tuple[int, int]], which: int) -> Told:
    return [({"to": name}, counts[which]) for name, counts in outboxes.items()]
