"""What a person said was no fault, kept until the class that it is about is seen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from detectors.method.members import members
from pipeline.records import Frame


def take(waiting: list[str], frame: Frame) -> NDArray[np.bool_] | None:
    """(N,) whom `waiting` names or stands for, which is emptied; None: nobody waits."""
    if not waiting:
        return None
    named = tuple(waiting)
    waiting.clear()
    return members(named, frame)
