"""Ranks that learnt while others of their stage were slow already: they cannot tell that the stage is as it was.

What they learnt may be of a stage with more work, as of one that a power cap or announced work kept from learning till
then. So they bear witness against nobody, and learn anew when it is over: else the next time they seemed well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from detectors.base.streams import LEARN, Bools
from detectors.straggler.allowance import MOST
from detectors.straggler.places import Places
from pipeline.records import SECOND

_HALF = 100 * SECOND  # who learnt as little later had half of its LEARN samples before, at the usual 10 s
_OVER = 600 * SECOND  # for so long nobody of a stage must be slow; as `hold`: a pause of a job begins its sums anew
_NEVER = np.iinfo(np.int64).max
_CELLS = ("learnt", "slow")


@dataclass(frozen=True, slots=True)
class Ruling:
    """witness: (S,) had learnt before anybody of its stage was slow, or long ago.   anew: slots that learn anew."""

    witness: Bools
    anew: list[int]


class Latecomers:
    """Arrays by slot and, by stage, since when ranks of it are slow and when one last was.

    learnt: when each had last not learnt enough.   slow: whether it was when it last told a step.
    """

    def __init__(self) -> None:
        self.learnt, self.slow = np.empty(0, np.int64), np.empty(0, bool)
        self.since: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def take(
        self, slow: Bools, silent: Bools, rose: NDArray[np.int64], count: NDArray[np.uint32], places: Places, time: int
    ) -> Ruling:
        """slow, silent: (S,) now.   rose: since when, if they are.   count: samples that each has learnt from."""
        size = len(slow)
        self._grow(size)
        learnt, known = self.learnt[:size], self.slow[:size]
        young = count[:size] < LEARN
        np.copyto(learnt, time, where=young)
        if not self.since and not slow.any():
            known[:] = False
            return Ruling(np.ones(size, bool), [])
        np.copyto(known, slow, where=~silent[:size] | young)
        stages, of = places.named["stage"], places.of["stage"]
        began = np.maximum(rose[:size], learnt)
        for i in np.unique(of[known & (of >= 0)]).tolist():
            name, mine = stages[i], slow & (of == i)
            if mine.any():
                self.since[name] = min(self.since.get(name, _NEVER), int(began[mine].min()))
            if name in self.since:
                self.last[name] = time
        anew = self._end(stages, of, time)
        until = [self.since[name] + _HALF if name in self.since else _NEVER for name in stages]
        early = learnt <= np.array([*until, _NEVER])[of]  # the last cell serves stage -1
        return Ruling(np.asarray(early | (time - learnt >= MOST)), anew)

    def _end(self, stages: list[str], of: NDArray[np.int32], time: int) -> list[int]:
        """Forgets stages that are well again or gone; slots of those that learnt meanwhile."""
        number, anew = {name: i for i, name in enumerate(stages)}, list[int]()
        for name in [n for n in self.since if n not in number or time - self.last[n] >= _OVER]:
            since, _ = self.since.pop(name), self.last.pop(name)
            if name in number:
                anew += np.flatnonzero((of == number[name]) & (self.learnt[: len(of)] > since + _HALF)).tolist()
        return anew

    def _grow(self, size: int) -> None:
        if size > len(self.learnt):
            for name in _CELLS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _CELLS}
        return {**arrays, "since": dict(self.since), "last": dict(self.last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learnt, self.slow = np.array(state["learnt"]), np.array(state["slow"])
        self.since, self.last = dict(state["since"]), dict(state["last"])
