"""Records of each event and each false alert, as plain data: all figures are computed from them.

Runs are added up by joining their records, so nothing is averaged twice. The JSON of `fleetpulse score --json` contains
the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from detectors.scoring.answer_rules import NOT_FOUND
from pipeline.model.errors import UsageError


@dataclass(frozen=True, slots=True)
class EventRecord:
    """The result of one labelled event.

    row:      class of the fault, for the confusion matrix.   said: class of the answering or blaming alert.
    large:    its effect is at least delta_min, or the truth has none.
    length_s: from when it is visible to its end, or the recording's; negative if it never is.
    delay_s:  from when it is visible to the answer; None: not found.   late: the answer came after the end.
    level:    of the answer: a page or only a ticket; None also where an incident answers with a ticket, but pages for
              something else: that counts neither way.   incident: of the answer, as an incident is one page.
    top1, top3: the guilty entity is the first, or among the first three, suspects.   detector: of the answer.
    """

    run: int
    id: str
    kind: str
    detectability: str
    row: str
    severity: float | None
    large: bool
    length_s: float
    delay_s: float | None = None
    late: bool = False
    level: str | None = None
    incident: str | None = None
    top1: bool = False
    top3: bool = False
    said: str = NOT_FOUND
    detector: str | None = None

    @property
    def found(self) -> bool:
        """Whether an alert answers it."""
        return self.delay_s is not None


@dataclass(frozen=True, slots=True)
class FalseRecord:
    """One page or ticket without an event.

    why:    duplicate (of an answer), benign (a harmless event was present), wrong (a fault was present, but device,
            type or level do not match the rule) or nothing.
    beside: kind of the event that was present, and its id.
    """

    run: int
    level: str
    time: str
    detector: str
    cause: str
    said: str
    why: str
    beside: str | None = None
    beside_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One recording. conditions: of all levels in the incidents that paged; page_conditions: pages alone."""

    node_days: float | None
    gpus: float | None
    cpu_seconds: float | None
    samples: float | None
    incidents: int | None
    conditions: int
    page_conditions: int
    stray: int


@dataclass(frozen=True, slots=True)
class Records:
    """All records of one run or of many."""

    events: tuple[EventRecord, ...] = ()
    false: tuple[FalseRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns the records as JSON data."""
        return {f.name: [_as_dict(line) for line in getattr(self, f.name)] for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Records:
        """Reads records from JSON data. Raises UsageError if they are not of this version."""
        try:
            return cls(
                tuple(EventRecord(**line) for line in data["events"]),
                tuple(FalseRecord(**line) for line in data["false"]),
                tuple(RunRecord(**line) for line in data["runs"]),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"records: {error}; expected the output of `score --json` of this version: score again"
            ) from error


def join_records(parts: Iterable[Records]) -> Records:
    """Returns several as one; runs are renumbered."""
    events: list[EventRecord] = []
    false: list[FalseRecord] = []
    runs: list[RunRecord] = []
    for part in parts:
        events += [replace(line, run=line.run + len(runs)) for line in part.events]
        false += [replace(line, run=line.run + len(runs)) for line in part.false]
        runs += part.runs
    return Records(tuple(events), tuple(false), tuple(runs))


def _as_dict(line: Any) -> dict[str, Any]:
    return {f.name: getattr(line, f.name) for f in fields(line)}
