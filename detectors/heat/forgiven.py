"""What a person said was no fault, kept until the class that it is about is seen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Frame

EVERYTHING = "site:all"
"""What a finding names where what it is about shares nothing that the topology knows."""


def take(waiting: list[str], frame: Frame) -> NDArray[np.bool_] | None:
    """(N,) whom `waiting` names or has below it, which is emptied; None: nobody waits."""
    if not waiting:
        return None
    named, above = frozenset(waiting), frame.topology.above
    waiting.clear()
    everybody = EVERYTHING in named
    found = (everybody or e in named or not named.isdisjoint(above(e)) for e in frame.entities)
    return np.fromiter(found, bool, len(frame.entities))
