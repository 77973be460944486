"""The agent's telemetry as OTLP: gathers what ticks bring, and hands out one request per interval.

A request holds the newest value of every signal that was looked at since the last one, each with the time of its look.
Nothing here waits: encoding is one pass over the values, sending is the outboxes' business.

Makes what [opentelemetry] asks for; the only place that knows all the parts.
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
from agents.otlp.outbox import Outbox
from agents.otlp.request_layout import Column, Group, Layout
from pipeline.config.sections import Config
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND, Batch, Origin
from pipeline.model.signals import CATALOGUE

if TYPE_CHECKING:
    from agents.otlp.agent_metrics import Metrics


LAYOUTS = 4
"""Layouts kept; chosen: signals of 10, 30 and 60 s make that many, each of about 0.5 MiB with 8 GPUs."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64"}
"""platform.machine() -> host.arch of the conventions."""


class Export:
    """Takes batches; `send` gets each request. Made for one run of one agent."""

    def __init__(
        self, origin: Origin, version: str, interval: float, send: Sequence[Callable[[bytes], object]]
    ) -> None:
        self._about, self._version = about(origin, version), version
        self._interval, self._send = round(interval * SECOND), send
        self._columns: dict[Group, dict[str, Column]] = {}
        self._begun: dict[Group, NDArray[np.uint64]] = {}
        self._parents: dict[str, str] = {}
        self._layouts: OrderedDict[object, Layout] = OrderedDict()
        self._beat = -1

    def take(self, batch: Batch) -> None:
        """One batch of the agent, and a request if the interval is over."""
        time = int(batch.times[-1])
        for block in batch.blocks:
            group, generation = (block.device_class, block.entities), f"{block.device_class}.generation"
            held = self._columns.setdefault(group, {})
            for name, values in block.columns.items():
                if name == generation:
                    self._begun[group] = _seconds(values[-1])
                elif name in CATALOGUE:
                    held[name] = Column(time, values[-1])
        if time // self._interval != self._beat:
            self._beat = time // self._interval
            self.flush()

    def describe(self, devices: Mapping[str, Device]) -> None:
        """All entities there are: their parents go into `hw.parent`."""
        parents = {entity: device.parents[0] for entity, device in devices.items() if device.parents}
        if parents != self._parents:
            self._parents = parents
            self._layouts.clear()

    def flush(self) -> None:
        """Hands out what was gathered."""
        gathered, self._columns = self._columns, {}
        columns = {group: _told(held) for group, held in gathered.items()}
        columns = {group: held for group, held in columns.items() if held}
        if columns:
            request = self._layout(columns).request(columns, self._begun)
            for send in self._send:
                send(request)
        self._begun = {group: begun for group, begun in self._begun.items() if group in gathered}

    def _layout(self, columns: Mapping[Group, Mapping[str, Column]]) -> Layout:
        key = tuple((group, tuple(held)) for group, held in columns.items())
        if key not in self._layouts:
            self._layouts[key] = Layout(self._about, self._version, columns, self._parents)
            if len(self._layouts) > LAYOUTS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]


def about(origin: Origin, version: str) -> dict[str, str | bool]:
    """Attributes of the resource: who sends this. OTEL_RESOURCE_ATTRIBUTES adds to them, such as k8s.node.name."""
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


def _told(held: Mapping[str, Column]) -> dict[str, Column]:
    """Without the signals that no entity could tell."""
    return {name: column for name, column in held.items() if not _all_missing(column.values)}


def _all_missing(values: NDArray[Any]) -> bool:
    """The first value, which nearly always tells enough, is looked at before all are."""
    if values.dtype.kind == "u":
        highest = np.iinfo(values.dtype).max
        return bool(values[0] == highest) and bool((values == highest).all())
    return bool(np.isnan(values[0])) and bool(np.isnan(values).all())


def _seconds(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Starts of counters, in UTC seconds; 0 where they are missing."""
    return np.where(values == np.iinfo(values.dtype).max, 0, values).astype(np.uint64)


class Telemetry:
    """Holds what is configured. Made by `open_telemetry`."""

    def __init__(self, export: Export | None, metrics: Metrics | None, outboxes: Mapping[str, Outbox]) -> None:
        self._export, self.metrics, self._outboxes = export, metrics, outboxes

    def take(self, batch: Batch) -> None:
        """The telemetry of one tick."""
        if self._export is not None:
            self._export.take(batch)

    def describe(self, devices: Mapping[str, Device]) -> None:
        """All entities there are, when that changed."""
        if self._export is not None:
            self._export.describe(devices)

    def observe(self, snapshot: Snapshot) -> None:
        """The agent itself, once per tick."""
        if self.metrics is not None:
            self.metrics.observe(snapshot, {name: (box.sent, box.dropped) for name, box in self._outboxes.items()})

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`; what is not sent by then is lost, but for what the spool holds."""
        if self._export is not None:
            self._export.flush()
        if self.metrics is not None:
            self.metrics.close()
        for outbox in self._outboxes.values():
            outbox.close(seconds)


def opened(config: Config, origin: Origin, say: Callable[[str, str], object]) -> Telemetry:
    """The parts that are configured, each loaded only then. Raises ConfigError."""
    settings, outboxes, version = config.opentelemetry, dict[str, Outbox](), _version()
    if settings.endpoint:
        from agents.otlp.http import Post

        post = Post(settings, config.source)
        outboxes["http"] = Outbox("otlp-http", post, functools.partial(say, "otlp"))
    if settings.kafka:
        from agents.otlp.broker import Broker

        broker = Broker(config.kafka, origin.node)
        outboxes["kafka"] = Outbox("otlp-kafka", broker, functools.partial(say, "otlp kafka"), broker.close)
    ways = [outboxes["kafka"].put] if settings.kafka else []
    ways += [outboxes["http"].put] if settings.metrics == "all" else []
    export = Export(origin, version, settings.interval, ways) if ways else None
    metrics = None
    if settings.endpoint or settings.prometheus_port:
        try:
            from agents.otlp import agent_metrics
        except ImportError as error:
            raise ConfigError(
                f"{config.source}: [opentelemetry]: {error}; wanted opentelemetry-sdk: pip install 'fleetpulse[agent]'"
            ) from error
        send = outboxes["http"].put if settings.endpoint else None
        metrics = agent_metrics.Metrics(
            about(origin, version), version, settings.interval, send, settings.prometheus_port
        )
    return Telemetry(export, metrics, outboxes)


def _version() -> str:
    try:
        return metadata.version("fleetpulse")
    except metadata.PackageNotFoundError:  # run from its folder
        return "0"
