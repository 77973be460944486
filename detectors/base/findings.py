"""Evidence of a finding, under the same names in all detectors, and when a condition is reported.

A condition is reported when it begins, when its level rises, and every minute while it holds: the Desk takes ten
minutes without a report for its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.model.records import LEVELS, SECOND, Finding, Level, to_json

CLEARS = "clears"
"""Key of the sentence on what would end the condition; every finding has it."""
COMPARED = ("value", "expected", "spread", "cohort", "peers", "effect", "unit")
"""Keys of a finding that compares a device with others or with its own past."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One device compared with its peers or its own past, in the unit of the signal.

    value:    of the device.            expected: the median of its peers, or its own past.
    spread:   robust standard deviation of the peers; None: too few.
    cohort:   name of the cohort, as `stage:81.2` or `rack:r1, H100, driver 570`; `own past` without peers.
    peers:    number of peers, the device itself not counted; 0 against its own past.
    effect:   deviation as the detector weighs it: a share of `expected` (0.15: 15 %), or in `unit` where `expected` is
              0, a rate, a level or an offset; positive is harm where only one side is.
    """

    value: float
    expected: float
    spread: float | None
    cohort: str
    peers: int
    effect: float
    unit: str

    def as_evidence(self) -> dict[str, Any]:
        """Returns its fields as evidence."""
        return {name: to_json(getattr(self, name)) for name in COMPARED}


def make_evidence(clears: str, compared: Comparison | None = None, **more: Any) -> Mapping[str, Any]:
    """Returns the evidence of a finding: comparison, other facts, and what would end the condition."""
    return {**(compared.as_evidence() if compared else {}), **more, CLEARS: clears}


def build_finding(
    detector: str,
    time: int,
    entity: str,
    due: tuple[int, Level],
    *,
    score: float,
    summary: str,
    signals: tuple[str, ...],
    clears: str,
    compared: Comparison | None = None,
    **evidence: Any,
) -> Finding:
    """Returns the finding of a condition that is due.

    due: onset and level, as `due_report` returns them.   clears: what would end the condition.   evidence: whatever
    else is known of it; see `make_evidence`.
    """
    onset, level = due
    facts = make_evidence(clears, compared, **evidence)
    return Finding(time, onset, entity, detector, level, score, summary, facts, signals)


REPEAT = 60 * SECOND
SET_BACK = 600 * SECOND  # a clock that goes back by as much was set; frames come out of order by less. Chosen
OpenConditions = dict[str, dict[str, Any]]


def due_report(conditions: OpenConditions, key: str, time: int, onset: int, level: Level) -> tuple[int, Level] | None:
    """Onset and level to report now, or None if nothing is due. The onset of the first report stays; levels rise."""
    known = conditions.get(key)
    if known is None:
        conditions[key] = {"onset": min(onset, time), "level": level, "reported": time}
        return min(onset, time), level
    if time < known["onset"]:
        if known["onset"] - time < SET_BACK:  # out of order: not newer than the last report
            return None
        known["onset"] = time
    rises = LEVELS.index(level) > LEVELS.index(known["level"])
    if rises:
        known["level"] = level
    elif 0 <= time - known["reported"] < REPEAT:
        return None
    known["reported"] = time
    return known["onset"], known["level"]


def close_ended(conditions: OpenConditions, holding: set[str]) -> None:
    """Removes the conditions that no longer hold."""
    for key in [k for k in conditions if k not in holding]:
        del conditions[key]
