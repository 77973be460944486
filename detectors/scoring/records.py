"""What came of each event and of each wrong alert, as plain data: all figures follow from it, of one run or of many.

Runs are added up by putting their records together, so nothing is averaged twice. The records stand in the JSON of
`fleetpulse score --json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from detectors.scoring.counts import NOT_FOUND
from pipeline.model.errors import UsageError


@dataclass(frozen=True, slots=True)
class EventRecord:
    """What came of one labelled event.

    row:      what is at fault, as the confusion has it.   said: what the answering or blaming alert named.
    large:    whether its effect is at least delta_min, or the truth tells none.
    length_s: from when it can be seen to its end, or the recording's; negative if it never could be.
    delay_s:  from when it can be seen to the answer; None: not found.   late: the answer came after the end.
    level:    of the answer: a page or only a ticket; None also where an incident answers with a ticket, but pages for
              something else: that counts neither way.   incident: of the answer, for one page is one incident.
    top1, top3: whether the guilty entity stands that far up.   detector: of the answer.
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
        return self.delay_s is not None


@dataclass(frozen=True, slots=True)
class FalseRecord:
    """One page or ticket that answered nothing.

    why:    duplicate (of an answer), benign (something harmless was on), wrong (of a fault of, above or below what it
            names: other device, type or level than counts) or nothing (nothing that what it names belongs to).
    beside: the kind of the event that it lies on, and its id.
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
    """One recording as a whole. conditions: of all levels in the incidents that paged; page_conditions: pages alone."""

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
    """Everything that figures are made of."""

    events: tuple[EventRecord, ...] = ()
    false: tuple[FalseRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {f.name: [_plain(line) for line in getattr(self, f.name)] for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Records:
        """Raises UsageError if these are not the records of this version."""
        try:
            return cls(
                tuple(EventRecord(**line) for line in data["events"]),
                tuple(FalseRecord(**line) for line in data["false"]),
                tuple(RunRecord(**line) for line in data["runs"]),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"records: {error}; wanted what `score --json` of this version writes: score anew"
            ) from error


def together(parts: Iterable[Records]) -> Records:
    """Several as one; runs are numbered on."""
    events: list[EventRecord] = []
    false: list[FalseRecord] = []
    runs: list[RunRecord] = []
    for part in parts:
        events += [replace(line, run=line.run + len(runs)) for line in part.events]
        false += [replace(line, run=line.run + len(runs)) for line in part.false]
        runs += part.runs
    return Records(tuple(events), tuple(false), tuple(runs))


def _plain(line: Any) -> dict[str, Any]:
    return {f.name: getattr(line, f.name) for f in fields(line)}
