"""Whom a name stands for: an entity itself, or all that is below the group that a finding named."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Frame
from pipeline.topology import kind_of

EVERYTHING = "site:all"
"""What a finding names where what it is about shares nothing that the topology knows."""
_WORK = frozenset({"job", "stage"})
"""Kinds that run on devices: those are above their ranks, not below the kind itself."""


def members(named: Collection[str], frame: Frame) -> NDArray[np.bool_]:
    """(N,) who of a frame is named, is below what is named, or carries the ranks of a job or stage that is."""
    wanted, above = frozenset(named), frame.topology.above
    if wanted & {EVERYTHING, f"fleet:{frame.device_class}"}:
        return np.ones(len(frame.entities), bool)
    ranks = [rank for e in wanted if kind_of(e) in _WORK for rank in frame.topology.below(e)]
    wanted |= {e for rank in ranks for e in above(rank) if kind_of(e) == frame.device_class}
    found = (e in wanted or not wanted.isdisjoint(above(e)) for e in frame.entities)
    return np.fromiter(found, bool, len(frame.entities))
