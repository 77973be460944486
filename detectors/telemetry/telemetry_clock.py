"""Finds wrong clocks: they put samples into the wrong frame and assign them to the wrong cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.event_data import read_number
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_READINGS = 2  # measurements in a row: a clock that is being set is right a moment later; chosen
_FAR = 1e10  # s of a jump at most: three hundred years; chosen
_ALL = "site:all"  # entity of an error that most senders share
_MUCH = 0.2  # share by which an error must change to be reported again, at least by ticket_seconds; chosen
_STALE = 600 * SECOND  # us without a measurement after which the state of a clock is unknown; chosen


@dataclass
class TelemetryClock(Detector):
    """Wrong clocks. Suspect: off by `suspect_seconds`. Ticket: off by `ticket_seconds`, or set repeatedly.

    Below `ticket_seconds` samples fall into their own frame or the next one, which does not matter; above it all of
    them are in a wrong frame. Above `suspect_seconds` the order of events of two nodes is unknown: XIDs, link states
    and ends of jobs follow each other within a second. `jumps` of a frame or more within a day are a ticket, whatever
    the offset is in between: a program sets the clock back and forth.

    Errors that the pipeline measured from arrival times count alike (event `clock_error`). The pipeline corrects the
    node's times by them, so its telemetry is judged in the right frame. An error that most senders share is one ticket
    on `site:all`: the clock of the pipeline or brokers is wrong, or all messages are delayed. An error that changes by
    much is reported again.

    Source: the offset in chronyd's tracking, and arrival times by the clock of pipeline or brokers.

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
        "An error below [pipeline] clock_bound of a clock that no service synchronizes, or whose service uses a wrong "
        "server. In a recording also larger errors: it has no arrival times."
    )

    suspect_seconds: float = 1.0
    ticket_seconds: float = 10.0
    jumps: int = 3

    readings: Any = memory(0, np.int32)  # measurements in a row beyond suspect_seconds
    offset: Any = memory(0.0)  # the newest one
    since: Any = memory(0, np.int64)
    seen: Any = memory(0, np.int64)
    jumped: dict[str, list[list[float]]] = notes()  # entity -> time and seconds of each jump
    measured: dict[str, list[float]] = notes()  # entity -> since when, and by how many seconds it is ahead
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()

    def budget(self) -> list[str]:
        """See `Detector.budget`."""
        offsets = f"offsets of {self.suspect_seconds:g} s, {_READINGS} times in a row"
        return [rule_line(f"{offsets}, and on jumps that were logged")]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """See `Detector.observe`."""
        for other in frames.values():
            self._record_errors(other)
        frame = frames.get("node")
        if frame is None:
            return []
        self.gates.update(frames)
        self._record_jumps(frame)
        offset = frame["node.clock_offset"]
        self.grow(len(offset))
        n = len(offset)
        known = ~np.isnan(offset)
        off = known & (np.abs(np.nan_to_num(offset)) >= self.suspect_seconds)
        readings = self.readings[:n]
        if not (off.any() or readings.any() or self.jumped or self.measured or self.conditions):
            return []
        self.since[:n][off & (readings == 0)] = frame.time
        readings[off] += 1
        readings[(known & ~off) | (~known & (frame.time - self.seen[:n] > _STALE))] = 0
        self.offset[:n][known], self.seen[:n][known] = offset[known], frame.time
        return self._report(frame)

    def _record_jumps(self, frame: Frame) -> None:
        """Adds the jumps of a frame or more, and drops those of yesterday."""
        for event in frame.events:
            jump = read_number(event.data.get("seconds"), -_FAR, _FAR) if event.kind == "clock_jump" else None
            if jump is not None and abs(jump) >= self.ticket_seconds:
                self.jumped.setdefault(event.entity, []).append([event.time, jump])
        day = frame.time - 24 * 3600 * SECOND
        kept = {e: [jump for jump in known if jump[0] > day][-64:] for e, known in self.jumped.items()}
        self.jumped = {e: known for e, known in kept.items() if known}

    def _record_errors(self, frame: Frame) -> None:
        """Adds errors that the pipeline measured; one that changed by much is a new condition with its own figure."""
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

    def _report(self, frame: Frame) -> list[Finding]:
        size = len(frame.entities)
        wrong = {frame.entities[i]: i for i in np.flatnonzero(self.readings[:size] >= _READINGS).tolist()}
        often = {e for e, known in self.jumped.items() if len(known) >= self.jumps}
        busy = self.gates.in_maintenance
        holding = {e for e in {*wrong, *often, *self.measured} if not busy(e, frame.topology, frame.time)}
        close_ended(self.conditions, holding)
        found = []
        for entity in sorted(holding):
            i = wrong.get(entity)
            since, error = self.measured.get(entity, [frame.time, 0.0])
            error = error or (-float(self.offset[i]) if i is not None else 0.0)
            level: Level = "ticket" if abs(error) >= self.ticket_seconds or entity in often else "suspect"
            since = since if entity in self.measured else self.since[i] if i is not None else self.jumped[entity][0][0]
            if due := due_report(self.conditions, entity, frame.time, int(since), level):
                if entity in self.measured:
                    found.append(self._measured_finding(entity, frame, due))
                elif i is not None:
                    found.append(self._offset_finding(entity, float(self.offset[i]), frame, due))
                else:
                    found.append(self._jumps_finding(entity, frame, due))
        return found

    def _measured_finding(self, entity: str, frame: Frame, due: tuple[int, Level]) -> Finding:
        error = self.measured[entity][1]
        way = "ahead" if error > 0 else "behind"
        text = f"clock {abs(error):.0f} s {way}, its times are corrected"
        if entity == _ALL:
            ours = "pipeline clock behind" if error > 0 else "pipeline clock ahead or messages late"
            text = f"most senders {abs(error):.0f} s {way}: {ours}"
        return self.finding(
            *(frame.time, entity, due),
            score=abs(error),
            summary=pager_title(entity, text),
            signals=("event:clock_error",),
            clears="clears when messages arrive with the right time",
            compared=Comparison(error, 0.0, None, "own past", 0, abs(error), "s"),
            way=way,
        )

    def _jumps_finding(self, entity: str, frame: Frame, due: tuple[int, Level]) -> Finding:
        jumps = self.jumped.get(entity, [])
        text = f"clock set {len(jumps)} times in a day by {self.ticket_seconds:g} s or more"
        return self.finding(
            *(frame.time, entity, due),
            score=float(len(jumps)),
            summary=pager_title(entity, text),
            signals=("event:clock_jump",),
            clears="clears when a day has fewer such jumps",
            jumps=jumps[-8:],
        )

    def _offset_finding(self, entity: str, offset: float, frame: Frame, due: tuple[int, Level]) -> Finding:
        way = "behind" if offset > 0 else "ahead"  # it has that much still to gain
        return self.finding(
            *(frame.time, entity, due),
            score=abs(offset),
            summary=pager_title(entity, f"clock {abs(offset):.1f} s {way}, its samples have wrong times"),
            signals=("node.clock_offset",),
            clears=f"clears when it is right within {self.suspect_seconds:g} s",
            compared=Comparison(offset, 0.0, None, "own past", 0, abs(offset), "s"),
            jumps=self.jumped.get(entity, [])[-8:],
        )
