"""Statistics that tell a faulty instrument from a real change: stuck, noisy, and the usual heat of a cohort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import AncestorIndex
from detectors.telemetry import instrument_kernel
from pipeline.model.records import Frame

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
        if all(len(cells) == size for cells in self.cells.values()):
            return self.cells
        for name, cells in self.cells.items():
            if len(cells) < size:
                self.cells[name] = np.append(cells, np.full(size - len(cells), self._fill[name]))
        return {name: cells[:size] for name, cells in self.cells.items()}

    def reset(self, mask: Bools) -> None:
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
        c, size = self.grow(len(values)), len(values)
        moved = np.empty(size, bool)
        instrument_kernel.still(values, c["last"], c["run"], c["usual"], c["seen"], moved, _GAIN, _LONG)
        spans = {}
        for name, other in witness.items():
            spans[name] = np.empty(size)
            instrument_kernel.spans(
                values, np.asarray(other, np.float64), moved, c[f"{name}.low"], c[f"{name}.high"], spans[name]
            )
        return c["run"], spans

    def stayed(self, values: Floats, odd: Bools, calm: Bools) -> Bools:
        """(N,) whether it stood for a while longer after it was odd first: heat follows load within a minute or so.

        calm: False for those of whom nothing can be said now; they begin anew.
        """
        c, out = self.grow(len(values)), np.empty(len(values), bool)
        instrument_kernel.stay(values, odd, calm, c["after"], c["run"], _FOLLOWS, out)
        return out


class Swing(Cells):
    """Mean change from one reading to the next, lately and usually, without what is a steady way up or down."""

    def __init__(self) -> None:
        super().__init__(**_SWING)

    def step(self, values: Floats, least: float, ratio: float, calm: Bools | None = None) -> tuple[Floats, Floats]:
        """(N,) how many times its usual the change is, and for how many readings it has been `ratio` or more.

        least: change below which nothing is usual: the instrument's own noise.   calm: False for those of whom nothing
        can be said now; they begin anew.
        """
        c, times = self.grow(len(values)), np.empty(len(values))
        instrument_kernel.swing(values, tuple(c[name] for name in _SWING), least, ratio, _KNOWN, _RATES, times)
        if calm is not None and not calm.all():
            c["held"][~calm] = 0
        return times, c["held"]


class Shift(Cells):
    """How far a reading is from its usual: a mean of minutes against one of hours, which what is odd does not teach."""

    def __init__(self) -> None:
        super().__init__(now=np.nan, usual=np.nan, seen=0.0)

    def step(self, values: Floats, odd: Bools) -> Floats:
        """(N,) shift, NaN until it is known. odd: whose usual stays as it is."""
        c, shifted = self.grow(len(values)), np.empty(len(values))
        instrument_kernel.shift(values, odd, c["now"], c["usual"], c["seen"], _KNOWN, _QUICK, _GAIN, shifted)
        return shifted


_FOLLOWS = 4.0
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
_KNOWN = 40.0
"""Readings until an instrument is known: 20 minutes; chosen."""
_LONG = 10.0
"""Readings of one value that teach no more how often it changes; chosen."""
_RATES = (_CALM, _GAIN, _TREND, _CLIP, _TEACHES)
_SWING = dict.fromkeys(("last", "now", "usual", "seen", "held", "trend", "one_ago", "two_ago"), 0.0)
_SWING |= {"last": np.nan, "one_ago": np.nan, "two_ago": np.nan}
"""What an instrument's swing begins with, in the order of instrument_kernel.swing."""


ODD_K = 3.0
"""Shift from which a cohort is another than before: three roundings; chosen."""
_USUAL_K_PER_W = 0.035
"""Thermal resistance of a liquid-cooled GPU until the cohort's own is known; chosen between the 0.03 and 0.04 of cold
plates."""
_K_PER_W = (0.02, 0.1)
"""Least and most of it: good cold plates, small heat sinks; what goes beyond is no resistance; chosen."""
K_ERROR = 0.2  # share of the resistance that is not known; chosen
_PRIOR_W2 = 2500.0  # variance of the load, 50 W, that this is worth; chosen
_CLIMATE_GAIN = 0.005  # of the moments: 200 readings, an hour and a half; chosen
_LEAST = 4  # GPUs that tell; fewer say little of a loop; chosen
_SETTLES = 900 // RHYTHM  # readings after which a cohort that moved has settled: smoothing and heat; chosen
_LIFT = 6.0 * 3600 / RHYTHM  # readings after which a cohort that moved is as it is now; chosen
_NUMBERS = (_CLIMATE_GAIN, _USUAL_K_PER_W, _PRIOR_W2, *_K_PER_W, ODD_K, K_ERROR, _LIFT)


class Climate:
    """State per cohort: shifts of temperature and power, and how the one follows the other.

    shift: K that temperatures moved and load does not explain; NaN where nobody knows.
    load:  K of it that load explains.   calm: whether the cohort is, and has been for a while, as it usually is.
    """

    def __init__(self) -> None:
        self.moved = {name: Shift() for name in ("heat", "power")}
        self.moments = Cells(heat=np.nan, power=np.nan, both=0.0, square=0.0, odd=0.0, since=float(_SETTLES))
        self.shift: Floats = np.empty(0)
        self.load: Floats = np.empty(0)
        self.calm: Bools = np.empty(0, bool)

    def step(self, heat: Floats, power: Floats) -> None:
        """Takes a reading: middle temperature and power of each cohort."""
        c, size = self.moments.grow(len(heat)), len(heat)
        frozen = (c["odd"] > 0) & (c["odd"] < _LIFT)
        moved = self.moved["heat"].step(heat, frozen), self.moved["power"].step(power, frozen)
        smooth = (self.moved["heat"].cells["now"][:size], self.moved["power"].cells["now"][:size])  # heat lags less
        self.load, self.shift = np.empty(size), np.empty(size)
        state = tuple(c[name] for name in ("heat", "power", "both", "square", "odd", "since"))
        instrument_kernel.climate(smooth, moved, state, _NUMBERS, self.load, self.shift)
        self.calm = c["since"] >= _SETTLES

    def snapshot(self) -> dict[str, Any]:
        return {"moments": self.moments.snapshot(), **{name: each.snapshot() for name, each in self.moved.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.moments.restore(state["moments"])
        for name, each in self.moved.items():
            each.restore(state[name])


class LoopMeans:
    """Mean temperature and power of the GPUs of each loop."""

    def __init__(self) -> None:
        self._index = AncestorIndex("cdu")

    def of(self, frame: Frame, gpus: Frame | None) -> tuple[Floats, Floats]:
        """(loops,) each; NaN where too few tell."""
        size = len(frame.entities)
        if gpus is None or not gpus.values:
            return np.full(size, np.nan), np.full(size, np.nan)
        heat, power, at = gpus["gpu.temperature"], gpus["gpu.power"], self._index.positions(gpus, frame)
        told = (at >= 0) & ~np.isnan(heat) & ~np.isnan(power)
        count = np.bincount(at[told], minlength=size)
        enough = np.where(count >= _LEAST, count, np.nan)
        heats = np.bincount(at[told], heat[told], size)
        powers = np.bincount(at[told], power[told], size)
        return np.asarray(heats / enough), np.asarray(powers / enough)
