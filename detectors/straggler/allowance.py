"""For how long something may be excused: time that runs up while it is and down while it is not, by slot.

Without an end, a condition that comes back before the excuse has lapsed would hide whoever it excuses for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.base.streams import Bools
from pipeline.records import SECOND

MOST = 4 * 3600 * SECOND
"""Half a shift: whoever mends coolant or power has come by then, or nobody minds. Chosen."""
_HOLE = 60 * SECOND  # a hole in the telemetry counts at most so much; chosen


class Allowance:
    """Array by slot: how much is used up, at most twice what is allowed, so that it does not come back at once."""

    def __init__(self) -> None:
        self.used, self.last = np.empty(0, np.int64), 0

    def take(self, excused: Bools, time: int) -> Bools:
        """(S,) whose allowance is used up."""
        if (more := len(excused) - len(self.used)) > 0:
            self.used = np.append(self.used, np.zeros(more, np.int64))
        since = min(max(time - self.last, 0), _HOLE)
        self.last, used = time, self.used[: len(excused)]
        if excused.any() or used.any():
            np.clip(used + np.where(excused, since, -since), 0, 2 * MOST, out=used)
        return np.asarray(used >= MOST)

    def snapshot(self) -> dict[str, Any]:
        return {"used": self.used.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.used, self.last = np.array(state["used"]), state["last"]
