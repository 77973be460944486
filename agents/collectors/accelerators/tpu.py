"""The collector `tpu`: Google TPUs through the metric service of libtpu inside the training process (localhost:8431).

Not yet run on hardware: docs/accelerators.md. The service exists only while a program holds the TPUs; between two
programs nothing is measured. Protocol: tpu.monitoring.runtime, tpu_metric_service.proto of Google's tpu-info.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.accelerators.answers import SignalColumns
from agents.collectors.accelerators.answers import to_text as printable
from agents.collectors.accelerators.pci_devices import PCI_DEVICES, PciDevice, entity_prefix, list_devices
from agents.grpc import UNAVAILABLE, UNIMPLEMENTED, CallFailed, GrpcChannel, make_connector
from agents.protobuf import MalformedMessage, ProtobufMessage, encode_text

SERVICE = "/tpu.monitoring.runtime.RuntimeMetricService"
MEMORY_TOTAL = "tpu.runtime.hbm.memory.total.bytes"
MEMORY_USED = "tpu.runtime.hbm.memory.usage.bytes"
DUTY_CYCLE = "tpu.runtime.tensorcore.dutycycle.percent"
QUEUE_SIZE = "hlo.queue.size.gauge"
SIGNALS = {
    MEMORY_TOTAL: "gpu.memory_total",
    MEMORY_USED: "gpu.memory_used",
    DUTY_CYCLE: "gpu.utilization",
    QUEUE_SIZE: "gpu.queued_programs",
}
MAX_ANSWER_BYTES = 256 * 1024
"""Longest accepted answer. Chosen: a host has up to 8 chips, whose metric takes some 100 bytes each."""
MAX_DEVICES = 64
"""Most devices of one host."""
_DEVICE_NUMBER_LIMIT = 2**20

CallMethod = Callable[[str, bytes], bytes]


def read_metric(ask: CallMethod, name: str) -> dict[int, float]:
    """Returns device number -> value of one metric. Raises MalformedMessage if the answer is none."""
    answer = ProtobufMessage(ask(f"{SERVICE}/GetRuntimeMetric", encode_text(1, name)))
    found: dict[int, float] = {}
    for one in answer.message(1).messages(3):  # MetricResponse.metric.metrics
        device = _parse_device(one.message(1))
        value = _parse_value(one.message(3))
        if device is not None and value is not None and len(found) < MAX_DEVICES:
            found[device] = value
    return found


def list_supported_metrics(ask: CallMethod) -> list[str]:
    """Returns the names of the metrics of this libtpu."""
    answer = ProtobufMessage(ask(f"{SERVICE}/ListSupportedMetrics", b""))
    return [printable(one.text(1)) for one in answer.messages(1)[:1024]]


def group_by_device(found: dict[str, dict[int, float]]) -> dict[int, dict[str, float]]:
    """Returns device -> signals. The duty cycle is per chip, which has two devices on v2, v3 and 7x: both get it."""
    memory = sorted({*found.get(MEMORY_TOTAL, {}), *found.get(MEMORY_USED, {})})
    duty = found.get(DUTY_CYCLE, {})
    if duty and len(memory) == 2 * len(duty):
        per_chip = [duty[chip] for chip in sorted(duty)]
        found = found | {DUTY_CYCLE: {device: per_chip[place // 2] for place, device in enumerate(memory)}}
    devices: dict[int, dict[str, float]] = {}
    for name, values in found.items():
        for device, value in values.items():
            devices.setdefault(device, {})[SIGNALS[name]] = value / 100 if name == DUTY_CYCLE else value
    return devices


def _parse_device(attribute: ProtobufMessage) -> int | None:
    """Returns the device number: bare (memory, duty cycle), or in a list as `device_ordinal`, number or text."""
    value = attribute.message(2)
    for one in value.message(6).messages(1)[:16]:
        if one.text(1) == "device_ordinal":
            value = one.message(2)
            break
    word = value.text(1)
    number = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else value.signed(3)
    return number if 0 <= number < _DEVICE_NUMBER_LIMIT else None


def _parse_value(gauge: ProtobufMessage) -> float | None:
    if gauge.has(1):
        return gauge.double(1)
    return float(gauge.signed(2)) if gauge.has(2) else None


READ_INTERVAL_S = 10.0
"""Seconds between two reads. Chosen: libtpu renews its own values every few seconds."""


@dataclass
class Tpu(Collector):
    """Reports gpu.*: one entity per device of libtpu, under libtpu's own number."""

    name: ClassVar[str] = "tpu"
    signals: ClassVar[tuple[str, ...]] = tuple(SIGNALS.values())
    address: str = "localhost:8431"
    timeout: float = 2.0
    pci: Path = PCI_DEVICES
    _node: str = field(default="", init=False, repr=False)
    _rhythm: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)
    _chips: tuple[PciDevice, ...] = field(default=(), init=False, repr=False)
    _prefix: str = field(default="", init=False, repr=False)
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)
    _devices: tuple[int, ...] = field(default=(), init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        self._chips = list_devices("tpu", self.pci)
        if not self._chips:
            raise NoData("no TPU: no such PCI device of the vendor Google (1ae0)")
        try:
            make_connector(self.address)
        except ValueError as error:
            raise NoData(f"[collector.tpu] address: {error}") from None
        self._node, self._rhythm = node, SamplingSchedule(node)
        self._prefix, self._names, self._devices = entity_prefix("tpu", self.pci), (), ()

    def read(self) -> tuple[Reading, ...]:
        """Returns the metrics of all devices; nothing while no program holds the TPUs."""
        if not self._rhythm.due(READ_INTERVAL_S):
            return ()
        try:
            found = self._read_metrics()
        except CallFailed as error:
            if error.code == UNAVAILABLE:  # no program holds the TPUs, or it just ended
                self._names = ()
                return ()
            raise RuntimeError(f"libtpu does not respond: {error}") from None
        except MalformedMessage as error:
            raise RuntimeError(f"libtpu at {self.address}: invalid answer of its metric service: {error}") from None
        self._devices = tuple(sorted({*self._devices, *found}))[:MAX_DEVICES]
        columns = SignalColumns(self.signals, len(self._devices))
        for row, device in enumerate(self._devices):
            columns.set_row(row, found.get(device, {}))
        entities = tuple(map(self._device_entity, self._devices))
        return (Reading("gpu", entities, columns.arrays()),) if entities else ()

    def inventory(self) -> Mapping[str, Device]:
        """Returns the devices seen so far."""
        facts: dict[str, Any] = {"vendor": "Google", "sku": self._chips[0].model if self._chips else ""}
        node = f"node:{self._node}"
        return {
            self._device_entity(d): Device((node,), facts | self._chip_attributes(row))
            for row, d in enumerate(self._devices)
        }

    def _read_metrics(self) -> dict[int, dict[str, float]]:
        """Reads all metrics over one connection; the list of metrics is requested once per program."""
        with GrpcChannel(self.address, self.timeout) as channel:

            def ask(method: str, request: bytes) -> bytes:
                """Calls a method of the metric service of libtpu; returns the answer."""
                return channel.call_unary(method, request, MAX_ANSWER_BYTES)

            self._names = self._names or self._known_metrics(ask)
            return group_by_device({name: read_metric(ask, name) for name in self._names})

    def _known_metrics(self, ask: CallMethod) -> tuple[str, ...]:
        """Returns which of our metrics this libtpu has; an old one has no list, but has the first three."""
        try:
            listed = list_supported_metrics(ask)
        except CallFailed as error:
            if error.code != UNIMPLEMENTED:
                raise
            return (MEMORY_TOTAL, MEMORY_USED, DUTY_CYCLE)
        return tuple(name for name in SIGNALS if name in listed)

    def _chip_attributes(self, row: int) -> dict[str, str]:
        """Returns the chip's PCI address, if there are as many chips as devices, or one for two devices."""
        per_chip = len(self._devices) // len(self._chips) if self._chips else 0
        fits = per_chip in (1, 2) and per_chip * len(self._chips) == len(self._devices)
        return {"pci": self._chips[row // per_chip].address} if fits else {}

    def _device_entity(self, device: int) -> str:
        return f"gpu:{self._node}.{self._prefix}{device}"
