"""Intel Gaudi accelerators through Intel's `pyhlml` binding, in the same signals as any other GPU.

Not yet run on hardware: docs/accelerators.md. The binding is not among our dependencies, since it must fit the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.collectors.accelerators.answers import Columns, number, text, wanted
from agents.collectors.accelerators.pci_devices import PCI, fitted, prefix
from agents.collectors.accelerators.vendor_library import Library, load, quiet

RHYTHMS = (60, 30, 10, 5, 1)
# numbers of hlml.h; the binding's own names for some of them are tuples by mistake (hlml_types.py of 1.9 to 1.20)
_AIP, _BOARD = 0, 1  # HLML_TEMPERATURE_ON_*
_SOC = 0  # HLML_CLOCK_SOC
_CORRECTED, _UNCORRECTED = 0, 1  # HLML_MEMORY_ERROR_TYPE_*
_VOLATILE, _AGGREGATE = 0, 1  # HLML_VOLATILE_ECC, HLML_AGGREGATE_ECC
_SRAM, _DRAM = 0, 1  # HLML_MEMORY_LOCATION_*
_MANY_SINGLE, _DOUBLE = 0, 1  # HLML_ROW_REPLACEMENT_CAUSE_*
_REASONS = {1: 0x4, 2: 0x20}
"""HLML_CLOCKS_THROTTLE_REASON_POWER and _THERMAL -> bits of gpu.throttle_reasons (power cap, software thermal)."""
_ERRORS = {
    "gpu.ecc_corrected": (10, "hlmlDeviceGetTotalECCErrors", (_CORRECTED, _VOLATILE)),
    "gpu.ecc_uncorrected": (10, "hlmlDeviceGetTotalECCErrors", (_UNCORRECTED, _VOLATILE)),
    "gpu.ecc_corrected_total": (60, "hlmlDeviceGetTotalECCErrors", (_CORRECTED, _AGGREGATE)),
    "gpu.ecc_uncorrected_total": (60, "hlmlDeviceGetTotalECCErrors", (_UNCORRECTED, _AGGREGATE)),
    "gpu.dram_corrected": (10, "hlmlDeviceGetMemoryErrorCounter", (_CORRECTED, _VOLATILE, _DRAM)),
    "gpu.dram_uncorrected": (10, "hlmlDeviceGetMemoryErrorCounter", (_UNCORRECTED, _VOLATILE, _DRAM)),
    "gpu.sram_corrected": (10, "hlmlDeviceGetMemoryErrorCounter", (_CORRECTED, _VOLATILE, _SRAM)),
    "gpu.sram_uncorrected": (10, "hlmlDeviceGetMemoryErrorCounter", (_UNCORRECTED, _VOLATILE, _SRAM)),
    "gpu.rows_corrected": (30, "hlmlDeviceGetReplacedRowsCount", (_MANY_SINGLE,)),
    "gpu.rows_uncorrected": (30, "hlmlDeviceGetReplacedRowsCount", (_DOUBLE,)),
    "gpu.rows_pending": (30, "hlmlDeviceGetReplacedRowsPendingStatus", ()),
}
_PLAIN = {
    "gpu.temperature": (5, "hlmlDeviceGetTemperature", (_AIP,)),
    "gpu.board_temperature": (5, "hlmlDeviceGetTemperature", (_BOARD,)),
    "gpu.sm_clock": (5, "hlmlDeviceGetClockInfo", (_SOC,)),
    "gpu.sm_clock_max": (60, "hlmlDeviceGetMaxClockInfo", (_SOC,)),
    "gpu.energy": (10, "hlmlDeviceGetTotalEnergyConsumption", ()),
    "gpu.pcie_generation": (30, "hlmlDeviceGetCurrPCIELinkGeneration", ()),
    "gpu.pcie_width": (30, "hlmlDeviceGetCurrPCIELinkWidth", ()),
    "gpu.pcie_replays": (10, "hlmlDeviceGetPCIEReplayCounter", ()),
}
_SCALED = {
    "gpu.power": (1, "hlmlDeviceGetPowerUsage", 1e-3),
    "gpu.power_limit_default": (60, "hlmlDeviceGetPowerManagementDefaultLimit", 1e-3),
    "gpu.utilization": (5, "hlmlDeviceGetUtilizationRates", 1e-2),
}
_TEXTS = {
    "sku": "hlmlDeviceGetName",
    "serial": "hlmlDeviceGetSerial",
    "uuid": "hlmlDeviceGetUUID",
    "part_number": "hlmlDeviceGetModelNumber",
    "firmware": "hlmlDeviceGetFirmwareSPIVersion",
    "cpld": "hlmlDeviceGetCPLDVersion",
    "module_id": "hlmlDeviceGetModuleID",
}
MOST_PORTS = 128
"""Bits of the mask of ports (hlml_get_mac_addr_info): two words of 64."""

_SLOWER = {"gpu.present": 5}
"""Seconds between two looks where that is not the catalogue's figure: presence needs many calls."""


@dataclass
class Gaudi(Collector):
    """gpu.*: one entity per accelerator that the library counts. One that stops answering keeps its place."""

    name: ClassVar[str] = "gaudi"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = (
        *(*_PLAIN, *_SCALED, *_ERRORS, "gpu.throttle_reasons", "gpu.memory_used", "gpu.memory_total"),
        *("gpu.links", "gpu.links_up", "gpu.present"),
    )
    deadline: float = 20.0
    pci: Path = PCI
    _node: str = field(default="", init=False, repr=False)
    _library: Library | None = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(default_factory=list, init=False, repr=False)
    _ports: list[tuple[int, ...]] = field(default_factory=list, init=False, repr=False)
    _facts: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _entities: tuple[str, ...] = field(default=(), init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)

    def open(self, node: str) -> None:
        if not fitted("gaudi", self.pci):
            raise NoData("no Gaudi accelerator: the PCI bus has no device of the vendor Habana (1da3)")
        module = load("pyhlml", "there is a Gaudi accelerator")
        self.close()
        self._node, self._rhythm = node, Rhythm(node)
        try:
            with quiet():
                module.hlmlInit()
        except module.HLMLError as error:
            raise NoData(f"the driver habanalabs does not answer: {error}; is it loaded, and may the agent?") from None
        self._library = Library(module, module.HLMLError)
        count = self._library.ask("hlmlDeviceGetCount") or 0
        handles = [handle for index in range(count) if (handle := self._handle(index)) is not None]
        if not handles:
            self.close()
            raise NoData("no Gaudi accelerator: the driver counts none")
        described = sorted(((self._described(handle), handle) for handle in handles), key=lambda one: one[0]["pci"])
        self._facts, self._handles = [facts for facts, _ in described], [handle for _, handle in described]
        self._ports = [self._ports_of(handle) for handle in self._handles]
        named = f"{node}.{prefix('gaudi', self.pci)}"
        self._entities = tuple(f"gpu:{named}{index}" for index in range(len(self._handles)))

    def read(self) -> tuple[Reading, ...]:
        assert self._library is not None
        due = max([every for every in RHYTHMS if self._rhythm.due(every)], default=1)
        columns = Columns(wanted(self.signals, due, _SLOWER), len(self._handles))
        for row, handle in enumerate(self._handles):
            before = self._library.answered
            columns.put(row, dict(self._values(handle, self._ports[row], due)))
            columns.put(row, {"gpu.present": int(self._library.answered > before)})
        return (Reading("gpu", self._entities, columns.taken()),)

    def inventory(self) -> Mapping[str, Device]:
        parents = (f"node:{self._node}",)
        found = [{key: value for key, value in facts.items() if value} for facts in self._facts]
        return {entity: Device(parents, facts) for entity, facts in zip(self._entities, found, strict=True)}

    def close(self) -> None:
        if self._library is not None:
            self._library.ask("hlmlShutdown")
        self._library, self._handles, self._ports, self._facts, self._entities = None, [], [], [], ()

    def _values(self, handle: Any, ports: tuple[int, ...], due: int) -> Iterator[tuple[str, object]]:
        """What is due of one accelerator."""
        for signal, (every, function, arguments) in (_PLAIN | _ERRORS).items():
            if every <= due:
                yield signal, self._ask(function, handle, *arguments)
        for signal, (every, function, factor) in _SCALED.items():
            if every <= due:
                yield signal, number(self._ask(function, handle)) * factor
        mask = self._ask("hlmlDeviceGetCurrentClocksThrottleReasons", handle)
        if isinstance(mask, int):
            yield "gpu.throttle_reasons", sum(ours for theirs, ours in _REASONS.items() if mask & theirs)
        if due >= 10:
            memory = self._ask("hlmlDeviceGetMemoryInfo", handle)
            yield "gpu.memory_used", getattr(memory, "used", None)
            yield "gpu.memory_total", getattr(memory, "total", None)
            states = [state for port in ports if (state := self._ask("hlmlDeviceNicGetLink", handle, port)) is not None]
            if states:
                yield "gpu.links", len(states)
                yield "gpu.links_up", sum(map(bool, states))

    def _handle(self, index: int) -> Any:
        """A handle of our own: the binding hands out one object for all devices, which holds the latest."""
        found = self._ask("hlmlDeviceGetHandleByIndex", index)
        return ctypes.c_void_p(found.value) if isinstance(found, ctypes.c_void_p) else found

    def _ports_of(self, handle: Any) -> tuple[int, ...]:
        """Numbers of the ports of the accelerator's own network."""
        found = self._ask("hlmlDeviceGetMacAddrInfo", handle)
        if not isinstance(found, tuple) or not found:
            return ()
        low, high = found[0]
        mask = low | high << 64
        return tuple(port for port in range(MOST_PORTS) if mask >> port & 1)

    def _described(self, handle: Any) -> dict[str, str]:
        pci = self._ask("hlmlDeviceGetPCIInfo", handle)
        facts = {key: text(self._ask(function, handle)) for key, function in _TEXTS.items()}
        facts |= {"vendor": "Intel", "pci": text(getattr(pci, "bus_id", "")).lower()}
        return facts | {"driver": text(self._ask("hlmlGetDriverVersion"))}

    def _ask(self, function: str, *arguments: Any) -> Any:
        assert self._library is not None
        return self._library.ask(function, *arguments)
