"""Ranks that have been slower than their stage since their first sample: more work, or a slow device.

What a rank learns as its own normal cannot tell; its stage can, and by itself that is no proof: a rank may have more
work by design. So it is a ticket after a hold, and a page when the device itself shows it: its clock is far below its
stage's, or ranks of other work were slow on it as well.

Ranks that learnt while others of their stage were slow already: they cannot tell that the stage is as it was.

What they learnt may be of a stage with more work, as of one that a power cap or announced work kept from learning till
then. So they bear witness against nobody, and learn anew when it is over: else the next time they seemed well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from detectors.base.streams import LEARN, Bools, Floats
from detectors.straggler.causes import Cause
from detectors.straggler.mass_throttling import LONGEST_EXCUSE
from detectors.straggler.rank_slots import RankSlots
from detectors.straggler.step_samples import RING
from pipeline.model.records import SECOND

CLOCK = 0.8
"""Share of its stage's SM clock from which a GPU is slow itself: identical ones differ by at most 22 % (Sinha et al.,
SC 2022). As `ratio` of straggler_inferred."""
REMEMBERED = 7 * 86_400 * SECOND
"""How long it is known which work was slow on a GPU: a job that runs for days is placed anew within. Chosen."""
_SMOOTH = 0.15  # of the clock's departure, as of straggler_inferred
_MOST = 0.5  # share of the slow ranks that must show a thing, as in blame.py
_TOLD = "slow since it started: more work or a slow device"
_CELLS: Mapping[str, float | int] = {
    "first": 0,  # time of its first sample since it began or began again, us
    "base": 0,  # samples that it had told before that
    "granted": 0.0,  # ln of the slowdown that a person called no fault
    "slower": 0.0,  # ln of its GPU's clock below the stage's, smoothed
}


class SlowSinceStart:
    """Arrays by slot, and by GPU which work (a rank's number in its job) was slow on it, and when last."""

    def __init__(self) -> None:
        self.cells: dict[str, NDArray[Any]] = {n: np.full(0, fill) for n, fill in _CELLS.items()}
        self.slow_work: dict[str, dict[str, int]] = {}

    def accepted_offset(self, size: int) -> Floats:
        """(S,) what may be added to a stage's normal."""
        self._grow(size)
        return np.asarray(self.cells["granted"][:size])

    def backdate(self, told: Bools, count: NDArray[np.int64], behind: NDArray[np.int64], time: int) -> None:
        """Dates back to its first sample who is far behind as soon as that can be told.

        told: (S,) had a sample.   count: samples since it is known.   behind: since when each is far behind, 0 not.
        """
        first, base = (self.cells[name][: len(told)] for name in ("first", "base"))
        new = told & (first == 0)
        first[new], base[new] = time, count[new] - 1
        early = (behind > first) & (count - base <= LEARN + RING)
        behind[early] = first[early]

    def read_clocks(self, clock: Floats, places: RankSlots, at_work: Bools) -> None:
        """Takes the SM clocks of the ranks' GPUs."""
        self._grow(len(clock))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(at_work & (clock > 0), -np.log(clock), np.nan)
        apart = value - places.stage_medians(value)
        slower, known = self.cells["slower"][: len(apart)], np.isfinite(apart)
        slower[known] += _SMOOTH * (apart[known] - slower[known])

    def slow_since(self, slots: Sequence[int], behind: NDArray[np.int64]) -> int | None:
        """Since when most of some slow ranks have been so from their first sample; None where they have not."""
        mine = np.asarray(slots)
        first = self.cells["first"][mine]
        late = (behind[mine] > 0) & (behind[mine] == first)
        return int(np.median(first[late])) if np.count_nonzero(late) >= _MOST * len(mine) else None

    def by_design(self, slots: Sequence[int], behind: NDArray[np.int64], places: RankSlots) -> bool:
        """Whether ranks on other nodes of the same stages have been slow since they started, too: so it is divided."""
        mine, first = np.asarray(slots), self.cells["first"][: len(behind)]
        late = (behind > 0) & (behind == first) & (places.column >= 0)
        late[mine] = False
        stages, nodes = places.numbers["stage"], places.numbers["node"]
        others = late & np.isin(stages, stages[mine]) & ~(np.isin(nodes, nodes[mine]) & (nodes >= 0))
        return bool(others.any())

    def remember_work(self, slots: Sequence[int], places: RankSlots, time: int) -> None:
        """Remembers which work is slow on which GPU."""
        for slot in slots:
            if (gpu := places.ancestor("gpu", slot)) is not None:
                self.slow_work.setdefault(gpu, {})[_rank_number(places.ranks[slot])] = time
        for gpu, known in list(self.slow_work.items()):
            self.slow_work[gpu] = {work: last for work, last in known.items() if time - last <= REMEMBERED}
            if not self.slow_work[gpu]:
                del self.slow_work[gpu]

    def find_causes(self, slots: Sequence[int], capped: Bools, places: RankSlots) -> list[Cause]:
        """What shows that the device is slow; that alone which everybody sees where nothing does."""
        slower = self.cells["slower"][list(slots)]
        low = (slower >= -np.log(CLOCK)) & ~capped[list(slots)]
        if np.count_nonzero(low) >= _MOST * len(slots):
            below = -float(np.expm1(-np.median(slower[low])))
            words = f"slow since it started, as the SM clock, {100 * below:.0f} % below that of its stage"
            return [Cause("sm_clock_below_stage", words, "gpu.sm_clock", True, round(below, 4))]
        if np.count_nonzero([self._slow_with_other_work(slot, places) for slot in slots]) >= _MOST * len(slots):
            words = "slow since it started, as other work was on the same device"
            return [Cause("slow_with_other_work", words, "rank.compute_time", True, 1.0)]
        return [Cause("slow_since_start", _TOLD, "rank.compute_time", False, 1.0)]

    def _slow_with_other_work(self, slot: int, places: RankSlots) -> bool:
        gpu = places.ancestor("gpu", slot)
        return gpu is not None and bool(self.slow_work.get(gpu, {}).keys() - {_rank_number(places.ranks[slot])})

    def accept(self, slots: Sequence[int], behind: NDArray[np.int64], by_stage: Floats) -> None:
        """A person said that it is no fault. by_stage: (S, RING) the newest departures from the stage."""
        for slot in slots:
            if slot < len(behind) and behind[slot] > 0:
                self.cells["granted"][slot] += max(0.0, float(np.median(by_stage[slot])))

    def restart(self, slots: Sequence[int], count: NDArray[np.int64], elsewhere: bool = False) -> None:
        """Begins anew after a rest or with other software; `elsewhere`: as another rank, or on another GPU."""
        mine = [slot for slot in slots if slot < len(self.cells["first"])]
        self.cells["first"][mine], self.cells["base"][mine] = 0, count[mine]
        if elsewhere:
            self.cells["granted"][mine] = self.cells["slower"][mine] = 0.0

    def _grow(self, size: int) -> None:
        if size > len(self.cells["first"]):
            self.cells = {name: grown(self.cells[name], size, fill) for name, fill in _CELLS.items()}

    def snapshot(self) -> dict[str, Any]:
        return {"cells": dict(self.cells), "seen": {gpu: dict(known) for gpu, known in self.slow_work.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells = {name: np.array(cells) for name, cells in state["cells"].items()}
        self.slow_work = {gpu: dict(known) for gpu, known in state["seen"].items()}


def _rank_number(rank: str) -> str:
    """What a rank does, whatever its job is called: its number. A job that is started again does the same there."""
    return rank.rpartition(".")[2]


_HALF = 100 * SECOND  # who learnt as little later had half of its LEARN samples before, at the usual 10 s
_OVER = 600 * SECOND  # for so long nobody of a stage must be slow; as `hold`: a pause of a job begins its sums anew
_NEVER = np.iinfo(np.int64).max
_LATE_CELLS = ("unlearned_at", "slow")


@dataclass(frozen=True, slots=True)
class LateLearning:
    """witness: (S,) had learnt before anybody of its stage was slow, or long ago.   anew: slots that learn anew."""

    witness: Bools
    relearn: list[int]


class LateLearners:
    """Arrays by slot and, by stage, since when ranks of it are slow and when one last was.

    learnt: when each had last not learnt enough.   slow: whether it was when it last told a step.
    """

    def __init__(self) -> None:
        self.unlearned_at, self.slow = np.empty(0, np.int64), np.empty(0, bool)
        self.since: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def update(
        self,
        slow: Bools,
        silent: Bools,
        rose: NDArray[np.int64],
        count: NDArray[np.uint32],
        places: RankSlots,
        time: int,
    ) -> LateLearning:
        """slow, silent: (S,) now.   rose: since when, if they are.   count: samples that each has learnt from."""
        size = len(slow)
        self._grow(size)
        learnt, known = self.unlearned_at[:size], self.slow[:size]
        young = count[:size] < LEARN
        np.copyto(learnt, time, where=young)
        if not self.since and not slow.any():
            known[:] = False
            return LateLearning(np.ones(size, bool), [])
        np.copyto(known, slow, where=~silent[:size] | young)
        stages, of = places.entities["stage"], places.numbers["stage"]
        began = np.maximum(rose[:size], learnt)
        for i in np.unique(of[known & (of >= 0)]).tolist():
            name, mine = stages[i], slow & (of == i)
            if mine.any():
                self.since[name] = min(self.since.get(name, _NEVER), int(began[mine].min()))
            if name in self.since:
                self.last[name] = time
        anew = self._end_stages(stages, of, time)
        until = [self.since[name] + _HALF if name in self.since else _NEVER for name in stages]
        early = learnt <= np.array([*until, _NEVER])[of]  # the last cell serves stage -1
        return LateLearning(np.asarray(early | (time - learnt >= LONGEST_EXCUSE)), anew)

    def _end_stages(self, stages: list[str], of: NDArray[np.int32], time: int) -> list[int]:
        """Forgets stages that are well again or gone; slots of those that learnt meanwhile."""
        number, anew = {name: i for i, name in enumerate(stages)}, list[int]()
        for name in [n for n in self.since if n not in number or time - self.last[n] >= _OVER]:
            since, _ = self.since.pop(name), self.last.pop(name)
            if name in number:
                anew += np.flatnonzero((of == number[name]) & (self.unlearned_at[: len(of)] > since + _HALF)).tolist()
        return anew

    def _grow(self, size: int) -> None:
        if size > len(self.unlearned_at):
            for name in _LATE_CELLS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _LATE_CELLS}
        return {**arrays, "since": dict(self.since), "last": dict(self.last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.unlearned_at, self.slow = np.array(state["unlearned_at"]), np.array(state["slow"])
        self.since, self.last = dict(state["since"]), dict(state["last"])
