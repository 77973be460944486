"""What a whole cohort's resistance does at once: its supply's sensor lies, or its loop flows less. Members go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.kernel import compiled
from detectors.base.streams import Step
from detectors.heat.resistance import Measured
from pipeline.records import SECOND

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
_MOVED = 0.06  # of a logarithm: all GPUs of a cohort at once; a supply sensor that lies by 2 K of 30; chosen
_SETTLES = 300 * SECOND  # in which nobody is judged: dies, coolant and filters are where they go by then; chosen
_NOW = 120.0  # s over which it is averaged: a step of the load moves it for less; chosen
_MEMORY = 6 * 3600.0  # s in which what a cohort shows becomes its usual; chosen
_OFF_MOST = 0.12  # what one GPU adds to the mean of its cohort at most; twice _MOVED, chosen
_FEWEST = 4  # members at work from which a median says what all do; chosen
_ROWS = {"usual": np.nan, "now": 0.0, "until": 0.0, "off": 0.0}


@compiled
def _followed(
    rows: Floats,
    ln_r: Floats,
    usable: Bools,
    own: NDArray[np.float32],
    groups: NDArray[np.int32],
    count: int,
    gains: Floats,
    time: int,
    told: Bools,
) -> bool:
    """Follows what the members of each cohort do; whether one that moved is settled now. told: who was counted."""
    total, members, due = np.zeros(count), np.zeros(count), False
    usual, now, until = rows[0], rows[1], rows[2]
    for i in range(len(ln_r)):
        off = ln_r[i] - usual[i] - own[i]
        told[i] = (groups[i] >= 0) and usable[i] and np.isfinite(off)
        if told[i]:
            total[groups[i]] += min(max(off, -_OFF_MOST), _OFF_MOST)
            members[groups[i]] += 1
    for i in range(len(ln_r)):
        g = groups[i]
        common = total[g] / members[g] if (g >= 0) and (members[g] > 0) else 0.0
        now[i] += gains[0] * (common - now[i])
        usual[i] += gains[1] * common
        if (abs(now[i]) > _MOVED) and (until[i] == 0):
            until[i] = time + _SETTLES
        until[i] = min(until[i], time + _SETTLES)  # the clock may have gone back
        due = due or ((g >= 0) and (until[i] > 0) and (until[i] <= time))
    return due


@dataclass
class LoopShift:
    """(N,) per GPU, the same for a cohort; a part() of a detector.

    usual: ln R of the cohort.   now: how far all are off it.   until: time when a cohort that moved is settled, 0 none.
    off:   K by which the sensor of the supply was found to lie, seen from all members alike.

    A sensor that lies moves ln R of a cool GPU by more than that of a hot one: the median of the cohort takes out only
    what all do alike, so the lie is taken out in K, before the logarithm, where that explains the members better.
    """

    rows: Floats = field(default_factory=lambda: np.empty((len(_ROWS), 0)))

    def off(self, size: int) -> Floats:
        self._grow(size)
        return self.rows[3, :size]

    def settling(self, size: int) -> Bools:
        self._grow(size)
        return np.asarray(self.rows[2, :size] > 0)

    def follow(
        self, seen: Measured, step: Step, own: Any, groups: NDArray[np.int32], time: int, seconds: float
    ) -> None:
        """One instant. `own`: (N,) what each learnt to be above its cohort."""
        n, mine = len(groups), groups >= 0
        self._grow(n)
        usual, now, until, _ = self.rows[:, :n]
        # a cohort that was seen once may be a cold plate: what is usual is known once its members are learnt
        fresh = np.isnan(usual) & mine
        if fresh.any() and (fresh := fresh & step.judged).any():
            usual[fresh], now[fresh] = step.median[fresh], 0.0
        told, count = np.zeros(n, bool), int(groups.max(initial=0)) + 1
        gains = -np.expm1(-np.array([seconds / _NOW, seconds / _MEMORY]))
        if not _followed(self.rows[:, :n], seen.ln_r, seen.usable, own[:n], groups, count, gains, time, told):
            return
        for group in np.unique(groups[mine & (until > 0) & (until <= time)]).tolist():
            self._align(seen, own[:n], told & (groups == group), groups == group, time)

    def _align(self, seen: Measured, own: Any, told: Bools, members: Bools, time: int) -> None:
        """Takes the common part out, as K of the supply or as a share of R, whichever leaves members nearer."""
        usual, now, until, off = self.rows[:, : len(members)]
        if np.count_nonzero(told) < _FEWEST:
            until[members] = time + _SETTLES
            return
        expected = usual[told] + own[told]
        share = seen.ln_r[told] - expected
        kelvin = seen.rise[told] - np.exp(expected) * seen.power[told]
        more, lie = float(np.median(share)), float(np.median(kelvin))
        apart = np.median(np.abs(share - more))
        left = np.maximum(seen.rise[told] - lie, 1e-3)
        if np.median(np.abs(np.log(left / seen.power[told]) - expected)) < apart:
            off[members] += lie
        else:
            usual[members] += more
        now[members], until[members] = 0.0, 0.0

    def forget(self, mask: Bools) -> None:
        self._grow(len(mask))
        for row, fill in zip(self.rows, _ROWS.values(), strict=True):
            row[: len(mask)][mask] = fill

    def snapshot(self) -> dict[str, Any]:
        return {"rows": self.rows.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.rows = state["rows"]

    def _grow(self, size: int) -> None:
        have = self.rows.shape[1]
        if size > have:
            fresh = np.tile(np.array(list(_ROWS.values()))[:, None], (1, size - have))
            self.rows = np.hstack([self.rows, fresh])
