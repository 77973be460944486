"""Reads all fields of all GPUs: one nvmlDeviceGetFieldValues per GPU and look, into one array that is used again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sources.nvml.fields import decode, unpack_rate
from agents.sources.nvml.refusals import Refusals
from agents.sources.nvml.values import Values

# nvmlFieldValue_t of nvml.h: 40 bytes, the union of the value last.
LAYOUT = np.dtype(
    {
        "names": ["id", "scope", "time", "latency", "type", "code", "value"],
        "formats": ["<u4", "<u4", "<i8", "<i8", "<i4", "<i4", "<u8"],
    }
)
UNREAD = 999
"""NVML_ERROR_UNKNOWN stands in every entry before a call, so that what the driver leaves out is missing."""


def what(number: int, scope: int) -> str:
    """A field among what may be refused."""
    return f"field {number} of {scope}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One field of one GPU and where its value goes."""

    gpu: int
    number: int
    scope: int
    every: int
    place: tuple[bool, int]
    scale: float = 1.0
    packed: bool = False

    @property
    def what(self) -> str:
        """What it is called among refusals."""
        return what(self.number, self.scope)


@dataclass(frozen=True, slots=True)
class _Beat:
    """What one rhythm reads: per GPU how many entries from where, and the index of each value's place."""

    spans: tuple[tuple[int, Any, ctypes.c_int32, slice], ...]
    entries: NDArray[np.intp]
    owner: NDArray[np.intp]
    counters: NDArray[np.intp]
    counter_places: NDArray[np.intp]
    gauges: NDArray[np.intp]
    gauge_places: NDArray[np.intp]
    scales: NDArray[np.float64]
    packed: NDArray[np.intp]


class FieldReader:
    """The array, cut into a part per GPU in which the fastest fields come first, so that each rhythm is a prefix."""

    def __init__(
        self,
        function: Callable[..., int],
        value_type: Any,
        wanted: Iterable[Wanted],
        never: Sequence[int],
        refusals: Refusals,
    ) -> None:
        self._function, self._type, self._never, self._refusals = function, value_type, never, refusals
        self._all = tuple(sorted(wanted, key=lambda w: (w.gpu, w.every)))
        self.lay_out()

    def call(self, gpu: int, handle: Any, due: int) -> int | None:
        """The driver's answer for one GPU, still raw; its return code, None where there is nothing to ask for."""
        span = self._beat(due).spans[gpu] if gpu < self._gpus else None
        if span is None or span[0] == 0:
            return None
        _, pointer, count, part = span
        self._code[part] = UNREAD
        code = self._function(handle, count, pointer)
        if code:
            self._code[part] = UNREAD
        return code

    def take(self, due: int, asked: Iterable[int], values: Values, latency: NDArray[np.float64]) -> None:
        """Decodes what `call` brought for the GPUs `asked` and puts it in its places."""
        beat = self._beat(due)
        if not beat.entries.size:
            return
        code = self._code[beat.entries]
        answered = np.zeros(self._gpus, np.bool_)
        answered[[gpu for gpu in asked if gpu < self._gpus]] = True
        good = (code == 0) & answered[beat.owner]
        floats, counters = decode(self._value[beat.entries], self._kind[beat.entries])
        floats[beat.packed] = unpack_rate(floats[beat.packed])
        with np.errstate(all="ignore"):  # garbage overflows to infinity, which no signal's range holds
            floats *= beat.scales
        chosen = good[beat.gauges]
        values.gauges[beat.gauge_places[chosen]] = floats[beat.gauges[chosen]]
        chosen = good[beat.counters]
        values.counters[beat.counter_places[chosen]] = counters[beat.counters[chosen]]
        np.fmax.at(latency, beat.owner[good], self._latency[beat.entries[good]] * 1e-6)
        self._keep(beat.entries[good], beat.entries[np.isin(code, self._never) & answered[beat.owner]])

    def _keep(self, told: NDArray[np.intp], refused: NDArray[np.intp]) -> None:
        """Remembers which entries are news: told for the first time, or refused."""
        for i in told[~self._steady[told]]:
            self._refusals.answer(self._asked[i].gpu, self._asked[i].what)
        self._steady[told] = True
        for i in refused:
            wanted = self._asked[i]
            self._refusals.refuse(wanted.gpu, wanted.what, f"field {wanted.number}")
        if refused.size:
            self.lay_out()

    def _beat(self, due: int) -> _Beat:
        if due not in self._beats:
            self._beats[due] = self._prepare(due)
        return self._beats[due]

    def lay_out(self) -> None:
        """Makes the array of what is not refused."""
        refusals = self._refusals
        self._asked = tuple(w for w in self._all if not refusals.refused(w.gpu, w.what))
        self._steady = np.array([refusals.steady(w.gpu, w.what) for w in self._asked], np.bool_)
        self._gpus = 1 + max((w.gpu for w in self._asked), default=-1)
        self._array = (self._type * max(len(self._asked), 1))()
        view = np.frombuffer(self._array, LAYOUT)
        view["id"][: len(self._asked)] = [w.number for w in self._asked]
        view["scope"][: len(self._asked)] = [w.scope for w in self._asked]
        self._code, self._kind, self._value, self._latency = (view[n] for n in ("code", "type", "value", "latency"))
        self._beats: dict[int, _Beat] = {}

    def _prepare(self, due: int) -> _Beat:
        entries = [i for i, w in enumerate(self._asked) if w.every <= due]
        spans = []
        for gpu in range(self._gpus):
            mine = [i for i in entries if self._asked[i].gpu == gpu]
            start = mine[0] if mine else 0
            pointer = ctypes.byref(self._array, start * LAYOUT.itemsize)
            spans.append((len(mine), pointer, ctypes.c_int32(len(mine)), slice(start, start + len(mine))))
        asked = [self._asked[i] for i in entries]
        counters = [i for i, w in enumerate(asked) if w.place[0]]
        gauges = [i for i, w in enumerate(asked) if not w.place[0]]
        return _Beat(
            tuple(spans),
            _indices(entries),
            _indices([w.gpu for w in asked]),
            _indices(counters),
            _indices([asked[i].place[1] for i in counters]),
            _indices(gauges),
            _indices([asked[i].place[1] for i in gauges]),
            np.array([w.scale for w in asked]),
            _indices([i for i, w in enumerate(asked) if w.packed]),
        )


def _indices(found: Sequence[int]) -> NDArray[np.intp]:
    return np.array(found, np.intp)
