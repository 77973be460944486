"""Finds clocks that are wrong: what is dated wrongly is judged in the wrong frame, and joined with the wrong cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_number
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report, make_evidence
from detectors.base.gates import Gates
from pipeline.model.records import SECOND, Finding, Frame, Level

_LOOKS = 2  # measurements in a row: a clock that is being set is right a moment later; chosen
_FAR = 1e10  # s of a jump at most: three hundred years; chosen
_ALL = "site:all"  # of whom the pipeline tells what most senders share
_MUCH = 0.2  # share by which an error must change to be told anew, at least by ticket_seconds; chosen
_RIGHT = 600 * SECOND  # after so long without a measurement nothing is known of a clock any more; chosen


@dataclass
class TelemetryClock(Detector):
    """A clock that is wrong by a second is a suspect, by a whole frame a ticket; one that is set again and again, too.

    Below `ticket_seconds` samples fall into their own frame or the next one, which every hold bears; from there on all
    of them stand in another frame than what they belong to. From `suspect_seconds` on the order of events of two nodes
    cannot be told: XIDs, link states and ends of jobs follow each other within a second. `jumps` in a day by a frame or
    more are a ticket whatever the offset is in between: something sets the clock to and fro.

    An error that the pipeline measured from the arrival of messages is judged alike (event `clock_error`): the node's
    times are corrected by it, so that its telemetry is judged in the right frame. An error that most senders share is
    one ticket on `site:all`: the clock of the pipeline or brokers, or a delay of all messages. One that changes by much
    is told anew.

    Source: chronyd's tracking, whose word the offset is, and arrival times by the clock of pipeline or brokers.

    ticket_seconds:  [pipeline] frame, 10 s.
    suspect_seconds, jumps:  chosen; chronyd steps a clock at boot, once or twice.
    """

    name: ClassVar[str] = "telemetry_clock"
    family: ClassVar[str] = "telemetry"
    device_class: ClassVar[str] = "node"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("node.clock_offset", "event:clock_error")
    wants: ClassVar[tuple[str, ...]] = ("event:clock_jump",)
    cannot_see: ClassVar[str] = (
        "An error of less than [pipeline] clock_bound of a clock that nobody keeps, or whose keeper believes a wrong "
        "server; in a recording also larger ones, as it has no times of arrival."
    )

    suspect_seconds: float = 1.0
    ticket_seconds: float = 10.0
    jumps: int = 3

    looks: Any = memory(0, np.int32)  # measurements in a row beyond suspect_seconds
    offset: Any = memory(0.0)  # the newest one
    since: Any = memory(0, np.int64)
    seen: Any = memory(0, np.int64)
    jumped: dict[str, list[list[float]]] = notes()
    measured: dict[str, list[float]] = notes()  # since when, and by how many seconds it is ahead
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        return [
            rule_line(f"offsets of {self.suspect_seconds:g} s, {_LOOKS} times in a row, and on jumps that were logged")
        ]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        for other in frames.values():
            self._measure(other)
        frame = frames.get("node")
        if frame is None:
            return []
        self.gates.update(frames)
        self._hear(frame)
        offset = frame["node.clock_offset"]
        self.grow(len(offset))
        n = len(offset)
        known = ~np.isnan(offset)
        off = known & (np.abs(np.nan_to_num(offset)) >= self.suspect_seconds)
        looks = self.looks[:n]
        if not (off.any() or looks.any() or self.jumped or self.measured or self.conditions):
            return []
        self.since[:n][off & (looks == 0)] = frame.time
        looks[off] += 1
        looks[(known & ~off) | (~known & (frame.time - self.seen[:n] > _RIGHT))] = 0
        self.offset[:n][known], self.seen[:n][known] = offset[known], frame.time
        return self._tell(frame)

    def _hear(self, frame: Frame) -> None:
        """Takes the jumps of a frame or more, and forgets those of yesterday."""
        for event in frame.events:
            jump = read_number(event.data.get("seconds"), -_FAR, _FAR) if event.kind == "clock_jump" else None
            if jump is not None and abs(jump) >= self.ticket_seconds:
                self.jumped.setdefault(event.entity, []).append([event.time, jump])
        day = frame.time - 24 * 3600 * SECOND
        kept = {e: [jump for jump in known if jump[0] > day][-64:] for e, known in self.jumped.items()}
        self.jumped = {e: known for e, known in kept.items() if known}

    def _measure(self, frame: Frame) -> None:
        """Takes what the pipeline measured; an error that changed by much begins anew, so that its figure is told."""
        for event in frame.events:
            error = read_number(event.data.get("seconds"), -_FAR, _FAR) if event.kind == "clock_error" else None
            since, before = self.measured.get(event.entity, [event.time, error or 0.0])
            if error is None:
                continue
            if abs(error - before) > max(self.ticket_seconds, _MUCH * abs(before)):
                since = event.time
                self.conditions.pop(event.entity, None)
            self.measured[event.entity] = [since, error]
            if not error:
                del self.measured[event.entity]

    def _tell(self, frame: Frame) -> list[Finding]:
        wrong = {frame.entities[i]: i for i in np.flatnonzero(self.looks[: len(frame.entities)] >= _LOOKS).tolist()}
        often = {e for e, known in self.jumped.items() if len(known) >= self.jumps}
        holding = {
            e for e in {*wrong, *often, *self.measured} if not self.gates.in_maintenance(e, frame.topology, frame.time)
        }
        close_ended(self.conditions, holding)
        found = []
        for entity in sorted(holding):
            i = wrong.get(entity)
            since, error = self.measured.get(entity, [frame.time, 0.0])
            error = error or (-float(self.offset[i]) if i is not None else 0.0)
            level: Level = "ticket" if abs(error) >= self.ticket_seconds or entity in often else "suspect"
            since = since if entity in self.measured else self.since[i] if i is not None else self.jumped[entity][0][0]
            if due := due_report(self.conditions, entity, frame.time, int(since), level):
                finding = self._by_arrival(entity, frame, *due) if entity in self.measured else None
                found.append(finding or self._finding(entity, i, frame, *due))
        return found

    def _by_arrival(self, entity: str, frame: Frame, onset: int, level: Level) -> Finding:
        error = self.measured[entity][1]
        way = "ahead" if error > 0 else "behind"
        summary = f"Clock of {entity}: {abs(error):.0f} s {way}, its times are corrected"
        if entity == _ALL:
            ours = "our clock or the brokers' is behind" if error > 0 else "our clock is ahead, or messages are late"
            summary = f"Most senders seem {abs(error):.0f} s {way}: {ours}"
        compared = Comparison(error, 0.0, None, "own past", 0, abs(error), "s")
        told = make_evidence("over when messages arrive with the right time", compared, way=way)
        signals = ("event:clock_error",)
        return Finding(frame.time, onset, entity, self.name, level, abs(error), summary, told, signals)

    def _finding(self, entity: str, i: int | None, frame: Frame, onset: int, level: Level) -> Finding:
        jumps = self.jumped.get(entity, [])
        if i is None:
            summary = (
                f"The clock of {entity} was set {len(jumps)} times within a day by {self.ticket_seconds:g} s or more"
            )
            told = make_evidence("over when a day has fewer such jumps", jumps=jumps[-8:])
            score, signals = float(len(jumps)), ("event:clock_jump",)
        else:
            offset = float(self.offset[i])
            way = "behind" if offset > 0 else "ahead"  # it has that much still to gain
            summary = f"The clock of {entity} is {abs(offset):.1f} s {way}: its samples are dated wrongly by as much"
            compared = Comparison(offset, 0.0, None, "own past", 0, abs(offset), "s")
            told = make_evidence(f"over when it is right to {self.suspect_seconds:g} s", compared, jumps=jumps[-8:])
            score, signals = abs(offset), ("node.clock_offset",)
        return Finding(frame.time, onset, entity, self.name, level, score, summary, told, signals)
