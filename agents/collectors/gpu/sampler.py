"""One read of all GPUs: calls each in turn, measures the duration of every call, and distinguishes a lost GPU from one
that does not support a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.collectors.gpu.calls import CALLS, CLOCK_REASONS_CALL, LinkCalls, NvmlCall, ProcessList, field_requests
from agents.collectors.gpu.calls import LINK_CALLS_INTERVAL as LINKS_EVERY
from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS, FieldReader
from agents.collectors.gpu.gpm import METRICS, GpmSampler
from agents.collectors.gpu.gpm import SAMPLE_INTERVAL as GPM_EVERY
from agents.collectors.gpu.library import NvmlLibrary
from agents.collectors.gpu.refusals import RefusedCalls
from agents.collectors.gpu.slots import GpuSlot
from agents.collectors.gpu.values import GpuValues

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
        if due >= GPM_EVERY:
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
