"""The pipeline process: ingest, judge, notify and serve, composed and kept going until somebody asks for the end.

One loop reads and judges; the API and the notifier have threads of their own. Nothing here ends for a dead transport, a
full disk or a refusing receiver: the loop waits, and /readyz tells.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import duckdb

from pipeline.api.backend import Health, Sources
from pipeline.api.server import create_app, serve
from pipeline.commands.assembly import known_topology, linked, open_transport
from pipeline.commands.notes import Notes
from pipeline.config.sections import Config
from pipeline.engine.engine import Engine, Judge
from pipeline.incidents import ledger
from pipeline.ingest.admission import RULES, Admission, StoredState
from pipeline.ingest.entities import load_entities
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.messages import NEWER
from pipeline.ingest.ownership import load_owners
from pipeline.judging.site_silence import SiteSilenceWatch, describe_shared
from pipeline.model.errors import ConfigError, Interrupted, Retryable
from pipeline.model.records import SECOND, iso
from pipeline.model.topology import ParentGraph
from pipeline.notify.outbox import Notifier
from pipeline.runtime.heartbeat import JudgingProgress
from pipeline.runtime.supervise import Stop
from pipeline.store import events
from pipeline.store.database import Database, explain_error
from pipeline.store.devices import Devices
from pipeline.store.retention import (
    DAY,
    apply_bounds,
    count_losses,
    delete_old_rows,
    drop_silent_devices,
    drop_unnamed_entities,
)
from pipeline.transport.signatures import SenderCheck

log = logging.getLogger("fleetpulse.pipeline")

IDLE = 0.1  # seconds between looks at a transport that had nothing
IDLE_SHARE, IDLE_MOST = 10.0, 0.5  # and so many times as long as the look took, up to so many seconds; chosen
STALLED = 15 * SECOND  # without a commit for so long, and with a reason, nothing comes in; chosen: agents send oftener
STALE = 30 * SECOND  # waiting input that stands uncommitted for so long makes the pipeline unready
SILENT = 60 * SECOND  # an agent without a message for so long counts as silent
_HOUR = 3600 * SECOND
_SHARE_AT_START, _SHARE_LATER = 0.25, 4.0
"""Silent devices per other one from which on the silent are dropped: a start costs the same anyway, later the detectors
lose what they know, for what at most five times the memory would keep. Chosen."""


def now() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1000


class Service(Notes):
    """Everything of one pipeline process but its threads; the backend of its API."""

    def __init__(
        self,
        config: Config,
        judge: Judge,
        clock: Callable[[], int] = now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.clock, self.judge = config, clock, judge
        self._untaught = judge.snapshot()
        self.database = Database(config.store.path, config.store.memory_limit, free_bytes=config.store.free_bytes)
        self._ended: Callable[[], bool] = lambda: False
        self._stale = False  # whether parts stand on what the store was before it was opened again
        try:
            self._assemble()
        except duckdb.Error as error:
            self.database.close()
            raise explain_error(config.store.path, error) from error
        self.judging = JudgingProgress(config.pipeline.frame, config.pipeline.lateness, monotonic)
        self.silence = SiteSilenceWatch(
            self.ingest.progress.arrivals,
            lambda node: self.devices.site_of(node),
            events.load_silent_sites(self.database),
            monotonic,
            lambda node: self.ingest.senders.interval_of(node),
        )
        self.notifier = self._notifier(config)
        self._moved = clock()
        self._advanced = self._judging = 0  # event time judged up to, and how much of it is being judged at once now
        self._expired, self._monotonic = 0, monotonic
        self._begun = clock(), monotonic()
        self._newer: set[str] = set()  # agents of which the log says that they are newer
        self._fault: str | None = None
        self._trouble: str | None = "starting: what was stored before is being judged"

    @property
    def _kept(self) -> int:
        """How long a silent device is known (us)."""
        return int(self.config.store.hot_hours * _HOUR + self.config.store.forget_days * DAY)

    def _forget(self, share: float) -> bool:
        """Drops silent devices if there are many; True if frames have other numbers for the rest now."""
        dropped = drop_silent_devices(self.database, self._kept, share, self.clock())
        if dropped:
            log.warning("store: %d devices dropped that sent nothing for %g days", dropped, self._kept / DAY)
        return bool(dropped)

    def _assemble(self) -> None:
        """All that is read from the store at a start; `start` makes the engine of it."""
        config, database = self.config, self.database
        self._forget(_SHARE_AT_START)
        drop_unnamed_entities(database, self._kept, self.clock())
        self.transport = open_transport(config, database)
        self.devices = Devices(database.connection)
        entities = load_entities(database.connection, self.clock())
        self.topology = known_topology(entities, config)
        self.skipped = len(entities.skipped)  # rows of `entity` that are as if they were not there
        lateness = int(config.pipeline.lateness * SECOND)
        bound = int(config.pipeline.clock_bound * SECOND)
        stored = StoredState(entities.known, ParentGraph(self.topology.parents))
        owners, check = load_owners(database, config.admission), SenderCheck(config.kafka.node_keys)
        admission = Admission(config.limits, stored, owners, check)
        letters = config.store.dead_letter_bytes
        self.ingest = Ingest(database, self.transport, self.devices, self.clock, lateness, bound, admission, letters)
        self.engine: Engine | None = None

    def _reopen(self) -> None:
        """Goes on after a fatal error of DuckDB as a new process would. Raises Retryable while the store stays shut."""
        self._stale, self.engine = True, None
        self.judging.heart.beat("opening the store again")
        self.database.reopen()
        self._begin_anew("opened again after a fatal error")

    def _begin_anew(self, why: str) -> None:
        """Reads all that is known from the store again, as a new process would; `start` follows."""
        self._stale, self.engine, self._advanced = True, None, 0
        log.warning("store %s: %s", self.config.store.path, why)
        self.transport.close()
        self.judge.restore(self._untaught)
        self._assemble()
        self._stale = False

    def _notifier(self, config: Config) -> Notifier:
        alive = lambda: not self._reasons()  # noqa: E731 - asked from the notifier's thread, not now
        try:
            return Notifier(self.database, linked(config), config.site.name, self.clock, alive)
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {error}") from error

    # --- the loop -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Judges what a restart left unjudged."""
        step = int(self.config.pipeline.frame * SECOND)
        enqueue = self.notifier.payloads
        self.engine = Engine(
            self.database,
            self.devices,
            self.topology,
            self.judge,
            enqueue,
            self.clock,
            step,
            self.config.modes,
            self.judging.heart.beat,
            self.notifier.wake,
            lambda: self._ended(),
        )
        self._trouble, self._moved = None, self.clock()

    def turn(self) -> bool:
        """One commit and its judgement; False if there was nothing to do. Raises Retryable. `start` comes first."""
        self.judging.heart.beat("retention")
        self._tidy()
        if self.engine is None:  # devices were dropped or the store was opened again: start anew
            return True
        if self.engine.is_ahead:
            self._begin_anew("our clock came back from far ahead")
            return True
        self.judging.heart.beat("ingest")
        committed = self.ingest.step(self.engine.framer.closed)
        self._warn_of_newer()
        self.judging.heart.beat("judging")
        if committed is not None:
            self.engine.observe(committed)
            self._moved = self.clock()
        watermark = self.watermark()
        judged = self._judged(self.engine, watermark) if watermark is not None else 0
        self._judging = 0
        newest = self.ingest.progress.newest
        time_ = self.clock()
        self.judging.note(self.engine.framer.closed, None if newest is None else min(newest, time_), time_)
        self.silence.record_arrivals(
            self.ingest.progress.arrivals, committed is not None and self.ingest.progress.backlog is not None
        )
        return bool(committed or judged)

    def _tidy(self) -> None:
        """Removes what is over the bounds of the store; before ingest, which may wait for that room."""
        now = self._retention_time()
        if now - self._expired >= _HOUR:
            delete_old_rows(self.database, now - int(self.config.store.hot_hours * _HOUR))
            apply_bounds(self.database, self.config.store, now)
            self.ingest.apply_retention(now - int(self.config.store.gap_days * DAY))
            self._expired = now
            if self._forget(_SHARE_LATER):
                self.devices.load(self.database.connection)
                self.engine = None  # judged on as after a restart

    def _retention_time(self) -> int:
        """What the clock shows, but at most an hour more than has passed since the start: one that is set forward by a
        mistake deletes nothing. Where it was set right, rows stay longer until the next start."""
        begun, monotonic = self._begun
        return min(self.clock(), begun + round((self._monotonic() - monotonic) * SECOND) + _HOUR)

    def _judged(self, engine: Engine, watermark: int) -> int:
        """Judges what can be judged. A fault there must not stop storing: it is logged, and said on /readyz."""
        self._judging, self._advanced = watermark - self._advanced, watermark
        try:
            judged = engine.advance(watermark)
        except (Retryable, Interrupted, duckdb.Error):
            raise
        except Exception as error:
            if self._fault is None:
                log.exception("judging failed; storing goes on")
            self._fault = f"judging failed: {type(error).__name__}: {error}; see the log"
            return 0
        if judged:
            self._fault = None
        return judged

    def watermark(self) -> int | None:
        """Least event time of what is still unread, and at most what all senders that are alive have passed."""
        known = self.ingest.progress
        if known.passed is None:
            return None
        return known.passed if known.backlog is None else min(known.passed, known.backlog)

    def run(self, stop: threading.Event) -> None:
        """Turns until `stop`; trouble is told, never the end. A backlog that is being judged does not delay it."""
        self._ended = stop.is_set
        while not stop.is_set():
            pause = max(self._attempt(self._go_on), self._attempt(self.report_silence))
            if pause:
                stop.wait(pause)

    def _go_on(self) -> bool:
        """One turn, after the store was opened again, and after the start, if these are still to come."""
        if self._stale or self.database.broken is not None:
            self._reopen()
        if self.engine is None:
            self.start()
        busy = self.turn()
        self._trouble = None
        return busy

    def _attempt(self, act: Callable[[], bool]) -> float:
        """Seconds to wait after `act`: none if it did something, else IDLE, or longer where a look costs more, else as
        long as its trouble wants."""
        begun = time.monotonic()
        try:
            return 0.0 if act() else min(max(IDLE, IDLE_SHARE * (time.monotonic() - begun)), IDLE_MOST)
        except Interrupted:
            return 0.0
        except (Retryable, duckdb.Error, OSError) as error:
            said = explain_error(self.config.store.path, error) if isinstance(error, duckdb.Error) else error
            self._stumble(str(said))
            return getattr(error, "after_s", 0.0) or 1.0
        except Exception as error:  # noqa: BLE001 - a fault of ours; what is not durable is fetched again
            self._stumble(f"{type(error).__name__}: {error}; see the log", unforeseen=True)
            return 1.0

    def report_silence(self) -> bool:
        """Pages for sites of which no agent is heard, and tells when they are heard again; True: it never waits."""
        found = self.silence.find_changes(self.clock(), self._unread(), self._shares) if self.engine is not None else []
        if self.engine is None or not found:
            return True
        for event in found:
            log.warning("%s: %s, %s agents", event.entity, event.kind, event.data["agents"])
        try:
            self.engine.report_events(found)
        except BaseException:
            self.silence.undo_changes(found)
            raise
        return True

    def _unread(self) -> str | None:
        """Why the pipeline cannot read its transport; None if it can."""
        return self._unreachable() or self._unanswered()

    def _unreachable(self) -> str | None:
        """What the transport says against it; on a new site the first agent makes the spool's folder."""
        new = not self.ingest.progress.arrivals and self.config.pipeline.transport == "spool"
        return None if new and not os.path.lexists(self.config.spool.directory) else self.transport.find_problem()

    def _shares(self, nodes: Sequence[str]) -> str:
        """What silent nodes have in common, in words. The page goes out whatever this finds."""
        if rejected := self.ingest.rejections.count_by_rule(nodes):
            return f"all they send is rejected ({', '.join(rejected)})"
        try:
            return describe_shared(
                nodes, self.topology, lambda sample: events.find_upgrade(self.database, sample, self.clock())
            )
        except duckdb.Error as error:
            log.exception("what the silent agents share was not found")
            return f"not known: {type(error).__name__}"

    def _stumble(self, trouble: str, unforeseen: bool = False) -> None:
        """Says why nothing moves, once."""
        if trouble != self._trouble:
            log.error("%s", trouble, exc_info=unforeseen)
        self._trouble = trouble

    def close(self) -> None:
        """Tells readers' positions and lets go of the store."""
        self.transport.close()
        self.database.close()

    # --- backend of the API -------------------------------------------------------------------------

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self.database.cursor()

    def health(self) -> Health:
        newest, waiting = self.ingest.progress.newest, self.ingest.progress.backlog
        due = max(self.watermark() or 0, (newest or 0) - int(self.config.pipeline.lateness * SECOND))
        unjudged = max(due - self._advanced, self._judging)  # in the order in which they pass on
        return {
            "watermark": self.engine.progress.judged if self.engine and self.engine.progress.judged > 0 else None,
            "backlog": self.engine is None or waiting is not None or unjudged > STALE,
            "lag_s": None if (oldest := waiting or newest) is None else max(0.0, (self.clock() - oldest) / SECOND),
            "stalled": self._is_blind(),
            "sources": self._sources(),
        }

    def _sources(self) -> Sources:
        cursor = self.database.cursor()
        try:
            nodes = self.ingest.progress.nodes
            gaps, letters = count_losses(cursor)
        finally:
            cursor.close()
        silent = sum(self.clock() - time > SILENT for time in nodes.values())
        return {"agents": len(nodes), "silent": silent, "gaps": gaps, "dead_letters": letters}

    def unready(self) -> list[str]:
        return [reason for reason in (*self._reasons(), self.notifier.trouble()) if reason]

    def _kept_out(self) -> list[str]:
        """Reasons why telemetry does not come in, all or a part of it."""
        reasons = [reason for reason in (self._trouble, self._unreachable()) if reason]
        if self.engine is not None and self.ingest.progress.backlog is not None and self.clock() - self._moved > STALE:
            reasons.append(f"waiting input has stood uncommitted since {iso(self._moved)}")
        if not reasons and (unanswered := self._unanswered()):
            reasons.append(unanswered)
        return reasons

    def _unanswered(self) -> str | None:
        """The partition that has not answered for longest, if that is too long."""
        partition, since = self.ingest.progress.unanswered or (None, 0)
        if partition is None or self.clock() - since <= STALE:
            return None
        return f"{partition.topic}/{partition.name}: cannot be read: no answer since {iso(since)}"

    def _is_blind(self) -> bool:
        """Whether nothing new would be found now: nothing comes in, or what came in is not judged."""
        if self.clock() - self._moved > STALLED and self._kept_out():
            return True
        return bool(self.judging.trouble() or self.silence.describe_total_silence(self.clock()) or self._all_rejected())

    def _reasons(self) -> list[str]:
        still = self.judging.trouble()
        reasons = [
            *self._kept_out(),
            *filter(None, (self._fault, still, self.silence.describe_total_silence(self.clock()))),
        ]
        if still and self.engine is not None and self.engine.progress.judged > 0:
            reasons.append(f"judged up to {iso(self.engine.progress.judged)}")
        reasons += filter(None, (self.database.find_space_problem(), self._all_newer(), self._all_rejected()))
        return list(dict.fromkeys(reasons))

    def _all_rejected(self) -> str | None:
        """Why nothing comes in where all telemetry is rejected; one sender of which it is alone is no such reason."""
        heard, known = self.ingest.progress.arrivals, self.ingest.senders
        apart = lambda: min((known.interval_of(node) for node in heard if known.interval_of(node)), default=0)  # noqa: E731
        return self.ingest.rejections.find_reason(self.clock(), bool(heard), apart)

    def _all_newer(self) -> str | None:
        """Why nothing comes in where every agent was upgraded before the pipeline; one alone is no such reason."""
        newer, heard = self.ingest.progress.newer, self.ingest.progress.arrivals
        if not newer or any(self.clock() - arrived < SILENT for node, arrived in heard.items() if node not in newer):
            return None
        return (
            f"{len(newer)} agents newer than the pipeline ({', '.join(newer[:3])}...): their telemetry waits in their "
            "spools; upgrade the pipeline"
        )

    def _warn_of_newer(self) -> None:
        """Says once which agents are newer than the pipeline."""
        fresh = set(self.ingest.progress.newer) - self._newer
        if fresh:
            told = ", ".join(sorted(fresh)[:10])
            log.warning("%d agents newer than the pipeline (%s): upgrade the pipeline", len(fresh), told)
            self._newer |= fresh
        if self.ingest.rejected[NEWER] and NEWER not in self._newer:
            log.warning("agents newer than the pipeline send over Kafka: kept as dead letters; upgrade the pipeline")
            self._newer.add(NEWER)

    def counters(self) -> Mapping[str, float]:
        health = self.health()
        out = {f"fleetpulse_ingest_{name}_total": float(n) for name, n in list(self.ingest.counters.items())}
        rejected = self.ingest.rejected
        out |= {f'fleetpulse_ingest_rejected_total{{rule="{name}"}}': float(rejected[name]) for name in RULES}
        cursor = self.database.cursor()
        try:
            letters = ledger.count_payloads(cursor)
        finally:
            cursor.close()
        for (receiver, state), number in sorted(letters.items()):
            out[f'fleetpulse_outbox{{receiver="{receiver}",state="{state}"}}'] = float(number)
        out["fleetpulse_store_entities_skipped"] = float(self.skipped)
        out["fleetpulse_ready"] = float(not self.unready())
        out["fleetpulse_lag_seconds"] = health["lag_s"] or 0.0
        out["fleetpulse_heartbeat_age_seconds"] = self.judging.heart.age_s
        out["fleetpulse_sites_silent"] = float(len(self.silence.silent))
        out["fleetpulse_agents"] = health["sources"]["agents"]
        out["fleetpulse_clocks_wrong"] = float(len(self.ingest.progress.clock_errors))
        out["fleetpulse_agents_newer"] = float(len(self.ingest.progress.newer))
        out["fleetpulse_dead_letter_bytes"] = float(self.ingest.letter_limits.stored)
        out["fleetpulse_agents_silent"] = health["sources"]["silent"]
        if self.engine is not None:
            late = self.engine.framer.late
            out |= {f'fleetpulse_rows_late_total{{class="{c}"}}': float(n) for c, n in sorted(late.items())}
            if self.engine.progress.judged > 0:
                out["fleetpulse_judged_up_to_timestamp_seconds"] = self.engine.progress.judged / SECOND
            out["fleetpulse_desk_faults_total"] = float(self.engine.faults)
            out["fleetpulse_rows_unjudged"] = float(self.engine.unjudged)
        for row in self.judge.listing():
            out[f'fleetpulse_detector_errors_total{{detector="{row["name"]}"}}'] = float(row["errors"])
        return out


def run(config: Config, judge: Judge, warm_up: Callable[[], None] = lambda: None) -> int:
    """`fleetpulse pipeline`: serves until SIGTERM or SIGINT, then ends within seconds.

    warm_up: called before anything is read, while /readyz says that the pipeline starts.
    """
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = Service(config, judge)
    api = serve(create_app(service, config), config, stop)
    where = f"store {config.store.path}, API http://{api.host}:{api.port}"
    print(f"fleetpulse pipeline: {where}", file=sys.stderr)  # noqa: T201 - talk of a command
    notifier = threading.Thread(target=service.notifier.run, args=(stop,), name="notifier")
    notifier.start()
    try:
        warm_up()
        service.run(stop)
    finally:
        stop.set()
        notifier.join()
        api.join()
        service.close()
    return 0
