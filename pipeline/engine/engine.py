"""Engine: durable rows become frames, findings and incidents; and a restart continues as if the process had not
stopped.

Results and the state that produced them are written in one transaction. The state of the detectors is large: it is
written to a file once per SNAPSHOT_EVERY of event time, and the transaction names the file. After a restart the frames
since then are evaluated again from the store, and the Desk, whose state is newer, receives only what it has not seen.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pipeline.config.sections import Budget, ModeRule
from pipeline.engine.decommission import Decommission, Decommissioned, Write
from pipeline.engine.restart import MAX_FUTURE, EngineProgress, keep_state, limit_to_now, read_since
from pipeline.incidents import ledger
from pipeline.incidents import ledger as mutes
from pipeline.incidents.arrivals import EarlyFinding, LiveDesk
from pipeline.incidents.cases import Change
from pipeline.ingest.ingest import Committed
from pipeline.judging.frames import Framer
from pipeline.judging.mutes import MAX_MUTES, FindingFilter, Mute, check_mute, check_rules, warn_unknown_scope
from pipeline.judging.page_budget import PageBudget
from pipeline.judging.presence import LastSeen
from pipeline.model.errors import Interrupted, UsageError
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Finding, Frame, Instant, Origin, Rows, iso, select_rows
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.detector_state import Piece, delete_other_states, read_state
from pipeline.store.devices import Devices
from pipeline.store.events import write_events

log = logging.getLogger("fleetpulse.engine")

SNAPSHOT_EVERY = 120 * SECOND  # chosen: a restart evaluates at most this much again; 0.4 s of CPU at 4,096 nodes
REVIEW_EVERY = 600 * SECOND  # between reviews of the page budgets; chosen: as the Desk resolves
CALIBRATION_EVERY = 86_400 * SECOND  # chosen: one version a day
Calibrated = Literal["pin", "unpin", "rollback"]
INSTANTS_PER_RESULT = 60  # maximum instants whose results are written in one transaction


Enqueue = Callable[[Sequence[Change], int], Sequence[ledger.Payload]]


class Judge(Protocol):
    """The detectors, passed in by the entry point. beat: heartbeat, called with the next step; set by the pipeline."""

    beat: Callable[[str], None]

    @property
    def signals(self) -> Collection[str] | None:
        """The signals that they use; None: all."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of the detectors, for modes and mutes."""
        ...

    def listing(self) -> list[dict[str, Any]]:
        """Returns a row per detector, as in GET /api/v1/detectors."""
        ...

    def calibration(self) -> dict[str, Any]:
        """Returns the thresholds in force, and the evidence for them."""
        ...

    def calibration_rows(self, other: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Returns them as rows, compared with an earlier version, as in GET /api/v1/calibration."""
        ...

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns the findings of one instant. frames: by device class."""
        ...

    def judge_events(self, events: Sequence[Event], topology: Topology, again: bool = False) -> list[Finding]:
        """Returns the findings of single events, on arrival. again: also for events that were judged before."""
        ...

    def snapshot(self) -> Iterable[Piece]:
        """Yields the state of the detectors in named pieces, to be read before the next instant."""
        ...

    def restore(self, pieces: Mapping[str, bytes]) -> None:
        """Restores the state of a snapshot."""
        ...


@dataclass(slots=True)
class PendingResults:
    """Results of the instants before `end`, and of events on arrival, that are not written yet.

    replay: the calls to the Desk, in order.
    """

    end: int
    findings: list[Finding] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    replay: list[Callable[[], list[Change]]] = field(default_factory=list)


class Engine:
    """Evaluates committed rows and events. `observe` and `advance` run in one thread; notes from others, under
    `lock`."""

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
        budget: Budget | None = None,
    ) -> None:
        """wake: called when payloads of `enqueue` are durable.  ended: whether the process is stopping; then
        Interrupted is raised before the next instant, here and by `advance`."""
        self._is_stopping = ended
        self._beat = judge.beat = beat
        self._wake = wake
        self.database, self.devices, self.topology = database, devices, topology
        self.finding_filter = FindingFilter(topology, modes, budget=PageBudget(budget or Budget()))
        check_rules(modes, judge.names)
        self.membership = Membership(topology)
        self.judge, self.clock = judge, clock
        self.lock = threading.RLock()
        self.desk = LiveDesk(topology, self._is_simulated, self._site_of)
        self.progress = EngineProgress()
        self.faults = self.unjudged = self._budget_reviewed = self.revision = 0  # revision: of stored incidents
        self._enqueue = enqueue
        self._last_seen = LastSeen()
        self._ready_instants: deque[Instant] = deque()
        self._restore()
        self._pending, self._desk_state = PendingResults(self.progress.judged), self.desk.snapshot()
        for device_class in CLASSES:
            self._last_seen.add_devices(device_class, devices.names(device_class))
        start = self.progress.snapshot if self.progress.snapshot > 0 else None
        self.framer = Framer(step, topology, devices.names, start=start, signals=judge.signals)
        self._stored_events: list[Event] = []  # only while stored rows are read at the start
        read_since(database, start or 0, clock() + MAX_FUTURE, self._add_stored)
        self._evaluate_arrived(self._stored_events, again=True)
        self._stored_events = []

    def _is_simulated(self, entity: str) -> bool:
        """Whether an entity is simulated; without own telemetry (job, leaf): whether all its descendants are."""
        if self.devices.has_device(entity):
            return self.devices.is_simulated(entity)
        below = [e for e in self.topology.descendants(entity) if self.devices.has_device(e)]
        if not below:  # a job that has ended, a whole site: like the rest
            return self.devices.are_all_simulated() or entity.split(":", 1)[1].startswith("sim-")
        return all(map(self.devices.is_simulated, below))

    def _site_of(self, entity: str) -> str | None:
        """The site of a node or of a part of it; for a group, that of its first known node."""
        inside = (entity, self.topology.ancestor_of_kind(entity, "node"), *self.topology.descendants(entity))
        nodes = (e.partition(":")[2] for e in inside if e is not None and e.startswith("node:"))
        site = next((site for node in nodes if (site := self.devices.site_of(node))), None)
        return site and f"site:{site}"

    # --- input --------------------------------------------------------------------------------------

    def observe(self, committed: Committed) -> None:
        """Adds durable rows and events; evaluates single events on arrival."""
        for block in committed.rows:
            self.framer.add_rows(self._map_devices(block))
        kept = self.decommissioned.keep_events(committed.events)
        inventories = [event for event in kept if event.kind == "inventory"]
        if inventories:
            self._last_seen.end_entities(
                self.membership.apply_inventories(inventories), max(event.time for event in inventories)
            )
        events = [event for event in kept if event.kind != "inventory"]
        self.framer.add_events(events)
        self._evaluate_arrived(events)

    def _map_devices(self, block: Rows) -> Rows:
        """Rows with slots instead of device ids, without dropped devices and decommissioned nodes."""
        slots = self.devices.find_slots(block.device_class, block.device)
        mine = block if slots is block.device else select_rows(replace(block, device=slots), slots >= 0)
        return self.decommissioned.keep_rows(mine, self.devices.names(block.device_class))

    def _add_stored(self, rows: Sequence[Rows], events: Sequence[tuple[int, Event]], until: int) -> None:
        """Adds a chunk of stored rows and events after the snapshot, at a restart; all before `until` is complete."""
        for block in rows:
            self.framer.add_rows(self._map_devices(block))
        events = [(at, event) for at, event in events if not self.decommissioned.has_event(event)]
        self.framer.add_dated_events(events)
        self._stored_events += [event for judged, event in events if judged >= self.progress.judged]
        self.advance(min(until, self.progress.judged))

    def _evaluate_arrived(self, events: Sequence[Event], again: bool = False) -> None:
        """Evaluates events that need no frame. again: their findings may be written already."""
        found = self.decommissioned.keep_findings(self.judge.judge_events(events, self.topology))
        if found and again:
            with self.database.lock:
                written = ledger.find_known_findings(self.database.connection, [f.key for f in found])
            found = [finding for finding in found if finding.key not in written]
        if found:
            with self.lock:
                self._observe_early(found)
            self._write()

    # --- output -------------------------------------------------------------------------------------

    def advance(self, watermark: int) -> int:
        """Evaluates every cell that the watermark has passed; returns how many.

        A failed transaction leaves its results in memory: the next call writes them first. Raises Interrupted; results
        that are not written are evaluated again after the next start.
        """
        self._write()
        with self.lock:  # notes of people add events
            self._ready_instants.extend(self.framer.advance(watermark))
        count = len(self._ready_instants)
        while self._ready_instants:
            for _ in range(min(INSTANTS_PER_RESULT, len(self._ready_instants))):
                self._evaluate(self._ready_instants.popleft())
            self._write()
        if count and abs(self.clock() - self._budget_reviewed) >= REVIEW_EVERY:
            self.review_budget()
        return count

    def review_budget(self) -> None:
        """Lowers detectors that spent their page budget to tickets, and raises those with room again.

        What was counted is in the store, so that a restart comes to the same.
        """
        with self.lock:
            self._budget_reviewed = now = self.clock()
            budget = self.finding_filter.budget
            with self.database.transaction() as connection:
                counts = ledger.count_wrong_pages(connection, now, budget.config.days, budget.resets)
            if found := budget.review(*counts, now):
                state = {"page_budget": budget.snapshot()}
                self._apply(lambda desk: desk.observe_own(now, found), [], found, state)

    def reset_budget(self, detector: str) -> list[dict[str, Any]]:
        """Forgets the wrong pages of a detector until now; returns the budgets. Raises UsageError if it is unknown."""
        if detector not in self.judge.names:
            known = ", ".join(self.judge.names)
            raise UsageError(f"detector = {detector!r}: no such detector; expected one of {known}")
        with self.lock:
            budget = self.finding_filter.budget
            budget.resets[detector] = self.clock()
            with self.database.transaction() as connection:
                ledger.save_snapshot(connection, "page_budget", self.clock(), budget.snapshot())
            self.review_budget()
        return self.list_budgets()

    def list_budgets(self) -> list[dict[str, Any]]:
        """Returns the page budget of each detector, in the form of the API."""
        return self.finding_filter.budget.list_rows(self.judge.names)

    def _evaluate(self, instant: Instant) -> None:
        """Passes an instant to the detectors, and their findings to the Desk unless it had them before a restart."""
        if self._is_stopping():
            raise Interrupted("interrupted while judging")
        self._beat("judging")
        instant = self.membership.apply_instant(instant)
        found = self.judge.observe(instant.frames)
        with self.lock:
            self._last_seen.record_instant(instant)
            if instant.end > self._pending.end:
                self._observe_instant(instant, found)

    def _observe_instant(self, instant: Instant, found: list[Finding]) -> None:
        """Passes an instant and earlier arrivals to the Desk."""
        found = [*self.desk.list_due(instant.end), *self.decommissioned.keep_findings(found)]
        found, passed = self.finding_filter.filter_findings(found, self.desk.open_level_by_frames, instant.time)
        time, end, seen = instant.time, instant.end, self._last_seen
        observe = lambda: self.desk.observe(time, end, passed, seen.is_present, self.clock(), seen.has_sample)  # noqa: E731
        if self._update_desk(observe, found):
            self._pending.end = instant.end

    def _observe_early(self, found: list[Finding]) -> None:
        """Passes findings to the Desk before their instant."""
        annotated = [self.finding_filter.annotate(finding, self.desk.open_level) for finding in found]
        early = [
            EarlyFinding(max(f.time, self.framer.closed), f, passed)
            for f, (_, passed) in zip(found, annotated, strict=True)
        ]
        self._update_desk(lambda: self.desk.observe_early(early, self.clock()), [finding for finding, _ in annotated])

    def _update_desk(self, observe: Callable[[], list[Change]], found: list[Finding]) -> bool:
        """Collects the results of a call to the Desk; if it fails, restores the Desk and returns False."""
        new = self._pending
        try:
            changes = observe()
        except Exception:
            self.faults += 1
            log.exception("the Desk failed on %d findings; they are skipped: %s", len(found), found[:1])
            self.desk.restore(self._desk_state)
            for before in new.replay:
                before()
            return False
        new.findings += found
        new.changes += changes
        new.replay.append(observe)
        return True

    def _write(self) -> None:
        """Writes findings, incidents, alerts and state in one transaction."""
        with self.lock:
            done = self._pending
            if done.end == self.progress.judged and not done.replay:
                return
            name = ""
            if done.end - max(self.progress.snapshot, self.progress.tried) >= SNAPSHOT_EVERY:
                name, self.progress.tried = keep_state(self.database, done.end, self.judge.snapshot()), done.end
            with self.database.transaction() as connection:
                payloads = self._enqueue(done.changes, self.clock())
                ledger.write_changes(connection, done.findings, done.changes, payloads, done.end)
                state = self.desk.snapshot()
                ledger.save_snapshot(connection, "desk", done.end, state)
                ledger.save_snapshot(connection, "unheard", done.end, self.finding_filter.held.snapshot())
                if name:
                    ledger.save_snapshot(connection, "judge", done.end, name)
                    ledger.keep_calibration(connection, done.end, CALIBRATION_EVERY, self.judge.calibration)
            self.progress.judged, self.revision = done.end, self.revision + bool(done.changes)
            if name:
                self.progress.snapshot = done.end
                delete_other_states(self.database.path, name)
            self._pending, self._desk_state = PendingResults(done.end), state
        if payloads:
            self._wake()

    def apply_note(self, change: Callable[[LiveDesk], Change], events: Sequence[Event] = ()) -> Change:
        """Applies a note to the Desk and writes it with its alerts and events, or neither."""
        return self._apply(lambda desk: [change(desk)], events)[0]

    def report_events(self, events: Sequence[Event]) -> list[Change]:
        """Evaluates events of the pipeline itself immediately: no telemetry would close their frames."""
        with self.lock:
            now = self.clock()
            self._write()
            judged = self.judge.judge_events(events, self.topology, again=True)  # a failed report is repeated
            found, passed = self.finding_filter.filter_findings(judged, self.desk.open_level, now)
            return self._apply(lambda desk: desk.observe_own(now, passed), events, found)

    def _apply(
        self,
        change: Callable[[LiveDesk], list[Change]],
        events: Sequence[Event],
        findings: Sequence[Finding] = (),
        states: Mapping[str, str] = {},
        more: Write = lambda _: None,
    ) -> list[Change]:
        """Changes the Desk and writes the changes with alerts, events, findings, states and `more`, or neither."""
        with self.lock:
            self._write()
            before = self.desk.snapshot()
            made = change(self.desk)
            try:
                with self.database.transaction() as connection:
                    payloads = self._enqueue(made, self.clock())
                    ledger.write_changes(connection, findings, made, payloads, self.clock())
                    more(connection)
                    if events:
                        write_events(connection, [EventBatch(Origin("", "", b""), tuple(events))], self.framer.closed)
                    if any(event.data.get("verdict") == "not_a_fault" for event in events):
                        ledger.add_wrong_page(connection, made[0].incident, self.clock(), "marked as not a fault")
                    after = self.desk.snapshot()
                    for key, state in {"desk": after, **states}.items():
                        ledger.save_snapshot(connection, key, self.progress.judged, state)
                    ledger.save_snapshot(
                        connection, "unheard", self.progress.judged, self.finding_filter.held.snapshot()
                    )
            except BaseException:
                self.desk.restore(before)
                raise
            self._desk_state, self.revision = after, self.revision + 1
            self.framer.add_events(events)
        if payloads:
            self._wake()
        return made

    def mute(self, detector: str, scope: str, seconds: float, reason: str, user: str) -> Mute:
        """Mutes a detector in a scope from now on. Raises UsageError on invalid arguments."""
        check_mute(detector, scope, seconds, reason, self.judge.names)
        with self.lock:
            now = self.clock()
            self.finding_filter.drop_expired(self.progress.judged)
            if len(self.finding_filter.mutes) >= MAX_MUTES:
                raise UsageError(f"mutes: {MAX_MUTES} are active, which is the maximum; end some of them")
            mute = Mute(uuid.uuid4().hex[:12], detector, scope, now, now + int(seconds * SECOND), reason.strip(), user)
            with self.database.transaction() as connection:
                mutes.add_mute(connection, mute)
            self.finding_filter.mutes.append(mute)
        return mute

    def describe_unknown_scope(self, scope: str) -> str:
        """A warning for a mute with an unknown scope; "" if it is known."""
        return warn_unknown_scope(scope, self.topology, self.devices.has_device)

    def unmute(self, id_: str, user: str) -> Mute:
        """Ends a mute now. Raises KeyError if there is no active mute of that id."""
        with self.lock:
            found = next((m for m in self.finding_filter.mutes if m.id == id_ and m.ended is None), None)
            if found is None:
                raise KeyError(id_)
            over = replace(found, ended=min(self.clock(), found.until), ended_by=user)
            with self.database.transaction() as connection:
                mutes.end_mute(connection, id_, user, self.clock())
            self.finding_filter.mutes[self.finding_filter.mutes.index(found)] = over
        return over

    def change_service(self, row: Decommission, event: Event, write: Write) -> None:
        """Decommissions or returns a node; the event and `write` are one transaction."""
        with self.lock:
            self._apply(lambda _: [], [event], more=write)
            self.decommissioned.set(row)
            self._expect_nothing()

    def _expect_nothing(self) -> None:
        """Makes devices of decommissioned nodes count as ended, so that incidents of others need not wait for them."""
        names = (name for c in CLASSES for name in self.devices.names(c) if self.decommissioned.has(name))
        self._last_seen.end_entities(names, self.clock())

    def resolve_as_not_a_fault(self, incident: str, user: str, comment: str) -> Change:
        """Resolves an incident as a false alarm: its detectors take the present values as normal and learn again.

        The verdict is an event, so that a restart evaluates it too.
        """
        with self.lock:
            time = max(self.clock(), self.framer.closed)
            said = {"verdict": "not_a_fault", "incident": incident, "user": user, "comment": comment}
            blamed = self.desk.list_conditions(incident)
            events = [Event(time, entity, "feedback", {**said, "detector": name}) for name, entity in blamed]
            change = self.apply_note(lambda desk: desk.resolve(incident, user, comment, self.clock()), events)
            self.review_budget()
        return change

    def change_calibration(self, action: Calibrated, version: int | None, user: str) -> list[dict[str, Any]]:
        """Pins a version, or what is in force now; unpins; or returns to a version. Returns the versions.

        The decision is an event, so that a restart and a replay apply it too. Raises KeyError without that version.
        """
        with self.lock:
            time = max(self.clock(), self.framer.closed)
            with self.database.transaction() as connection:
                if action == "pin" and version is None:
                    document = json.dumps(self.judge.calibration())
                    version = ledger.add_calibration(connection, time, "learned", user, None, document)
                found = None if version is None else ledger.load_calibration(connection, version)
                ledger.add_calibration(connection, time, action, user, version, None)
                versions = ledger.list_calibrations(connection)
            data = {"action": action, "version": version, "user": user, "calibration": found}
            self._apply(lambda _: [], [Event(time, "site:all", "calibration", data)])
        return versions

    @property
    def is_ahead(self) -> bool:
        """Whether our clock was set back far behind the closed frames: nothing would be evaluated until then."""
        return self.framer.closed > self.clock() + MAX_FUTURE

    def _restore(self) -> None:
        with self.database.lock:
            self.decommissioned = Decommissioned(self.database.connection, self.clock())
            self._expect_nothing()
            self.finding_filter.mutes = mutes.load_active_mutes(self.database.connection, max(self.progress.judged, 0))
            desk = ledger.load_snapshot(self.database.connection, "desk")
            unheard = ledger.load_snapshot(self.database.connection, "unheard")
            judge = ledger.load_snapshot(self.database.connection, "judge")
            spent = ledger.load_snapshot(self.database.connection, "page_budget")
        if spent is not None:
            self.finding_filter.budget.restore(spent[1])
        if unheard is not None:
            self.finding_filter.held.restore(unheard[1])
        if desk is not None:
            self.progress.judged, state = desk
            state, self.unjudged = limit_to_now(self.progress, self.database, state, self.clock())
            self.desk.restore(state)
        if judge is not None:
            self.progress.snapshot, state = judge
            if self.progress.snapshot > self.clock() + MAX_FUTURE:
                log.warning("the detectors learn again: their snapshot is of %s, later than our clock", iso(judge[0]))
                self.progress.snapshot = self.progress.judged
                return
            if not state:
                log.warning("the detectors learn again: devices without data for long were dropped")
                return
            try:
                self.judge.restore(read_state(self.database.path, state))
            except Exception:
                log.exception("the detectors learn again: their snapshot of %s cannot be read", iso(judge[0]))
