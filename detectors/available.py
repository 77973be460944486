"""What a running pipeline has to judge by: which of the signals that detectors need were measured lately."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pipeline.records import SECOND, Frame
from pipeline.signals import Signal

LATELY = 3600.0
"""s for which a signal that was measured counts as there; chosen: a node's reboot or a job's end takes less."""
LOOKS = 3
"""Where agents look more seldom than that, so many looks must fail; chosen."""
ROUTINE: Mapping[str, float] = {"event:digest": 86_400.0, "event:replica_digest": 86_400.0}
"""Events that come although nothing is wrong, and s within which there is one; chosen: canaries run daily at least.
Of all other events none is good news, so that a detector which waits for them is never off."""
_AGAIN = 60 * SECOND  # so seldom is a signal looked for that is known to be there; chosen, for speed


class Available:
    """When each needed signal had a value last, by the time of the data; bounded by what detectors need."""

    def __init__(self, needs: Collection[str], catalogue: Mapping[str, Signal]) -> None:
        self._needs = [name for name in dict.fromkeys(needs) if name in ROUTINE or not name.startswith("event:")]
        intervals = {name: (catalogue[name].interval or 0.0) if name in catalogue else 0.0 for name in self._needs}
        self._patience = {n: ROUTINE.get(n) or max(LATELY, LOOKS * intervals[n]) for n in self._needs}
        self.last: dict[str, int] = {}
        self.time = self.since = 0

    def look(self, frames: Mapping[str, Frame]) -> None:
        """Takes an instant."""
        self.time = max(frame.time for frame in frames.values())
        self.since = min(self.since or self.time, self.time)
        due = [name for name in self._needs if not 0 <= self.time - self.last.get(name, -_AGAIN) < _AGAIN]
        if any(name in ROUTINE for name in due):
            told = {f"event:{event.kind}" for frame in frames.values() for event in frame.events}
            self.last.update(dict.fromkeys(told.intersection(due), self.time))
        for frame in frames.values():
            for name in due:
                if name in frame.values and not np.isnan(frame.values[name]).all():
                    self.last[name] = self.time

    def has(self, name: str) -> bool:
        """Whether somebody measures it now; so it is taken until it was waited for as long as it may stay away."""
        if name not in self._patience or not self.time:
            return True
        return self.time - self.last.get(name, self.since) <= self._patience[name] * SECOND

    def snapshot(self) -> dict[str, Any]:
        return {"time": self.time, "since": self.since, "last": dict(self.last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a snapshot; an older one has none, so that nothing is known yet. Takes all of it or nothing."""
        time, last = int(state.get("time", 0)), {str(k): int(v) for k, v in dict(state.get("last", {})).items()}
        self.time, self.since, self.last = time, int(state.get("since", time)), last
