"""The pipeline process: ingest, judge, notify and serve, composed and kept going until somebody asks for the end.

One loop reads and judges; the API and the notifier have threads of their own. Nothing here ends for a dead transport, a
full disk or a refusing receiver: the loop waits, and /readyz tells.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

import duckdb

from pipeline.api.backend import Health, Sources
from pipeline.api.server import create_app, serve
from pipeline.config import Config, Notify
from pipeline.engine import Engine, Judge
from pipeline.errors import ConfigError, Retryable
from pipeline.ingest import Ingest
from pipeline.notes import Notes
from pipeline.offsets import stored_offsets
from pipeline.recordings import read_topology
from pipeline.records import SECOND, iso
from pipeline.respond.outbox import Notifier
from pipeline.stopping import Stop
from pipeline.store import ledger
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.retention import expire
from pipeline.topology import Topology
from pipeline.transport import Transport
from pipeline.transport.spool import SpoolTransport

log = logging.getLogger("fleetpulse.pipeline")

IDLE = 0.5  # seconds between looks at a transport that had nothing
STALLED = 15 * SECOND  # without a commit for so long, and with a reason, nothing comes in; chosen: agents send oftener
STALE = 30 * SECOND  # waiting input that stands uncommitted for so long makes the pipeline unready
SILENT = 60 * SECOND  # an agent without a message for so long counts as silent
_HOUR = 3600 * SECOND


def now() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1000


class Service(Notes):
    """Everything of one pipeline process but its threads; the backend of its API."""

    def __init__(self, config: Config, judge: Judge, clock: Callable[[], int] = now) -> None:
        self.config, self.clock = config, clock
        self.database = Database(config.store.path, config.store.memory_limit)
        self.transport = open_transport(config, self.database)
        self.devices = Devices(self.database.connection)
        self.topology = known_topology(self.database, config)
        lateness = int(config.pipeline.lateness * SECOND)
        self.ingest = Ingest(self.database, self.transport, self.devices, clock, lateness)
        self.notifier = self._notifier(config)
        self.engine: Engine | None = None
        self.judge = judge
        self._moved = clock()
        self._advanced = self._judging = 0  # event time judged up to, and how much of it is being judged at once now
        self._expired = 0
        self._fault: str | None = None
        self._trouble: str | None = "starting: what was stored before is being judged"

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
            self.database, self.devices, self.topology, self.judge, enqueue, self.clock, step, self.config.modes
        )
        self._trouble, self._moved = None, self.clock()

    def turn(self) -> bool:
        """One commit and its judgement; False if there was nothing to do. Raises Retryable."""
        assert self.engine is not None, "start() comes first"
        committed = self.ingest.step()
        if committed is not None:
            self.engine.observe(committed)
            self._moved = self.clock()
        watermark = self.watermark()
        judged = self._judged(self.engine, watermark) if watermark is not None else 0
        self._judging = 0
        if self.clock() - self._expired >= _HOUR:
            expire(self.database, self.clock() - int(self.config.store.hot_hours * _HOUR))
            self._expired = self.clock()
        return bool(committed or judged)

    def _judged(self, engine: Engine, watermark: int) -> int:
        """Judges what can be judged. A fault there must not stop storing: it is logged, and said on /readyz."""
        self._judging, self._advanced = watermark - self._advanced, watermark
        try:
            judged = engine.advance(watermark)
        except (Retryable, duckdb.Error):
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
        """Least event time of what is still unread; newest minus the lateness for what was read to its end."""
        known = self.ingest.progress
        if known.newest is None:
            return None
        mark = min(known.newest, self.clock()) - int(self.config.pipeline.lateness * SECOND)
        return mark if known.backlog is None else min(mark, known.backlog)

    def run(self, stop: threading.Event) -> None:
        """Turns until `stop`; trouble is told, never the end."""
        while not stop.is_set():
            try:
                if self.engine is None:
                    self.start()
                busy = self.turn()
                self._trouble = None
                if not busy:
                    stop.wait(IDLE)
            except (Retryable, duckdb.Error, OSError) as error:
                self._stumble(str(error))
                stop.wait(getattr(error, "after_s", 0.0) or 1.0)
            except Exception as error:  # noqa: BLE001 - a fault of ours; what is not durable is fetched again
                self._stumble(f"{type(error).__name__}: {error}; see the log", unforeseen=True)
                stop.wait(1.0)

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
        unjudged = max((self.watermark() or 0) - self._advanced, self._judging)  # in the order in which they pass on
        return {
            "watermark": self.engine.standing.judged if self.engine and self.engine.standing.judged > 0 else None,
            "backlog": self.engine is None or waiting is not None or unjudged > STALE,
            "lag_s": None if (oldest := waiting or newest) is None else max(0.0, (self.clock() - oldest) / SECOND),
            "stalled": self.clock() - self._moved > STALLED and bool(self._kept_out()),
            "sources": self._sources(),
        }

    def _sources(self) -> Sources:
        cursor = self.database.cursor()
        try:
            nodes = self.ingest.progress.nodes
            gaps, letters = cursor.execute(
                "SELECT (SELECT count(*) FROM gaps), (SELECT count(*) FROM dead_letter)"
            ).fetchall()[0]
        finally:
            cursor.close()
        silent = sum(self.clock() - time > SILENT for time in nodes.values())
        return {"agents": len(nodes), "silent": silent, "gaps": gaps, "dead_letters": letters}

    def unready(self) -> list[str]:
        return [reason for reason in (*self._reasons(), self.notifier.trouble()) if reason]

    def _kept_out(self) -> list[str]:
        """Reasons why telemetry does not come in, all or a part of it."""
        reasons = [reason for reason in (self._trouble, self.transport.reachable()) if reason]
        if self.engine is not None and self.ingest.progress.backlog is not None and self.clock() - self._moved > STALE:
            reasons.append(f"waiting input has stood uncommitted since {iso(self._moved)}")
        if not reasons and (unanswered := self.ingest.progress.unanswered):
            partition, since = unanswered
            if self.clock() - since > STALE:
                reasons.append(f"{partition.topic}/{partition.name}: cannot be read: no answer since {iso(since)}")
        return reasons

    def _reasons(self) -> list[str]:
        reasons = self._kept_out() + ([self._fault] if self._fault else [])
        folder, floor = self.config.store.path.parent, self.config.spool.free_bytes
        if (free := shutil.disk_usage(folder).free) < floor:
            reasons.append(f"{folder}: {free} bytes free, wanted at least {floor}")
        return reasons

    def counters(self) -> Mapping[str, float]:
        health = self.health()
        out = {f"fleetpulse_ingest_{name}_total": float(n) for name, n in self.ingest.counters.items()}
        cursor = self.database.cursor()
        try:
            letters = ledger.payloads_by_state(cursor)
        finally:
            cursor.close()
        for (receiver, state), number in sorted(letters.items()):
            out[f'fleetpulse_outbox{{receiver="{receiver}",state="{state}"}}'] = float(number)
        out["fleetpulse_ready"] = float(not self.unready())
        out["fleetpulse_lag_seconds"] = health["lag_s"] or 0.0
        out["fleetpulse_agents"] = health["sources"]["agents"]
        out["fleetpulse_agents_silent"] = health["sources"]["silent"]
        if self.engine is not None:
            late = self.engine.framer.late
            out |= {f'fleetpulse_rows_late_total{{class="{c}"}}': float(n) for c, n in sorted(late.items())}
            out["fleetpulse_rows_ahead_total"] = float(self.engine.ahead)
            out["fleetpulse_desk_faults_total"] = float(self.engine.faults)
        for row in self.judge.listing():
            out[f'fleetpulse_detector_errors_total{{detector="{row["name"]}"}}'] = float(row["errors"])
        return out


def linked(config: Config) -> Notify:
    """[notify] with the dashboard's address as the links in alerts, unless another one is configured."""
    own = f"http://{config.dashboard.host}:{config.dashboard.port}"
    return dataclasses.replace(config.notify, external_url=config.notify.external_url or own)


def open_transport(config: Config, database: Database) -> Transport:
    """The transport that the configuration names. Raises ConfigError on credentials that cannot be read."""
    if config.pipeline.transport == "spool":
        return SpoolTransport(config.spool.directory)
    from pipeline.transport.allocator import collect_seldom, keep_large_blocks
    from pipeline.transport.kafka import KafkaTransport  # only here: one host needs no Kafka client

    keep_large_blocks()
    collect_seldom()
    cursor = database.cursor()
    try:
        return KafkaTransport(config.kafka, stored_offsets(cursor))
    finally:
        cursor.close()


def known_topology(database: Database, config: Config) -> Topology:
    """What inventory said before, and on top of it the file of [topology], which knows what agents cannot."""
    topology = Topology()
    cursor = database.cursor()
    try:
        rows = cursor.execute("SELECT entity, parents, attributes FROM entity ORDER BY entity").fetchall()
    finally:
        cursor.close()
    topology.merge({e: p for e, p, _ in rows if p}, {e: json.loads(a) for e, _, a in rows if a != "{}"})
    if config.topology.path is not None:
        extra = read_topology(config.topology.path)
        topology.merge(extra.parents, extra.attributes)
    return topology


def run(config: Config, judge: Judge) -> int:
    """`fleetpulse pipeline`: serves until SIGTERM or SIGINT, then ends within seconds."""
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
        service.run(stop)
    finally:
        stop.set()
        notifier.join()
        api.join()
        service.close()
    return 0
