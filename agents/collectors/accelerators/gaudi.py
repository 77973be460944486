"""The collector `gaudi`: Intel Gaudi accelerators through Intel's `pyhlml` binding, in the signals of any other GPU.

Not yet run on hardware: docs/accelerators.md. The binding is not among our dependencies, since it must fit the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.accelerators.answers import SignalColumns, due_signals, to_float, to_text
from agents.collectors.accelerators.pci_devices import PCI_DEVICES, entity_prefix, list_devices
from agents.collectors.accelerators.vendor_library import VendorLibrary, import_binding, stdout_to_stderr

INTERVALS_S = (60, 30, 10, 5, 1)
# numbers of hlml.h; the binding's own names for some of them are tuples by mistake (hlml_types.py of 1.9 to 1.20)
_AIP, _BOARD = 0, 1  # HLML_TEMPERATURE_ON_*
_SOC = 0  # HLML_CLOCK_SOC
_CORRECTED, _UNCORRECTED = 0, 1  # HLML_MEMORY_ERROR_TYPE_*
_VOLATILE, _AGGREGATE = 0, 1  # HLML_VOLATILE_ECC, HLML_AGGREGATE_ECC
_SRAM, _DRAM = 0, 1  # HLML_MEMORY_LOCATION_*
_MANY_SINGLE, _DOUBLE = 0, 1  # HLML_ROW_REPLACEMENT_CAUSE_*
_REASONS = {1: 0x4, 2: 0x20}
"""HLML_CLOCKS_THROTTLE_REASON_POWER and _THERMAL -> bits of gpu.throttle_reasons (power cap, software thermal)."""
_ERROR_COUNTS = {
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
_DIRECT_VALUES = {
    "gpu.temperature": (5, "hlmlDeviceGetTemperature", (_AIP,)),
    "gpu.board_temperature": (5, "hlmlDeviceGetTemperature", (_BOARD,)),
    "gpu.sm_clock": (5, "hlmlDeviceGetClockInfo", (_SOC,)),
    "gpu.sm_clock_max": (60, "hlmlDeviceGetMaxClockInfo", (_SOC,)),
    "gpu.energy": (10, "hlmlDeviceGetTotalEnergyConsumption", ()),
    "gpu.pcie_generation": (30, "hlmlDeviceGetCurrPCIELinkGeneration", ()),
    "gpu.pcie_width": (30, "hlmlDeviceGetCurrPCIELinkWidth", ()),
    "gpu.pcie_replays": (10, "hlmlDeviceGetPCIEReplayCounter", ()),
}
_SCALED_VALUES = {
    "gpu.power": (1, "hlmlDeviceGetPowerUsage", 1e-3),
    "gpu.power_limit_default": (60, "hlmlDeviceGetPowerManagementDefaultLimit", 1e-3),
    "gpu.utilization": (5, "hlmlDeviceGetUtilizationRates", 1e-2),
}
_ATTRIBUTES = {
    "sku": "hlmlDeviceGetName",
    "serial": "hlmlDeviceGetSerial",
    "uuid": "hlmlDeviceGetUUID",
    "part_number": "hlmlDeviceGetModelNumber",
    "firmware": "hlmlDeviceGetFirmwareSPIVersion",
    "cpld": "hlmlDeviceGetCPLDVersion",
    "module_id": "hlmlDeviceGetModuleID",
}
MAX_PORTS = 128
"""Bits of the mask of ports (hlml_get_mac_addr_info): two words of 64."""

_OWN_INTERVALS_S = {"gpu.present": 5}
"""Seconds between two reads that differ from the catalogue: presence needs many calls."""


@dataclass
class Gaudi(Collector):
    """Reports gpu.*: one entity per accelerator of the library. One that stops answering keeps its number."""

    name: ClassVar[str] = "gaudi"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = (
        *(
            *_DIRECT_VALUES,
            *_SCALED_VALUES,
            *_ERROR_COUNTS,
            "gpu.throttle_reasons",
            "gpu.memory_used",
            "gpu.memory_total",
        ),
        *("gpu.links", "gpu.links_up", "gpu.present"),
    )
    deadline: float = 20.0
    pci: Path = PCI_DEVICES
    _node: str = field(default="", init=False, repr=False)
    _library: VendorLibrary | None = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(default_factory=list, init=False, repr=False)
    _ports: list[tuple[int, ...]] = field(default_factory=list, init=False, repr=False)
    _facts: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _entities: tuple[str, ...] = field(default=(), init=False, repr=False)
    _rhythm: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        if not list_devices("gaudi", self.pci):
            raise NoData("no Gaudi accelerator: no PCI device of the vendor Habana (1da3)")
        module = import_binding("pyhlml", "there is a Gaudi accelerator")
        self.close()
        self._node, self._rhythm = node, SamplingSchedule(node)
        try:
            with stdout_to_stderr():
                module.hlmlInit()
        except module.HLMLError as error:
            raise NoData(
                f"the driver habanalabs does not respond: {error}; is it loaded, and may the agent use it?"
            ) from None
        self._library = VendorLibrary(module, module.HLMLError)
        count = self._library.call("hlmlDeviceGetCount") or 0
        handles = [handle for index in range(count) if (handle := self._own_handle(index)) is not None]
        if not handles:
            self.close()
            raise NoData("no Gaudi accelerator: the driver reports none")
        described = sorted(((self._describe(handle), handle) for handle in handles), key=lambda one: one[0]["pci"])
        self._facts, self._handles = [facts for facts, _ in described], [handle for _, handle in described]
        self._ports = [self._list_ports(handle) for handle in self._handles]
        named = f"{node}.{entity_prefix('gaudi', self.pci)}"
        self._entities = tuple(f"gpu:{named}{index}" for index in range(len(self._handles)))

    def read(self) -> tuple[Reading, ...]:
        """Returns the signals that are due."""
        assert self._library is not None
        due = max([every for every in INTERVALS_S if self._rhythm.due(every)], default=1)
        columns = SignalColumns(due_signals(self.signals, due, _OWN_INTERVALS_S), len(self._handles))
        for row, handle in enumerate(self._handles):
            before = self._library.answered_calls
            columns.set_row(row, dict(self._due_values(handle, self._ports[row], due)))
            columns.set_row(row, {"gpu.present": int(self._library.answered_calls > before)})
        return (Reading("gpu", self._entities, columns.arrays()),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the accelerators with their attributes."""
        parents = (f"node:{self._node}",)
        found = [{key: value for key, value in facts.items() if value} for facts in self._facts]
        return {entity: Device(parents, facts) for entity, facts in zip(self._entities, found, strict=True)}

    def close(self) -> None:
        """See `Collector.close`."""
        if self._library is not None:
            self._library.call("hlmlShutdown")
        self._library, self._handles, self._ports, self._facts, self._entities = None, [], [], [], ()

    def _due_values(self, handle: Any, ports: tuple[int, ...], due: int) -> Iterator[tuple[str, object]]:
        """Yields the due values of one accelerator."""
        for signal, (every, function, arguments) in (_DIRECT_VALUES | _ERROR_COUNTS).items():
            if every <= due:
                yield signal, self._call(function, handle, *arguments)
        for signal, (every, function, factor) in _SCALED_VALUES.items():
            if every <= due:
                yield signal, to_float(self._call(function, handle)) * factor
        mask = self._call("hlmlDeviceGetCurrentClocksThrottleReasons", handle)
        if isinstance(mask, int):
            yield "gpu.throttle_reasons", sum(ours for theirs, ours in _REASONS.items() if mask & theirs)
        if due >= 10:
            memory = self._call("hlmlDeviceGetMemoryInfo", handle)
            yield "gpu.memory_used", getattr(memory, "used", None)
            yield "gpu.memory_total", getattr(memory, "total", None)
            states = [
                state for port in ports if (state := self._call("hlmlDeviceNicGetLink", handle, port)) is not None
            ]
            if states:
                yield "gpu.links", len(states)
                yield "gpu.links_up", sum(map(bool, states))

    def _own_handle(self, index: int) -> Any:
        """Returns a handle of our own: the binding returns one object for all devices, which holds the latest."""
        found = self._call("hlmlDeviceGetHandleByIndex", index)
        return ctypes.c_void_p(found.value) if isinstance(found, ctypes.c_void_p) else found

    def _list_ports(self, handle: Any) -> tuple[int, ...]:
        """Returns the numbers of the accelerator's own network ports."""
        found = self._call("hlmlDeviceGetMacAddrInfo", handle)
        if not isinstance(found, tuple) or not found:
            return ()
        low, high = found[0]
        mask = low | high << 64
        return tuple(port for port in range(MAX_PORTS) if mask >> port & 1)

    def _describe(self, handle: Any) -> dict[str, str]:
        pci = self._call("hlmlDeviceGetPCIInfo", handle)
        facts = {key: to_text(self._call(function, handle)) for key, function in _ATTRIBUTES.items()}
        facts |= {"vendor": "Intel", "pci": to_text(getattr(pci, "bus_id", "")).lower()}
        return facts | {"driver": to_text(self._call("hlmlGetDriverVersion"))}

    def _call(self, function: str, *arguments: Any) -> Any:
        assert self._library is not None
        return self._library.call(function, *arguments)
