"""Google TPUs through the metric service that libtpu opens within the training process (localhost:8431).

Not yet run on hardware: docs/accelerators.md. The service is there only while a program holds the TPUs; between two
programs nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.sources.accelerators import tpu
from agents.sources.accelerators.columns import Columns
from agents.sources.accelerators.places import PCI, Found, fitted, prefix
from agents.sources.grpc.client import Channel
from agents.sources.grpc.status import UNAVAILABLE, UNIMPLEMENTED, CallFailed
from agents.sources.grpc.target import opener
from agents.sources.protobuf import Malformed

EVERY_S = 10.0
"""Seconds between two looks; chosen: libtpu renews its own values every few seconds."""


@dataclass
class Tpu(Collector):
    """gpu.*: one entity per device that libtpu tells of, under libtpu's own number."""

    name: ClassVar[str] = "tpu"
    signals: ClassVar[tuple[str, ...]] = tuple(tpu.SIGNALS.values())
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
        self._devices = tuple(sorted({*self._devices, *found}))[: tpu.MOST_DEVICES]
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
                return channel.unary(method, request, tpu.MOST_BYTES)

            self._names = self._names or self._known(ask)
            return tpu.by_signal({name: tpu.metric(ask, name) for name in self._names})

    def _known(self, ask: tpu.Ask) -> tuple[str, ...]:
        """Metrics that this libtpu has of those wanted; an old one does not list them, but has the first three."""
        try:
            listed = tpu.supported(ask)
        except CallFailed as error:
            if error.code != UNIMPLEMENTED:
                raise
            return (tpu.TOTAL, tpu.USED, tpu.DUTY)
        return tuple(name for name in tpu.SIGNALS if name in listed)

    def _place(self, row: int) -> dict[str, str]:
        """The chip's address on the bus, where chips and devices are as many, or two devices are one chip."""
        per_chip = len(self._devices) // len(self._chips) if self._chips else 0
        fits = per_chip in (1, 2) and per_chip * len(self._chips) == len(self._devices)
        return {"pci": self._chips[row // per_chip].address} if fits else {}

    def _gpu(self, device: int) -> str:
        return f"gpu:{self._node}.{self._prefix}{device}"
