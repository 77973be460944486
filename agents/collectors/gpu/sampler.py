"""One read of all GPUs: calls each in turn, measures the duration of every call, and distinguishes a lost GPU from one
that does not support a call.

On Hopper and newer it also reads GPU performance monitoring (GPM): activity between two samples. Profiling counters are
not used: they take a host-wide lock and conflict with a user's profiler.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.collectors.gpu.calls import CALLS, CLOCK_REASONS_CALL, LinkCalls, NvmlCall, ProcessList, field_requests
from agents.collectors.gpu.calls import LINK_CALLS_INTERVAL as LINKS_EVERY
from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS, FieldReader
from agents.collectors.gpu.library import NvmlLibrary
from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.slots import GpuSlot
from agents.collectors.gpu.values import GpuValues

SAMPLE_INTERVAL = 5
"""Seconds between two samples. The signal catalogue allows 5 to 10."""
_PERCENT, _MEBI = 1e-2, float(1 << 20)
METRICS: dict[str, tuple[int, float]] = {
    # signal -> (NVML_GPM_METRIC_*, factor to the signal's unit): percent, or MiB/s
    "gpu.sm_active": (2, _PERCENT),
    "gpu.sm_occupancy": (3, _PERCENT),
    "gpu.tensor_active": (5, _PERCENT),
    "gpu.dram_active": (10, _PERCENT),
    "gpu.fp64_active": (11, _PERCENT),
    "gpu.fp32_active": (12, _PERCENT),
    "gpu.fp16_active": (13, _PERCENT),
    "gpu.pcie_tx_rate": (20, _MEBI),
    "gpu.pcie_rx_rate": (21, _MEBI),
    "gpu.nvlink_rx_rate": (60, _MEBI),
    "gpu.nvlink_tx_rate": (61, _MEBI),
}
RATIO_TOLERANCE = 0.01
"""How far above 1 a ratio may be and still count as 1. Chosen: nvml.h specifies 0 to 100 %, but busy cycles and all
cycles are not counted at the same moment (100.003 % was seen). Larger values are garbage and are dropped by the
valid range."""
_REFUSAL_KEY = "monitoring"
_LAYOUT = np.dtype([("id", "<u4"), ("code", "<i4"), ("value", "<f8"), ("names", "<u8", 3)])  # nvmlGpmMetric_t


class GpmSampler:
    """Two samples per GPU, an older and a newer one, which swap at each read."""

    def __init__(self, nvml: Any, function: Any, refusals: RefusedCalls) -> None:
        """find_function: returns a function of the library by name, None if it has none."""
        self._nvml, self._refusals = nvml, refusals
        names = ("SampleAlloc", "SampleFree", "SampleGet", "MetricsGet", "QueryDeviceSupport")
        self._sample_alloc, self._sample_free, self._sample_get, self._metrics_get, self._query_support = (
            function(f"nvmlGpm{n}") for n in names
        )
        self._available = None not in (
            self._sample_alloc,
            self._sample_free,
            self._sample_get,
            self._metrics_get,
            self._query_support,
        )
        self._samples: dict[int, list[Any]] = {}
        self._has_baseline: set[int] = set()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        view = np.frombuffer(self._request, np.uint8)[nvml.c_nvmlGpmMetricsGet_t.metrics.offset :]
        self._view = view[: len(METRICS) * _LAYOUT.itemsize].view(_LAYOUT)
        self._view["id"] = [number for number, _ in METRICS.values()]
        self._scales = np.array([scale for _, scale in METRICS.values()])
        self._is_ratio = self._scales == _PERCENT

    def read(self, gpu: int, handle: Any, values: GpuValues) -> int:
        """Takes a sample and compares it with the previous one, if any. Returns the NVML code."""
        if not self._available or self._refusals.is_refused(gpu, _REFUSAL_KEY):
            return 0
        if gpu not in self._samples:
            code = self._allocate_samples(gpu, handle)
            if code or self._refusals.is_refused(gpu, _REFUSAL_KEY):
                return code
        older, newer = self._samples[gpu]
        code = int(self._sample_get(handle, newer))
        if code:
            self._has_baseline.discard(gpu)
            if code == self._nvml.NVML_ERROR_NOT_SUPPORTED:  # in MIG mode
                self._refusals.record_refusal(gpu, _REFUSAL_KEY, "nvmlGpmSampleGet")
            return code
        self._refusals.record_answer(gpu, _REFUSAL_KEY)
        self._samples[gpu] = [newer, older]
        if gpu not in self._has_baseline:
            self._has_baseline.add(gpu)
            return 0
        return self._compare_samples(gpu, older, newer, values)

    def discard_samples(self, gpu: int) -> None:
        """Discards the previous sample of a GPU that was lost or came back."""
        self._has_baseline.discard(gpu)

    def close(self) -> None:
        """Frees all samples."""
        for samples in self._samples.values():
            for sample in samples:
                self._sample_free(sample)
        self._samples.clear()
        self._has_baseline.clear()

    def _allocate_samples(self, gpu: int, handle: Any) -> int:
        support = self._nvml.c_nvmlGpmSupport_t()
        support.version = self._nvml.NVML_GPM_SUPPORT_VERSION
        code = int(self._query_support(handle, ctypes.byref(support)))
        if code == self._nvml.NVML_ERROR_NOT_SUPPORTED or (code == 0 and not support.isSupportedDevice):
            self._refusals.record_refusal(gpu, _REFUSAL_KEY, "nvmlGpmQueryDeviceSupport")
            return 0
        made: list[Any] = []
        while code == 0 and len(made) < 2:
            sample = self._nvml.c_nvmlGpmSample_t()
            code = int(self._sample_alloc(ctypes.byref(sample)))
            if code == 0:
                made.append(sample)
        if code:
            for sample in made:
                self._sample_free(sample)
            return code
        self._samples[gpu] = made
        return 0

    def _compare_samples(self, gpu: int, older: Any, newer: Any, values: GpuValues) -> int:
        self._request.sample1, self._request.sample2 = older, newer
        self._view["code"] = self._nvml.NVML_ERROR_UNKNOWN
        code = int(self._metrics_get(ctypes.byref(self._request)))
        if code == 0:
            with np.errstate(all="ignore"):  # garbage overflows to infinity, which no signal's range holds
                found = self._view["value"] * self._scales
                found[self._is_ratio & (found > 1) & (found <= 1 + RATIO_TOLERANCE)] = 1.0
            for signal, value, returned in zip(METRICS, found.tolist(), self._view["code"].tolist(), strict=True):
                if returned == 0:
                    values.set_value(values.index_of(signal, gpu), value)
        return code


PROCESSES_INTERVAL = 30
"""Seconds. Listing processes takes milliseconds under the driver's global lock (MangoHud pull request 2104)."""
COLLECTOR_SIGNALS = ("gpu.present", "gpu.call_latency_max", "gpu.field_latency", "gpu.processes")


def _signals_of(call: NvmlCall | None) -> Iterator[str]:
    while call is not None:
        yield from call.signals
        call = call.fallback


GPU_SIGNALS = tuple(
    dict.fromkeys(
        (*COLLECTOR_SIGNALS, *METRICS, *(f.signal for f in GPU_FIELDS), *(s for c in CALLS for s in _signals_of(c)))
    )
)
LINK_SIGNALS = tuple(field.signal for field in LINK_FIELDS)


@dataclass(frozen=True, slots=True)
class SlowCall:
    """A call that took longer than the limit."""

    slot: GpuSlot
    function: str
    seconds: float


class _PreparedCall:
    """A call with its arguments. Shared by all GPUs, since they are called one after the other."""

    def __init__(self, call: NvmlCall, driver: NvmlLibrary, values: GpuValues) -> None:
        self.call, self.function = call, driver.find_function(call.function)
        self.key = " ".join((call.function, *call.signals))
        self.arguments, self.read_values = call.prepare(driver.nvml)
        self.indices = [values.index_of(signal, 0) for signal in call.signals]
        self.fallback = _PreparedCall(call.fallback, driver, values) if call.fallback else None


class GpuSampler:
    """Everything that is prepared once for a set of GPUs and links. A new one is created when the set changes."""

    def __init__(
        self,
        driver: NvmlLibrary,
        version: str,
        places: Sequence[GpuSlot],
        entities: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        self._library, self._slots = driver, tuple(places)
        gpus, links = entities
        self.values = GpuValues(((GPU_SIGNALS, gpus), (LINK_SIGNALS, links)))
        read_fields = driver.find_function("nvmlDeviceGetFieldValues")
        fields = field_requests(driver, version, places, self.values) if read_fields else ()
        kind, refusals = driver.nvml.c_nvmlFieldValue_t, RefusedCalls(places)
        self._fields = FieldReader(read_fields or _read_no_fields, kind, fields, driver.unsupported_codes, refusals)
        self._gpm = GpmSampler(driver.nvml, driver.find_function, refusals)
        self._links = LinkCalls(driver, version, refusals)
        self.refusals = refusals
        self._processes = ProcessList(driver.nvml)
        self._list_processes = driver.find_function("nvmlDeviceGetComputeRunningProcesses_v3")
        self._prepared = [_PreparedCall(call, driver, self.values) for call in CALLS]
        self._probe = self._prepared[CALLS.index(CLOCK_REASONS_CALL)]
        self._select_calls()
        self._call_count = self._answer_count = 0
        self._durations = np.zeros(len(places))
        self._slow_calls: list[SlowCall] = []
        self._driver_gone_for: set[int] = set()
        self.pids: dict[int, tuple[int, ...]] = {}

    def _select_calls(self) -> None:
        chosen = ([self._first_supported(place.index, ready) for ready in self._prepared] for place in self._slots)
        self._calls = [[ready for ready in calls if ready] for calls in chosen]

    def _first_supported(self, gpu: int, ready: _PreparedCall | None) -> _PreparedCall | None:
        """Returns a call, or the first of its fallbacks that this GPU does not refuse."""
        while ready is not None and self.refusals.is_refused(gpu, ready.key):
            ready = ready.fallback
        return ready

    def read(self, due: int, slow_call: float, now: int) -> list[SlowCall]:
        """Fills `values` with all signals that are due at this interval or a shorter one. Returns the calls that were
        slow.

        now: UTC microseconds; decides when to retry refused calls. Every hour all are retried (MIG mode may have been
        disabled).
        """
        if self.refusals.start_read(now, due >= 3600):
            self._fields.rebuild()
            self._select_calls()
        self._driver_gone_for.clear()
        self.values.clear_all()
        self._durations.fill(0)
        self._slow_calls, self._slow_limit = [], slow_call
        self.pids = {}
        first, answered = 0, []
        for place in self._slots:
            if self._sample_gpu(place, first, due):
                answered.append(place.index)
            first += place.links or 0
        latency = np.full(len(self._slots), np.nan)
        self._fields.decode_into(due, answered, self.values, latency)
        self._store_collector_signals(latency)
        return self._slow_calls

    def close(self) -> None:
        """Frees the samples of GPU performance monitoring."""
        self._gpm.close()

    @property
    def driver_gone(self) -> bool:
        """Whether the driver disappeared in this read: no GPU responds, and all of them or the driver itself say so."""
        if not self._driver_gone_for or not all(place.lost for place in self._slots):
            return False
        handles = {place.index for place in self._slots if place.handle is not None}
        return handles == self._driver_gone_for or self._library.driver_is_gone()

    def _sample_gpu(self, place: GpuSlot, first: int, due: int) -> bool:
        """Makes all calls to one GPU. Returns whether its fields were read."""
        if place.handle is None:
            place.lost = True
            return False
        if place.lost and not self._check_back(place):
            return False
        if not self._run_calls(place, due):
            return False
        code = self._timed(place, "nvmlDeviceGetFieldValues", self._fields.read_gpu, place.index, place.handle, due)
        if self._check_lost(place, code or 0) or self._check_silent(place, code, due):
            return False
        if due >= SAMPLE_INTERVAL:
            self._timed(place, "nvmlGpmMetricsGet", self._gpm.read, place.index, place.handle, self.values)
        if due >= LINKS_EVERY:
            self._links.read(place, first, self.values, self._timed_call)
        if due >= PROCESSES_INTERVAL and self._list_processes:
            self._count_processes(place)
        return bool(code == 0)

    def _run_calls(self, place: GpuSlot, due: int) -> bool:
        """Makes the calls that return single values. Returns False if the GPU turned out to be lost."""
        self._call_count = self._answer_count = 0
        for ready in tuple(self._calls[place.index]):
            if ready.call.interval > due:
                continue
            code = self._run_call(place, ready)
            if code in self._library.unsupported_codes:
                code = self._use_fallback(place, ready, code)
            if self._check_lost(place, code, ready is self._probe):
                return False
        return True

    def _use_fallback(self, place: GpuSlot, ready: _PreparedCall, code: int) -> int:
        """Replaces a refused call of this GPU by its older variant, if there is one. `RefusedCalls` decides when to
        retry.

        Returns the code of the older variant, or the code of the refusal.
        """
        self.refusals.record_refusal(place.index, ready.key, ready.call.function)
        calls, instead = self._calls[place.index], self._first_supported(place.index, ready.fallback)
        position = calls.index(ready)
        calls[position : position + 1] = [instead] if instead else []
        if instead is None:
            return code
        other = self._run_call(place, instead)
        if other not in self._library.unsupported_codes:
            return other
        self._use_fallback(place, instead, other)
        return code

    def _run_call(self, place: GpuSlot, ready: _PreparedCall) -> int:
        if ready.function is None:
            return int(self._library.nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        started = time.perf_counter()
        code = ready.function(place.handle, *ready.arguments)
        self._record_duration(place, ready.call.function, time.perf_counter() - started)
        self._call_count += 1
        self._answer_count += code == 0 or code in self._library.unsupported_codes
        if code == 0:
            self.refusals.record_answer(place.index, ready.key)
            for (whole, start), value in zip(ready.indices, ready.read_values(), strict=True):
                self.values.set_value((whole, start + place.index), value)
        elif code in ready.call.code_values:
            whole, start = ready.indices[0]
            self.values.set_value((whole, start + place.index), ready.call.code_values[code])
        return code

    def _count_processes(self, place: GpuSlot) -> None:
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        code = self._timed(place, name, self._processes.read, self._list_processes, place.handle)
        if code == 0:
            self.values.set_value(self.values.index_of("gpu.processes", place.index), self._processes.count)
            self.pids[place.index] = tuple(sorted(self._processes.pids))

    def _timed(self, place: GpuSlot, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        found = function(*arguments)
        self._record_duration(place, name, time.perf_counter() - started)
        return found

    def _timed_call(self, place: GpuSlot, function: Callable[..., int], *arguments: Any) -> int:
        return int(self._timed(place, getattr(function, "__name__", "NVLink"), function, *arguments))

    def _record_duration(self, place: GpuSlot, name: str, took: float) -> None:
        if took > self._durations[place.index]:
            self._durations[place.index] = took
        if took > self._slow_limit:
            self._slow_calls.append(SlowCall(place, name, took))

    def _check_lost(self, place: GpuSlot, code: int, probe: bool = False) -> bool:
        """Returns whether a code means that the GPU is lost. INVALID_ARGUMENT to a call without arguments: an invalid
        handle.

        One such code is not enough if another call succeeds.
        """
        doubted = code in self._library.lost_codes or code in self._library.driver_gone_codes
        if doubted and not probe:
            code = self._run_call(place, self._probe)
        if code in self._library.driver_gone_codes:
            self._driver_gone_for.add(place.index)
        if (doubted and not self._means_alive(code)) or (
            probe and code == self._library.nvml.NVML_ERROR_INVALID_ARGUMENT
        ):
            self._mark_lost(place)
        return place.lost

    def _means_alive(self, code: int) -> bool:
        return code in (0, self._library.nvml.NVML_ERROR_NOT_SUPPORTED)

    def _check_silent(self, place: GpuSlot, code: int | None, due: int) -> bool:
        """Returns whether no call was answered, regardless of the codes. A 1 s read makes too few calls to decide."""
        if due > 1 and self._call_count and not self._answer_count and code != 0:
            self._mark_lost(place)
        return place.lost

    def _mark_lost(self, place: GpuSlot) -> None:
        """Marks a GPU as lost. When it comes back, perhaps after a reset, all calls are tried again."""
        place.lost = True
        self._gpm.discard_samples(place.index)
        self.refusals.reset_gpu(place.index)

    def _check_back(self, place: GpuSlot) -> bool:
        """Calls a lost GPU once and returns whether it responds."""
        code = self._run_call(place, self._probe)
        if not self._means_alive(code):
            self._driver_gone_for |= {place.index} if code in self._library.driver_gone_codes else set()
            return False
        place.lost = False
        return True

    def _store_collector_signals(self, latency: Any) -> None:
        """Stores the collector's own signals about the GPUs. All others of a lost GPU are cleared."""
        first = 0
        for place in self._slots:
            if place.lost:
                self.values.clear_device(GPU_SIGNALS, place.index)
                for link in range(place.links or 0):
                    self.values.clear_device(LINK_SIGNALS, first + link)
            first += place.links or 0
            self.values.set_value(self.values.index_of("gpu.present", place.index), float(not place.lost))
            self.values.set_value(
                self.values.index_of("gpu.call_latency_max", place.index), self._durations[place.index]
            )
            self.values.set_value(self.values.index_of("gpu.field_latency", place.index), latency[place.index])


def _read_no_fields(*_: Any) -> int:
    """Replaces nvmlDeviceGetFieldValues in a library without it. Never called, since there are no fields to read."""
    return 0
