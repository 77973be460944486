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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pipeline.config.sections import ModeRule
from pipeline.engine.restart import FUTURE, clamped, dated_later, reread
from pipeline.incidents import ledger
from pipeline.incidents import ledger as mutes
from pipeline.incidents.arrivals import EarlyFinding, LiveDesk
from pipeline.incidents.cases import Change
from pipeline.ingest.ingest import Committed
from pipeline.judging.frames import Framer
from pipeline.judging.mutes import MAX_MUTES, FindingFilter, Mute, check_mute, check_rules, warn_unknown_scope
from pipeline.judging.presence import LastSeen
from pipeline.model.errors import Interrupted, UsageError
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Finding, Frame, Instant, Origin, Rows, iso, select_rows
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.events import write_events

log = logging.getLogger("fleetpulse.engine")

SNAPSHOT_EVERY = 60 * SECOND  # chosen: a restart judges at most this much again
INSTANTS_PER_RESULT = 60  # bound of judged instants whose results wait for one transaction


Enqueue = Callable[[Sequence[Change], int], Sequence[ledger.Payload]]


class Judge(Protocol):
    """The detectors, as the pipeline sees them; the door passes them in. signals: all that they look at; None: any.

    names: of the detectors, for modes and mutes.   listing: a row for each, as GET /api/v1/detectors has it.
    beat: called with what it does next; the pipeline sets it.
    judge_events: findings of events by themselves, as they arrive.
    """

    @property
    def signals(self) -> Collection[str] | None: ...

    @property
    def names(self) -> Collection[str]: ...

    def listing(self) -> list[dict[str, Any]]: ...

    beat: Callable[[str], None]

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]: ...

    def judge_events(self, events: Sequence[Event], topology: Topology, again: bool = False) -> list[Finding]: ...

    def snapshot(self) -> str: ...

    def restore(self, state: str) -> None: ...


@dataclass(slots=True)
class Standing:
    """How far judging has come: end of the last judged cell, and of that in the judge's snapshot."""

    judged: int = -(1 << 62)
    snapshot: int = -(1 << 62)


@dataclass(slots=True)
class Unwritten:
    """Results of the instants before `end`, and of events on arrival, that no transaction holds yet.

    shown: what the Desk was shown, in order.
    """

    end: int
    findings: list[Finding] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    shown: list[Callable[[], list[Change]]] = field(default_factory=list)


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
        beat: Callable[[str], None] = lambda doing: None,
        wake: Callable[[], None] = lambda: None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """wake: called when payloads of `enqueue` are durable.  ended: whether somebody asked for the end; then Ended
        is raised before the next instant, here and by `advance`."""
        self._ended = ended
        self._beat = judge.beat = beat
        self._wake = wake
        self.database, self.devices, self.topology = database, devices, topology
        self.voice = FindingFilter(topology, modes)
        check_rules(modes, judge.names)
        self.membership = Membership(topology)
        self.judge, self.clock = judge, clock
        self.lock = threading.RLock()
        self.desk = LiveDesk(topology, self._is_simulated, self._site_of)
        self.standing = Standing()
        self.faults = self.unjudged = 0
        self._enqueue = enqueue
        self._seen = LastSeen()
        self._ready: deque[Instant] = deque()
        self._restore()
        self._unwritten, self._desk_state = Unwritten(self.standing.judged), self.desk.snapshot()
        for device_class in CLASSES:
            self._seen.know(device_class, devices.names(device_class))
        start = self.standing.snapshot if self.standing.snapshot > 0 else None
        self.framer = Framer(step, topology, devices.names, start=start, signals=judge.signals)
        self._unjudged: list[Event] = []  # only while what the store holds is read again
        reread(database, start or 0, clock() + FUTURE, self._refill)
        self._judge_arrived(self._unjudged, again=True)
        self._unjudged = []

    def _is_simulated(self, entity: str) -> bool:
        """Of what sends no telemetry itself, such as a job or a leaf: whether all that is below it is simulated."""
        if self.devices.knows(entity):
            return self.devices.is_simulated(entity)
        below = [e for e in self.topology.descendants(entity) if self.devices.knows(e)]
        if not below:  # a job that has ended, a whole site: as simulated as the rest
            return self.devices.all_simulated() or entity.split(":", 1)[1].startswith("sim-")
        return all(map(self.devices.is_simulated, below))

    def _site_of(self, entity: str) -> str | None:
        """The site of a node or of what is in it; of a group that of the first of its nodes that is known."""
        inside = (entity, self.topology.ancestor_of_kind(entity, "node"), *self.topology.descendants(entity))
        nodes = (e.partition(":")[2] for e in inside if e is not None and e.startswith("node:"))
        site = next((site for node in nodes if (site := self.devices.site_of(node))), None)
        return site and f"site:{site}"

    # --- what comes in ------------------------------------------------------------------------------

    def observe(self, committed: Committed) -> None:
        """Takes rows and events that are durable now; judges on arrival what an event is by itself."""
        for block in committed.rows:
            self.framer.add(self._placed(block))
        inventories = [event for event in committed.events if event.kind == "inventory"]
        if inventories:
            self._seen.end(self.membership.apply_inventories(inventories), max(event.time for event in inventories))
        events = [event for event in committed.events if event.kind != "inventory"]
        self.framer.add_events(events)
        self._judge_arrived(events)

    def _placed(self, block: Rows) -> Rows:
        """Rows with the slots of their devices instead of the ids; without those of devices that were dropped."""
        slots = self.devices.slots(block.device_class, block.device)
        return block if slots is block.device else select_rows(replace(block, device=slots), slots >= 0)

    def _refill(self, rows: Sequence[Rows], events: Sequence[tuple[int, Event]], until: int) -> None:
        """A restart: what the store holds after the snapshot, in chunks; all before `until` is complete."""
        for block in rows:
            self.framer.add(self._placed(block))
        self.framer.place_events(events)
        self._unjudged += [event for judged, event in events if judged >= self.standing.judged]
        self.advance(min(until, self.standing.judged))

    def _judge_arrived(self, events: Sequence[Event], again: bool = False) -> None:
        """Findings that need only an event do not wait for its frame. again: some may have been written before."""
        found = self.judge.judge_events(events, self.topology)
        if found and again:
            with self.database.lock:
                written = ledger.find_known_findings(self.database.connection, [f.key for f in found])
            found = [finding for finding in found if finding.key not in written]
        if found:
            with self.lock:
                self._show_arrived(found)
            self._write()

    # --- what goes out ------------------------------------------------------------------------------

    def advance(self, watermark: int) -> int:
        """Judges every cell that the watermark has passed; returns how many there were.

        A transaction that fails leaves its results in memory: they are written first when this is called again. Raises
        Ended; what no transaction holds then is judged again after the next start.
        """
        self._write()
        with self.lock:  # persons add events of their own
            self._ready.extend(self.framer.advance(watermark))
        count = len(self._ready)
        while self._ready:
            for _ in range(min(INSTANTS_PER_RESULT, len(self._ready))):
                self._judge(self._ready.popleft())
            self._write()
        return count

    def _judge(self, instant: Instant) -> None:
        """Shows an instant to the judge, and its findings to the Desk unless the Desk saw them before a restart."""
        if self._ended():
            raise Interrupted("asked to end while judging")
        self._beat("judging")
        instant = self.membership.apply_instant(instant)
        found = self.judge.observe(instant.frames)
        with self.lock:
            self._seen.note(instant)
            if instant.end > self._unwritten.end:
                self._show(instant, found)

    def _show(self, instant: Instant, found: list[Finding]) -> None:
        """Takes what the Desk makes of an instant and of what arrived before it."""
        found = [*self.desk.list_due(instant.end), *found]
        found, heard = self.voice.filter_findings(found, self.desk.open_level_by_frames, instant.time)
        time, end, present = instant.time, instant.end, self._seen.present
        if self._shown(lambda: self.desk.observe(time, end, heard, present, self.clock()), found):
            self._unwritten.end = instant.end

    def _show_arrived(self, found: list[Finding]) -> None:
        """Takes what the Desk makes of findings before their instant."""
        told = [self.voice.annotate(finding, self.desk.open_level) for finding in found]
        early = [
            EarlyFinding(max(f.time, self.framer.closed), f, heard) for f, (_, heard) in zip(found, told, strict=True)
        ]
        self._shown(lambda: self.desk.observe_early(early, self.clock()), [finding for finding, _ in told])

    def _shown(self, observe: Callable[[], list[Change]], found: list[Finding]) -> bool:
        """All of what the Desk makes of it or, if the Desk fails, nothing of it; whether it did not fail."""
        new = self._unwritten
        try:
            changes = observe()
        except Exception:
            self.faults += 1
            log.exception("the Desk failed on %d findings; they are left out: %s", len(found), found[:1])
            self.desk.restore(self._desk_state)
            for before in new.shown:
                before()
            return False
        new.findings += found
        new.changes += changes
        new.shown.append(observe)
        return True

    def _write(self) -> None:
        """Writes findings, incidents, alerts and state in one transaction."""
        with self.lock:
            done = self._unwritten
            if done.end == self.standing.judged and not done.shown:
                return
            snapshot = done.end - self.standing.snapshot >= SNAPSHOT_EVERY
            with self.database.transaction() as connection:
                payloads = self._enqueue(done.changes, self.clock())
                ledger.write_changes(connection, done.findings, done.changes, payloads, done.end)
                state = self.desk.snapshot()
                ledger.save_snapshot(connection, "desk", done.end, state)
                ledger.save_snapshot(connection, "unheard", done.end, self.voice.held.snapshot())
                if snapshot:
                    ledger.save_snapshot(connection, "judge", done.end, self.judge.snapshot())
            self.standing = Standing(done.end, done.end if snapshot else self.standing.snapshot)
            self._unwritten, self._desk_state = Unwritten(done.end), state
        if payloads:
            self._wake()

    def note(self, change: Callable[[LiveDesk], Change], events: Sequence[Event] = ()) -> Change:
        """Applies a person's note to the Desk and writes it with its alerts and events, or nothing of it."""
        return self._apply(lambda desk: [change(desk)], events)[0]

    def report(self, events: Sequence[Event]) -> list[Change]:
        """Judges events of the pipeline itself at once: they have no telemetry that would close their frames."""
        with self.lock:
            now = self.clock()
            self._write()
            judged = self.judge.judge_events(events, self.topology, again=True)  # a report that failed is repeated
            found, heard = self.voice.filter_findings(judged, self.desk.open_level, now)
            return self._apply(lambda desk: desk.observe_own(now, heard), events, found)

    def _apply(
        self, change: Callable[[LiveDesk], list[Change]], events: Sequence[Event], findings: Sequence[Finding] = ()
    ) -> list[Change]:
        """Changes the Desk and writes that with its alerts, events and findings, or nothing of it."""
        with self.lock:
            self._write()
            before = self.desk.snapshot()
            made = change(self.desk)
            try:
                with self.database.transaction() as connection:
                    payloads = self._enqueue(made, self.clock())
                    ledger.write_changes(connection, findings, made, payloads, self.clock())
                    if events:
                        write_events(connection, [EventBatch(Origin("", "", b""), tuple(events))], self.framer.closed)
                    after = self.desk.snapshot()
                    ledger.save_snapshot(connection, "desk", self.standing.judged, after)
                    ledger.save_snapshot(connection, "unheard", self.standing.judged, self.voice.held.snapshot())
            except BaseException:
                self.desk.restore(before)
                raise
            self._desk_state = after
            self.framer.add_events(events)
        if payloads:
            self._wake()
        return made

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mute:
        """Silences a detector on a scope from now on. Raises UsageError on what nobody could want."""
        check_mute(detector, scope, seconds, reason, self.judge.names)
        with self.lock:
            now = self.clock()
            self.voice.drop_expired(self.standing.judged)
            if len(self.voice.mutes) >= MAX_MUTES:
                raise UsageError(f"mutes: {MAX_MUTES} stand already, which is the most; end some of them")
            mute = Mute(uuid.uuid4().hex[:12], detector, scope, now, now + int(seconds * SECOND), reason.strip(), user)
            with self.database.transaction() as connection:
                mutes.add_mute(connection, mute)
            self.voice.mutes.append(mute)
        return mute

    def doubt(self, scope: str) -> str:
        """What to tell somebody who mutes a scope that is not known; empty if it is."""
        return warn_unknown_scope(scope, self.topology, self.devices.knows)

    def unmute(self, id_: str, user: str) -> Mute:
        """Somebody ends a mute now. Raises KeyError if none of that id stands."""
        with self.lock:
            found = next((m for m in self.voice.mutes if m.id == id_ and m.ended is None), None)
            if found is None:
                raise KeyError(id_)
            over = replace(found, ended=min(self.clock(), found.until), ended_by=user)
            with self.database.transaction() as connection:
                mutes.end_mute(connection, id_, user, self.clock())
            self.voice.mutes[self.voice.mutes.index(found)] = over
        return over

    def not_a_fault(self, incident: str, user: str, comment: str) -> Change:
        """Resolves an incident and tells its detectors that what they saw is normal there: they learn anew.

        The verdict is an event of its own, so that a restart judges with it as well.
        """
        with self.lock:
            time = max(self.clock(), self.framer.closed)
            said = {"verdict": "not_a_fault", "incident": incident, "user": user, "comment": comment}
            blamed = self.desk.list_conditions(incident)
            events = [Event(time, entity, "feedback", {**said, "detector": name}) for name, entity in blamed]
            return self.note(lambda desk: desk.resolve(incident, user, comment, self.clock()), events)

    @property
    def is_ahead(self) -> bool:
        """Whether our clock came back from far ahead since frames were closed: nothing would be judged till then."""
        return self.framer.closed > self.clock() + FUTURE

    def _believable(self, state: str) -> str:
        """The state of the Desk; judging goes on from now where it was made by a clock that was far ahead."""
        now, judged = self.clock(), self.standing.judged
        if judged <= now + FUTURE:
            return state
        self.unjudged = dated_later(self.database, now)
        log.warning(
            "our clock came back: judged up to %s, which is in the future; judging goes on from %s. %d rows and events "
            "dated later are not judged again; rows that came too late meanwhile are in late_rows",
            *(iso(judged), iso(now), self.unjudged),
        )
        self.standing.judged = now
        return clamped(state, now)

    def _restore(self) -> None:
        with self.database.lock:
            self.voice.mutes = mutes.load_active_mutes(self.database.connection, max(self.standing.judged, 0))
            desk = ledger.load_snapshot(self.database.connection, "desk")
            unheard = ledger.load_snapshot(self.database.connection, "unheard")
            judge = ledger.load_snapshot(self.database.connection, "judge")
        if unheard is not None:
            self.voice.held.restore(unheard[1])
        if desk is not None:
            self.standing.judged, state = desk
            self.desk.restore(self._believable(state))
        if judge is not None:
            self.standing.snapshot, state = judge
            if self.standing.snapshot > self.clock() + FUTURE:
                log.warning("the detectors learn anew: their snapshot is of %s, later than our clock", iso(judge[0]))
                self.standing.snapshot = self.standing.judged
                return
            if not state:
                log.warning("the detectors learn anew: devices that were silent for long were dropped")
                return
            try:
                self.judge.restore(state)
            except Exception:
                log.exception("the detectors learn anew: their snapshot of %s cannot be read", iso(judge[0]))
