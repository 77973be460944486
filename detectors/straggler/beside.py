"""A slow rank beside its peers, as people are told it: what they lead one to expect, and how far it is from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Compared
from detectors.base.streams import Floats, Step
from detectors.straggler.places import MOST, Places
from detectors.straggler.struck import Struck


class Kept(Protocol):
    """What the detector `straggler` keeps by slot."""

    places: Places
    struck: Struck
    count: NDArray[np.int64]
    newest: Floats
    usual: Floats
    recent: NDArray[Any]


def beside(of: Kept, slots: Sequence[int], step: Step) -> tuple[int, Compared]:
    """The worst of some slow ranks, beside peers that are not slow with it."""
    worst = slots[int(np.argmax(step.effect[slots]))]
    cohort, mates, usual = _expected(of, worst, slots, step)
    # one quick step does not make a slow rank a fast one: the newest step, or how slow it has been of late
    late = float(step.effect[worst]) if step.on[worst] else float(np.median(of.recent["stage"][worst]))
    late += float(of.usual[worst]) - usual if step.on[worst] else 0.0
    slowdown, expected = float(np.exp(max(of.newest[worst] - usual, late))), float(np.exp(usual))
    spread = expected * float(step.spread[worst]) if np.isfinite(step.spread[worst]) else None
    return worst, Compared(expected * slowdown, expected, spread, cohort, mates, slowdown - 1, "s")


def _expected(of: Kept, slot: int, slots: Sequence[int], step: Step) -> tuple[str, int, float]:
    """With whom a rank is compared, how many they are, and the ln(time) that they lead one to expect."""
    own, places = bool(step.on[slot]), of.places
    numbers = places.groups if own else places.of["stage"]
    alike = (numbers == numbers[slot]) & (numbers[slot] >= 0) & (places.at >= 0) & (of.count[: len(numbers)] > 0)
    alike[list(slots)] = False
    alike &= ~of.struck.out[: len(alike)]
    mates = np.flatnonzero(alike)
    if not own and len(mates):
        return places.entity("stage", slot) or "own past", len(mates), float(np.median(of.newest[mates]))
    usual = float(of.usual[slot])
    if len(slots) > MOST * (len(slots) + len(mates)) and len(mates):
        # the median lies between the slow and the others, who seem quicker by as much as it has moved
        usual += float(np.nan_to_num(np.median(of.newest[mates] - of.usual[mates])))
    return places.cohort(slot), len(mates), usual
