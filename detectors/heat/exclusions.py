"""What a whole cohort's resistance does at once: its supply's sensor lies, or its loop flows less. Members go on.

Cores that are warmer by what the memory on the same plate does not share: their sensor, not their cooling.

Cohorts of which enough are at work to be compared: the few that hang on when a job waits are odd.

Loops that hardly flow now: what their GPUs lose of their heat says nothing of plates and paste.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import edge_events
from detectors.base.kernel import compiled
from detectors.base.streams import Bools, Floats, Step
from detectors.heat.resistance import Measured
from pipeline.model.records import SECOND, Frame

_MOVED = 0.06  # of a logarithm: all GPUs of a cohort at once; a supply sensor that lies by 2 K of 30; chosen
_SHIFT_SETTLES = 300 * SECOND  # in which nobody is judged: dies, coolant and filters are where they go by then; chosen
_NOW = 120.0  # s over which it is averaged: a step of the load moves it for less; chosen
_MEMORY = 6 * 3600.0  # s in which what a cohort shows becomes its usual; chosen
_OFF_MOST = 0.12  # what one GPU adds to the mean of its cohort at most; twice _MOVED, chosen
_LEAST_MEMBERS = 4  # members at work from which a median says what all do; chosen
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
            until[i] = time + _SHIFT_SETTLES
        until[i] = min(until[i], time + _SHIFT_SETTLES)  # the clock may have gone back
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
        if np.count_nonzero(told) < _LEAST_MEMBERS:
            until[members] = time + _SHIFT_SETTLES
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

    def reset(self, mask: Bools) -> None:
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


_ALONE = 0.6  # share of a core's change that the memory beside it does not follow; they share the plate; chosen
_DOUBTED, _STAYS = 0.65, 0.45
"""The same of a mean, from which the core's sensor is doubted, and until which it stays so; chosen."""
_MEAN_S = 160.0  # of that mean: rounding makes 0.4 K of noise of six samples, and half of it of sixteen; chosen


@dataclass
class Doubts:
    """(N,) each; a part() of a detector.

    apart: K by which a core left its memory, a mean.   doubted: whether its sensor is.
    told:  when core and memory were compared last.
    """

    apart: Floats = field(default_factory=lambda: np.zeros(0))
    doubted: Bools = field(default_factory=lambda: np.zeros(0, bool))
    told: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def follow(self, parted: Step, seconds: float) -> None:
        """One instant. parted: stream of the core above its memory."""
        n = len(parted.on)
        if (more := n - len(self.apart)) > 0:
            for name in ("apart", "doubted", "told"):
                cells = getattr(self, name)
                setattr(self, name, np.append(cells, np.zeros(more, cells.dtype)))
        self.apart[:n] -= np.expm1(-seconds / _MEAN_S) * (parted.effect - self.apart[:n])

    def settle(self, known: Bools, parted: Step, warmer: Floats, step: Step, hold: float, time: int) -> Bools:
        """(N,) whose sensor is to blame. warmer: K that each core is warmer by; known: compared with its memory now.

        Whether it is the sensor is settled within `hold` s of the change; that holds until the memory follows, or has
        not been told for as long.
        """
        n = len(known)
        doubted, told, apart = self.doubted[:n], self.told[:n], self.apart[:n]
        # a core that idles is blamed by nobody meanwhile; and the clock may have gone back
        told[:] = np.where(known | ~step.judged, time, np.minimum(told, time))
        fresh = known & (apart >= _DOUBTED * warmer) & (step.held <= hold)
        stays = doubted & (~known | (apart >= _STAYS * warmer)) & (time - told <= hold * SECOND)
        doubted[:] = (fresh | stays) & step.on
        return np.asarray(doubted | (known & (parted.effect >= _ALONE * warmer)))

    def reset(self, mask: Bools) -> None:
        for cells in (self.apart, self.doubted, self.told):
            cells[: len(mask)][mask[: len(cells)]] = 0

    def snapshot(self) -> dict[str, Any]:
        return {"apart": self.apart.copy(), "doubted": self.doubted.copy(), "told": self.told.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.apart, self.doubted, self.told = state["apart"], state["doubted"], state["told"]


_LEAST_WORKING, _WORKING_SHARE = 4, 0.2  # members of a cohort, and share of it, that must be at work; chosen


def attended(gate: Bools, groups: NDArray[np.int32], whole: NDArray[np.int64]) -> None:
    """Closes the gate for cohorts of which too few are at work; `whole`: members of each."""
    _closed(gate, groups, whole, _LEAST_WORKING, _WORKING_SHARE)


@compiled
def _closed(gate: Bools, groups: NDArray[np.int32], whole: NDArray[np.int64], fewest: int, share: float) -> None:
    count = np.zeros(len(whole))
    for i in range(len(gate)):
        if gate[i] and groups[i] >= 0:
            count[groups[i]] += 1
    for i in range(len(gate)):
        if groups[i] >= 0 and count[groups[i]] < max(fewest, share * whole[groups[i]]):
            gate[i] = False


KINDS = ("flow_collapse", "pressure_collapse")
_COLLAPSE_SETTLES = 300 * SECOND  # after it: dies, coolant and filters are where they go by then; chosen
_COLLAPSE_LASTS = 3600 * SECOND  # longest collapse without an end event: dry GPUs are off long before; chosen


class Collapses:
    """Entity -> until when its collapse spoils what is measured below it; a part() of a detector."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}
        self._mask: tuple[object, NDArray[np.bool_]] | None = None

    def hear(self, frames: Mapping[str, Frame]) -> None:
        """Takes the events of an instant."""
        time = max((frame.time for frame in frames.values()), default=0)
        for said in edge_events(frames, KINDS):
            # who dates an event ahead, or goes back with the clock, blinds for no longer than anybody else
            self._until[said.entity] = min(said.time, time) + (_COLLAPSE_LASTS if said.active else _COLLAPSE_SETTLES)
        if self._until and frames:
            self._until = {e: min(until, time + _COLLAPSE_LASTS) for e, until in self._until.items() if until >= time}

    def below(self, frame: Frame) -> NDArray[np.bool_] | None:
        """(N,) who is cooled by such a loop; None: nobody."""
        if not self._until:
            return None
        named = frozenset(self._until)
        key = (id(frame.topology), frame.topology.version, len(frame.entities), named)
        if self._mask is None or self._mask[0] != key:
            above = frame.topology.ancestors
            self._mask = key, np.fromiter((not named.isdisjoint(above(e)) for e in frame.entities), bool)
        return self._mask[1]

    def snapshot(self) -> dict[str, Any]:
        return {"until": dict(self._until)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._until, self._mask = dict(state["until"]), None
