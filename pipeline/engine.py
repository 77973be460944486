"""Engine: durable rows -> frames -> findings -> incidents, and what a restart needs to go on as if it had never ended.

Results and the state that made them are written in one transaction. The judge's state is large, so it is written once
per SNAPSHOT_EVERY of event time; after a restart the frames since then are judged again from the store, and the Desk,
whose state is newer, is shown only what it has not seen.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from pipeline.cases import Change
from pipeline.errors import UsageError
from pipeline.frames import Framer, Instant, select
from pipeline.incidents import Desk
from pipeline.ingest import Committed
from pipeline.membership import Membership
from pipeline.modes import ModeRule
from pipeline.presence import LastSeen
from pipeline.records import SECOND, Event, EventBatch, Finding, Frame, Origin, Rows, iso
from pipeline.signals import CLASSES
from pipeline.store import ledger, mutes
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.events import write_events
from pipeline.store.reread import reread
from pipeline.topology import Topology
from pipeline.voice import MOST_MUTES, Mute, Voice, check_rules, checked, doubt

log = logging.getLogger("fleetpulse.engine")

SNAPSHOT_EVERY = 60 * SECOND  # chosen: a restart judges at most this much again
INSTANTS_PER_RESULT = 60  # bound of judged instants whose results wait for one transaction
AHEAD = 300 * SECOND  # rows further in the future than this are stored and counted, not judged: a clock is wrong


Enqueue = Callable[[Sequence[Change], int], Sequence[ledger.Payload]]


class Judge(Protocol):
    """The detectors, as the pipeline sees them; the door passes them in. signals: all that they look at; None: any.

    names: of the detectors, for modes and mutes.   listing: a row for each, as GET /api/v1/detectors has it.
    """

    @property
    def signals(self) -> Collection[str] | None: ...

    @property
    def names(self) -> Collection[str]: ...

    def listing(self) -> list[dict[str, Any]]: ...

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]: ...

    def snapshot(self) -> str: ...

    def restore(self, state: str) -> None: ...


@dataclass(slots=True)
class Standing:
    """How far judging has come: end of the last judged cell, and of that in the judge's snapshot."""

    judged: int = -(1 << 62)
    snapshot: int = -(1 << 62)


@dataclass(slots=True)
class Unwritten:
    """Results of the instants before `end` that no transaction holds yet."""

    end: int
    findings: list[Finding] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    shown: list[tuple[int, list[Finding]]] = field(default_factory=list)


class Engine:
    """Judges what ingest committed. `observe` and `advance` run in one thread; notes come from others, under `lock`."""

    def __init__(
        self,
        database: Database,
        devices: Devices,
        topology: Topology,
        judge: Judge,
        enqueue: Enqueue,
        clock: Callable[[], int],
        step: int,
        modes: Sequence[ModeRule] = (),
    ) -> None:
        self.database, self.devices, self.topology = database, devices, topology
        self.voice = Voice(topology, modes)
        check_rules(modes, judge.names)
        self.membership = Membership(topology)
        self.judge, self.clock = judge, clock
        self.lock = threading.RLock()
        self.desk = Desk(topology, self._is_simulated)
        self.standing = Standing()
        self.ahead = self.faults = 0
        self._enqueue = enqueue
        self._seen = LastSeen()
        self._ready: deque[Instant] = deque()
        self._restore()
        self._unwritten, self._desk_state = Unwritten(self.standing.judged), self.desk.snapshot()
        for device_class in CLASSES:
            self._seen.know(device_class, devices.names(device_class))
        start = self.standing.snapshot if self.standing.snapshot > 0 else None
        self.framer = Framer(step, topology, devices.names, start=start, signals=judge.signals)
        reread(database, start or 0, self._refill)

    def _is_simulated(self, entity: str) -> bool:
        """Of what sends no telemetry itself, such as a job or a leaf: whether all that is below it is simulated."""
        if self.devices.knows(entity):
            return self.devices.is_simulated(entity)
        below = [e for e in self.topology.below(entity) if self.devices.knows(e)]
        if not below:  # a job that has ended, a whole site: as simulated as the rest
            return self.devices.all_simulated() or entity.split(":", 1)[1].startswith("sim-")
        return all(map(self.devices.is_simulated, below))

    # --- what comes in ------------------------------------------------------------------------------

    def observe(self, committed: Committed) -> None:
        """Takes rows and events that are durable now."""
        self._take(committed.rows, committed.events)

    def _take(self, rows: Iterable[Rows], events: Iterable[Event]) -> None:
        limit = self.clock() + AHEAD
        for block in rows:
            sane = block.time <= limit
            self.ahead += len(sane) - int(np.count_nonzero(sane))
            self.framer.add(block if sane.all() else select(block, sane))
        events = list(events)
        inventories = [event for event in events if event.kind == "inventory"]
        if inventories:
            self._seen.end(self.membership.learn(inventories), max(event.time for event in inventories))
        self.framer.add_events(event for event in events if event.kind != "inventory" and event.time <= limit)

    def _refill(self, rows: Sequence[Rows], events: Sequence[Event], until: int) -> None:
        """A restart: what the store holds after the snapshot, in chunks; all before `until` is complete."""
        self._take(rows, events)
        self.advance(min(until, self.standing.judged))

    # --- what goes out ------------------------------------------------------------------------------

    def advance(self, watermark: int) -> int:
        """Judges every cell that the watermark has passed; returns how many there were.

        A transaction that fails leaves its results in memory: they are written first when this is called again.
        """
        self._write()
        self._ready.extend(self.framer.advance(watermark))
        count = len(self._ready)
        while self._ready:
            for _ in range(min(INSTANTS_PER_RESULT, len(self._ready))):
                self._judge(self._ready.popleft())
            self._write()
        return count

    def _judge(self, instant: Instant) -> None:
        """Shows an instant to the judge, and its findings to the Desk unless the Desk saw them before a restart."""
        instant = self.membership.applied(instant)
        found = self.judge.observe(instant.frames)
        with self.lock:
            self._seen.note(instant)
            if instant.end > self._unwritten.end:
                self._show(instant, found)

    def _show(self, instant: Instant, found: list[Finding]) -> None:
        """Takes what the Desk makes of an instant; all of it or, if the Desk fails, nothing of it."""
        new = self._unwritten
        found, heard = self.voice.judged(found, self.desk.standing, instant.time)
        try:
            changes = self.desk.observe(instant.time, heard, self._seen.present)
        except Exception:
            self.faults += 1
            log.exception("the Desk failed on %d findings of %s; they are left out", len(found), iso(instant.time))
            self.desk.restore(self._desk_state)
            for time, findings in new.shown:
                self.desk.observe(time, findings, self._seen.present)
            return
        new.end = instant.end
        new.findings += found
        new.changes += changes
        new.shown.append((instant.time, heard))

    def _write(self) -> None:
        """Writes findings, incidents, alerts and state in one transaction."""
        with self.lock:
            done = self._unwritten
            if done.end == self.standing.judged:
                return
            snapshot = done.end - self.standing.snapshot >= SNAPSHOT_EVERY
            with self.database.transaction() as connection:
                payloads = self._enqueue(done.changes, self.clock())
                ledger.record(connection, done.findings, done.changes, payloads, done.end)
                state = self.desk.snapshot()
                ledger.save_snapshot(connection, "desk", done.end, state)
                ledger.save_snapshot(connection, "unheard", done.end, self.voice.unheard.snapshot())
                if snapshot:
                    ledger.save_snapshot(connection, "judge", done.end, self.judge.snapshot())
            self.standing = Standing(done.end, done.end if snapshot else self.standing.snapshot)
            self._unwritten, self._desk_state = Unwritten(done.end), state

    def note(self, change: Callable[[Desk], Change], events: Sequence[Event] = ()) -> Change:
        """Applies a person's note to the Desk and writes it with its alerts and events, or nothing of it."""
        with self.lock:
            self._write()
            before = self.desk.snapshot()
            made = change(self.desk)
            try:
                with self.database.transaction() as connection:
                    ledger.record(connection, [], [made], self._enqueue([made], self.clock()), self.clock())
                    if events:
                        write_events(connection, [EventBatch(Origin("", "", b""), tuple(events))])
                    after = self.desk.snapshot()
                    ledger.save_snapshot(connection, "desk", self.standing.judged, after)
            except BaseException:
                self.desk.restore(before)
                raise
            self._desk_state = after
            self.framer.add_events(events)
        return made

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mute:
        """Silences a detector on a scope from now on. Raises UsageError on what nobody could want."""
        checked(detector, scope, seconds, reason, self.judge.names)
        with self.lock:
            now = self.clock()
            self.voice.forget(self.standing.judged)
            if len(self.voice.mutes) >= MOST_MUTES:
                raise UsageError(f"mutes: {MOST_MUTES} stand already, which is the most; end some of them")
            mute = Mute(uuid.uuid4().hex[:12], detector, scope, now, now + int(seconds * SECOND), reason.strip(), user)
            with self.database.transaction() as connection:
                mutes.add(connection, mute)
            self.voice.mutes.append(mute)
        return mute

    def doubt(self, scope: str) -> str:
        """What to tell somebody who mutes a scope that is not known; empty if it is."""
        return doubt(scope, self.topology, self.devices.knows)

    def unmute(self, id_: str, user: str) -> Mute:
        """Somebody ends a mute now. Raises KeyError if none of that id stands."""
        with self.lock:
            found = next((m for m in self.voice.mutes if m.id == id_ and m.ended is None), None)
            if found is None:
                raise KeyError(id_)
            over = replace(found, ended=min(self.clock(), found.until), ended_by=user)
            with self.database.transaction() as connection:
                mutes.end(connection, id_, user, self.clock())
            self.voice.mutes[self.voice.mutes.index(found)] = over
        return over

    def not_a_fault(self, incident: str, user: str, comment: str) -> Change:
        """Resolves an incident and tells its detectors that what they saw is normal there: they learn anew.

        The verdict is an event of its own, so that a restart judges with it as well.
        """
        with self.lock:
            time = max(self.clock(), self.framer.closed)
            said = {"verdict": "not_a_fault", "incident": incident, "user": user, "comment": comment}
            blamed = self.desk.blamed(incident)
            events = [Event(time, entity, "feedback", {**said, "detector": name}) for name, entity in blamed]
            return self.note(lambda desk: desk.resolve(incident, user, comment, self.clock()), events)

    def _restore(self) -> None:
        with self.database.lock:
            self.voice.mutes = mutes.standing(self.database.connection, max(self.standing.judged, 0))
            desk = ledger.load_snapshot(self.database.connection, "desk")
            unheard = ledger.load_snapshot(self.database.connection, "unheard")
            judge = ledger.load_snapshot(self.database.connection, "judge")
        if unheard is not None:
            self.voice.unheard.restore(unheard[1])
        if desk is not None:
            self.standing.judged, state = desk
            self.desk.restore(state)
        if judge is not None:
            self.standing.snapshot, state = judge
            try:
                self.judge.restore(state)
            except Exception:
                log.exception("the detectors learn anew: their snapshot of %s cannot be read", iso(judge[0]))
