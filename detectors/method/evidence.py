"""What every finding shows for itself, under the same names whichever detector speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.records import finite

CLEARS = "clears"
"""Key of the sentence that says what would end the condition; every finding has it."""
COMPARED = ("value", "expected", "spread", "cohort", "peers", "effect", "unit")
"""Keys of a finding that compares a device with others or with its own past."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One device against those that ought to be like it, in the unit of the signal.

    value:    what it shows.            expected: the median of its peers, or its own past.
    spread:   robust standard deviation of the peers; None: too few to tell.
    cohort:   who the peers are, in words such as `stage:81.2` or `rack:r1, H100, driver 570`; `own past` without peers.
    peers:    how many they are, itself not counted; 0 against its own past.
    effect:   how far it is off, as the detector weighs it: a share of `expected` (0.15: 15 %), or in `unit` where that
              is 0, a rate, a level or an offset; positive is harm where only one side is.
    """

    value: float
    expected: float
    spread: float | None
    cohort: str
    peers: int
    effect: float
    unit: str

    def as_evidence(self) -> dict[str, Any]:
        return {name: finite(getattr(self, name)) for name in COMPARED}


def evidence(clears: str, compared: Compared | None = None, **more: Any) -> Mapping[str, Any]:
    """The evidence of a finding: comparison, whatever else tells, and what would clear it."""
    return {**(compared.as_evidence() if compared else {}), **more, CLEARS: clears}
