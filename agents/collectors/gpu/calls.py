"""The NVML functions that answer for one GPU at a time: which there are, how often, and which signals each fills.

NVLinks: how many a GPU has, and the older calls for GPUs whose driver does not tell links' state as fields.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS, Field, Wanted, number_of, refusal_key
from agents.collectors.gpu.library import Driver
from agents.collectors.gpu.refusals import Refusals
from agents.collectors.gpu.slots import Place
from agents.collectors.gpu.values import Values

PERCENT = 1e-2
PROCESSES = 1024
"""Most processes of a GPU that are named; chosen: each is 24 bytes, and a GPU runs a few at a time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One function. `prepare` gets the binding; it makes the arguments after the handle and what reads the answer.

    instead: asked from then on where the driver refuses this one, such as the older version of a function.
    means: return codes that are an answer.
    """

    function: str
    every: int
    signals: tuple[str, ...]
    prepare: Callable[[Any], tuple[tuple[Any, ...], Callable[[], Sequence[float]]]]
    instead: Call | None = None
    means: Mapping[int, float] = field(default_factory=dict)


def number(
    function: str,
    every: int,
    signal: str,
    *before: int,
    kind: Any = ctypes.c_uint,
    scale: float = 1,
    instead: Call | None = None,
) -> Call:
    """A call that writes one number; `before` are numbers that stand between the handle and it."""

    def prepare(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
        found = kind()
        return (*map(ctypes.c_uint, before), ctypes.byref(found)), lambda: (found.value * scale,)

    return Call(function, every, (signal,), prepare, instead)


def struct(
    function: str, every: int, signals: tuple[str, ...], kind: str, version: str, members: tuple[str, ...],
    scale: float = 1, instead: Call | None = None, **given: int,
) -> Call:  # fmt: skip
    """A call that fills a struct of the binding; `given` are members to set before it, `version` names its version."""

    def prepare(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
        found = getattr(nvml, kind)()
        if version:
            found.version = getattr(nvml, version)
        for member, value in given.items():
            setattr(found, member, value)
        return (ctypes.byref(found),), lambda: [getattr(found, member) * scale for member in members]

    return Call(function, every, signals, prepare, instead)


_CORRUPTED = 14  # NVML_ERROR_CORRUPTED_INFOROM


def _by_code(nvml: Any) -> tuple[tuple[Any, ...], Callable[[], Sequence[float]]]:
    """nvmlDeviceValidateInforom answers by its return code alone."""
    return (), lambda: (1.0,)


def _errors(place: str, location: int, counter: int, ending: str) -> tuple[Call, ...]:
    """nvmlDeviceGetMemoryErrorCounter(type, counter, location): corrected is 0 and uncorrected 1."""
    return tuple(
        number(
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

REASONS = number(
    "nvmlDeviceGetCurrentClocksEventReasons", 1, "gpu.throttle_reasons", kind=ctypes.c_ulonglong,
    instead=number("nvmlDeviceGetCurrentClocksThrottleReasons", 1, "gpu.throttle_reasons", kind=ctypes.c_ulonglong),
)  # fmt: skip
_FAST = (
    REASONS,
    number("nvmlDeviceGetPowerUsage", 1, "gpu.power", scale=1e-3),
    struct("nvmlDeviceGetUtilizationRates", 5, ("gpu.utilization", "gpu.memory_utilization"),
           "c_nvmlUtilization_t", "", ("gpu", "memory"), PERCENT),
    number("nvmlDeviceGetClockInfo", 5, "gpu.sm_clock", _SM),
    number("nvmlDeviceGetClockInfo", 5, "gpu.memory_clock", _MEM),
    struct("nvmlDeviceGetTemperatureV", 5, ("gpu.temperature",), "c_nvmlTemperature_v1_t", "nvmlTemperature_v1",
           ("temperature",), sensorType=0, instead=number("nvmlDeviceGetTemperature", 5, "gpu.temperature", 0)),
    struct("nvmlDeviceGetMarginTemperature", 5, ("gpu.thermal_margin",), "c_nvmlMarginTemperature_v1_t",
           "nvmlMarginTemperature_v1", ("marginTemperature",)),
)  # fmt: skip
_SLOW = (
    struct("nvmlDeviceGetMemoryInfo_v2", 10, ("gpu.memory_used", "gpu.memory_total", "gpu.memory_reserved"),
           "c_nvmlMemory_v2_t", "nvmlMemory_v2", ("used", "total", "reserved"),
           instead=struct("nvmlDeviceGetMemoryInfo", 10, ("gpu.memory_used", "gpu.memory_total"),
                          "c_nvmlMemory_t", "", ("used", "total"))),
    *_errors("dram", _DRAM, 0, ""),
    *_errors("sram", _SRAM, 0, ""),
    struct("nvmlDeviceGetGpuFabricInfoV", 10, _FABRIC_SIGNALS, "c_nvmlGpuFabricInfo_v3_t",
           "nvmlGpuFabricInfo_v3", _FABRIC,
           instead=struct("nvmlDeviceGetGpuFabricInfoV", 10, _FABRIC_SIGNALS[:4],
                          "c_nvmlGpuFabricInfo_v2_t", "nvmlGpuFabricInfo_v2", _FABRIC[:4])),
    number("nvmlDeviceGetCurrPcieLinkGeneration", 30, "gpu.pcie_generation"),
    number("nvmlDeviceGetCurrPcieLinkWidth", 30, "gpu.pcie_width"),
    number("nvmlDeviceGetMaxPcieLinkGeneration", 30, "gpu.pcie_generation_max"),
    number("nvmlDeviceGetMaxPcieLinkWidth", 30, "gpu.pcie_width_max"),
    number("nvmlDeviceGetMaxClockInfo", 60, "gpu.sm_clock_max", _SM),
    number("nvmlDeviceGetMaxClockInfo", 60, "gpu.memory_clock_max", _MEM),
    number("nvmlDeviceGetEnforcedPowerLimit", 60, "gpu.power_limit", scale=1e-3),
    *_errors("dram", _DRAM, 1, "_total"),
    *_errors("sram", _SRAM, 1, "_total"),
    struct("nvmlDeviceGetSramEccErrorStatus", 60, tuple(_SRAM_SIGNALS), "c_nvmlEccSramErrorStatus_v1_t",
           "nvmlEccSramErrorStatus_v1", tuple(_SRAM_SIGNALS.values())),
    struct("nvmlDeviceGetUnrepairableMemoryFlag_v1", 60, ("gpu.memory_unrepairable",),
           "c_nvmlUnrepairableMemory_v1_t", "nvmlUnrepairableMemory_v1", ("unrepairableMemory",)),
    struct("nvmlDeviceGetRepairStatus", 60, ("gpu.channel_repair_pending", "gpu.tpc_repair_pending"),
           "c_nvmlRepairStatus_t", "nvmlRepairStatus_v1", ("bChannelRepairPending", "bTpcRepairPending")),
    struct("nvmlDeviceGetRowRemapperHistogram", 300, tuple(f"gpu.banks_{spare}" for spare in _SPARE),
           "c_nvmlRowRemapperHistogramValues", "", _SPARE),
    Call("nvmlDeviceValidateInforom", 3600, ("gpu.inforom_valid",), _by_code, means={_CORRUPTED: 0.0}),
)  # fmt: skip
CALLS: tuple[Call, ...] = (*_FAST, *_SLOW)

LINK_CALLS: tuple[tuple[str, str, tuple[int, ...], Any], ...] = (
    # signal, function, arguments after the link: for GPUs and drivers that do not tell it as a field
    ("nvlink.state", "nvmlDeviceGetNvLinkState", (), ctypes.c_uint),
    ("nvlink.replay_errors", "nvmlDeviceGetNvLinkErrorCounter", (0,), ctypes.c_ulonglong),
    ("nvlink.recovery_errors", "nvmlDeviceGetNvLinkErrorCounter", (1,), ctypes.c_ulonglong),
    ("nvlink.crc_errors", "nvmlDeviceGetNvLinkErrorCounter", (2,), ctypes.c_ulonglong),
)


class Processes:
    """The processes with a compute context: their number, and of the first ones their ids."""

    def __init__(self, nvml: Any) -> None:
        self._count = ctypes.c_uint()
        self._list = (nvml.c_nvmlProcessInfo_v3_t * PROCESSES)()
        self._too_small = nvml.NVML_ERROR_INSUFFICIENT_SIZE
        self.count, self.pids = math.nan, list[int]()

    def read(self, function: Callable[..., int], handle: Any) -> int:
        """Asks for the list; where it is longer than ours, only the number is known. Returns NVML's code."""
        self._count.value = PROCESSES
        self.count, self.pids = math.nan, []
        code = function(handle, ctypes.byref(self._count), self._list)
        if code == 0:
            self.pids = [process.pid for process in self._list[: min(self._count.value, PROCESSES)]]
        if code in (0, self._too_small):
            self.count, code = self._count.value, 0
        return code


LINK_CALLS_EVERY = 10
MOST_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of nvidia-ml-py 13.615.71."""


def count_links(driver: Driver, handle: Any) -> int:
    """Links of one GPU: what it says, else as many as answer; none on a GPU without NVLink."""
    told = driver.field(handle, driver.nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
    if told is not None:
        return told if told <= MOST_LINKS else 0
    ask, state = driver.function("nvmlDeviceGetNvLinkState"), ctypes.c_uint()
    count = 0
    while ask is not None and count < MOST_LINKS and ask(handle, ctypes.c_uint(count), ctypes.byref(state)) == 0:
        count += 1
    return count


def wanted_fields(driver: Driver, version: str, places: Iterable[Place], values: Values) -> Iterator[Wanted]:
    """Every field to be read, of every GPU and link."""
    numbers = {field.name: number_of(field.name, driver.nvml, version) for field in (*GPU_FIELDS, *LINK_FIELDS)}
    first = 0
    for place in places:
        for entry in GPU_FIELDS:
            yield from _want(
                entry, numbers[entry.name], place.index, entry.scope, values.place(entry.signal, place.index)
            )
        for link in range(place.links or 0):
            for entry in LINK_FIELDS:
                yield from _want(
                    entry, numbers[entry.name], place.index, link, values.place(entry.signal, first + link)
                )
        first += place.links or 0


def _want(field: Field, number: int | None, gpu: int, scope: int, place: tuple[bool, int]) -> Iterator[Wanted]:
    if number is not None:
        yield Wanted(gpu, number, scope, field.every, place, field.scale, field.packed)


class LinkCalls:
    """Asks link by link for what was refused as a field."""

    def __init__(self, driver: Driver, version: str, refusals: Refusals) -> None:
        names = {field.signal: field.name for field in LINK_FIELDS}
        self._never = frozenset(driver.never)
        self._calls = [
            (signal, number_of(names[signal], driver.nvml, version), driver.function(function), kind(), arguments)
            for signal, function, arguments, kind in LINK_CALLS
        ]
        self._refusals = refusals

    def read(
        self,
        place: Place,
        first: int,
        values: Values,
        timed: Callable[..., int],
    ) -> int:
        """Reads the links of one GPU; returns NVML's last code."""
        code, refusals, gpu = 0, self._refusals, place.index
        for signal, number, function, found, arguments in self._calls:
            if function is None or refusals.refused(gpu, signal):
                continue
            for link in range(place.links or 0):
                if number is not None and not refusals.refused(gpu, refusal_key(number, link)):
                    continue
                code = timed(place, function, place.handle, ctypes.c_uint(link), *arguments, ctypes.byref(found))
                if code == 0:
                    refusals.answer(gpu, signal)
                    values.put(values.place(signal, first + link), found.value)
                elif code in self._never:
                    refusals.refuse(gpu, signal, getattr(function, "__name__", signal))
                    break
        return code
