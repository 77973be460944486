"""Engine: durable rows become frames, findings and incidents; and a restart continues as if the process had not
stopped.

Results and the state that produced them are written in one transaction. The state of the detectors is large: it is
written to a file once per SNAPSHOT_EVERY of event time, and the transaction names the file. After a restart the frames
since then are evaluated again from the store, and the Desk, whose state is newer, receives only what it has not seen.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb

from pipeline.config.sections import Budget, Impact, Incidents, ModeRule
from pipeline.engine.decommission import Decommission, Decommissioned, Write
from pipeline.engine.judge import Judge
from pipeline.engine.restart import MAX_FUTURE, EngineProgress, keep_state, limit_to_now, read_since
from pipeline.incidents import calibrations, ledger, wrong_pages
from pipeline.incidents.arrivals import EarlyFinding, LiveDesk
from pipeline.incidents.audit import AuditEntry, write_audit
from pipeline.incidents.changes import Change
from pipeline.incidents.impact import ImpactBook
from pipeline.incidents.impact_rows import ImpactWriter, load_books, load_losses
from pipeline.incidents.job_pace import SIGNALS
from pipeline.incidents.jobs import JobBook
from pipeline.incidents.life import KEPT, LifeBook
from pipeline.incidents.silences import load_silences
from pipeline.incidents.storms import decode_pages, encode_pages
from pipeline.ingest.ingest import Committed
from pipeline.judging.frames import Framer
from pipeline.judging.mutes import FindingFilter, check_rules
from pipeline.judging.page_budget import PageBudget
from pipeline.judging.presence import LastSeen
from pipeline.model.errors import Interrupted
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Finding, Instant, Origin, Rows, iso, select_rows
from pipeline.model.signals import CLASSES
from pipeline.model.topology import Topology
from pipeline.store.database import Database
from pipeline.store.detector_state import delete_other_states, read_state
from pipeline.store.devices import Devices
from pipeline.store.events import write_events

log = logging.getLogger("fleetpulse.engine")

SNAPSHOT_EVERY = 120 * SECOND  # chosen: a restart evaluates at most this much again; 0.4 s of CPU at 4,096 nodes
REVIEW_EVERY = 600 * SECOND  # between reviews of the page budgets; chosen: as the Desk resolves
CALIBRATION_EVERY = 86_400 * SECOND  # chosen: one version a day
INSTANTS_PER_RESULT = 60  # maximum instants whose results are written in one transaction


Enqueue = Callable[[Sequence[Change], int], Sequence[ledger.Payload]]


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
        rules: Incidents | None = None,
        site: str = "local",
        prices: Impact | None = None,
    ) -> None:
        """wake: called when payloads of `enqueue` are durable.  ended: whether the process is stopping; then
        Interrupted is raised before the next instant, here and by `advance`."""
        self._is_stopping, self._wake, self._enqueue = ended, wake, enqueue
        self._beat = judge.beat = beat
        self.database, self.devices, self.topology = database, devices, topology
        self.finding_filter = FindingFilter(topology, modes, budget=PageBudget(budget or Budget()), site=site)
        check_rules(modes, judge.names)
        self.judge, self.clock, self.membership = judge, clock, Membership(topology)
        self.lock = threading.RLock()
        self.desk = LiveDesk(topology, self._is_simulated, self._site_of)
        self.life = LifeBook(rules or Incidents(), topology, site)
        self.impact = ImpactBook(JobBook(topology, self._is_simulated), prices or Impact())
        self._impact_rows = ImpactWriter(self.impact)
        self.progress = EngineProgress()
        self.faults = self.unjudged = self._budget_reviewed = self.revision = 0  # revision: of stored incidents
        self._last_seen, self._ready_instants, self._stored_states = LastSeen(), deque[Instant](), dict[str, str]()
        self._restore()
        self._pending, self._desk_state = PendingResults(self.progress.judged), self.desk.snapshot()
        self._expect_devices()
        start = self.progress.snapshot if self.progress.snapshot > 0 else None
        wanted = judge.signals if judge.signals is None else {*judge.signals, *SIGNALS}
        self.framer = Framer(step, topology, devices.names, start=start, signals=wanted)
        self._read_stored(start or 0)

    def _read_stored(self, start: int) -> None:
        """Reads and evaluates again the rows since the snapshot."""
        self._stored_events: list[Event] = []  # only while stored rows are read
        read_since(self.database, start, self.clock() + MAX_FUTURE, self._add_stored)
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
            self.impact.jobs.listings.note(inventories)
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

        The counts are in the store, so that a restart comes to the same.
        """
        with self.lock:
            self._budget_reviewed = now = self.clock()
            budget = self.finding_filter.budget
            with self.database.transaction() as connection:
                counts = wrong_pages.count_wrong_pages(connection, now, budget.config.days, budget.resets)
            if found := budget.review(*counts, now):
                state = {"page_budget": budget.snapshot()}
                self.apply(lambda desk: desk.observe_own(now, found), [], found, state)

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
            self.impact.jobs.observe(instant)
            if instant.end > self._pending.end:
                self._observe_instant(instant, found)
                self.impact.advance(instant.end)

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
            with self._changing_life(), self.database.transaction() as connection:
                changes = self.life.publish(done.changes, self.clock())
                payloads = self._write_changes(connection, done.findings, changes, done.end)
                state = self.desk.snapshot()
                ledger.save_snapshot(connection, "desk", done.end, state)
                self._save_changed(connection, "unheard", done.end, self.finding_filter.held.snapshot())
                if name:
                    ledger.save_snapshot(connection, "judge", done.end, name)
                    calibrations.keep_calibration(connection, done.end, CALIBRATION_EVERY, self.judge.calibration)
            self.progress.judged, self.revision = done.end, self.revision + bool(done.changes)
            self._impact_rows.done(self.clock())
            if name:
                self.progress.snapshot = done.end
                delete_other_states(self.database.path, name)
            self._pending, self._desk_state = PendingResults(done.end), state
        if payloads:
            self._wake()

    @contextlib.contextmanager
    def _changing_life(self) -> Iterator[None]:
        """Restores life and impact of the incidents if they were not written."""
        before, impact = self.life.copy_state(), self.impact.copy_state()
        try:
            yield
        except BaseException:
            self.life.restore_state(before)
            self.impact.restore_state(impact)
            self._stored_states.clear()
            raise

    @contextlib.contextmanager
    def _changing_desk(self) -> Iterator[None]:
        """Restores the Desk, too, if a change of it was not written."""
        before = self.desk.snapshot()
        try:
            with self._changing_life():
                yield
        except BaseException:
            self.desk.restore(before)
            raise

    def _write_changes(
        self, connection: duckdb.DuckDBPyConnection, findings: Sequence[Finding], changes: Sequence[Change], time: int
    ) -> Sequence[ledger.Payload]:
        """Writes changes as people see them, with their impact, alerts and the life after them; returns the alerts."""
        judged = self._pending.end if self._pending.end > 0 else self.clock()  # nothing is evaluated yet
        self.impact.publish(changes, findings, judged, lambda id_: load_losses(connection, id_))
        payloads = self._enqueue(changes, self.clock())
        ledger.write_changes(connection, findings, changes, payloads, time)
        self._impact_rows.write(connection, self.clock())
        self._save_changed(connection, "life", self.clock(), encode_pages(self.life.pages))
        return payloads

    def _save_changed(self, connection: duckdb.DuckDBPyConnection, key: str, time: int, state: str) -> None:
        """Stores a state whose time does not matter, unless the store has it; within `_changing_life`."""
        if self._stored_states.get(key) != state:
            ledger.save_snapshot(connection, key, time, state)
            self._stored_states[key] = state

    def advance_life(self) -> list[Change]:
        """Makes the changes that are due by the clock: see `LifeBook.advance`. Cheap if nothing is."""
        with self.lock:
            now = self.clock()
            if now < self.life.due:
                return []
            self._write()
            with self._changing_life():
                made = self.life.advance(now)
                payloads = self._store_changes(made) if made else ()
        if payloads:
            self._wake()
        return made

    def _store_changes(self, made: Sequence[Change]) -> Sequence[ledger.Payload]:
        """Writes changes of the clock with their alerts."""
        with self.database.transaction() as connection:
            payloads = self._write_changes(connection, [], made, self.clock())
        self._impact_rows.done(self.clock())
        self.revision += 1
        return payloads

    def report_events(self, events: Sequence[Event]) -> list[Change]:
        """Evaluates events of the pipeline itself immediately: no telemetry would close their frames."""
        with self.lock:
            now = self.clock()
            self._write()
            judged = self.judge.judge_events(events, self.topology, again=True)  # a failed report is repeated
            found, passed = self.finding_filter.filter_findings(judged, self.desk.open_level, now)
            return self.apply(lambda desk: desk.observe_own(now, passed), events, found)

    def apply(
        self,
        change: Callable[[LiveDesk], list[Change]],
        events: Sequence[Event] = (),
        findings: Sequence[Finding] = (),
        states: Mapping[str, str] = {},
        audit: Sequence[AuditEntry] = (),
        also: Callable[[duckdb.DuckDBPyConnection, Sequence[Change]], object] = lambda connection, made: None,
    ) -> list[Change]:
        """Changes the Desk and writes the changes as people see them, with alerts, events, findings, states, the audit
        and what `also` writes, or none of it."""
        with self.lock:
            self._write()  # first: if the change is refused, what this wrote stays
            with self._changing_desk():
                made = self.life.publish(change(self.desk), self.clock())
                with self.database.transaction() as connection:
                    payloads = self._write_changes(connection, findings, made, self.clock())
                    if events:
                        own = EventBatch(Origin("", "", b""), tuple(events))
                        write_events(connection, [own], self.framer.closed)
                    also(connection, made)
                    write_audit(connection, audit, self.clock())
                    after, held = self.desk.snapshot(), self.finding_filter.held.snapshot()
                    self._save_changed(connection, "unheard", self.progress.judged, held)
                    for key, state in {"desk": after, **states}.items():
                        ledger.save_snapshot(connection, key, self.progress.judged, state)
            self._impact_rows.done(self.clock())
            self._desk_state, self.revision = after, self.revision + 1
            self.framer.add_events(events)
        if payloads:
            self._wake()
        return made

    def change_service(self, row: Decommission, event: Event, write: Write) -> None:
        """Decommissions or returns a node; the event and `write` are one transaction."""
        with self.lock:
            self.apply(lambda _: [], [event], also=lambda connection, _: write(connection))
            self.decommissioned.set(row)
            self._expect_nothing()

    def _expect_devices(self) -> None:
        """Makes all devices count as absent until their first sample, but for ranks of jobs that ended: none comes."""
        for device_class in CLASSES:
            self._last_seen.add_devices(device_class, self.devices.names(device_class))
        over = (rank for rank in self.devices.names("rank") if rank not in self.topology.parents)
        self._last_seen.end_entities(over, 0)  # before any sample: one that comes makes it expected again

    def _expect_nothing(self) -> None:
        """Makes devices of decommissioned nodes count as ended, so that incidents of others need not wait for them."""
        names = (name for c in CLASSES for name in self.devices.names(c) if self.decommissioned.has(name))
        self._last_seen.end_entities(names, self.clock())

    def has_telemetry(self, entity: str) -> bool:
        """Whether an entity had a recent sample; True if none is expected."""
        return self._last_seen.is_present(entity)

    @property
    def visible_revision(self) -> tuple[int, int]:
        """A value that differs after each change of incidents or of their impact."""
        return self.revision, self._impact_rows.revision

    @property
    def is_ahead(self) -> bool:
        """Whether our clock was set back far behind the closed frames: nothing would be evaluated until then."""
        return self.framer.closed > self.clock() + MAX_FUTURE

    def _restore(self) -> None:
        with self.database.lock:
            self.decommissioned = Decommissioned(self.database.connection, self.clock())
            self._expect_nothing()
            self.finding_filter.mutes = ledger.load_active_mutes(self.database.connection, max(self.progress.judged, 0))
            found = load_silences(self.database.connection, self.clock())
            self.life.silences = [s for s in found if s.kind != "mute"]  # a mute leaves open incidents open
            lives = ledger.load_lives(self.database.connection, self.clock() - KEPT)
            pages = ledger.load_snapshot(self.database.connection, "life")
            desk = ledger.load_snapshot(self.database.connection, "desk")
            unheard = ledger.load_snapshot(self.database.connection, "unheard")
            judge = ledger.load_snapshot(self.database.connection, "judge")
            spent = ledger.load_snapshot(self.database.connection, "page_budget")
            load_books(self.database.connection, self.impact, [i for i in lives if i.resolved is None], self.clock())
        self.life.load(lives)
        if pages is not None:
            self.life.pages = decode_pages(pages[1])
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
