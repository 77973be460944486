"""Ranks whose own baseline cannot be trusted: slow since their first sample, or learned while their stage was slow.

Slow since the first sample: more work, or a slow device. The rank's own baseline cannot show it; its stage can. That
alone proves nothing: a rank may have more work by design. So it is a ticket after a hold, and a page when the device
itself shows it: its clock is far below its stage's, or ranks of other work were slow on it too.

Learned while others of the stage were slow: the baseline may be of a stage with more work, as of a rank that a power
cap or announced maintenance kept from learning until then. Such ranks are not witnesses, and learn again when the stage
is healthy: else they would look slow the next time that they are healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.streams import LEARN, Bools, Floats
from detectors.straggler.causes import Cause
from detectors.straggler.mass_throttling import LONGEST_EXCUSE
from detectors.straggler.rank_slots import RankSlots
from detectors.straggler.step_samples import RING
from pipeline.model.records import SECOND

SLOW_CLOCK = 0.8
"""Share of its stage's SM clock below which a GPU is slow itself: identical ones differ by at most 22 % (Sinha et al.,
SC 2022). As `ratio` of straggler_inferred."""
REMEMBERED = 7 * 86_400 * SECOND
"""us for which it is known which work was slow on a GPU: a job that runs for days is placed again within. Chosen."""
_SMOOTH = 0.15  # gain of the clock's departure, as in straggler_inferred
_MOST = 0.5  # share of the slow ranks that must show a cause, as in blame.py


@dataclass
class SlowSinceStart(State):
    """By slot. first: time of the first sample since it started or restarted (us); base: samples before that.

    accepted: ln of the slowdown that a person called no fault.   slower: ln of the clock below the stage's, smoothed.
    slow_work: GPU -> which work (a rank's number in its job) was slow on it -> when last.
    """

    first: NDArray[np.int64] = memory(0, np.int64)
    base: NDArray[np.int64] = memory(0, np.int64)
    accepted: Floats = memory(0.0)
    slower: Floats = memory(0.0)
    slow_work: dict[str, dict[str, int]] = notes()

    def accepted_offset(self, size: int) -> Floats:
        """Returns (S,) what may be added to a stage's normal."""
        self.grow(size)
        return np.asarray(self.accepted[:size])

    def backdate(self, sampled: Bools, count: NDArray[np.int64], behind: NDArray[np.int64], time: int) -> None:
        """Moves the onset of a rank that is far behind from its start on to its first sample.

        sampled: (S,) had a sample.   count: samples since it is known.   behind: since when each is far behind, 0 not.
        """
        first, base = self.first[: len(sampled)], self.base[: len(sampled)]
        new = sampled & (first == 0)
        first[new], base[new] = time, count[new] - 1
        early = (behind > first) & (count - base <= LEARN + RING)
        behind[early] = first[early]

    def read_clocks(self, clock: Floats, ranks: RankSlots, at_work: Bools) -> None:
        """Adds the SM clocks of the ranks' GPUs."""
        self.grow(len(clock))
        with np.errstate(divide="ignore", invalid="ignore"):
            value = np.where(at_work & (clock > 0), -np.log(clock), np.nan)
        apart = value - ranks.stage_medians(value)
        slower, known = self.slower[: len(apart)], np.isfinite(apart)
        slower[known] += _SMOOTH * (apart[known] - slower[known])

    def slow_since(self, slots: Sequence[int], behind: NDArray[np.int64]) -> int | None:
        """Returns since when most of some slow ranks are slow, from their first sample; None if they are not."""
        mine = np.asarray(slots)
        first = self.first[mine]
        late = (behind[mine] > 0) & (behind[mine] == first)
        return int(np.median(first[late])) if np.count_nonzero(late) >= _MOST * len(mine) else None

    def is_by_design(self, slots: Sequence[int], behind: NDArray[np.int64], ranks: RankSlots) -> bool:
        """Returns whether ranks of the same stages on other nodes are slow since their start too: the work is divided
        so."""
        mine, first = np.asarray(slots), self.first[: len(behind)]
        late = (behind > 0) & (behind == first) & (ranks.column >= 0)
        late[mine] = False
        stages, nodes = ranks.numbers["stage"], ranks.numbers["node"]
        others = late & np.isin(stages, stages[mine]) & ~(np.isin(nodes, nodes[mine]) & (nodes >= 0))
        return bool(others.any())

    def remember_work(self, slots: Sequence[int], ranks: RankSlots, time: int) -> None:
        """Records which work is slow on which GPU."""
        for slot in slots:
            if (gpu := ranks.ancestor("gpu", slot)) is not None:
                self.slow_work.setdefault(gpu, {})[_rank_number(ranks.ranks[slot])] = time
        for gpu, known in list(self.slow_work.items()):
            self.slow_work[gpu] = {work: last for work, last in known.items() if time - last <= REMEMBERED}
            if not self.slow_work[gpu]:
                del self.slow_work[gpu]

    def find_causes(self, slots: Sequence[int], capped: Bools, ranks: RankSlots) -> list[Cause]:
        """Returns what shows that the device is slow; if nothing does, only that the rank is slow since its start."""
        slower = self.slower[list(slots)]
        low = (slower >= -np.log(SLOW_CLOCK)) & ~capped[list(slots)]
        if np.count_nonzero(low) >= _MOST * len(slots):
            below = -float(np.expm1(-np.median(slower[low])))
            title = f"SM clock {100 * below:.0f} % low since start"
            text = f"slow since it started, as the SM clock, {100 * below:.0f} % below that of its stage"
            return [Cause("sm_clock_below_stage", title, text, "gpu.sm_clock", True, round(below, 4))]
        if np.count_nonzero([self._slow_with_other_work(slot, ranks) for slot in slots]) >= _MOST * len(slots):
            text = "slow since it started, as other work was on the same device"
            return [Cause("slow_with_other_work", "as other work on this GPU", text, "rank.compute_time", True, 1.0)]
        text = "slow since it started: more work or a slow device"
        return [Cause("slow_since_start", "since start", text, "rank.compute_time", False, 1.0)]

    def _slow_with_other_work(self, slot: int, ranks: RankSlots) -> bool:
        gpu = ranks.ancestor("gpu", slot)
        return gpu is not None and bool(self.slow_work.get(gpu, {}).keys() - {_rank_number(ranks.ranks[slot])})

    def accept(self, slots: Sequence[int], behind: NDArray[np.int64], by_stage: Floats) -> None:
        """Accepts a slowdown that a person called no fault. by_stage: (S, RING) newest departures from the stage."""
        for slot in slots:
            if slot < len(behind) and behind[slot] > 0:
                self.accepted[slot] += max(0.0, float(np.median(by_stage[slot])))

    def restart(self, slots: Sequence[int], count: NDArray[np.int64], elsewhere: bool = False) -> None:
        """Starts again after a rest or with other software; `elsewhere`: as another rank, or on another GPU."""
        mine = [slot for slot in slots if slot < len(self.first)]
        self.first[mine], self.base[mine] = 0, count[mine]
        if elsewhere:
            self.accepted[mine] = self.slower[mine] = 0.0


def _rank_number(rank: str) -> str:
    """Returns the number of a rank in its job: a job that is started again does the same work there."""
    return rank.rpartition(".")[2]


_HALF = 100 * SECOND  # us; a rank that learned as little later had half of its LEARN samples before, at the usual 10 s
_OVER = 600 * SECOND  # us without a slow rank until a stage is healthy; as `hold`: a pause of a job restarts its sums
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class LateLearning:
    """witness: (S,) learned before any of its stage was slow, or long ago.   relearn: slots that learn again."""

    witness: Bools
    relearn: list[int]


@dataclass
class LateLearners(State):
    """By slot and by stage.

    unlearned_at: when each had last not learned enough.   slow: whether it was slow at its last step.
    since, last: stage -> since when ranks of it are slow, and when one last was.
    """

    unlearned_at: NDArray[np.int64] = memory(0, np.int64)
    slow: Bools = memory(False, np.bool_)
    since: dict[str, int] = notes()
    last: dict[str, int] = notes()

    def update(
        self,
        slow: Bools,
        silent: Bools,
        rose: NDArray[np.int64],
        count: NDArray[np.uint32],
        ranks: RankSlots,
        time: int,
    ) -> LateLearning:
        """slow, silent: (S,) now.   rose: since when, if they are.   count: samples that each has learned from."""
        size = len(slow)
        self.grow(size)
        unlearned_at, known = self.unlearned_at[:size], self.slow[:size]
        young = count[:size] < LEARN
        np.copyto(unlearned_at, time, where=young)
        if not self.since and not slow.any():
            known[:] = False
            return LateLearning(np.ones(size, bool), [])
        np.copyto(known, slow, where=~silent[:size] | young)
        stages, number = ranks.entities["stage"], ranks.numbers["stage"]
        began = np.maximum(rose[:size], unlearned_at)
        for i in np.unique(number[known & (number >= 0)]).tolist():
            name, members = stages[i], slow & (number == i)
            if members.any():
                self.since[name] = min(self.since.get(name, _NEVER), int(began[members].min()))
            if name in self.since:
                self.last[name] = time
        relearn = self._end_stages(stages, number, time)
        until = [self.since[name] + _HALF if name in self.since else _NEVER for name in stages]
        early = unlearned_at <= np.array([*until, _NEVER])[number]  # the last cell is for stage -1
        return LateLearning(np.asarray(early | (time - unlearned_at >= LONGEST_EXCUSE)), relearn)

    def _end_stages(self, stages: list[str], number: NDArray[np.int32], time: int) -> list[int]:
        """Removes stages that are healthy again or gone; returns the slots that learned in between."""
        number_of, relearn = {name: i for i, name in enumerate(stages)}, list[int]()
        for name in [n for n in self.since if n not in number_of or time - self.last[n] >= _OVER]:
            since, _ = self.since.pop(name), self.last.pop(name)
            if name in number_of:
                late = self.unlearned_at[: len(number)] > since + _HALF
                relearn += np.flatnonzero((number == number_of[name]) & late).tolist()
        return relearn
