"""The agent's metrics of itself, through OpenTelemetry's SDK: sent as OTLP, or shown to Prometheus on loopback.

The SDK keeps the instruments; `requests` encodes what it collects with our own few lines of protobuf, since the SDK's
OTLP exporter would add requests, urllib3 and the generated classes: 4 MiB of memory for three kinds of message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.resources import Resource

from agents.node.snapshot import Snapshot
from agents.otlp.prometheus import Exposition
from agents.otlp.requests import encoded
from pipeline.model.records import SECOND

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
        for look in snapshot.looks:
            about = {"collector": look.collector}
            self._looks.add(1, {**about, "result": look.result})
            self._took.record(look.took, about)
        self._now, self._requests = snapshot, requests
        if self._send is not None and snapshot.time // self._interval != self._beat:
            self._beat = snapshot.time // self._interval
            self._send(encoded(self.collect(), self._resource, self._version))

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
        self._looks = meter.create_counter("fleetpulse.agent.looks", "{look}", "Looks of the collectors by result")
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
