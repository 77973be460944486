"""Which cohorts are off as one, so that nobody can say which member is odd; and which members stand out all the same.

With more than three in ten on one side the median is near its breakdown (Huber, Robust Statistics, 1981, section 1.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import SECOND

Bools = NDArray[np.bool_]
MOST = 0.3  # share of a cohort on one side above which the cohort is the event
LEAST_COHORT = 4  # members from which a share means something; chosen
LINGERS = 300 * SECOND
"""So long after its share was last too large a cohort counts as moved, so that a share at the limit does not flicker:
half of the hold of a page. Chosen."""
KNOWN = 900  # s for which a member was off before the others: it has been blamed, and what others do changes nothing
LONG = 300  # s of being off that count as a condition where more than MOST were off for so long: half of a hold; chosen
_BEYOND = 1.5
"""Times what the others are off by, and one least effect more, for a member that stands out of a cohort that moved:
members of a cohort that one cause moves differ by less. Chosen."""
_SURE = 600  # s for which it must: what moves a cohort reaches its members one after another


class Told(Protocol):
    """What is asked of a Step: (N,) each."""

    on: Bools

    @property
    def off(self) -> NDArray[np.int8]: ...
    @property
    def effect(self) -> NDArray[np.float32]: ...
    @property
    def held(self) -> NDArray[np.int64]: ...
    @property
    def measured(self) -> Bools: ...
    @property
    def groups(self) -> NDArray[np.int32]: ...


def _flags() -> Bools:
    return np.zeros(0, bool)


@dataclass
class Moved:
    """The cohorts of one metric that are off as one; a piece of Streams.

    cohort: (N,) whether a stream is of one.   seen: (N,) when its share was last too large.
    known:  (N,) was off long before its cohort moved.
    """

    cohort: Bools = field(default_factory=_flags)
    seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    known: Bools = field(default_factory=_flags)

    def lengthen(self, size: int) -> None:
        more = size - len(self.cohort)
        self.cohort, self.known = (np.append(a, np.zeros(more, bool)) for a in (self.cohort, self.known))
        self.seen = np.append(self.seen, np.zeros(more, np.int64))

    def take(self, told: Told, size: NDArray[np.int32], delta: float, time: int) -> Bools:
        """(N,) whose cohort moved, but for those that stand out of it.

        size: (G,) members of each cohort that were measured.   delta: least effect that matters.

        Many that are off alike widen the spread of their cohort, and the sums of some rise late, at exactly half of the
        cohort never: they count all the same, as soon as one of them has a condition or so many were off for LONG. A
        cohort of which nobody is measured stays as it is.
        """
        n = len(told.groups)
        cohort, known = self.cohort[:n], self.known[:n]
        off = told.off
        if not (off.any() or cohort.any()):
            known[:] = False
            return np.zeros(n, bool)
        over = _over(told, off, size)
        if over.any() or cohort.any():
            self._follow(told.groups, over, size == 0, time)
        known[:] = told.on & (known | ((told.held >= KNOWN) & ~cohort))
        moved = cohort & ~known
        return moved & ~_beyond(told, off, moved, delta) if moved.any() else moved

    def _follow(self, groups: NDArray[np.int32], over: Bools, unseen: Bools, time: int) -> None:
        """Which cohorts move now, and since when each was last too large a share. over, unseen: (G,)"""
        cohort, seen, mine = self.cohort[: len(groups)], self.seen[: len(groups)], groups >= 0
        before = np.bincount(groups[mine & cohort], minlength=len(over)) > 0
        last = np.zeros(len(over), np.int64)
        np.maximum.at(last, groups[mine], seen[mine])
        last[over | (before & unseen)] = time
        goes_on = over | (before & (time - last >= 0) & (time - last <= LINGERS))
        cohort[:] = np.append(goes_on, False)[groups]
        seen[:] = np.where(cohort, np.append(last, 0)[groups], 0)

    def snapshot(self) -> dict[str, Any]:
        return {"cohort": self.cohort.copy(), "seen": self.seen.copy(), "known": self.known.copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self.cohort, self.seen, self.known = state["cohort"], state["seen"], state["known"]


def _over(told: Told, off: NDArray[np.int8], size: NDArray[np.int32]) -> Bools:
    """(G,) cohorts of which more than MOST are off on one side."""
    over = np.zeros(len(size), bool)
    at = np.flatnonzero((off != 0) & (told.groups >= 0))
    for side in (1, -1):
        mine = at[off[at] == side]
        if len(mine) and (_counts(told.groups[mine], size) > MOST * size).any():
            mine = mine[told.measured[mine]]
            chosen = (mine, mine[told.on[mine]], mine[told.held[mine] >= LONG])
            many, on, long = (_counts(told.groups[one], size) for one in chosen)
            over |= (many > MOST * size) & ((on > 0) | (long > MOST * size)) & (size >= LEAST_COHORT)
    return over


def _counts(groups: NDArray[np.int32], size: NDArray[np.int32]) -> NDArray[np.int64]:
    """(G,) how often each cohort is among `groups`."""
    return np.bincount(groups, minlength=len(size))


def _beyond(told: Told, off: NDArray[np.int8], moved: Bools, delta: float) -> Bools:
    """(N,) those that are off by far more than the others of their cohort that are off, and have been for long."""
    at = np.flatnonzero(moved & (off != 0))
    effect = np.abs(told.effect[at])
    key = 2 * told.groups[at].astype(np.int64) + (off[at] > 0)  # of those of a cohort that are off on one side
    order = np.lexsort((effect, key))
    _, first, inverse, many = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    ranked = effect[order]
    median = (ranked[first + (many - 1) // 2] + ranked[first + many // 2]) / 2
    beyond = np.zeros(len(moved), bool)
    beyond[at[order]] = ranked >= _BEYOND * median[inverse] + delta
    return beyond & told.on & (told.held >= _SURE)
