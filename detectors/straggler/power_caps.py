"""Which ranks a power cap makes slower or faster than their peers, unlike when they learned: policy, no fault.

A cap on a unit of the power supply cuts through jobs, and caps overlap. What counts is whether a GPU is under a cap
while most of its cohort is not, or the other way round, and whether that was so while its baseline was learned.

A power cap bit that comes and goes under full load is how a GPU at its own limit works. A policy adds to the share of
time under a cap. Of a GPU whose bit flickered while it learned, that share is followed; of all others a bit means a cap
in the same sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes, part
from detectors.base.streams import LEARN, Bools, Floats

SEVERAL = 4
"""GPUs of a cohort whose state changed: policy, not one broken GPU. Chosen: half a server."""
_CHANGED, _SETTLED = 0.4, 0.2
"""Change of a GPU against its cohort, as a share of the difference between capped and not, below the half that shows
where the cohort is halved; and the rest of it when the change is over. Chosen."""
_ON, _OFF = 0.8, 0.2  # smoothed share under a cap above which one has come, and below which it has gone; chosen
_SMOOTH = 0.25  # 3 samples show a change, 6 that it is over; chosen
_GAIN = 5e-4  # of the usual value, as the kernel learns baselines
_NIL = 1e-3  # smoothed states below it count as 0; chosen
_FLICKER_LEARN = 100  # samples until it is known whether a bit flickers; chosen: two caps in them change it four times
_FLICKERS = 0.05
"""Changes per sample above which a bit flickers: that of a share from 3 to 97 %. Chosen: with less, several of a cohort
hardly ever change for two samples together, which would count as a cap."""
_SHARE_SMOOTH = 0.05
"""Gain of the share: its standard deviation is 0.08 at one half, and a cap from there to always shows after 14 samples,
before a hold of 10 min ends. Chosen."""
_MORE = 0.25
"""Share of the time above usual that is a new cap, and half of it still is one: three standard deviations, which on
several GPUs of a cohort is policy. Chosen."""
_NONE: list[int] = []


@dataclass
class CapFlicker(State):
    """By slot. last: newest bit.   share: of the time under a cap, smoothed; usual_share, usual_changes: that, and the
    share of samples that change the bit, as learned from `samples`.   flickers: judged by its share.   capped_more:
    under a cap far more often than usual.
    """

    last: Bools = memory(False, np.bool_)
    share: Floats = memory(0.0)
    usual_share: Floats = memory(0.0)
    usual_changes: Floats = memory(0.0)
    samples: NDArray[np.int64] = memory(0, np.int64)
    flickers: Bools = memory(False, np.bool_)
    capped_more: Bools = memory(False, np.bool_)

    def update(self, bit: Bools, known: Bools, learns: Bools) -> tuple[Bools, Bools]:
        """Returns (S,) which are under a cap, flickering ones only if far more often than usual; and (S,) which have
        just begun or stopped to flicker.

        bit: as reported.   known: where it is reported.   learns: whose present state is usual.
        """
        size = len(bit)
        self.grow(size)
        share, usual = self.share[:size], self.usual_share[:size]
        changed = known & (bit != self.last[:size])
        share[known] += _SHARE_SMOOTH * (bit[known] - share[known])
        self.last[:size][known] = bit[known]
        self._learn(bit, changed, np.flatnonzero(learns & known))
        flickers = (self.samples[:size] >= _FLICKER_LEARN) & (self.usual_changes[:size] > _FLICKERS)
        turned = flickers != self.flickers[:size]
        self.flickers[:size] = flickers
        more = self.capped_more[:size]
        more[:] = share - usual >= np.where(more, _MORE / 2, _MORE)
        return np.where(flickers, more, bit), turned

    def unlearned(self, size: int) -> Bools:
        """Returns (S,) which have not enough samples yet."""
        self.grow(size)
        return self.samples[:size] < _FLICKER_LEARN

    def _learn(self, bit: Bools, changed: Bools, slots: NDArray[np.intp]) -> None:
        self.samples[slots] += 1
        gain = np.maximum(1 / self.samples[slots], _GAIN)
        self.usual_share[slots] += gain * (bit[slots] - self.usual_share[slots])
        self.usual_changes[slots] += gain * (changed[slots] - self.usual_changes[slots])


@dataclass(frozen=True, slots=True)
class CapEffects:
    """hold: (S,) not to be judged now.   doubt: (S,) whose sums may be of a cap that changes or holds.

    relearn: slots that learn again.   restart: slots whose sums start again.
    """

    hold: Bools
    doubt: Bools
    relearn: Sequence[int]
    restart: Sequence[int]


@dataclass
class PowerCaps(State):
    """By slot. relative: -1 to 1, under a cap against most of the cohort, smoothed; usual_relative: the same as learned
    from `samples`.   capped_share: under a cap at all, smoothed; capped: whether one has come, and not gone;
    learned_share: share of the learned samples under one. Of two caps one may be lower, which no bit shows.
    held: not judged since a cap changed.
    """

    relative: Floats = memory(0.0)
    usual_relative: Floats = memory(0.0)
    capped_share: Floats = memory(0.0)
    samples: NDArray[np.int64] = memory(0, np.int64)
    learned_share: Floats = memory(0.0)
    held: Bools = memory(False, np.bool_)
    capped: Bools = memory(False, np.bool_)
    flicker: CapFlicker = part(CapFlicker)
    _active: bool = notes(lambda: True)  # any GPU is or was under a cap

    def update(self, bit: Bools, groups: NDArray[np.int32], known: Bools, gate: Bools) -> CapEffects:
        """bit: (S,) power cap bit now.   known: where it is reported.   gate: which learn now."""
        size = len(groups)
        self.grow(size)
        unlearned = self.flicker.unlearned(size)
        under, turned = self.flicker.update(bit, known, gate & (unlearned | ~self.held[:size]))
        if turned.any():
            self._relearn_changed(turned, groups)
        if not self._active and not bit.any():
            self._learn(np.zeros(size), under, gate)
            none = np.zeros(size, bool)
            return CapEffects(none, none, _NONE, _NONE)
        relative, usual, held = self.relative[:size], self.usual_relative[:size], self.held[:size]
        alike = np.where(groups >= 0, 2 * groups + self.flicker.flickers[:size], -1)
        now = np.where(known, _relative_state(under, alike, known), relative)
        relative += _SMOOTH * (now - relative)
        self._learn(now, under, gate & ~held)
        flips = self._update_steady(under, known, groups)
        more = under & self.flicker.flickers[:size]
        changes = (under != self.capped[:size]) | (bit != self.capped[:size])
        unsettled = _several_of_cohort(known & (changes | more), groups)
        begins = ~held & _several_of_cohort(np.abs(relative - usual) >= _CHANGED, groups)
        held |= begins
        settled = held & known & (np.abs(now - relative) < _SETTLED)
        # caps overlap and one bit shows all of them: a GPU apart from its cohort stays held until its own cap is gone
        back = settled & np.where(np.abs(now) < _CHANGED, ~self.capped[:size], np.abs(now - usual) < _SETTLED)
        steady, learned_share = self.capped[:size], self.learned_share[:size]
        relearn = back & ((np.abs(now - usual) >= _SETTLED) | (np.abs(steady - learned_share) >= _SETTLED))
        usual[relearn], learned_share[relearn], self.samples[:size][relearn] = now[relearn], steady[relearn], 0
        held &= ~back
        hold = held | _several_of_cohort(np.abs(now - usual) >= _CHANGED, groups)
        states = (relative, usual, self.capped_share)
        any_now = bit.any() or under.any() or held.any()
        self._active = bool(any_now or any((np.abs(state) > _NIL).any() for state in states))
        restart = np.flatnonzero(begins | back | flips).tolist()
        return CapEffects(hold, hold | unsettled, np.flatnonzero(relearn).tolist(), restart)

    def _update_steady(self, under: Bools, known: Bools, groups: NDArray[np.int32]) -> Bools:
        """Returns (S,) for which, with others of the cohort, a cap came or went."""
        share, steady = self.capped_share[: len(groups)], self.capped[: len(groups)]
        share[known] += _SMOOTH * (under[known] - share[known])
        flips = _several_of_cohort((share > _ON) & ~steady | (share < _OFF) & steady, groups)
        steady[:] = np.where(steady, share >= _OFF, share > _ON)
        return flips

    def _relearn_changed(self, turned: Bools, groups: NDArray[np.int32]) -> None:
        """Learns again those whose bit means something else now, and cohorts in which several changed."""
        cohorts = np.unique(groups[_several_of_cohort(turned, groups)])
        slots = np.flatnonzero(turned | np.isin(groups, cohorts))
        self.usual_relative[slots], self.samples[slots] = self.relative[slots], int(1 / _SMOOTH)
        self.held[slots] = False

    def _learn(self, now: Floats, under: Bools, gate: Bools) -> None:
        """Learns the usual value, as the kernel learns baselines."""
        slots = np.flatnonzero(gate)
        self.samples[slots] += 1
        gain = np.where(self.samples[slots] <= LEARN, 1 / np.maximum(self.samples[slots], 1), _GAIN)
        self.usual_relative[slots] += gain * (now[slots] - self.usual_relative[slots])
        self.learned_share[slots] += gain * (under[slots] - self.learned_share[slots])

    def reset_slots(self, slots: Sequence[int]) -> None:
        """Resets slots with another rank, GPU or software than before."""
        mask = np.zeros(len(self.flicker.samples), bool)
        mask[[slot for slot in slots if slot < len(mask)]] = True
        self.flicker.reset(mask)
        known = [slot for slot in slots if slot < len(self.samples)]
        self.samples[known] = 0
        self.usual_relative[known] = self.learned_share[known] = 0.0
        self.held[known] = False


def _relative_state(under: Bools, groups: NDArray[np.int32], known: Bools) -> Floats:
    """Returns (S,) under a cap against most of the cohort; 0 without a cohort."""
    counted = known & (groups >= 0)
    count = np.bincount(groups[counted], minlength=1)
    capped = np.bincount(groups[counted & under], minlength=len(count))
    most = np.append((np.sign(2 * capped - count) + 1) / 2, 0.0)  # the last cell is for group -1
    at = np.where(counted, groups, -1)
    return np.where(counted, under - most[at], 0.0)


def _several_of_cohort(which: Bools, groups: NDArray[np.int32]) -> Bools:
    """Returns those of `which` that are several in their cohort."""
    counted = which & (groups >= 0)
    if np.count_nonzero(counted) < SEVERAL:
        return np.zeros(len(which), bool)
    count = np.bincount(groups[counted], minlength=1)
    return np.asarray(counted & (np.append(count, 0)[np.where(counted, groups, -1)] >= SEVERAL))
