"""One look at all GPUs: asks each in turn, times every call, and tells a lost GPU from one that will not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.collectors.gpu.calls import CALLS, REASONS, Call, LinkCalls, Processes, wanted_fields
from agents.collectors.gpu.calls import LINK_CALLS_EVERY as LINKS_EVERY
from agents.collectors.gpu.fields import GPU_FIELDS, LINK_FIELDS, FieldReader
from agents.collectors.gpu.gpm import METRICS, Gpm
from agents.collectors.gpu.gpm import SAMPLE_EVERY as GPM_EVERY
from agents.collectors.gpu.library import Driver
from agents.collectors.gpu.refusals import Refusals
from agents.collectors.gpu.slots import Place
from agents.collectors.gpu.values import Values

PROCESSES_EVERY = 30
"""Seconds; a process list takes milliseconds under the driver's global lock (MangoHud pull request 2104)."""
OWN = ("gpu.present", "gpu.call_latency_max", "gpu.field_latency", "gpu.processes")


def _filled_by(call: Call | None) -> Iterator[str]:
    while call is not None:
        yield from call.signals
        call = call.instead


GPU_SIGNALS = tuple(
    dict.fromkeys((*OWN, *METRICS, *(f.signal for f in GPU_FIELDS), *(s for c in CALLS for s in _filled_by(c))))
)
LINK_SIGNALS = tuple(field.signal for field in LINK_FIELDS)


@dataclass(frozen=True, slots=True)
class Slow:
    """A call that took long."""

    place: Place
    function: str
    seconds: float


class _Ready:
    """A call with its arguments made; shared by all GPUs, since they are asked one after the other."""

    def __init__(self, call: Call, driver: Driver, values: Values) -> None:
        self.call, self.function = call, driver.function(call.function)
        self.what = " ".join((call.function, *call.signals))
        self.arguments, self.take = call.prepare(driver.nvml)
        self.places = [values.place(signal, 0) for signal in call.signals]
        self.instead = _Ready(call.instead, driver, values) if call.instead else None


class Look:
    """Everything that is prepared once for the GPUs and links there are. Made anew when one comes."""

    def __init__(
        self, driver: Driver, version: str, places: Sequence[Place], entities: tuple[Sequence[str], Sequence[str]]
    ) -> None:
        self._driver, self._places = driver, tuple(places)
        gpus, links = entities
        self.values = Values(((GPU_SIGNALS, gpus), (LINK_SIGNALS, links)))
        read_fields = driver.function("nvmlDeviceGetFieldValues")
        fields = wanted_fields(driver, version, places, self.values) if read_fields else ()
        kind, refusals = driver.nvml.c_nvmlFieldValue_t, Refusals(places)
        self._fields = FieldReader(read_fields or _nothing, kind, fields, driver.never, refusals)
        self._gpm = Gpm(driver.nvml, driver.function, refusals)
        self._links = LinkCalls(driver, version, refusals)
        self.refusals = refusals
        self._processes = Processes(driver.nvml)
        self._list_processes = driver.function("nvmlDeviceGetComputeRunningProcesses_v3")
        self._ready = [_Ready(call, driver, self.values) for call in CALLS]
        self._probe = self._ready[CALLS.index(REASONS)]
        self._begin()
        self._asked = self._answered = 0
        self._took = np.zeros(len(places))
        self._slow: list[Slow] = []
        self._gone: set[int] = set()
        self.pids: dict[int, tuple[int, ...]] = {}

    def _begin(self) -> None:
        chosen = ([self._allowed(place.index, ready) for ready in self._ready] for place in self._places)
        self._calls = [[ready for ready in calls if ready] for calls in chosen]

    def _allowed(self, gpu: int, ready: _Ready | None) -> _Ready | None:
        """A call, or the first in its place that this GPU does not refuse."""
        while ready is not None and self.refusals.refused(gpu, ready.what):
            ready = ready.instead
        return ready

    def read(self, due: int, slow_call: float, now: int) -> list[Slow]:
        """Fills `values` with everything of this rhythm and the faster ones; gives the calls that took long.

        now: UTC microseconds, to know when to ask again for what was refused; each hour (MIG mode was left) for all.
        """
        if self.refusals.wake(now, due >= 3600):
            self._fields.lay_out()
            self._begin()
        self._gone.clear()
        self.values.forget()
        self._took.fill(0)
        self._slow, self._limit = [], slow_call
        self.pids = {}
        first, answered = 0, []
        for place in self._places:
            if self._ask(place, first, due):
                answered.append(place.index)
            first += place.links or 0
        latency = np.full(len(self._places), np.nan)
        self._fields.take(due, answered, self.values, latency)
        self._finish(latency)
        return self._slow

    def close(self) -> None:
        self._gpm.close()

    @property
    def driver_gone(self) -> bool:
        """Whether it was the driver that went away in this look: no GPU answers, and all or it itself say so."""
        if not self._gone or not all(place.lost for place in self._places):
            return False
        handles = {place.index for place in self._places if place.handle is not None}
        return handles == self._gone or self._driver.is_gone()

    def _ask(self, place: Place, first: int, due: int) -> bool:
        """All calls to one GPU; whether its fields were read."""
        if place.handle is None:
            place.lost = True
            return False
        if place.lost and not self._is_back(place):
            return False
        if not self._ask_calls(place, due):
            return False
        code = self._timed(place, "nvmlDeviceGetFieldValues", self._fields.call, place.index, place.handle, due)
        if self._is_lost(place, code or 0) or self._is_silent(place, code, due):
            return False
        if due >= GPM_EVERY:
            self._timed(place, "nvmlGpmMetricsGet", self._gpm.read, place.index, place.handle, self.values)
        if due >= LINKS_EVERY:
            self._links.read(place, first, self.values, self._timed_call)
        if due >= PROCESSES_EVERY and self._list_processes:
            self._count_processes(place)
        return bool(code == 0)

    def _ask_calls(self, place: Place, due: int) -> bool:
        """The calls that answer one by one; False where the GPU turned out to be lost."""
        self._asked = self._answered = 0
        for ready in tuple(self._calls[place.index]):
            if ready.call.every > due:
                continue
            code = self._one(place, ready)
            if code in self._driver.never:
                code = self._refused(place, ready, code)
            if self._is_lost(place, code, ready is self._probe):
                return False
        return True

    def _refused(self, place: Place, ready: _Ready, code: int) -> int:
        """Asks this GPU the older call in its place, if there is one; this one again when `Refusals` says so.

        Returns what the older one answered, or why this one was refused.
        """
        self.refusals.refuse(place.index, ready.what, ready.call.function)
        calls, instead = self._calls[place.index], self._allowed(place.index, ready.instead)
        position = calls.index(ready)
        calls[position : position + 1] = [instead] if instead else []
        if instead is None:
            return code
        other = self._one(place, instead)
        if other not in self._driver.never:
            return other
        self._refused(place, instead, other)
        return code

    def _one(self, place: Place, ready: _Ready) -> int:
        if ready.function is None:
            return int(self._driver.nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        started = time.perf_counter()
        code = ready.function(place.handle, *ready.arguments)
        self._note(place, ready.call.function, time.perf_counter() - started)
        self._asked += 1
        self._answered += code == 0 or code in self._driver.never
        if code == 0:
            self.refusals.answer(place.index, ready.what)
            for (whole, start), value in zip(ready.places, ready.take(), strict=True):
                self.values.put((whole, start + place.index), value)
        elif code in ready.call.means:
            whole, start = ready.places[0]
            self.values.put((whole, start + place.index), ready.call.means[code])
        return code

    def _count_processes(self, place: Place) -> None:
        name = "nvmlDeviceGetComputeRunningProcesses_v3"
        code = self._timed(place, name, self._processes.read, self._list_processes, place.handle)
        if code == 0:
            self.values.put(self.values.place("gpu.processes", place.index), self._processes.count)
            self.pids[place.index] = tuple(sorted(self._processes.pids))

    def _timed(self, place: Place, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        found = function(*arguments)
        self._note(place, name, time.perf_counter() - started)
        return found

    def _timed_call(self, place: Place, function: Callable[..., int], *arguments: Any) -> int:
        return int(self._timed(place, getattr(function, "__name__", "NVLink"), function, *arguments))

    def _note(self, place: Place, name: str, took: float) -> None:
        if took > self._took[place.index]:
            self._took[place.index] = took
        if took > self._limit:
            self._slow.append(Slow(place, name, took))

    def _is_lost(self, place: Place, code: int, probe: bool = False) -> bool:
        """Whether a code means that the GPU is gone. INVALID_ARGUMENT to a call without arguments: a dead handle.

        One call that says so is not enough where another one answers.
        """
        doubted = code in self._driver.lost or code in self._driver.gone
        if doubted and not probe:
            code = self._one(place, self._probe)
        if code in self._driver.gone:
            self._gone.add(place.index)
        if (doubted and not self._answers(code)) or (probe and code == self._driver.nvml.NVML_ERROR_INVALID_ARGUMENT):
            self._lose(place)
        return place.lost

    def _answers(self, code: int) -> bool:
        return code in (0, self._driver.nvml.NVML_ERROR_NOT_SUPPORTED)

    def _is_silent(self, place: Place, code: int | None, due: int) -> bool:
        """Whether nothing was answered, whatever the errors say; a look of one second asks too little to tell."""
        if due > 1 and self._asked and not self._answered and code != 0:
            self._lose(place)
        return place.lost

    def _lose(self, place: Place) -> None:
        """A GPU that comes back, perhaps after a reset, is asked everything again."""
        place.lost = True
        self._gpm.drop(place.index)
        self.refusals.forget(place.index)

    def _is_back(self, place: Place) -> bool:
        """Asks a lost GPU one thing."""
        code = self._one(place, self._probe)
        if not self._answers(code):
            self._gone |= {place.index} if code in self._driver.gone else set()
            return False
        place.lost = False
        return True

    def _finish(self, latency: Any) -> None:
        """What this look says of the GPUs themselves; of a lost one, nothing else."""
        first = 0
        for place in self._places:
            if place.lost:
                self.values.clear(GPU_SIGNALS, place.index)
                for link in range(place.links or 0):
                    self.values.clear(LINK_SIGNALS, first + link)
            first += place.links or 0
            self.values.put(self.values.place("gpu.present", place.index), float(not place.lost))
            self.values.put(self.values.place("gpu.call_latency_max", place.index), self._took[place.index])
            self.values.put(self.values.place("gpu.field_latency", place.index), latency[place.index])


def _nothing(*_: Any) -> int:
    """Stands for nvmlDeviceGetFieldValues in a library without it; never called, as there is nothing to ask it for."""
    return 0
