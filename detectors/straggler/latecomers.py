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

from detectors.method.streams import LEARN, Bools
from detectors.straggler.places import Places

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Ruling:
    """witness: (S,) had learnt before anybody of its stage was slow.   anew: slots that learn anew."""

    witness: Bools
    anew: list[int]


class Latecomers:
    """learnt: (S,) when each had last not learnt enough.   since: stage -> since when ranks of it are slow."""

    def __init__(self) -> None:
        self.learnt = np.empty(0, np.int64)
        self.since: dict[str, int] = {}

    def take(self, slow: Bools, rose: NDArray[np.int64], count: NDArray[np.int64], places: Places, time: int) -> Ruling:
        """slow: (S,) now.   rose: since when, if they are.   count: samples that each has learnt from."""
        size = len(slow)
        if (more := size - len(self.learnt)) > 0:
            self.learnt = np.append(self.learnt, np.zeros(more, np.int64))
        learnt = self.learnt[:size]
        np.copyto(learnt, time, where=count[:size] <= LEARN)
        if not self.since and not slow.any():
            return Ruling(np.ones(size, bool), [])
        stages, of = places.named["stage"], places.of["stage"]
        number = {name: i for i, name in enumerate(stages)}
        mine = slow & (of >= 0)
        first = np.full(len(stages) + 1, _NEVER)  # the last cell serves stage -1
        np.minimum.at(first, of[mine], np.maximum(rose[:size], learnt)[mine])
        over = [name for name in self.since if first[number.get(name, -1)] == _NEVER]
        ended = [(number[name], since) for name in over if (since := self.since.pop(name)) and name in number]
        anew = [slot for i, since in ended for slot in np.flatnonzero((of == i) & (learnt > since)).tolist()]
        for i in np.unique(of[mine]).tolist():
            first[i] = self.since[stages[i]] = min(self.since.get(stages[i], _NEVER), int(first[i]))
        return Ruling(np.asarray(learnt <= first[of]), anew)

    def snapshot(self) -> dict[str, Any]:
        return {"learnt": self.learnt.copy(), "since": dict(self.since)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.learnt, self.since = np.array(state["learnt"]), dict(state["since"])
