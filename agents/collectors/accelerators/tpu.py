"""Google TPUs through the metric service that libtpu opens within the training process (localhost:8431).

Not yet run on hardware: docs/accelerators.md. The service is there only while a program holds the TPUs; between two
programs nothing is measured.

What libtpu's metric service says (tpu.monitoring.runtime, tpu_metric_service.proto of Google's tpu-info).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.collectors.accelerators.answers import Columns
from agents.collectors.accelerators.answers import text as printable
from agents.collectors.accelerators.pci_devices import PCI, Found, fitted, prefix
from agents.grpc import UNAVAILABLE, UNIMPLEMENTED, CallFailed, Channel, opener
from agents.protobuf import Malformed, Message, text

SERVICE = "/tpu.monitoring.runtime.RuntimeMetricService"
TOTAL = "tpu.runtime.hbm.memory.total.bytes"
USED = "tpu.runtime.hbm.memory.usage.bytes"
DUTY = "tpu.runtime.tensorcore.dutycycle.percent"
QUEUE = "hlo.queue.size.gauge"
SIGNALS = {TOTAL: "gpu.memory_total", USED: "gpu.memory_used", DUTY: "gpu.utilization", QUEUE: "gpu.queued_programs"}
MOST_BYTES = 256 * 1024
"""Longest answer that is taken; chosen: a host has up to 8 chips, whose metric takes some 100 bytes each."""
MOST_DEVICES = 64
"""Most devices of one host."""
_MOST_NUMBER = 2**20

Ask = Callable[[str, bytes], bytes]


def read_metric(ask: Ask, name: str) -> dict[int, float]:
    """Device number -> value of one metric. Raises Malformed for what is no answer."""
    answer = Message(ask(f"{SERVICE}/GetRuntimeMetric", text(1, name)))
    found: dict[int, float] = {}
    for one in answer.message(1).messages(3):  # MetricResponse.metric.metrics
        device = _device(one.message(1))
        value = _value(one.message(3))
        if device is not None and value is not None and len(found) < MOST_DEVICES:
            found[device] = value
    return found


def list_supported_metrics(ask: Ask) -> list[str]:
    """Names of the metrics that this libtpu has."""
    answer = Message(ask(f"{SERVICE}/ListSupportedMetrics", b""))
    return [printable(one.text(1)) for one in answer.messages(1)[:1024]]


def group_by_device(found: dict[str, dict[int, float]]) -> dict[int, dict[str, float]]:
    """Device -> signals. The duty cycle is of a chip, which has two devices on v2, v3 and 7x: both get it."""
    memory = sorted({*found.get(TOTAL, {}), *found.get(USED, {})})
    duty = found.get(DUTY, {})
    if duty and len(memory) == 2 * len(duty):
        per_chip = [duty[chip] for chip in sorted(duty)]
        found = found | {DUTY: {device: per_chip[place // 2] for place, device in enumerate(memory)}}
    devices: dict[int, dict[str, float]] = {}
    for name, values in found.items():
        for device, value in values.items():
            devices.setdefault(device, {})[SIGNALS[name]] = value / 100 if name == DUTY else value
    return devices


def _device(attribute: Message) -> int | None:
    """The number stands alone (memory, duty cycle), or in a list under `device_ordinal`, in newer ones as a text."""
    value = attribute.message(2)
    for one in value.message(6).messages(1)[:16]:
        if one.text(1) == "device_ordinal":
            value = one.message(2)
            break
    word = value.text(1)
    number = int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else value.signed(3)
    return number if 0 <= number < _MOST_NUMBER else None


def _value(gauge: Message) -> float | None:
    if gauge.has(1):
        return gauge.double(1)
    return float(gauge.signed(2)) if gauge.has(2) else None


EVERY_S = 10.0
"""Seconds between two looks; chosen: libtpu renews its own values every few seconds."""


@dataclass
class Tpu(Collector):
    """gpu.*: one entity per device that libtpu tells of, under libtpu's own number."""

    name: ClassVar[str] = "tpu"
    signals: ClassVar[tuple[str, ...]] = tuple(SIGNALS.values())
    address: str = "localhost:8431"
    timeout: float = 2.0
    pci: Path = PCI
    _node: str = field(default="", init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)
    _chips: tuple[Found, ...] = field(default=(), init=False, repr=False)
    _prefix: str = field(default="", init=False, repr=False)
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)
    _devices: tuple[int, ...] = field(default=(), init=False, repr=False)

    def open(self, node: str) -> None:
        self._chips = fitted("tpu", self.pci)
        if not self._chips:
            raise NoData("no TPU: the PCI bus has no such device of the vendor Google (1ae0)")
        try:
            opener(self.address)
        except ValueError as error:
            raise NoData(f"[collector.tpu] address: {error}") from None
        self._node, self._rhythm = node, Rhythm(node)
        self._prefix, self._names, self._devices = prefix("tpu", self.pci), (), ()

    def read(self) -> tuple[Reading, ...]:
        if not self._rhythm.due(EVERY_S):
            return ()
        try:
            found = self._ask()
        except CallFailed as error:
            if error.code == UNAVAILABLE:  # no program holds the TPUs, or it just ended
                self._names = ()
                return ()
            raise RuntimeError(f"libtpu does not answer: {error}") from None
        except Malformed as error:
            raise RuntimeError(f"libtpu at {self.address}: no answer of its metric service: {error}") from None
        self._devices = tuple(sorted({*self._devices, *found}))[:MOST_DEVICES]
        columns = Columns(self.signals, len(self._devices))
        for row, device in enumerate(self._devices):
            columns.put(row, found.get(device, {}))
        entities = tuple(map(self._gpu, self._devices))
        return (Reading("gpu", entities, columns.taken()),) if entities else ()

    def inventory(self) -> Mapping[str, Device]:
        facts: dict[str, Any] = {"vendor": "Google", "sku": self._chips[0].model if self._chips else ""}
        node = f"node:{self._node}"
        return {self._gpu(d): Device((node,), facts | self._place(row)) for row, d in enumerate(self._devices)}

    def _ask(self) -> dict[int, dict[str, float]]:
        """All metrics over one connection; which there are is asked once per program."""
        with Channel(self.address, self.timeout) as channel:

            def ask(method: str, request: bytes) -> bytes:
                return channel.unary(method, request, MOST_BYTES)

            self._names = self._names or self._known(ask)
            return group_by_device({name: read_metric(ask, name) for name in self._names})

    def _known(self, ask: Ask) -> tuple[str, ...]:
        """Metrics that this libtpu has of those wanted; an old one does not list them, but has the first three."""
        try:
            listed = list_supported_metrics(ask)
        except CallFailed as error:
            if error.code != UNIMPLEMENTED:
                raise
            return (TOTAL, USED, DUTY)
        return tuple(name for name in SIGNALS if name in listed)

    def _place(self, row: int) -> dict[str, str]:
        """The chip's address on the bus, where chips and devices are as many, or two devices are one chip."""
        per_chip = len(self._devices) // len(self._chips) if self._chips else 0
        fits = per_chip in (1, 2) and per_chip * len(self._chips) == len(self._devices)
        return {"pci": self._chips[row // per_chip].address} if fits else {}

    def _gpu(self, device: int) -> str:
        return f"gpu:{self._node}.{self._prefix}{device}"
