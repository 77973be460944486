"""Engine: durable rows -> frames -> findings -> incidents, and what a restart needs to go on as if it had never ended.

Results and the state that made them are written in one transaction. The judge's state is large, so it is written once
per SNAPSHOT_EVERY of event time; after a restart the frames since then are judged again from the store, and the Desk,
whose state is newer, is shown only what it has not seen.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipeline.cases import Change
from pipeline.errors import UsageError
from pipeline.frames import Framer, Instant
from pipeline.incidents import Desk
from pipeline.ingest import Committed
from pipeline.presence import LastSeen
from pipeline.records import SECOND, Event, Finding, Frame, Rows
from pipeline.store import ledger
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.events import inventory
from pipeline.store.reread import reread
from pipeline.topology import Topology

log = logging.getLogger("fleetpulse.engine")

SNAPSHOT_EVERY = 60 * SECOND  # chosen: a restart judges at most this much again
INSTANTS_PER_RESULT = 60  # bound of judged instants whose results wait for one transaction
AHEAD = 300 * SECOND  # rows further in the future than this are stored and counted, not judged: a clock is wrong


Enqueue = Callable[[Sequence[Change], int], Sequence[ledger.Payload]]


class Judge(Protocol):
    """The detectors, as the pipeline sees them; the door passes them in."""

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
    ) -> None:
        self.database, self.devices, self.topology = database, devices, topology
        self.judge, self.clock = judge, clock
        self.lock = threading.RLock()
        self.desk = Desk(topology, devices.is_simulated)
        self.standing = Standing()
        self.ahead = 0
        self._enqueue = enqueue
        self._seen = LastSeen()
        self._ready: deque[Instant] = deque()
        self._restore()
        self._unwritten = Unwritten(self.standing.judged)
        start = self.standing.snapshot if self.standing.snapshot > 0 else None
        self.framer = Framer(step, topology, devices.names, start=start)
        reread(database, start or 0, self._refill)

    # --- what comes in ------------------------------------------------------------------------------

    def observe(self, committed: Committed) -> None:
        """Takes rows and events that are durable now."""
        limit = self.clock() + AHEAD
        for rows in committed.rows:
            sane = rows.time <= limit
            self.ahead += len(sane) - int(np.count_nonzero(sane))
            if not sane.all():
                columns = {name: column[sane] for name, column in rows.columns.items()}
                rows = Rows(rows.device_class, rows.time[sane], rows.device[sane], columns)
            self.framer.add(rows)
        self._take_events([e for e in committed.events if e.time <= limit])

    def _take_events(self, events: Iterable[Event]) -> None:
        judged = []
        for event in events:
            if event.kind == "inventory":
                learn(self.topology, event)
            else:
                judged.append(event)
        self.framer.add_events(judged)

    def _refill(self, rows: Sequence[Rows], events: Sequence[Event], until: int) -> None:
        """A restart: what the store holds after the snapshot, in chunks; all before `until` is complete."""
        for block in rows:
            self.framer.add(block)
        self._take_events(events)
        self.advance(min(until, self.standing.judged))

    # --- what goes out ------------------------------------------------------------------------------

    def advance(self, watermark: int) -> int:
        """Judges every cell that the watermark has passed; returns how many there were.

        A transaction that fails leaves its results in memory: they are written first when this is called again.
        """
        self._ready.extend(self.framer.advance(watermark))
        count = len(self._ready)
        self._write()
        while self._ready:
            for _ in range(min(INSTANTS_PER_RESULT, len(self._ready))):
                self._judge(self._ready.popleft())
            self._write()
        return count

    def _judge(self, instant: Instant) -> None:
        """Shows an instant to the judge, and its findings to the Desk unless the Desk saw them before a restart."""
        found = self.judge.observe(instant.frames)
        with self.lock:
            self._seen.note(instant)
            if instant.end > self._unwritten.end:
                self._unwritten.end = instant.end
                self._unwritten.findings += found
                self._unwritten.changes += self.desk.observe(instant.time, found, self._seen.present)

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
                ledger.save_snapshot(connection, "desk", done.end, self.desk.snapshot())
                if snapshot:
                    ledger.save_snapshot(connection, "judge", done.end, self.judge.snapshot())
            self.standing = Standing(done.end, done.end if snapshot else self.standing.snapshot)
            self._unwritten = Unwritten(done.end)

    def note(self, change: Callable[[Desk], Change]) -> Change:
        """Applies a person's note to the Desk and writes it with its alerts, or neither."""
        with self.lock:
            self._write()
            before = self.desk.snapshot()
            made = change(self.desk)
            try:
                with self.database.transaction() as connection:
                    ledger.record(connection, [], [made], self._enqueue([made], self.clock()), self.clock())
                    ledger.save_snapshot(connection, "desk", self.standing.judged, self.desk.snapshot())
            except BaseException:
                self.desk.restore(before)
                raise
        return made

    def _restore(self) -> None:
        with self.database.lock:
            desk = ledger.load_snapshot(self.database.connection, "desk")
            judge = ledger.load_snapshot(self.database.connection, "judge")
        if desk is not None:
            self.standing.judged, state = desk
            self.desk.restore(state)
        if judge is not None:
            self.standing.snapshot, state = judge
            self.judge.restore(state)


def learn(topology: Topology, event: Event) -> None:
    """Takes parents and attributes from an inventory event; a circle is refused with a line in the log."""
    lines = inventory(event.data)
    try:
        topology.merge({e: p for e, p, _ in lines if p}, {e: a for e, _, a in lines if a})
    except UsageError as error:
        log.warning("inventory of %s refused: %s", event.entity, error)
