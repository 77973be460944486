"""What tells an instrument that is wrong from what it measures: it stands still, or swings, while its like do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


RHYTHM = 30
"""s from one reading that is judged to the next: who lies does so for hours, so every tick were waste; chosen."""


class Middles:
    """Medians of groups; keeps the order of the groups for as long as they stay."""

    def __init__(self) -> None:
        self._groups = np.empty(0, np.int32)
        self._table = np.empty((0, 0), np.intp)

    def of(self, values: Floats, groups: NDArray[np.int32]) -> Floats:
        """(N,) median of each one's group, missing values left out; NaN without a group or a value."""
        if groups is not self._groups:
            self._groups, self._table = groups, _table(groups)
        padded = np.append(values, np.nan)[self._table]
        padded.sort(axis=1)
        count = padded.shape[1] - np.isnan(padded).sum(axis=1)
        rows = np.arange(len(padded))
        low, high = padded[rows, np.maximum(count - 1, 0) // 2], padded[rows, np.maximum(count, 1) // 2]
        middle = np.append(np.where(count > 0, 0.5 * (low + high), np.nan), np.nan)
        return np.asarray(middle[groups], np.float64)


def _table(groups: NDArray[np.int32]) -> NDArray[np.intp]:
    """(groups, most members) positions of the members; one beyond the last where there are fewer."""
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    table = np.full((len(sizes), max(1, int(sizes.max()))), len(groups), np.intp)
    order = np.argsort(groups, kind="stable")[np.count_nonzero(groups < 0) :]
    starts = np.cumsum(sizes) - sizes
    table[groups[order], np.arange(len(order)) - starts[groups[order]]] = order
    return table


class Cells:
    """Arrays with a cell per instrument that grow with the fleet; base of what follows."""

    def __init__(self, **fill: float) -> None:
        self._fill = fill
        self.cells: dict[str, Floats] = {name: np.zeros(0) for name in fill}

    def grow(self, size: int) -> dict[str, Floats]:
        """Views of the first `size` cells."""
        for name, cells in self.cells.items():
            if len(cells) < size:
                self.cells[name] = np.append(cells, np.full(size - len(cells), self._fill[name]))
        return {name: cells[:size] for name, cells in self.cells.items()}

    def forget(self, mask: Bools) -> None:
        """These are learnt anew."""
        for name, cells in self.grow(len(mask)).items():
            cells[mask] = self._fill[name]

    def snapshot(self) -> dict[str, Any]:
        return {name: cells.copy() for name, cells in self.cells.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        size = max((len(cells) for cells in state.values()), default=0)
        self.cells = {name: state.get(name, np.full(size, fill)) for name, fill in self._fill.items()}


class Still(Cells):
    """For how many readings an instrument has told the same, and how far what hangs together with it went meanwhile.

    usual: share of readings that differ from the one before, learnt while it moves.
    """

    def __init__(self, *witnesses: str) -> None:
        self.witnesses = witnesses
        spans = {f"{name}.{end}": np.nan for name in witnesses for end in ("low", "high")}
        super().__init__(last=np.nan, run=0.0, usual=0.0, seen=0.0, after=0.0, **spans)

    def step(self, values: Floats, **witness: Floats) -> tuple[Floats, dict[str, Floats]]:
        """(N,) readings since the last change, and by witness the range that it went through since."""
        c = self.grow(len(values))
        there = ~np.isnan(values)
        moved = there & (values != c["last"])
        same = there & ~moved
        c["seen"][there] += 1
        gain = np.maximum(1 / np.maximum(c["seen"], 1), _GAIN)
        learn = there & (c["run"] < _LONG)  # a run that is odd already teaches nothing
        c["usual"][learn] += (gain * (moved - c["usual"]))[learn]
        c["run"][same] += 1
        c["run"][moved] = 0
        np.copyto(c["last"], values, where=there)
        spans = {}
        for name, other in witness.items():
            low, high = c[f"{name}.low"], c[f"{name}.high"]
            np.copyto(low, np.where(moved, other, np.fmin(low, other)), where=there)  # who told nothing stood not still
            np.copyto(high, np.where(moved, other, np.fmax(high, other)), where=there)
            spans[name] = np.nan_to_num(high - low)
        return c["run"], spans

    def stayed(self, values: Floats, odd: Bools, calm: Bools) -> Bools:
        """(N,) whether it stood for a while longer after it was odd first: heat follows load within a minute or so.

        calm: False for those of whom nothing can be said now; they begin anew.
        """
        c = self.grow(len(values))
        there = ~np.isnan(values)
        c["after"][there] = np.where(odd, c["after"] + 1, 0.0)[there]
        for name in ("after", "run"):
            c[name][~calm] = 0.0
        return np.asarray(there & (c["after"] > _FOLLOWS))


class Swing(Cells):
    """Mean change from one reading to the next, lately and usually, without what is a steady way up or down."""

    def __init__(self) -> None:
        super().__init__(last=np.nan, now=0.0, usual=0.0, seen=0.0, held=0.0, trend=0.0, one_ago=np.nan, two_ago=np.nan)

    def step(self, values: Floats, least: float, ratio: float, calm: Bools | None = None) -> tuple[Floats, Floats]:
        """(N,) how many times its usual the change is, and for how many readings it has been `ratio` or more.

        least: change below which nothing is usual: the instrument's own noise.   calm: False for those of whom nothing
        can be said now; they begin anew.
        """
        c = self.grow(len(values))
        moved = values - c["last"]
        change = np.abs(moved - c["trend"])
        known = ~np.isnan(change)
        self._follow(c, moved, known)
        c["seen"][known] += 1
        quick = np.maximum(1 / np.maximum(c["seen"], 1), _CALM)
        clipped = np.fmin(change, _CLIP * np.maximum(c["usual"], least))
        c["now"][known] += (quick * (clipped - c["now"]))[known]
        times = c["now"] / np.maximum(c["usual"], least)
        odd = known & (c["seen"] > _KNOWN) & (times >= ratio)
        learn = known & ((times < _TEACHES) | (c["seen"] <= _KNOWN))  # what begins to swing is not the usual
        slow = np.maximum(1 / np.maximum(c["seen"], 1), _GAIN)
        c["usual"][learn] += (slow * (clipped - c["usual"]))[learn]
        c["held"][odd] += 1
        c["held"][known & ~odd] = 0
        if calm is not None:
            c["held"][~calm] = 0
        np.copyto(c["last"], values, where=~np.isnan(values))
        return times, c["held"]

    def _follow(self, c: dict[str, Floats], moved: Floats, known: Bools) -> None:
        """Learns the trend: the middle of three changes, as one step alone, such as a job's start, is none."""
        a, b = c["one_ago"], c["two_ago"]
        middle = np.maximum(np.minimum(moved, a), np.minimum(np.maximum(moved, a), b))
        step = known & ~np.isnan(middle)
        c["trend"][step] += (_TREND * (middle - c["trend"]))[step]
        np.copyto(b, a, where=known)
        np.copyto(a, moved, where=known)


class Shift(Cells):
    """How far a reading is from its usual: a mean of minutes against one of hours, which what is odd does not teach."""

    def __init__(self) -> None:
        super().__init__(now=np.nan, usual=np.nan, seen=0.0)

    def step(self, values: Floats, odd: Bools) -> Floats:
        """(N,) shift, NaN until it is known. odd: whose usual stays as it is."""
        c = self.grow(len(values))
        there = ~np.isnan(values)
        first = there & np.isnan(c["now"])
        c["now"][first], c["usual"][first] = values[first], values[first]
        c["seen"][there] += 1
        quick = np.maximum(1 / np.maximum(c["seen"], 1), _QUICK)
        slow = np.maximum(1 / np.maximum(c["seen"], 1), _GAIN)
        c["now"][there] += (quick * (values - c["now"]))[there]
        learn = there & ~odd
        c["usual"][learn] += (slow * (values - c["usual"]))[learn]
        return np.where(c["seen"] > _KNOWN, c["now"] - c["usual"], np.nan)


_FOLLOWS = 4
"""Readings, two minutes, within which a sound instrument shows what its witnesses showed; chosen: cold plates need
some 30 s, heat sinks in air a minute."""
_QUICK = 0.15
"""Of a mean of 7 readings: three minutes; chosen."""
_TREND = 0.3
"""Of a mean of 3 changes and more: a ramp is followed within two minutes; chosen."""
_CALM = 0.05
"""Of a mean of 20 readings: ten minutes; chosen: an instrument swings all the time, load now and then."""
_CLIP = 6.0
"""Times the usual that one change counts at most, so that a job's start or one dip is no noise; chosen."""
_TEACHES = 1.5
"""Times the usual change above which readings teach nothing any more; chosen: half of the least ratio and more."""
_GAIN = 0.005
"""Of a mean of 200 readings: an hour and a half; chosen."""
_KNOWN = 40
"""Readings until an instrument is known: 20 minutes; chosen."""
_LONG = 10
"""Readings of one value that teach no more how often it changes; chosen."""
