"""AMD Instinct accelerators through ROCm's `amdsmi` binding, in the same signals as any other GPU.

Not yet run on hardware: docs/accelerators.md. The binding is not among our dependencies, since it must fit the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.sources.accelerators import amd
from agents.sources.accelerators.columns import Columns, text, wanted
from agents.sources.accelerators.library import Library, load, quiet
from agents.sources.accelerators.places import PCI, prefix

RHYTHMS = (300, 60, 30, 10, 5, 1)
_FACTS = {
    "asic": "amdsmi_get_gpu_asic_info",
    "board": "amdsmi_get_gpu_board_info",
    "driver": "amdsmi_get_gpu_driver_info",
    "vbios": "amdsmi_get_gpu_vbios_info",
    "firmware": "amdsmi_get_fw_info",
    "uuid": "amdsmi_get_gpu_device_uuid",
    "bdf": "amdsmi_get_gpu_device_bdf",
}
_ECC = ("gpu.ecc_corrected", "gpu.ecc_uncorrected", "gpu.ecc_deferred")
_BLOCKS = {
    "UMC": ("gpu.dram_corrected", "gpu.dram_uncorrected"),
    "GFX": ("gpu.sram_corrected", "gpu.sram_uncorrected"),
    "XGMI_WAFL": ("gpu.xgmi_corrected", "gpu.xgmi_uncorrected"),
}
"""Blocks of the chip that count errors: memory controller, shader engine, XGMI (AmdSmiGpuBlock)."""
_CLOCKS = {"GFX": "gpu.sm_clock", "MEM": "gpu.memory_clock"}
_SENSORS = {"HOTSPOT": "gpu.temperature", "VRAM": "gpu.memory_temperature", "EDGE": "gpu.edge_temperature"}

Values = Mapping[str, object]

_SLOWER = {"gpu.present": 5, "gpu.throttle_reasons": 5, "gpu.throttled": 5}
"""Seconds between two looks where that is not the catalogue's figure: the firmware's table is long, and presence needs
many calls, since a virtual machine may be refused those of each look."""


@dataclass
class Amd(Collector):
    """gpu.*: one entity per accelerator that the library counts. One that stops answering keeps its place."""

    name: ClassVar[str] = "amd"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = (
        *("gpu.utilization", "gpu.memory_utilization", "gpu.memory_used", "gpu.memory_total"),
        *("gpu.power", "gpu.power_limit", "gpu.power_limit_default", "gpu.power_limit_min", "gpu.power_limit_max"),
        *("gpu.energy", "gpu.sm_clock", "gpu.sm_clock_max", "gpu.memory_clock", "gpu.memory_clock_max"),
        *("gpu.temperature", "gpu.memory_temperature", "gpu.edge_temperature", "gpu.regulator_temperature"),
        *("gpu.throttle_reasons", "gpu.throttled", "gpu.limiter_ticks", "gpu.limiter_power", "gpu.limiter_thermal"),
        *("gpu.limiter_memory_thermal", "gpu.limiter_regulator_thermal", "gpu.limiter_prochot"),
        *(*_ECC, "gpu.dram_corrected", "gpu.dram_uncorrected", "gpu.sram_corrected", "gpu.sram_uncorrected"),
        *("gpu.xgmi_corrected", "gpu.xgmi_uncorrected", "gpu.xgmi_rx_bytes", "gpu.xgmi_tx_bytes"),
        *("gpu.links", "gpu.links_up", "gpu.pages_uncorrected", "gpu.pages_pending", "gpu.pages_failed"),
        *("gpu.pcie_generation", "gpu.pcie_generation_max", "gpu.pcie_width", "gpu.pcie_width_max"),
        *("gpu.pcie_replays", "gpu.pcie_replay_rollovers", "gpu.pcie_recoveries", "gpu.pcie_naks_sent"),
        *("gpu.pcie_naks_received", "gpu.present"),
    )
    deadline: float = 20.0
    driver: Path = Path("/dev/kfd")
    pci: Path = PCI
    _node: str = field(default="", init=False, repr=False)
    _library: Library | None = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(default_factory=list, init=False, repr=False)
    _facts: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _entities: tuple[str, ...] = field(default=(), init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)

    def open(self, node: str) -> None:
        if not self.driver.exists():
            raise NoData(f"no AMD accelerator: {self.driver} is not there (the driver amdgpu makes it)")
        module = load("amdsmi", "there is an AMD accelerator")
        self.close()
        self._node, self._rhythm = node, Rhythm(node)
        try:
            with quiet():
                module.amdsmi_init()
        except module.AmdSmiException as error:
            raise NoData(
                f"AMD's driver does not answer: {error}; is the agent in the groups video and render?"
            ) from None
        self._library = Library(module, module.AmdSmiException)
        handles = self._library.ask("amdsmi_get_processor_handles") or []
        if not handles:
            self.close()
            raise NoData("no AMD accelerator: the driver counts none")
        self._handles = sorted(handles, key=lambda handle: text(self._ask("amdsmi_get_gpu_device_bdf", handle)))
        self._facts = [self._described(handle) for handle in self._handles]
        named = f"{node}.{prefix('amd', self.pci)}"
        self._entities = tuple(f"gpu:{named}{index}" for index in range(len(self._handles)))

    def read(self) -> tuple[Reading, ...]:
        assert self._library is not None
        due = max([every for every in RHYTHMS if self._rhythm.due(every)], default=1)
        columns = Columns(wanted(self.signals, due, _SLOWER), len(self._handles))
        for row, handle in enumerate(self._handles):
            before = self._library.answered
            for values in self._looks(handle, due):
                columns.put(row, values)
            columns.put(row, {"gpu.present": int(self._library.answered > before)})
        return (Reading("gpu", self._entities, columns.taken()),)

    def inventory(self) -> Mapping[str, Device]:
        parents = (f"node:{self._node}",)
        return {entity: Device(parents, facts) for entity, facts in zip(self._entities, self._facts, strict=True)}

    def close(self) -> None:
        if self._library is not None:
            self._library.ask("amdsmi_shut_down")
        self._library, self._handles, self._facts, self._entities = None, [], [], ()

    def _looks(self, handle: Any, due: int) -> Iterator[Values]:
        """What is due of one accelerator, call by call."""
        yield self._values("amdsmi_get_power_info", amd.power, handle)
        if due >= 5:
            yield self._values("amdsmi_get_gpu_activity", amd.activity, handle)
            yield self._values("amdsmi_get_gpu_metrics_info", amd.metrics, handle)
            yield self._temperatures(handle)
            yield from self._clocks(handle)
        if due >= 10:
            yield self._values("amdsmi_get_gpu_vram_usage", amd.memory, handle)
            yield self._values("amdsmi_get_energy_count", amd.energy, handle)
            yield self._values("amdsmi_get_pcie_info", amd.pcie, handle)
            yield from self._errors(handle)
        if due >= 60:
            yield self._values("amdsmi_get_power_cap_info", amd.power_cap, handle)
        if due >= 300 and (pages := self._ask("amdsmi_get_gpu_bad_page_info", handle)) is not None:
            yield amd.bad_pages(pages)

    def _temperatures(self, handle: Any) -> Values:
        """A sensor that the chip has not is refused."""
        metric = self._constant("AmdSmiTemperatureMetric", "CURRENT")
        return {
            signal: amd.celsius(self._ask("amdsmi_get_temp_metric", handle, sensor, metric))
            for name, signal in _SENSORS.items()
            if (sensor := self._constant("AmdSmiTemperatureType", name)) is not None
        }

    def _clocks(self, handle: Any) -> Iterator[Values]:
        for name, signal in _CLOCKS.items():
            kind = self._constant("AmdSmiClkType", name)
            found = None if kind is None else self._ask("amdsmi_get_clock_info", handle, kind)
            if isinstance(found, dict):
                yield amd.clock(signal, found)

    def _errors(self, handle: Any) -> Iterator[Values]:
        yield self._values("amdsmi_get_gpu_total_ecc_count", lambda answer: amd.errors(answer, *_ECC), handle)
        for name, signals in _BLOCKS.items():
            block = self._constant("AmdSmiGpuBlock", name)
            found = None if block is None else self._ask("amdsmi_get_gpu_ecc_count", handle, block)
            if isinstance(found, dict):
                yield amd.errors(found, *signals)

    def _described(self, handle: Any) -> dict[str, Any]:
        return amd.facts({key: self._ask(function, handle) for key, function in _FACTS.items()})

    def _values(self, function: str, meaning: Callable[[Mapping[str, Any]], Values], handle: Any) -> Values:
        assert self._library is not None
        found = self._library.table(function, handle)
        return {} if found is None else meaning(found)

    def _ask(self, function: str, *arguments: Any) -> Any:
        assert self._library is not None
        return self._library.ask(function, *arguments)

    def _constant(self, table: str, name: str) -> Any:
        """A member of one of the binding's enumerations; None where this version has it not."""
        assert self._library is not None
        return getattr(getattr(self._library.module, table, None), name, None)
