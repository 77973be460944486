"""The collector `amd`: AMD Instinct accelerators through ROCm's `amdsmi` binding, in the signals of any other GPU.

Not yet run on hardware: docs/accelerators.md. The binding is not among our dependencies, since it must fit the driver.

Shapes and units are those of ROCm's amdsmi documentation, 6.0 to 7.0; "N/A", absent and out of range are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.accelerators.answers import (
    SignalColumns,
    due_signals,
    scale,
    sum_counts,
    to_count,
    to_float,
    to_text,
)
from agents.collectors.accelerators.pci_devices import PCI_DEVICES, entity_prefix
from agents.collectors.accelerators.vendor_library import VendorLibrary, import_binding, stdout_to_stderr

MIB = 1024 * 1024
KIB = 1024
"""XGMI counters are in kilobytes of 1,024 (amdsmi.h, xgmi_read_data_acc)."""
_MAX_WATTS = 100_000
"""A higher power limit is in microwatts, as in amdsmi_get_power_cap_info since ROCm 6; earlier versions gave watts."""
_GENERATIONS = {2_500: 1, 5_000: 2, 8_000: 3, 16_000: 4, 32_000: 5, 64_000: 6}
"""MT/s of a lane -> PCIe generation."""
POWER_CAP, SOFTWARE_THERMAL, HARDWARE_THERMAL = 0x4, 0x20, 0x40
"""Bits of gpu.throttle_reasons: NVML's, so that a detector reads every vendor alike."""
_BITS: tuple[tuple[range, int], ...] = (
    # bits of indep_throttle_status (Linux, amdgpu_smu.h, SMU_THROTTLER_*_BIT)
    (range(24), POWER_CAP),  # package power and current
    (range(32, 38), SOFTWARE_THERMAL),  # die and memory
    (range(38, 44), SOFTWARE_THERMAL),  # regulators and liquid
    (range(44, 48), HARDWARE_THERMAL),  # VRHOT and PROCHOT lines
)
_LIMITERS = {
    "gpu.limiter_ticks": "accumulation_counter",
    "gpu.limiter_power": "ppt_residency_acc",
    "gpu.limiter_thermal": "socket_thm_residency_acc",
    "gpu.limiter_memory_thermal": "hbm_thm_residency_acc",
    "gpu.limiter_regulator_thermal": "vr_thm_residency_acc",
    "gpu.limiter_prochot": "prochot_residency_acc",
}
_PENDING, _UNRESERVABLE = 1, 2
"""AmdSmiMemoryPageStatus."""


def convert_activity(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_gpu_activity: percent."""
    return {
        "gpu.utilization": scale(answer.get("gfx_activity"), 0.01),
        "gpu.memory_utilization": scale(answer.get("umc_activity"), 0.01),
    }


def convert_power(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_power_info: W. The MI300 gives current power, older chips the average."""
    names = ("current_socket_power", "average_socket_power", "socket_power")
    return {"gpu.power": next((w for name in names if 0 < (w := to_float(answer.get(name))) < 65_535), None)}


def convert_power_cap(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_power_cap_info."""
    names = {"": "power_cap", "_default": "default_power_cap", "_min": "min_power_cap", "_max": "max_power_cap"}
    return {f"gpu.power_limit{end}": _to_watts(to_float(answer.get(name))) for end, name in names.items()}


def convert_energy(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_energy_count: steps of so many microjoules; the counter was called `power` before ROCm 6."""
    steps = to_count(answer.get("energy_accumulator", answer.get("power")))
    size = to_float(answer.get("counter_resolution"))
    return {"gpu.energy": int(steps * size / 1000) if steps < 2**63 and 0 < size < 1e6 else None}


def convert_clock(signal: str, answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_clock_info: MHz; the clock was called `cur_clk` before ROCm 6."""
    return {signal: answer.get("clk", answer.get("cur_clk")), f"{signal}_max": answer.get("max_clk")}


def convert_memory(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_gpu_vram_usage: MiB."""
    return {f"gpu.memory_{end}": scale(answer.get(f"vram_{end}"), MIB) for end in ("used", "total")}


def convert_error_counts(
    answer: Mapping[str, Any], corrected: str, uncorrected: str, deferred: str = ""
) -> dict[str, object]:
    """Converts amdsmi_get_gpu_total_ecc_count and amdsmi_get_gpu_ecc_count: since the driver was loaded."""
    found = {corrected: answer.get("correctable_count"), uncorrected: answer.get("uncorrectable_count")}
    return found | ({deferred: answer.get("deferred_count")} if deferred else {})


def convert_temperature(value: object) -> float:
    """Converts amdsmi_get_temp_metric: degrees Celsius. ROCm 5 gave thousandths, and no chip reaches 1,000 degrees."""
    found = to_float(value)
    return found / 1000 if abs(found) > 1000 else found


def convert_bad_pages(answer: object) -> dict[str, object]:
    """Converts amdsmi_get_gpu_bad_page_info: a list of records; ROCm 5 and 6.0 return a sentence if there are none."""
    pages = answer if isinstance(answer, list) else []
    found = [to_count(page.get("status")) for page in pages if isinstance(page, Mapping)]
    return {
        "gpu.pages_uncorrected": len(found),
        "gpu.pages_pending": int(_PENDING in found),
        "gpu.pages_failed": int(_UNRESERVABLE in found),
    }


def convert_pcie(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_pcie_info: lanes, MT/s, counters since the driver was loaded."""
    now, fixed = _nested_dict(answer, "pcie_metric"), _nested_dict(answer, "pcie_static")
    return {
        "gpu.pcie_width": now.get("pcie_width"),
        "gpu.pcie_width_max": fixed.get("max_pcie_width"),
        "gpu.pcie_generation": _GENERATIONS.get(to_count(now.get("pcie_speed"))),
        "gpu.pcie_generation_max": _GENERATIONS.get(to_count(fixed.get("max_pcie_speed"))),
        "gpu.pcie_replays": now.get("pcie_replay_count"),
        "gpu.pcie_replay_rollovers": now.get("pcie_replay_roll_over_count"),
        "gpu.pcie_recoveries": now.get("pcie_l0_to_recovery_count"),
        "gpu.pcie_naks_sent": now.get("pcie_nak_sent_count"),
        "gpu.pcie_naks_received": now.get("pcie_nak_received_count"),
    }


def convert_metrics_table(answer: Mapping[str, Any]) -> dict[str, object]:
    """Converts amdsmi_get_gpu_metrics_info: the firmware's own table."""
    found: dict[str, object] = {signal: answer.get(name) for signal, name in _LIMITERS.items()}
    regulators = [to_float(answer.get(f"temperature_{name}")) for name in ("vrgfx", "vrsoc", "vrmem")]
    found["gpu.regulator_temperature"] = max((value for value in regulators if value == value), default=None)
    return found | dict(_convert_throttling(answer)) | dict(_convert_links(answer))


def describe_device(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes from the answers about chip, board, driver, BIOS and firmware, without empty ones."""
    asic, board = _nested_dict(answers, "asic"), _nested_dict(answers, "board")
    driver, bios = _nested_dict(answers, "driver"), _nested_dict(answers, "vbios")
    found = {
        "vendor": "AMD",
        "sku": to_text(asic.get("market_name")) or to_text(board.get("product_name")),
        "serial": to_text(board.get("product_serial")) or to_text(asic.get("asic_serial")),
        "uuid": to_text(answers.get("uuid")),
        "pci": to_text(answers.get("bdf")).lower(),
        "driver": to_text(driver.get("driver_version")),
        "vbios": to_text(bios.get("version")),
        "part_number": to_text(board.get("model_number")) or to_text(bios.get("part_number")),
        "module_id": to_text(asic.get("oam_id")),
        "firmware": _find_firmware(answers.get("firmware")),
    }
    return {key: value for key, value in found.items() if value}


def _nested_dict(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, Mapping) else {}


def _to_watts(value: float) -> float:
    return value * 1e-6 if value > _MAX_WATTS else value


def _convert_throttling(answer: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields throttle signals. Some versions of the binding give the mask, some only whether a bit is set."""
    mask, any_bit = answer.get("indep_throttle_status"), answer.get("throttle_status")
    if isinstance(mask, int) and not isinstance(mask, bool) and 0 <= mask < 2**64 - 1:
        bits = [bit for bit in range(64) if mask >> bit & 1]
        reasons = {reason for bit in bits for place, reason in _BITS if bit in place}
        yield "gpu.throttle_reasons", sum(reasons)
        yield "gpu.throttled", int(bool(mask))
    elif isinstance(mask, bool) or isinstance(any_bit, int):
        yield "gpu.throttled", int(bool(mask if isinstance(mask, bool) else any_bit))


def _convert_links(answer: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yields XGMI signals. A link that is absent has "N/A" in the list."""
    status = [value for value in _valid_counts(answer.get("xgmi_link_status")) if value in (0, 1)]
    if status:
        yield "gpu.links", len(status)
        yield "gpu.links_up", sum(status)
    for signal, name in (("gpu.xgmi_rx_bytes", "xgmi_read_data_acc"), ("gpu.xgmi_tx_bytes", "xgmi_write_data_acc")):
        moved = sum_counts(_valid_counts(answer.get(name)))
        yield signal, None if moved is None else moved * KIB


def _valid_counts(values: object) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return []
    return [value for value in values if isinstance(value, int) and 0 <= value < 2**64 - 1]


def _find_firmware(answer: object) -> str:
    """Returns the version of the power management firmware, on which the behaviour under load depends."""
    listed = answer.get("fw_list") if isinstance(answer, Mapping) else None
    for one in listed if isinstance(listed, list) else ():
        name = one.get("fw_name") if isinstance(one, Mapping) else None
        if str(getattr(name, "name", name)).endswith(("_PM", "SMC")):
            return to_text(one.get("fw_version"))
    return ""


INTERVALS_S = (300, 60, 30, 10, 5, 1)
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

_OWN_INTERVALS_S = {"gpu.present": 5, "gpu.throttle_reasons": 5, "gpu.throttled": 5}
"""Seconds between two reads that differ from the catalogue: the firmware's table is long; presence needs many calls,
since a virtual machine may be refused those of a single read."""


@dataclass
class Amd(Collector):
    """Reports gpu.*: one entity per accelerator of the library. One that stops answering keeps its number."""

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
    pci: Path = PCI_DEVICES
    _node: str = field(default="", init=False, repr=False)
    _library: VendorLibrary | None = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(default_factory=list, init=False, repr=False)
    _facts: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)
    _entities: tuple[str, ...] = field(default=(), init=False, repr=False)
    _rhythm: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        if not self.driver.exists():
            raise NoData(f"no AMD accelerator: {self.driver} is missing (the driver amdgpu creates it)")
        module = import_binding("amdsmi", "there is an AMD accelerator")
        self.close()
        self._node, self._rhythm = node, SamplingSchedule(node)
        try:
            with stdout_to_stderr():
                module.amdsmi_init()
        except module.AmdSmiException as error:
            raise NoData(
                f"AMD's driver does not respond: {error}; is the agent in the groups video and render?"
            ) from None
        self._library = VendorLibrary(module, module.AmdSmiException)
        handles = self._library.call("amdsmi_get_processor_handles") or []
        if not handles:
            self.close()
            raise NoData("no AMD accelerator: the driver reports none")
        self._handles = sorted(handles, key=lambda handle: to_text(self._call("amdsmi_get_gpu_device_bdf", handle)))
        self._facts = [self._describe(handle) for handle in self._handles]
        named = f"{node}.{entity_prefix('amd', self.pci)}"
        self._entities = tuple(f"gpu:{named}{index}" for index in range(len(self._handles)))

    def read(self) -> tuple[Reading, ...]:
        """Returns the signals that are due."""
        assert self._library is not None
        due = max([every for every in INTERVALS_S if self._rhythm.due(every)], default=1)
        columns = SignalColumns(due_signals(self.signals, due, _OWN_INTERVALS_S), len(self._handles))
        for row, handle in enumerate(self._handles):
            before = self._library.answered_calls
            for values in self._due_values(handle, due):
                columns.set_row(row, values)
            columns.set_row(row, {"gpu.present": int(self._library.answered_calls > before)})
        return (Reading("gpu", self._entities, columns.arrays()),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the accelerators with their attributes."""
        parents = (f"node:{self._node}",)
        return {entity: Device(parents, facts) for entity, facts in zip(self._entities, self._facts, strict=True)}

    def close(self) -> None:
        """See `Collector.close`."""
        if self._library is not None:
            self._library.call("amdsmi_shut_down")
        self._library, self._handles, self._facts, self._entities = None, [], [], ()

    def _due_values(self, handle: Any, due: int) -> Iterator[Values]:
        """Yields the due values of one accelerator, call by call."""
        yield self._call_and_convert("amdsmi_get_power_info", convert_power, handle)
        if due >= 5:
            yield self._call_and_convert("amdsmi_get_gpu_activity", convert_activity, handle)
            yield self._call_and_convert("amdsmi_get_gpu_metrics_info", convert_metrics_table, handle)
            yield self._read_temperatures(handle)
            yield from self._read_clocks(handle)
        if due >= 10:
            yield self._call_and_convert("amdsmi_get_gpu_vram_usage", convert_memory, handle)
            yield self._call_and_convert("amdsmi_get_energy_count", convert_energy, handle)
            yield self._call_and_convert("amdsmi_get_pcie_info", convert_pcie, handle)
            yield from self._read_errors(handle)
        if due >= 60:
            yield self._call_and_convert("amdsmi_get_power_cap_info", convert_power_cap, handle)
        if due >= 300 and (pages := self._call("amdsmi_get_gpu_bad_page_info", handle)) is not None:
            yield convert_bad_pages(pages)

    def _read_temperatures(self, handle: Any) -> Values:
        """Returns the temperatures; a sensor that the chip lacks is missing."""
        metric = self._constant("AmdSmiTemperatureMetric", "CURRENT")
        return {
            signal: convert_temperature(self._call("amdsmi_get_temp_metric", handle, sensor, metric))
            for name, signal in _SENSORS.items()
            if (sensor := self._constant("AmdSmiTemperatureType", name)) is not None
        }

    def _read_clocks(self, handle: Any) -> Iterator[Values]:
        for name, signal in _CLOCKS.items():
            kind = self._constant("AmdSmiClkType", name)
            found = None if kind is None else self._call("amdsmi_get_clock_info", handle, kind)
            if isinstance(found, dict):
                yield convert_clock(signal, found)

    def _read_errors(self, handle: Any) -> Iterator[Values]:
        yield self._call_and_convert(
            "amdsmi_get_gpu_total_ecc_count", lambda answer: convert_error_counts(answer, *_ECC), handle
        )
        for name, signals in _BLOCKS.items():
            block = self._constant("AmdSmiGpuBlock", name)
            found = None if block is None else self._call("amdsmi_get_gpu_ecc_count", handle, block)
            if isinstance(found, dict):
                yield convert_error_counts(found, *signals)

    def _describe(self, handle: Any) -> dict[str, Any]:
        return describe_device({key: self._call(function, handle) for key, function in _FACTS.items()})

    def _call_and_convert(self, function: str, meaning: Callable[[Mapping[str, Any]], Values], handle: Any) -> Values:
        assert self._library is not None
        found = self._library.call_for_dict(function, handle)
        return {} if found is None else meaning(found)

    def _call(self, function: str, *arguments: Any) -> Any:
        assert self._library is not None
        return self._library.call(function, *arguments)

    def _constant(self, table: str, name: str) -> Any:
        """Returns a member of one of the binding's enumerations; None if this version lacks it."""
        assert self._library is not None
        return getattr(getattr(self._library.module, table, None), name, None)
