"""The agent's telemetry as OTLP: gathers the batches of ticks, and makes one request per interval.

A request holds the newest value of every signal since the last request, each with the time of its read. Nothing here
waits: encoding is one pass over the values, and outboxes send.
"""

from __future__ import annotations

import functools
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agents.collector import Device
from agents.node.snapshot import Snapshot
from agents.otlp.delivery import HttpDelivery, KafkaDelivery, Outbox
from agents.otlp.request_layout import Group, RequestLayout, SignalColumn
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Batch, Origin
from pipeline.model.signals import CATALOGUE

if TYPE_CHECKING:
    from agents.otlp.agent_metrics import AgentMetrics


MAX_LAYOUTS = 4
"""Layouts kept. Chosen: signals of 10, 30 and 60 s make that many, each of about 0.5 MiB with 8 GPUs."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64"}
"""platform.machine() -> host.arch of the semantic conventions."""


class TelemetryExport:
    """Gathers batches and passes each request to `send`. For one run of one agent."""

    def __init__(
        self, origin: Origin, version: str, interval: float, send: Sequence[Callable[[bytes], object]]
    ) -> None:
        self._resource, self._version = resource_attributes(origin, version), version
        self._interval, self._send = round(interval * SECOND), send
        self._columns: dict[Group, dict[str, SignalColumn]] = {}
        self._counter_starts: dict[Group, NDArray[np.uint64]] = {}
        self._parents: dict[str, str] = {}
        self._layouts: OrderedDict[object, RequestLayout] = OrderedDict()
        self._beat = -1

    def add_batch(self, batch: Batch) -> None:
        """Adds one batch of the agent; makes a request if the interval is over."""
        time = int(batch.times[-1])
        for block in batch.blocks:
            group, generation = (block.device_class, block.entities), f"{block.device_class}.generation"
            held = self._columns.setdefault(group, {})
            for name, values in block.columns.items():
                if name == generation:
                    self._counter_starts[group] = _start_seconds(values[-1])
                elif name in CATALOGUE:
                    held[name] = SignalColumn(time, values[-1])
        if time // self._interval != self._beat:
            self._beat = time // self._interval
            self.flush()

    def set_devices(self, devices: Mapping[str, Device]) -> None:
        """Sets all entities: their parents become `hw.parent`."""
        parents = {entity: device.parents[0] for entity, device in devices.items() if device.parents}
        if parents != self._parents:
            self._parents = parents
            self._layouts.clear()

    def flush(self) -> None:
        """Makes a request of the gathered values."""
        gathered, self._columns = self._columns, {}
        columns = {group: _drop_missing(held) for group, held in gathered.items()}
        columns = {group: held for group, held in columns.items() if held}
        if columns:
            request = self._get_layout(columns).fill(columns, self._counter_starts)
            for send in self._send:
                send(request)
        self._counter_starts = {group: begun for group, begun in self._counter_starts.items() if group in gathered}

    def _get_layout(self, columns: Mapping[Group, Mapping[str, SignalColumn]]) -> RequestLayout:
        key = tuple((group, tuple(held)) for group, held in columns.items())
        if key not in self._layouts:
            self._layouts[key] = RequestLayout(self._resource, self._version, columns, self._parents)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]


def resource_attributes(origin: Origin, version: str) -> dict[str, str | bool]:
    """Returns the resource's attributes. OTEL_RESOURCE_ATTRIBUTES adds more, such as k8s.node.name."""
    machine = platform.machine()
    found: dict[str, str | bool] = {
        "service.name": "fleetpulse-agent",
        "service.namespace": origin.site,
        "service.version": version,
        "service.instance.id": f"{origin.node}/{origin.boot_id.hex()}",
        "host.id": origin.node,
        "host.name": origin.node,
        "host.arch": _ARCHITECTURES.get(machine, machine),
    }
    if origin.simulated:
        found["fleetpulse.simulated"] = True
    for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = pair.partition("=")
        if equals and key.strip() not in found:
            found[key.strip()] = value.strip()
    return found


def _drop_missing(held: Mapping[str, SignalColumn]) -> dict[str, SignalColumn]:
    """Returns the columns that have a value."""
    return {name: column for name, column in held.items() if not _all_missing(column.values)}


def _all_missing(values: NDArray[Any]) -> bool:
    """Whether all values are missing. The first one is checked first, since it nearly always decides."""
    if values.dtype.kind == "u":
        highest = np.iinfo(values.dtype).max
        return bool(values[0] == highest) and bool((values == highest).all())
    return bool(np.isnan(values[0])) and bool(np.isnan(values).all())


def _start_seconds(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns the starts of counters in UTC seconds; 0 if missing."""
    return np.where(values == np.iinfo(values.dtype).max, 0, values).astype(np.uint64)


class OpenTelemetry:
    """The configured parts. Made by build_opentelemetry."""

    def __init__(
        self, export: TelemetryExport | None, metrics: AgentMetrics | None, outboxes: Mapping[str, Outbox]
    ) -> None:
        self._export, self.metrics, self._outboxes = export, metrics, outboxes

    def add_batch(self, batch: Batch) -> None:
        """Adds the telemetry of one tick."""
        if self._export is not None:
            self._export.add_batch(batch)

    def set_devices(self, devices: Mapping[str, Device]) -> None:
        """Sets all entities, when they changed."""
        if self._export is not None:
            self._export.set_devices(devices)

    def update_snapshot(self, snapshot: Snapshot) -> None:
        """Updates the agent's own metrics, once per tick."""
        if self.metrics is not None:
            self.metrics.update_snapshot(
                snapshot, {name: (box.sent, box.dropped) for name, box in self._outboxes.items()}
            )

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`. Requests not sent by then are lost; the spool still has their telemetry."""
        if self._export is not None:
            self._export.flush()
        if self.metrics is not None:
            self.metrics.close()
        for outbox in self._outboxes.values():
            outbox.close(seconds)


def check_exports(config: Config) -> None:
    """Raises ConfigError if a part of [opentelemetry] could not be built: its files cannot be used, a package misses.

    Ports and the login at Kafka are checked apart.
    """
    settings = config.opentelemetry
    if settings.endpoint:
        HttpDelivery(settings, config.source)
    if settings.endpoint or settings.prometheus_port:
        _import_metrics(config.source)


def build_opentelemetry(config: Config, origin: Origin, log: Callable[[str, str], object]) -> OpenTelemetry:
    """Returns the configured parts, imported only now. Raises ConfigError."""
    settings, outboxes, version = config.opentelemetry, dict[str, Outbox](), _version()
    if settings.endpoint:
        post = HttpDelivery(settings, config.source)
        outboxes["http"] = Outbox("otlp-http", post, functools.partial(log, "otlp"))
    if settings.kafka:
        broker = KafkaDelivery(config.kafka, origin.node)
        outboxes["kafka"] = Outbox("otlp-kafka", broker, functools.partial(log, "otlp kafka"), broker.close)
    ways = [outboxes["kafka"].enqueue] if settings.kafka else []
    ways += [outboxes["http"].enqueue] if settings.metrics == "all" else []
    export = TelemetryExport(origin, version, settings.interval, ways) if ways else None
    metrics = None
    if settings.endpoint or settings.prometheus_port:
        build_metrics = _import_metrics(config.source)
        send = outboxes["http"].enqueue if settings.endpoint else None
        metrics = build_metrics(
            resource_attributes(origin, version), version, settings.interval, send, settings.prometheus_port
        )
    return OpenTelemetry(export, metrics, outboxes)


def _import_metrics(source: str) -> type[AgentMetrics]:
    try:
        from agents.otlp.agent_metrics import AgentMetrics
    except ImportError as error:
        raise ConfigError(f"{source}: [opentelemetry]: {error}; install it: pip install 'fleetpulse[agent]'") from error
    return AgentMetrics


def _version() -> str:
    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
