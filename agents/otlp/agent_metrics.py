"""The agent's metrics of itself, through OpenTelemetry's SDK: sent as OTLP, or served to Prometheus on loopback.

The SDK keeps the instruments; their values are encoded here, since the SDK's OTLP exporter would add requests, urllib3
and generated classes: 4 MiB of memory for three kinds of message. The Prometheus page is text format 0.0.4, with names
as the OpenTelemetry specification maps them: dots become underscores, the unit and `_total` are appended.
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


class PrometheusPage:
    """Serves `/metrics` on 127.0.0.1. Raises ConfigError if the port is not free."""

    def __init__(self, port: int, collect: Callable[[], MetricsData | None]) -> None:
        class Page(BaseHTTPRequestHandler):
            """Serves /metrics."""

            def do_GET(self) -> None:
                """Answers with the metrics; 404 for other paths."""
                body, status = (
                    (render_text(collect()).encode(), 200) if self.path == "/metrics" else (b"/metrics\n", 404)
                )
                self.send_response(status)
                self.send_header("Content-Type", MEDIA_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Logs nothing: scrapes are routine."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Page)
        except OSError as error:
            raise ConfigError(
                f"[opentelemetry] prometheus_port = {port}: {error.strerror}; expected a port that is free on 127.0.0.1"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def render_text(data: MetricsData | None) -> str:
    """Returns all metrics, each with HELP and TYPE."""
    lines: list[str] = []
    for found in data.resource_metrics if data else ():
        for scope in found.scope_metrics:
            for metric in scope.metrics:
                lines += _render_family(metric)
    return "\n".join(lines) + "\n"


def _render_family(metric: Metric) -> Iterator[str]:
    data, unit = metric.data, _UNITS.get(metric.unit or "", "")
    name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name) + (f"_{unit}" if unit else "")
    monotonic = isinstance(data, Sum) and data.is_monotonic
    name += "_total" if monotonic else ""
    kind = "counter" if monotonic else "histogram" if isinstance(data, Histogram) else "gauge"
    yield f"# HELP {name} {metric.description}"
    yield f"# TYPE {name} {kind}"
    for point in data.data_points:
        if isinstance(point, HistogramDataPoint):
            yield from _render_buckets(name, point)
        elif isinstance(point, NumberDataPoint):
            yield f"{name}{_render_labels(point.attributes)} {_format_number(point.value)}"


def _render_buckets(name: str, point: HistogramDataPoint) -> Iterator[str]:
    below = 0
    for bound, count in zip((*point.explicit_bounds, float("inf")), point.bucket_counts, strict=True):
        below += count
        label = "+Inf" if bound == float("inf") else _format_number(bound)
        yield f"{name}_bucket{_render_labels(point.attributes, le=label)} {below}"
    yield f"{name}_sum{_render_labels(point.attributes)} {_format_number(point.sum)}"
    yield f"{name}_count{_render_labels(point.attributes)} {point.count}"


def _render_labels(attributes: Mapping[str, object] | None, **more: str) -> str:
    pairs = {**{key.replace(".", "_"): str(value) for key, value in (attributes or {}).items()}, **more}
    texts = (f'{key}="{_escape(value)}"' for key, value in pairs.items())
    return "{" + ",".join(texts) + "}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(value).removesuffix(".0")


def encode_metrics(data: MetricsData | None, resource: Mapping[str, str | bool], version: str) -> bytes:
    """Returns the OTLP request; `resource` replaces the SDK's."""
    metrics = [
        messages.encode_metric(metric.name, metric.description or "", metric.unit or "", _encode_data(metric))
        for found in (data.resource_metrics if data else ())
        for scope in found.scope_metrics
        for metric in scope.metrics
    ]
    return messages.encode_request(messages.encode_attributes(1, resource), "fleetpulse", version, SCHEMA, metrics)


def _encode_data(metric: Metric) -> bytes:
    data = metric.data
    if isinstance(data, Gauge):
        return messages.encode_gauge(
            b"".join(messages.encode_nested(1, _encode_number_point(point)) for point in data.data_points)
        )
    if isinstance(data, Sum):
        points = b"".join(messages.encode_nested(1, _encode_number_point(point)) for point in data.data_points)
        return messages.encode_sum(points, data.is_monotonic)
    if isinstance(data, Histogram):
        return messages.encode_histogram(
            b"".join(messages.encode_nested(1, _encode_histogram_point(point)) for point in data.data_points)
        )
    raise TypeError(f"{metric.name}: {type(data).__name__}: expected Gauge, Sum or Histogram")


def _encode_number_point(point: NumberDataPoint) -> bytes:
    """Encodes a NumberDataPoint. All of our integers are unsigned."""
    value = point.value
    body = messages.encode_fixed64(6, value) if isinstance(value, int) else messages.encode_double(4, value)
    times = messages.encode_fixed64(2, point.start_time_unix_nano or 0) + messages.encode_fixed64(
        3, point.time_unix_nano
    )
    return times + body + messages.encode_attributes(7, _texts(point.attributes))


def _encode_histogram_point(point: HistogramDataPoint) -> bytes:
    """Encodes a HistogramDataPoint."""
    return b"".join(
        (
            messages.encode_fixed64(2, point.start_time_unix_nano or 0),
            messages.encode_fixed64(3, point.time_unix_nano),
            messages.encode_fixed64(4, point.count),
            messages.encode_double(5, point.sum),
            messages.encode_packed_fixed64(6, point.bucket_counts),
            messages.encode_packed_doubles(7, point.explicit_bounds),
            messages.encode_double(11, point.min),
            messages.encode_double(12, point.max),
            messages.encode_attributes(9, _texts(point.attributes)),
        )
    )


def _texts(attributes: Mapping[str, object] | None) -> dict[str, str | bool]:
    return {key: str(value) for key, value in (attributes or {}).items()}


LOOK_TIME_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Histogram bounds of read times, in s. Chosen: two per decade, from a file in /proc to a hung driver's deadline."""
PointValues = Iterable[tuple[Mapping[str, str], float | int | None]]
"""Attributes and value of each point of an instrument."""


class AgentMetrics:
    """Instruments over the newest Snapshot. `send` gets one request per interval; a prometheus_port of 0 serves
    nothing.
    """

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
        # an empty resource: encode_metrics adds ours, and the SDK's would read the environment again
        self._provider = MeterProvider([self._reader], Resource({}), shutdown_on_exit=False)
        self._instruments()
        self._exposition = PrometheusPage(prometheus_port, self.collect) if prometheus_port else None

    def update_snapshot(self, snapshot: Snapshot, requests: Mapping[str, tuple[int, int]] = {}) -> None:
        """Takes the agent's snapshot after one tick, and each outbox's requests (sent, dropped)."""
        for look in snapshot.results:
            about = {"collector": look.collector}
            self._looks.add(1, {**about, "result": look.result})
            self._took.record(look.took, about)
        self._now, self._requests = snapshot, requests
        if self._send is not None and snapshot.time // self._interval != self._beat:
            self._beat = snapshot.time // self._interval
            self._send(encode_metrics(self.collect(), self._resource, self._version))

    def collect(self) -> MetricsData | None:
        """Returns the instruments' current values; None before there are any."""
        with self._lock:
            return self._reader.get_metrics_data()

    def close(self) -> None:
        """Stops the page and the SDK."""
        if self._exposition is not None:
            self._exposition.close()
        self._provider.shutdown()

    def _instruments(self) -> None:
        meter = self._provider.get_meter("fleetpulse", self._version)
        self._looks = meter.create_counter("fleetpulse.agent.looks", "{look}", "Reads of the collectors by result")
        self._took = meter.create_histogram(
            "fleetpulse.agent.look.duration",
            "s",
            "Duration of the collectors' reads",
            explicit_bucket_boundaries_advisory=LOOK_TIME_BOUNDS_S,
        )

        def counter(name: str, unit: str, help: str, read_points: Callable[[], PointValues]) -> None:
            """Adds a counter that is read by `read_points`."""
            meter.create_observable_counter(f"fleetpulse.agent.{name}", [_callback(read_points)], unit, help)

        def gauge(name: str, unit: str, help: str, read_points: Callable[[], PointValues]) -> None:
            """Adds a gauge that is read by `read_points`."""
            meter.create_observable_gauge(f"fleetpulse.agent.{name}", [_callback(read_points)], unit, help)

        counter(
            "restarts",
            "{restart}",
            "Collectors stopped and restarted",
            lambda: _by("collector", self._now.restarts),
        )
        gauge("spool.size", "By", "Bytes of the spools on disk", lambda: [({}, self._now.spool_bytes)])
        gauge("spool.wait", "s", "Longest wait for the spool's disk in 10 s", lambda: [({}, self._now.spool_wait)])
        counter("spool.dropped", "{message}", "Messages dropped by the spools", lambda: [({}, self._now.dropped)])
        counter("gaps", "{message}", "Messages lost before they were sent", lambda: [({}, self._now.gaps)])
        gauge("sender.unsent", "{message}", "Messages not yet acknowledged", lambda: [({}, self._now.unsent)])
        gauge("sender.lag", "s", "Age of the oldest message not yet acknowledged", lambda: [({}, self._now.lag)])
        counter("ticks.late", "{tick}", "Ticks that began late or were skipped", lambda: [({}, self._now.late_ticks)])
        counter("cpu.time", "s", "Processor time of all its processes", lambda: [({}, self._now.cpu_time)])
        gauge("memory.usage", "By", "Proportional set size of all its processes", lambda: [({}, self._now.memory)])
        counter("otlp.sent", "{request}", "OTLP requests delivered", lambda: _requests(self._requests, 0))
        counter("otlp.dropped", "{request}", "OTLP requests dropped", lambda: _requests(self._requests, 1))


def _callback(read_points: Callable[[], PointValues]) -> Callable[[CallbackOptions], Iterator[Observation]]:
    """For the SDK: one Observation per point that is known."""

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        """Returns the present points; values of None are left out."""
        return (Observation(value, attributes) for attributes, value in read_points() if value is not None)

    return observe


def _by(key: str, values: Mapping[str, float]) -> PointValues:
    return [({key: name}, value) for name, value in values.items()]


def _requests(outboxes: Mapping[str, tuple[int, int]], which: int) -> PointValues:
    return [({"to": name}, counts[which]) for name, counts in outboxes.items()]
