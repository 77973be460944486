"""Which ranks a power cap makes slower or faster beside their peers than they were when they learnt: policy, no fault.

A cap on a unit of the power supply cuts through jobs, and caps overlap. What counts is whether a GPU is under one while
most of its cohort is not, or the other way round, and whether that was so while its baseline was learnt.

Power cap bits that come and go under full load, which is how a GPU at its own limit works and no news.

A policy adds to the share of time under a cap. Of a GPU whose bit flickered while it learnt that share is followed; of
all others a bit means a cap at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from detectors.base.streams import LEARN, Bools, Floats

_YOUNG = 100  # samples after which it is known whether a bit flickers; chosen: two caps in them change it four times
_FLICKERS = 0.05
"""Changes per sample above which a bit flickers: that of a share from 3 to 97 %. Chosen: with less, hardly ever do
several of a cohort change for two samples at once, which `caps` takes for a cap.
"""
_SHARE_SMOOTH = 0.05
"""Of the share. 0.08 is its standard deviation at one half, and a cap from there to always is seen after 14 samples,
before a hold of 10 min is over. Chosen."""
_MORE = 0.25
"""Of the time more than usual is a cap that came, and half of it is still one: three standard deviations, which of
several GPUs of a cohort is policy. Chosen."""
_FLICKER_GAIN = 5e-4  # as the kernel learns baselines, once it is less than a mean's
_FLICKER_CELLS = ("last", "share", "usual_share", "usual_changes", "samples", "flickers", "capped_more")


class CapFlicker:
    """Arrays by slot. share: of the time under a cap, smoothed; usual_share, usual_changes: that, and samples that
    change the bit, as learnt; flickers: who is judged by its share.
    """

    def __init__(self) -> None:
        self.last, self.flickers, self.capped_more = np.empty(0, bool), np.empty(0, bool), np.empty(0, bool)
        self.share, self.usual_share, self.usual_changes = np.empty(0), np.empty(0), np.empty(0)
        self.samples = np.empty(0, np.int64)

    def update(self, capped: Bools, there: Bools, learns: Bools) -> tuple[Bools, Bools]:
        """(S,) who is under a cap, those that flicker only if far more often than usual; (S,) who flickers since now,
        or no longer.

        capped: the bit as told.   there: of whom it is told.   learns: whose usual this is.
        """
        size = len(capped)
        self._grow(size)
        share, usual = self.share[:size], self.usual_share[:size]
        changed = there & (capped != self.last[:size])
        share[there] += _SHARE_SMOOTH * (capped[there] - share[there])
        self.last[:size][there] = capped[there]
        self._learn(capped, changed, np.flatnonzero(learns & there))
        flickers = (self.samples[:size] >= _YOUNG) & (self.usual_changes[:size] > _FLICKERS)
        turned = flickers != self.flickers[:size]
        self.flickers[:size] = flickers
        more = self.capped_more[:size]
        more[:] = share - usual >= np.where(more, _MORE / 2, _MORE)
        return np.where(flickers, more, capped), turned

    def unlearned(self, size: int) -> Bools:
        """(S,) who has not learnt enough yet to tell."""
        self._grow(size)
        return self.samples[:size] < _YOUNG

    def _learn(self, capped: Bools, changed: Bools, mine: NDArray[np.intp]) -> None:
        self.samples[mine] += 1
        gain = np.maximum(1 / self.samples[mine], _FLICKER_GAIN)
        self.usual_share[mine] += gain * (capped[mine] - self.usual_share[mine])
        self.usual_changes[mine] += gain * (changed[mine] - self.usual_changes[mine])

    def reset(self, slots: Sequence[int]) -> None:
        """Another rank, another GPU or other software than before."""
        mine = [slot for slot in slots if slot < len(self.samples)]
        for name in _FLICKER_CELLS:
            getattr(self, name)[mine] = 0

    def _grow(self, size: int) -> None:
        if size > len(self.samples):
            for name in _FLICKER_CELLS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FLICKER_CELLS}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


SEVERAL = 4
"""GPUs of a cohort whose state changed: policy, no broken one. Chosen: half a server."""
_CHANGED, _SETTLED = 0.4, 0.2
"""Of the difference between under a cap and not: change of a GPU against its cohort, below the half that is seen where
the cohort is halved; and what is left of it when the change is over. Chosen."""
_ON, _OFF = 0.8, 0.2  # smoothed, above and below which a cap has come or gone; chosen
_SMOOTH = 0.25  # 3 samples show a change, 6 that it is over; chosen
_GAIN = 5e-4  # as the kernel learns baselines
_NIL = 1e-3  # less of a smoothed state is none; chosen
_CELLS = ("relative", "usual_relative", "capped_share", "samples", "learned_share", "held", "capped")
_NONE: list[int] = []


@dataclass(frozen=True, slots=True)
class CapEffects:
    """hold: (S,) not to be judged now.   doubt: (S,) what their sums say may be of a cap that changes or holds.

    anew: slots that learn anew.   over: slots whose sums begin anew.
    """

    hold: Bools
    doubt: Bools
    relearn: Sequence[int]
    restart: Sequence[int]


class PowerCaps:
    """Arrays by slot. beside: -1 to 1, under a cap against most of the cohort, smoothed; usual: the same when learnt.

    under: under a cap at all, smoothed; steady: whether one has come, and not gone; learnt_under: how much of what was
    learnt was learnt under one. Of two caps one may be lower, which no bit tells.
    """

    def __init__(self) -> None:
        self.relative, self.usual_relative, self.capped_share = np.empty(0), np.empty(0), np.empty(0)
        self.samples, self.learned_share = np.empty(0, np.int64), np.empty(0)
        self.held, self.capped = np.empty(0, bool), np.empty(0, bool)
        self.flicker = CapFlicker()
        self._active = True  # something is or was under a cap

    def update(self, capped: Bools, groups: NDArray[np.int32], there: Bools, gate: Bools) -> CapEffects:
        """capped: (S,) now.   there: whose GPU is known to be under a cap or not.   gate: who learns now."""
        size = len(groups)
        self._grow(size)
        told = capped
        young = self.flicker.unlearned(size)
        capped, turned = self.flicker.update(told, there, gate & (young | ~self.held[:size]))
        if turned.any():
            self._relearn_changed(turned, groups)
        if not self._active and not told.any():
            self._learn(np.zeros(size), capped, gate)
            nobody = np.zeros(size, bool)
            return CapEffects(nobody, nobody, _NONE, _NONE)
        beside, usual, held = self.relative[:size], self.usual_relative[:size], self.held[:size]
        alike = np.where(groups >= 0, 2 * groups + self.flicker.flickers[:size], -1)
        now = np.where(there, _relative_state(capped, alike, there), beside)
        beside += _SMOOTH * (now - beside)
        self._learn(now, capped, gate & ~held)
        flips = self._update_steady(capped, there, groups)
        more = capped & self.flicker.flickers[:size]
        changes = (capped != self.capped[:size]) | (told != self.capped[:size])
        unsettled = _several_of_cohort(there & (changes | more), groups)
        begins = ~held & _several_of_cohort(np.abs(beside - usual) >= _CHANGED, groups)
        held |= begins
        settled = held & there & (np.abs(now - beside) < _SETTLED)
        # caps overlap and one bit tells of all: who was apart from its cohort is until its own cap is gone
        back = settled & np.where(np.abs(now) < _CHANGED, ~self.capped[:size], np.abs(now - usual) < _SETTLED)
        under, learnt_under = self.capped[:size], self.learned_share[:size]
        anew = back & ((np.abs(now - usual) >= _SETTLED) | (np.abs(under - learnt_under) >= _SETTLED))
        usual[anew], learnt_under[anew], self.samples[:size][anew] = now[anew], under[anew], 0
        held &= ~back
        hold = held | _several_of_cohort(np.abs(now - usual) >= _CHANGED, groups)
        states = (beside, usual, self.capped_share)
        now_any = told.any() or capped.any() or held.any()
        self._active = bool(now_any or any((np.abs(state) > _NIL).any() for state in states))
        over = np.flatnonzero(begins | back | flips).tolist()
        return CapEffects(hold, hold | unsettled, np.flatnonzero(anew).tolist(), over)

    def _update_steady(self, capped: Bools, there: Bools, groups: NDArray[np.int32]) -> Bools:
        """(S,) for whom, with others, a cap came or went."""
        under, steady = self.capped_share[: len(groups)], self.capped[: len(groups)]
        under[there] += _SMOOTH * (capped[there] - under[there])
        flips = _several_of_cohort((under > _ON) & ~steady | (under < _OFF) & steady, groups)
        steady[:] = np.where(steady, under >= _OFF, under > _ON)
        return flips

    def _relearn_changed(self, turned: Bools, groups: NDArray[np.int32]) -> None:
        """Learns the usual anew of those whose bit means something else now, and of a cohort that several changed."""
        mine = np.flatnonzero(turned | np.isin(groups, np.unique(groups[_several_of_cohort(turned, groups)])))
        self.usual_relative[mine], self.samples[mine], self.held[mine] = self.relative[mine], int(1 / _SMOOTH), False

    def _learn(self, now: Floats, capped: Bools, gate: Bools) -> None:
        """Follows as the kernel's baselines do."""
        mine = np.flatnonzero(gate)
        self.samples[mine] += 1
        gain = np.where(self.samples[mine] <= LEARN, 1 / np.maximum(self.samples[mine], 1), _GAIN)
        self.usual_relative[mine] += gain * (now[mine] - self.usual_relative[mine])
        self.learned_share[mine] += gain * (capped[mine] - self.learned_share[mine])

    def reset(self, slots: Sequence[int]) -> None:
        """Another rank, another GPU or other software than before."""
        self.flicker.reset(slots)
        mine = [slot for slot in slots if slot < len(self.samples)]
        self.samples[mine] = 0
        self.usual_relative[mine] = self.learned_share[mine] = 0.0
        self.held[mine] = False

    def _grow(self, size: int) -> None:
        if size > len(self.samples):
            for name in _CELLS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _CELLS}, "flicker": self.flicker.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in _CELLS:
            setattr(self, name, state[name])
        self.flicker.restore(state["flicker"])
        self._active = True


def _relative_state(capped: Bools, groups: NDArray[np.int32], there: Bools) -> Floats:
    """(S,) under a cap against most of the cohort; 0 without one."""
    mine = there & (groups >= 0)
    count = np.bincount(groups[mine], minlength=1)
    under = np.bincount(groups[mine & capped], minlength=len(count))
    most = np.append((np.sign(2 * under - count) + 1) / 2, 0.0)  # the last cell serves group -1
    at = np.where(mine, groups, -1)
    return np.where(mine, capped - most[at], 0.0)


def _several_of_cohort(which: Bools, groups: NDArray[np.int32]) -> Bools:
    """Those of them of which a cohort has several."""
    mine = which & (groups >= 0)
    if np.count_nonzero(mine) < SEVERAL:
        return np.zeros(len(which), bool)
    count = np.bincount(groups[mine], minlength=1)
    return np.asarray(mine & (np.append(count, 0)[np.where(mine, groups, -1)] >= SEVERAL))
