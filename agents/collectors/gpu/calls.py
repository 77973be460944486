"""NVML functions that return values of one GPU or one link: interval, signals filled, and fallbacks.

NVLinks: how many a GPU has, and the older per-link calls for drivers that do not provide link state as fields.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS, FieldRequest, NvmlField, field_key, field_number
from agents.collectors.gpu.library import NvmlLibrary
from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.slots import GpuSlot
from agents.collectors.gpu.values import GpuValues

PERCENT = 1e-2
MAX_PROCESSES = 1024
"""Most processes of a GPU whose ids are reported. Chosen: 24 bytes each, and a GPU runs a few at a time."""


@dataclass(frozen=True, slots=True)
class NvmlCall:
    """One function. `prepare` receives the binding and returns the arguments after the handle, and a function that
    reads the result.

    fallback: called instead from then on if the driver refuses this one, such as the older version of a function.
    code_values: return codes that are themselves a value.
    """

    function: str
    interval: int
    signals: tuple[str, ...]
    prepare: Callable[[Any], tuple[tuple[Any, ...], Callable[[], Sequence[float]]]]
    fallback: NvmlCall | None = None
    code_values: Mapping[int, float] = field(default_factory=dict)


def number_call(
    function: str,
    every: int,
    signal: str,
    *before: int,
    kind: Any = ctypes.c_uint,
    scale: float = 1,
    fallback: NvmlCall | None = None,
) -> NvmlCall:
    """Returns a call that writes one number. `before`: numbers between the handle and the result."""

    def prepare(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
        """Returns the arguments after the handle, and a function that returns the value read."""
        found = kind()
        return (*map(ctypes.c_uint, before), ctypes.byref(found)), lambda: (found.value * scale,)

    return NvmlCall(function, every, (signal,), prepare, fallback)


def struct_call(
    function: str, every: int, signals: tuple[str, ...], kind: str, version: str, members: tuple[str, ...],
    scale: float = 1, fallback: NvmlCall | None = None, **given: int,
) -> NvmlCall:  # fmt: skip
    """Returns a call that fills a struct of the binding. `given`: members to set before the call; `version`: name of
    its version.
    """

    def prepare(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
        """Returns the arguments after the handle, and a function that returns the members read."""
        found = getattr(nvml, kind)()
        if version:
            found.version = getattr(nvml, version)
        for member, value in given.items():
            setattr(found, member, value)
        return (ctypes.byref(found),), lambda: [getattr(found, member) * scale for member in members]

    return NvmlCall(function, every, signals, prepare, fallback)


_CORRUPTED = 14  # NVML_ERROR_CORRUPTED_INFOROM


def _prepare_code_call(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
    """Prepares nvmlDeviceValidateInforom, which answers only by its return code."""
    return (), lambda: (1.0,)


def _ecc_calls(place: str, location: int, counter: int, ending: str) -> tuple[NvmlCall, ...]:
    """Calls of nvmlDeviceGetMemoryErrorCounter(type, counter, location): corrected is 0 and uncorrected 1."""
    return tuple(
        number_call(
            "nvmlDeviceGetMemoryErrorCounter",
            60 if counter else 10,
            f"gpu.{place}_{kind}{ending}",
            *(type_, counter, location),
            kind=ctypes.c_ulonglong,
        )
        for type_, kind in enumerate(("corrected", "uncorrected"))
    )


_DRAM, _SRAM = 2, 7  # NVML_MEMORY_LOCATION_DRAM, NVML_MEMORY_LOCATION_SRAM
_SM, _MEM = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_SPARE = ("max", "high", "partial", "low", "none")
_FABRIC = ("state", "status", "healthMask", "cliqueId", "healthSummary")
_FABRIC_SIGNALS = (
    "gpu.fabric_state",
    "gpu.fabric_status",
    "gpu.fabric_health",
    "gpu.fabric_clique",
    "gpu.fabric_summary",
)
_SRAM_SIGNALS = {
    "gpu.sram_parity_total": "aggregateUncParity",
    "gpu.sram_secded_total": "aggregateUncSecDed",
    "gpu.sram_l2_total": "aggregateUncBucketL2",
    "gpu.sram_sm_total": "aggregateUncBucketSm",
    "gpu.sram_pcie_total": "aggregateUncBucketPcie",
    "gpu.sram_mcu_total": "aggregateUncBucketMcu",
    "gpu.sram_other_total": "aggregateUncBucketOther",
    "gpu.sram_threshold": "bThresholdExceeded",
}

CLOCK_REASONS_CALL = number_call(
    "nvmlDeviceGetCurrentClocksEventReasons", 1, "gpu.throttle_reasons", kind=ctypes.c_ulonglong,
    fallback=number_call("nvmlDeviceGetCurrentClocksThrottleReasons", 1, "gpu.throttle_reasons",
                         kind=ctypes.c_ulonglong),
)  # fmt: skip
_FAST = (
    CLOCK_REASONS_CALL,
    number_call("nvmlDeviceGetPowerUsage", 1, "gpu.power", scale=1e-3),
    struct_call("nvmlDeviceGetUtilizationRates", 5, ("gpu.utilization", "gpu.memory_utilization"),
           "c_nvmlUtilization_t", "", ("gpu", "memory"), PERCENT),
    number_call("nvmlDeviceGetClockInfo", 5, "gpu.sm_clock", _SM),
    number_call("nvmlDeviceGetClockInfo", 5, "gpu.memory_clock", _MEM),
    struct_call("nvmlDeviceGetTemperatureV", 5, ("gpu.temperature",), "c_nvmlTemperature_v1_t", "nvmlTemperature_v1",
           ("temperature",), sensorType=0, fallback=number_call("nvmlDeviceGetTemperature", 5, "gpu.temperature", 0)),
    struct_call("nvmlDeviceGetMarginTemperature", 5, ("gpu.thermal_margin",), "c_nvmlMarginTemperature_v1_t",
           "nvmlMarginTemperature_v1", ("marginTemperature",)),
)  # fmt: skip
_SLOW = (
    struct_call("nvmlDeviceGetMemoryInfo_v2", 10, ("gpu.memory_used", "gpu.memory_total", "gpu.memory_reserved"),
           "c_nvmlMemory_v2_t", "nvmlMemory_v2", ("used", "total", "reserved"),
           fallback=struct_call("nvmlDeviceGetMemoryInfo", 10, ("gpu.memory_used", "gpu.memory_total"),
                          "c_nvmlMemory_t", "", ("used", "total"))),
    *_ecc_calls("dram", _DRAM, 0, ""),
    *_ecc_calls("sram", _SRAM, 0, ""),
    struct_call("nvmlDeviceGetGpuFabricInfoV", 10, _FABRIC_SIGNALS, "c_nvmlGpuFabricInfo_v3_t",
           "nvmlGpuFabricInfo_v3", _FABRIC,
           fallback=struct_call("nvmlDeviceGetGpuFabricInfoV", 10, _FABRIC_SIGNALS[:4],
                          "c_nvmlGpuFabricInfo_v2_t", "nvmlGpuFabricInfo_v2", _FABRIC[:4])),
    number_call("nvmlDeviceGetCurrPcieLinkGeneration", 30, "gpu.pcie_generation"),
    number_call("nvmlDeviceGetCurrPcieLinkWidth", 30, "gpu.pcie_width"),
    number_call("nvmlDeviceGetMaxPcieLinkGeneration", 30, "gpu.pcie_generation_max"),
    number_call("nvmlDeviceGetMaxPcieLinkWidth", 30, "gpu.pcie_width_max"),
    number_call("nvmlDeviceGetMaxClockInfo", 60, "gpu.sm_clock_max", _SM),
    number_call("nvmlDeviceGetMaxClockInfo", 60, "gpu.memory_clock_max", _MEM),
    number_call("nvmlDeviceGetEnforcedPowerLimit", 60, "gpu.power_limit", scale=1e-3),
    *_ecc_calls("dram", _DRAM, 1, "_total"),
    *_ecc_calls("sram", _SRAM, 1, "_total"),
    struct_call("nvmlDeviceGetSramEccErrorStatus", 60, tuple(_SRAM_SIGNALS), "c_nvmlEccSramErrorStatus_v1_t",
           "nvmlEccSramErrorStatus_v1", tuple(_SRAM_SIGNALS.values())),
    struct_call("nvmlDeviceGetUnrepairableMemoryFlag_v1", 60, ("gpu.memory_unrepairable",),
           "c_nvmlUnrepairableMemory_v1_t", "nvmlUnrepairableMemory_v1", ("unrepairableMemory",)),
    struct_call("nvmlDeviceGetRepairStatus", 60, ("gpu.channel_repair_pending", "gpu.tpc_repair_pending"),
           "c_nvmlRepairStatus_t", "nvmlRepairStatus_v1", ("bChannelRepairPending", "bTpcRepairPending")),
    struct_call("nvmlDeviceGetRowRemapperHistogram", 300, tuple(f"gpu.banks_{spare}" for spare in _SPARE),
           "c_nvmlRowRemapperHistogramValues", "", _SPARE),
    NvmlCall("nvmlDeviceValidateInforom", 3600, ("gpu.inforom_valid",), _prepare_code_call,
             code_values={_CORRUPTED: 0.0}),
)  # fmt: skip
CALLS: tuple[NvmlCall, ...] = (*_FAST, *_SLOW)

LINK_CALLS: tuple[tuple[str, str, tuple[int, ...], Any], ...] = (
    # signal, function, arguments after the link: for GPUs and drivers that do not provide it as a field
    ("nvlink.state", "nvmlDeviceGetNvLinkState", (), ctypes.c_uint),
    ("nvlink.replay_errors", "nvmlDeviceGetNvLinkErrorCounter", (0,), ctypes.c_ulonglong),
    ("nvlink.recovery_errors", "nvmlDeviceGetNvLinkErrorCounter", (1,), ctypes.c_ulonglong),
    ("nvlink.crc_errors", "nvmlDeviceGetNvLinkErrorCounter", (2,), ctypes.c_ulonglong),
)


class ProcessList:
    """Processes with a compute context: their number, and the ids of the first ones."""

    def __init__(self, nvml: Any) -> None:
        self._count = ctypes.c_uint()
        self._buffer = (nvml.c_nvmlProcessInfo_v3_t * MAX_PROCESSES)()
        self._insufficient_size = nvml.NVML_ERROR_INSUFFICIENT_SIZE
        self.count, self.pids = math.nan, list[int]()

    def read(self, function: Callable[..., int], handle: Any) -> int:
        """Reads the list. If it is longer than the buffer, only the number is known. Returns the NVML code."""
        self._count.value = MAX_PROCESSES
        self.count, self.pids = math.nan, []
        code = function(handle, ctypes.byref(self._count), self._buffer)
        if code == 0:
            self.pids = [process.pid for process in self._buffer[: min(self._count.value, MAX_PROCESSES)]]
        if code in (0, self._insufficient_size):
            self.count, code = self._count.value, 0
        return code


LINK_CALLS_INTERVAL = 10
MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13.615.71."""


def count_links(driver: NvmlLibrary, handle: Any) -> int:
    """Returns the number of links of a GPU: as reported, else as many as respond; 0 for a GPU without NVLink."""
    reported_values = driver.read_field(handle, driver.nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    if reported_values is not None:
        return reported_values if reported_values <= MAX_LINKS else 0
    ask, state = driver.find_function("nvmlDeviceGetNvLinkState"), ctypes.c_uint()
    count = 0
    while ask is not None and count < MAX_LINKS and ask(handle, ctypes.c_uint(count), ctypes.byref(state)) == 0:
        count += 1
    return count


def field_requests(
    driver: NvmlLibrary, version: str, places: Iterable[GpuSlot], values: GpuValues
) -> Iterator[FieldRequest]:
    """Yields every field to be read, of every GPU and link."""
    numbers = {field.name: field_number(field.name, driver.nvml, version) for field in (*GPU_FIELDS, *LINK_FIELDS)}
    first = 0
    for place in places:
        for entry in GPU_FIELDS:
            yield from _field_request(
                entry, numbers[entry.name], place.index, entry.scope, values.index_of(entry.signal, place.index)
            )
        for link in range(place.links or 0):
            for entry in LINK_FIELDS:
                yield from _field_request(
                    entry, numbers[entry.name], place.index, link, values.index_of(entry.signal, first + link)
                )
        first += place.links or 0


def _field_request(
    field: NvmlField, number: int | None, gpu: int, scope: int, place: tuple[bool, int]
) -> Iterator[FieldRequest]:
    if number is not None:
        yield FieldRequest(gpu, number, scope, field.interval, place, field.scale, field.packed)


class LinkCalls:
    """Calls each link for signals that were refused as fields."""

    def __init__(self, driver: NvmlLibrary, version: str, refusals: RefusedCalls) -> None:
        names = {field.signal: field.name for field in LINK_FIELDS}
        self._unsupported = frozenset(driver.unsupported_codes)
        self._calls = [
            (
                signal,
                field_number(names[signal], driver.nvml, version),
                driver.find_function(function),
                kind(),
                arguments,
            )
            for signal, function, arguments, kind in LINK_CALLS
        ]
        self._refusals = refusals

    def read(
        self,
        place: GpuSlot,
        first: int,
        values: GpuValues,
        timed: Callable[..., int],
    ) -> int:
        """Reads the links of one GPU. Returns the last NVML code."""
        code, refusals, gpu = 0, self._refusals, place.index
        for signal, number, function, found, arguments in self._calls:
            if function is None or refusals.is_refused(gpu, signal):
                continue
            for link in range(place.links or 0):
                if number is not None and not refusals.is_refused(gpu, field_key(number, link)):
                    continue
                code = timed(place, function, place.handle, ctypes.c_uint(link), *arguments, ctypes.byref(found))
                if code == 0:
                    refusals.record_answer(gpu, signal)
                    values.set_value(values.index_of(signal, first + link), found.value)
                elif code in self._unsupported:
                    refusals.record_refusal(gpu, signal, getattr(function, "__name__", signal))
                    break
        return code
