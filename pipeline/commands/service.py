"""The loop of the pipeline process: ingest, evaluation, retention, silence of sites, readiness.

The loop never ends because of an unreachable transport, a full disk or a refusing receiver: it waits, and /readyz
reports the reason. API and notifier have their own threads.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import duckdb

from pipeline.api.tokens import find_role_file, load_role_tokens
from pipeline.commands.newer_agents import NewerAgents, describe_all_newer
from pipeline.commands.open_transport import open_transport
from pipeline.commands.site_reload import SiteReload
from pipeline.config.receivers import Notify
from pipeline.config.sections import Config, Store
from pipeline.engine.decommission import Decommissioned
from pipeline.engine.ended_ranks import drop_ended_ranks
from pipeline.engine.engine import Engine
from pipeline.engine.judge import Judge
from pipeline.incidents.outside_acts import OutsideActs
from pipeline.ingest.admission import Admission, StoredState
from pipeline.ingest.entities import load_entities, load_topology
from pipeline.ingest.foreign import ForeignDecoder
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.messages import NEWER
from pipeline.ingest.ownership import load_owners
from pipeline.judging.site_silence import SiteSilenceWatch, describe_shared
from pipeline.model.errors import ConfigError, Interrupted, Retryable
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import ParentGraph
from pipeline.notify.alertmanager import locate_entity
from pipeline.notify.annotations import Annotations
from pipeline.notify.outbox import Notifier
from pipeline.runtime.bounded_clock import BoundedClock
from pipeline.runtime.heartbeat import EvaluationProgress
from pipeline.runtime.long_start import LongStart
from pipeline.store import events
from pipeline.store.backup import Checkpoints
from pipeline.store.database import Database, explain_error
from pipeline.store.devices import Devices
from pipeline.store.retention import DAY, apply_bounds, delete_old_rows, drop_silent_devices, drop_unnamed_entities
from pipeline.store.sealing import Sealer
from pipeline.transport.signatures import SenderCheck

log = logging.getLogger("fleetpulse.pipeline")

IDLE_S = 0.5
"""Pause after a step without input (s). Chosen: a sixth of the 3 s that an edge alarm may take; with 0.2 s, looking for
input took a quarter of the CPU of 8 nodes."""
STALL_LIMIT = 15 * SECOND  # without a commit, and with a problem: stalled; chosen: agents send more often
COMMIT_LIMIT = 30 * SECOND  # pending input without a commit: not ready
MAX_UNSEALED = DAY
"""Age beyond hot_hours at which hours are sealed although they are not evaluated (us). Chosen: the store is bounded."""
_HOUR = 3600 * SECOND
_START_SHARE, _LATER_SHARE = 0.25, 4.0
"""Silent devices per active one above which they are dropped, at the start and later. Chosen: dropping later restarts
the learning of detectors, so it needs a larger share; memory is at most five times that of the active devices. Ranks
that ended are dropped earlier, without that: see pipeline/engine/ended_ranks.py."""


def now() -> int:
    """Returns the clock (UTC us)."""
    return time.time_ns() // 1000


def link_alerts(config: Config) -> Notify:
    """Returns [notify] with the dashboard's address for links in alerts, unless another one is configured."""
    own = f"http://{config.dashboard.host}:{config.dashboard.port}"
    return dataclasses.replace(config.notify, external_url=config.notify.external_url or own)


def open_database(store: Store, start: LongStart | None) -> Database:
    """Opens the store of [store]; one of an older schema is backed up and migrated, unless `start` must stop."""
    return Database(
        store.path, store.memory_limit, free_bytes=store.free_bytes, keep_older=store.migration_backup, start=start
    )


class PipelineService:
    """The parts of one pipeline process, its loop, and its readiness; without threads.

    each_round: called by the loop, after the due changes of incidents.
    """

    each_round: tuple[Callable[[], object], ...] = ()

    engine: Engine | None = None

    def __init__(
        self,
        config: Config,
        judge: Judge,
        clock: Callable[[], int] = now,
        monotonic: Callable[[], float] = time.monotonic,
        start: LongStart | None = None,
    ) -> None:
        self.config, self.clock, self.judge, self._monotonic = config, clock, judge, monotonic
        self._initial_state = {name: b"".join(buffers) for name, buffers in judge.snapshot()}
        self.database = open_database(config.store, start)
        self._must_stop: Callable[[], bool] = lambda: False
        self.sealer = Sealer(self.database, config.store, clock)
        self.backups = Checkpoints(config.store.path, self.database.lock, self.database.cursor, config.site.name, clock)
        roles = find_role_file(config.store.path)
        self._outside_acts = OutsideActs(config.store.path, roles, lambda: load_role_tokens(roles))
        self._must_reload = False  # the parts belong to the store before it was reopened
        try:
            self._assemble()
        except duckdb.Error as error:
            self.database.close()
            raise explain_error(config.store.path, error) from error
        self.progress = EvaluationProgress(config.pipeline.frame, config.pipeline.lateness, monotonic)
        self.site_silence = SiteSilenceWatch(
            self.decommissioned.keep_senders(self.ingest.progress.arrivals),
            lambda node: self.devices.site_of(node),
            events.load_silent_sites(self.database),
            monotonic,
            lambda node: self.ingest.senders.interval_of(node),
            lambda: map(self.devices.site_of, list(self.decommissioned.nodes)),
        )
        self.notifier = self._notifier(config)
        self._last_commit = clock()
        self.evaluated = self.evaluating = 0  # event time evaluated up to; span being evaluated now (us)
        self.retention_at = 0
        self._old_rows = BoundedClock(clock, monotonic)
        self.newer = NewerAgents()
        self._fault: str | None = None
        self._trouble: str | None = "starting: detectors are compiled, then stored data is evaluated"

    @property
    def decommissioned(self) -> Decommissioned:
        """The nodes out of service, also while there is no engine."""
        return self._out_of_service if self.engine is None else self.engine.decommissioned

    @property
    def _max_silence_us(self) -> int:
        """Time after which a silent device may be dropped (us)."""
        return int(self.config.store.hot_hours * _HOUR + self.config.store.forget_days * DAY)

    def _drop_silent(self, share: float) -> bool:
        """Drops ended ranks and silent devices if there are many. Returns whether columns of frames changed."""
        reloading = self._must_reload
        self._must_reload = True  # until it is done: the judge may have a state that no engine can go on with
        ended = drop_ended_ranks(self.database, self.judge, self.clock())
        dropped = drop_silent_devices(self.database, self._max_silence_us, share, self.clock())
        self._must_reload = reloading
        if ended:
            self.judge.restore(self._initial_state)
            log.info("store: %d ranks dropped that ended; the detectors keep what they learned", ended)
        if dropped:
            log.warning("store: %d devices dropped that sent nothing for %g days", dropped, self._max_silence_us / DAY)
        return bool(ended or dropped)

    def _assemble(self) -> None:
        """Reads all parts from the store; `start_engine` follows."""
        config, database = self.config, self.database
        self._drop_silent(_START_SHARE)
        drop_unnamed_entities(database, self._max_silence_us, self.clock())
        self.transport = open_transport(config, database)
        self.devices = Devices(database.connection)
        entities = load_entities(database.connection, self.clock())
        self.site = SiteReload(config.topology, database, self.clock, self._monotonic)
        self.site.start()
        self.topology = load_topology(entities, self.site.merged)
        self._out_of_service = Decommissioned(database.connection, self.clock())
        self.skipped = len(entities.skipped)  # ignored rows of `entity`
        lateness = int(config.pipeline.lateness * SECOND)
        bound = int(config.pipeline.clock_bound * SECOND)
        stored = StoredState(entities.known, ParentGraph(self.topology.parents))
        owners, check = load_owners(database, config.admission), SenderCheck(config.kafka.node_keys)
        admission = Admission(config.limits, stored, owners, check)
        letters = config.store.dead_letter_bytes
        wait = config.pipeline.commit_wait
        self.ingest = Ingest(
            database,
            self.transport,
            self.devices,
            self.clock,
            lateness,
            bound,
            admission,
            letters,
            wait,
            self._monotonic,
            ForeignDecoder(config.site.name, config.otlp.node),
        )

    def _reopen(self) -> None:
        """Reopens the store after a fatal error of DuckDB. Raises Retryable while it cannot be opened."""
        self._must_reload, self.engine = True, None
        self.progress.heartbeat.beat("reopening the store")
        self.sealer.stop()
        self.backups.release()
        self.database.reopen()
        self._reload("reopened after a fatal error")

    def _reload(self, why: str) -> None:
        """Reads all parts again, as a new process would; `start_engine` follows."""
        self._must_reload, self.engine, self.evaluated = True, None, 0
        log.warning("store %s: %s", self.config.store.path, why)
        self.transport.close()
        self.judge.restore(self._initial_state)
        self._assemble()
        self._must_reload = False

    def _notifier(self, config: Config) -> Notifier:
        alive = lambda: not self.list_evaluation_faults()  # noqa: E731 - called later by the notifier's thread
        try:
            locate = lambda entity: locate_entity(self.topology, entity)  # noqa: E731 - called for each new incident
            notify = link_alerts(config)
            impact = lambda id_: ("", "") if self.engine is None else self.engine.impact.summarize(id_)  # noqa: E731
            notes = Annotations(config, notify.external_url, impact)
            about = (self.database, notify, config.site.name, self.clock, alive)
            return Notifier(*about, locate=locate, annotate=notes)
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {error}") from error

    # --- the loop -----------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Creates the engine, which evaluates what a restart left unevaluated."""
        step = int(self.config.pipeline.frame * SECOND)
        self.engine = Engine(
            self.database,
            self.devices,
            self.topology,
            self.judge,
            self.notifier.make_payloads,
            self.clock,
            step,
            self.config.modes,
            self.progress.heartbeat.beat,
            self.notifier.wake,
            lambda: self._must_stop(),
            self.config.budget,
            self.config.incidents,
            self.config.site.name,
            self.config.impact,
        )
        self.engine.life.find_inhibited = self.notifier.find_inhibited
        self.engine.life.list_receivers = self.notifier.list_receivers_of
        self._trouble, self._last_commit = None, self.clock()

    def run_step(self) -> bool:
        """Runs one commit and its evaluation. Returns False if there was nothing to do. Raises Retryable."""
        self.progress.heartbeat.beat("retention")
        self._apply_retention()
        if self.engine is None:  # columns were dropped: start again
            return True
        if self.engine.is_ahead:
            self._reload("clock returned from far ahead")
            return True
        self.backups.expire()
        self.site.poll(self.engine.membership)
        self.progress.heartbeat.beat("ingest")
        committed = self.ingest.step(self.engine.framer.closed)
        self.newer.warn(self.ingest.progress.newer, bool(self.ingest.rejected[NEWER]))
        self.progress.heartbeat.beat("evaluation")
        if committed is not None:
            self.engine.observe(committed)
            self._last_commit = self.clock()
        watermark = self.compute_watermark()
        judged = self._evaluate(self.engine, watermark) if watermark is not None else 0
        self.evaluating = 0
        newest = self.ingest.progress.newest
        time_ = self.clock()
        self.progress.record(self.engine.framer.closed, None if newest is None else min(newest, time_), time_)
        behind = committed is not None and self.ingest.progress.backlog is not None
        with self.engine.lock:  # a node that is decommissioned during this must not come back into the watch
            self.site_silence.record_arrivals(self.decommissioned.keep_senders(self.ingest.progress.arrivals), behind)
        return bool(committed or judged)

    def _apply_retention(self) -> None:
        """Applies retention and size limits of the store; before ingest, which may need the space."""
        now = self._old_rows.now()
        if now - self.retention_at >= _HOUR:
            store = self.config.store
            delete_old_rows(self.database, now - int(store.telemetry_days * DAY))
            self.sealer.expire(now)
            apply_bounds(self.database, self.config.store, now)
            self.ingest.apply_retention(now - int(self.config.store.gap_days * DAY))
            self.retention_at = now
            if self.engine is not None and (due := self.decommissioned.due_announcements(self.clock())):
                self.engine.report_events(due)
            self.ingest.write_latest()  # by which devices are silent
            if self._drop_silent(_LATER_SHARE):
                self._reload("columns of devices were dropped")
        if self.engine is not None:
            self._seal(self.engine, now)

    def _seal(self, engine: Engine, now: int) -> None:
        """Seals full hours older than [store] hot_hours which a restart need not evaluate again. A problem is logged,
        and the rows stay hot until it is over."""
        before = now - int(self.config.store.hot_hours * _HOUR)
        if 0 < engine.progress.snapshot < before:
            before = max(engine.progress.snapshot, before - MAX_UNSEALED)
        try:
            self.sealer.advance(before, self.ingest.write_latest)
        except (duckdb.Error, OSError) as error:
            if isinstance(error, duckdb.FatalException):
                self.database.broken = str(error)
            if self.database.broken is not None:
                raise
            log.warning("history: not sealed, tried again later: %s", error)

    def _evaluate(self, engine: Engine, watermark: int) -> int:
        """Evaluates up to the watermark. An exception is logged and reported on /readyz, and storing continues."""
        self.evaluating, self.evaluated = watermark - self.evaluated, watermark
        try:
            judged = engine.advance(watermark)
        except (Retryable, Interrupted, duckdb.Error):
            raise
        except Exception as error:
            if self._fault is None:
                log.exception("evaluation failed; storing continues")
            self._fault = f"evaluation failed: {type(error).__name__}: {error}; see the log"
            return 0
        if judged:
            self._fault = None
        return judged

    def compute_watermark(self) -> int | None:
        """Returns the least event time of unread input, at most the time that all alive senders have passed."""
        known = self.ingest.progress
        if known.passed is None:
            return None
        return known.passed if known.backlog is None else min(known.passed, known.backlog)

    def run(self, stop: threading.Event) -> None:
        """Runs the loop until `stop` is set; problems never end it. A backlog in evaluation does not delay the stop."""
        self._must_stop = stop.is_set
        while not stop.is_set():
            pause = max(map(self._attempt, (self._run_once, self.report_silence, self.advance_life)))
            if pause:
                stop.wait(pause)

    def _run_once(self) -> bool:
        """Runs one step; before it, reopens the store and starts the engine if necessary."""
        if self._must_reload or self.database.broken is not None:
            self._reopen()
        if self.engine is None:
            self.start_engine()
        busy = self.run_step()
        self._trouble = None
        return busy

    def _attempt(self, act: Callable[[], bool]) -> float:
        """Runs `act` and returns the pause after it (s): 0 after work, else the idle pause or that of the error."""
        try:
            return 0.0 if act() else IDLE_S
        except Interrupted:
            return 0.0
        except (Retryable, duckdb.Error, OSError) as error:
            shown = explain_error(self.config.store.path, error) if isinstance(error, duckdb.Error) else error
            self._record_trouble(str(shown))
            return getattr(error, "after_s", 0.0) or 1.0
        except Exception as error:  # noqa: BLE001 - a bug; uncommitted input is read again
            self._record_trouble(f"{type(error).__name__}: {error}; see the log", with_traceback=True)
            return 1.0

    def report_silence(self) -> bool:
        """Reports sites that became silent or returned. Returns True: it never waits."""
        found = (
            self.site_silence.find_changes(self.clock(), self._read_problem(), self._describe_shared)
            if self.engine is not None
            else []
        )
        if self.engine is None or not found:
            return True
        for event in found:
            log.warning("%s: %s, %s agents", event.entity, event.kind, event.data["agents"])
        try:
            self.engine.report_events(found)
        except BaseException:
            self.site_silence.undo_changes(found)
            raise
        return True

    def advance_life(self) -> bool:
        """Makes the changes of incidents that the clock requires. Returns True: it never waits."""
        if self.engine is not None:
            self.engine.advance_life()
            self._outside_acts.record(self.database, self.clock())
            for call in self.each_round:
                call()
        return True

    def _read_problem(self) -> str | None:
        """Returns why the transport cannot be read, None if it can."""
        return self._find_unreachable() or self._find_unanswered() or self.database.find_space_problem()

    def _find_unreachable(self) -> str | None:
        """Returns why the transport is unreachable. On a new site the first agent creates the spool directory."""
        new = not self.ingest.progress.arrivals and self.config.pipeline.transport == "spool"
        return None if new and not os.path.lexists(self.config.spool.directory) else self.transport.find_problem()

    def _describe_shared(self, nodes: Sequence[str]) -> str:
        """Returns what silent nodes have in common, in words; an error does not prevent the page."""
        if rejected := self.ingest.rejections.count_by_rule(nodes):
            return f"all their messages are rejected ({', '.join(rejected)})"
        try:
            return describe_shared(
                nodes, self.topology, lambda sample: events.find_upgrade(self.database, sample, self.clock())
            )
        except duckdb.Error as error:
            log.exception("no common cause of the silent agents: query failed")
            return f"unknown: {type(error).__name__}"

    def _record_trouble(self, trouble: str, with_traceback: bool = False) -> None:
        """Stores a problem and logs it once."""
        if trouble != self._trouble:
            log.error("%s", trouble, exc_info=with_traceback)
        self._trouble = trouble

    def close(self) -> None:
        """Closes transport and store, whose file then has the newest rows of all devices."""
        self.sealer.stop()
        self.backups.release()
        self.transport.close()
        if self.database.broken is None and not self._must_reload:
            try:
                self.ingest.write_latest()
            except duckdb.Error as error:  # as on a full disk: the next start finds them
                log.warning("store: the newest rows are not written: %s", error)
        self.database.close()

    # --- readiness ----------------------------------------------------------------------------------

    def list_unready_reasons(self) -> list[str]:
        """Returns why the pipeline is not ready, also for receivers; empty if it is."""
        return [reason for reason in (*self.list_evaluation_faults(), self.notifier.describe_trouble()) if reason]

    def _input_problems(self) -> list[str]:
        """Returns why telemetry, or a part of it, is not ingested."""
        reasons = [reason for reason in (self._trouble, self._find_unreachable()) if reason]
        if (
            self.engine is not None
            and self.ingest.progress.backlog is not None
            and self.clock() - self._last_commit > COMMIT_LIMIT
        ):
            reasons.append(f"pending input without a commit since {iso(self._last_commit)}")
        if not reasons and (unanswered := self._find_unanswered()):
            reasons.append(unanswered)
        return reasons

    def _find_unanswered(self) -> str | None:
        """Returns the partition without an answer for longest, if it is over COMMIT_LIMIT."""
        partition, since = self.ingest.progress.unanswered or (None, 0)
        if partition is None or self.clock() - since <= COMMIT_LIMIT:
            return None
        return f"{partition.topic}/{partition.name}: cannot be read: no answer since {iso(since)}"

    def is_stalled(self) -> bool:
        """Returns whether no new telemetry is evaluated: none is ingested, or the evaluation is stalled."""
        if self.clock() - self._last_commit > STALL_LIMIT and self._input_problems():
            return True
        return bool(
            self.progress.describe_trouble()
            or self.site_silence.describe_total_silence(self.clock())
            or self._all_rejected()
        )

    def list_evaluation_faults(self) -> list[str]:
        """Returns why incidents may be missing: why the pipeline is not ready, apart from receivers."""
        stall = self.progress.describe_trouble()
        reasons = [
            *self._input_problems(),
            *filter(None, (self._fault, stall, self.site_silence.describe_total_silence(self.clock()))),
        ]
        if stall and self.engine is not None and self.engine.progress.judged > 0:
            reasons.append(f"evaluated up to {iso(self.engine.progress.judged)}")
        progress, now = self.ingest.progress, self.clock()
        serving = self.decommissioned.keep_senders(progress.arrivals)
        all_newer = describe_all_newer([n for n in progress.newer if n in serving], serving, now)
        reasons += filter(None, (self.database.find_space_problem(), all_newer, self._all_rejected()))
        return list(dict.fromkeys(reasons))

    def _all_rejected(self) -> str | None:
        """Returns the reason if telemetry of all senders is rejected; one rejected sender is not enough."""
        arrivals, known = self.decommissioned.keep_senders(self.ingest.progress.arrivals), self.ingest.senders
        return self.ingest.rejections.find_reason(
            self.clock(),
            bool(arrivals),
            lambda: min((s for node in arrivals if (s := known.interval_of(node))), default=0),
        )
