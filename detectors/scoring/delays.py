"""When a share of events is known, with those that were not found in time counted as what they are: still waiting."""

from __future__ import annotations

import math
from collections.abc import Iterable


def reached(waits: Iterable[tuple[float, bool]], share: float) -> float | None:
    """The time after which `share` is known; Kaplan and Meier (1958), J. Am. Stat. Assoc. 53, 457-481. None: never.

    waits: of each event how long it was watched, and whether that ended with its finding (else with the event).
    """
    left, waiting = 1.0, sorted(waits, key=lambda w: (w[0], not w[1]))
    for place, (time, known) in enumerate(waiting):
        if known:
            left *= 1 - 1 / (len(waiting) - place)
        if left <= 1 - share or math.isclose(left, 1 - share):
            return time
    return None
