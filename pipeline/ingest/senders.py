"""What is known of every sender: when it was heard last by our clock, its newest event time, the error of its clock."""

from __future__ import annotations

from collections.abc import Iterable

import duckdb

from pipeline.ingest.clocks import BOUND, CommonClock, SenderClock
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.model.signals import CLASSES
from pipeline.store.append import insert, times
from pipeline.store.database import Database
from pipeline.store.events import clock_errors

MOST = 100_000
"""Senders that are known; of more, those heard longest ago are forgotten. Chosen: eight times a fleet of 12,500 nodes,
100 MB."""
ALIVE = 10 * SECOND
"""A sender with a message within so long is alive: agents send at least every 5 s, and 5 s for the way."""
LOOKS = 3
"""And so are slower senders, for so many of their intervals; chosen: one message may be late, one lost."""
KIND = "clock_error"
ALL = "site:all"
"""What is blamed for an error that most senders share, as for a silence of all that nothing known holds."""
REPORTED = 256
"""Wrong clocks that are reported at once, those longest reported first; chosen: a person reads fewer. All are corrected
and counted (`fleetpulse_clocks_wrong`); made-up senders store no more events, and open no more tickets, than this."""
GONE = 3600 * SECOND
"""A sender that is not heard for so long has no clock that could be wrong; chosen."""
DISK = "disk_slow"
SLOW = 3600 * SECOND
"""So long after an agent says that its disk is slow, its messages prove no clock behind: each waits for the disk alike.
Chosen: an agent that is killed meanwhile never says that it is over."""
WITNESS = 60 * SECOND
"""How long a sender counts for what most say of our clock, or LOOKS of its intervals; chosen: as long as an agent
counts as heard."""
SAVE_EVERY = 10 * SECOND
"""Least time between two writes of what a restart needs; chosen: a sixth of what makes a node silent."""


class Senders:
    """All senders by node. For one thread; `bound` as [pipeline] clock_bound, in us.

    arrivals: when the newest message of each arrived (UTC us, our clock or that of the brokers).
    newest:   event time that the telemetry of each has reached; a node that sent events alone has none.
    """

    def __init__(self, database: Database, now: int, bound: int = BOUND) -> None:
        self.bound, self._saved = bound, now
        self.arrivals: dict[str, int] = {}
        self.newest: dict[str, int] = {}
        self._intervals: dict[str, int] = {}  # event time between the last two messages of telemetry
        self._heard: dict[str, int] = {}  # when the newest telemetry arrived
        self._clocks: dict[str, SenderClock] = {}
        self._slow: dict[str, int] = {}  # senders with a slow disk, and when they said so
        self._reported: dict[str, int] = {}  # entity -> error of its clock that is stored as event
        self._common = CommonClock(bound)
        self._changed: set[str] = set()
        self._forgotten: list[str] = []
        self._restore(database, now)

    def interval(self, node: str) -> int:
        """Event time between the last two messages of a node's telemetry (us); 0 while that is not known."""
        return self._intervals.get(node, 0)

    @property
    def clock_errors(self) -> dict[str, int]:
        """Node -> measured error of its clock (us), of those whose clock is wrong."""
        return {node: clock.error for node, clock in self._clocks.items() if clock.error}

    def clock_events(self, now: int) -> list[EventBatch]:
        """An event `clock_error` for each clock that became wrong, wrong by another amount, or right again; one of ALL
        in place of those that share an error with most senders."""
        errors = {n: e for n, e in self.clock_errors.items() if now - self.arrivals.get(n, now) < GONE}
        heard = self._heard.items() if errors else ()
        alive = {n: self.interval(n) for n, last in heard if -ALIVE <= now - last <= self._witness(n)}
        common, own = self._common.split(errors, alive, now)
        due = {f"node:{node}": error for node, error in own.items()}
        # what is reported stays until it is right, or turns out to be shared
        shared = {n for n in errors if common is not None and abs(errors[n] - common[0]) <= self.bound}
        due |= {e: errors[n] for n in errors if (e := f"node:{n}") in self._reported and n not in shared}
        due |= {} if common is None else {ALL: common[0]}
        over = self._reported.keys() - due.keys()
        fresh = sorted(due.keys() - self._reported.keys())[: max(0, REPORTED - len(self._reported) + len(over))]
        fresh = [*fresh, *({ALL} & due.keys() - self._reported.keys() - set(fresh))]
        news = {e: due[e] for e in fresh if abs(due[e]) > self.bound}
        news |= {e: n for e, n in due.items() if e in self._reported and abs(n - self._reported[e]) > self.bound}
        news |= dict.fromkeys(over, 0)
        return [_clock_event(now, entity, error, common) for entity, error in sorted(news.items())]

    def reported(self, batches: Iterable[EventBatch]) -> None:
        """Events of `clock_events` are stored."""
        for event in (event for batch in batches for event in batch.events):
            self._reported[event.entity] = round(event.data["seconds"] * SECOND)
            if not self._reported[event.entity]:
                del self._reported[event.entity]

    def measure(self, node: str, sent: int, arrived: int, exact: bool) -> int:
        """By how much the times of a message are to be moved back (us): see SenderClock.measure."""
        if node not in self._clocks:
            self._make_room()
            self._clocks[node] = SenderClock()
        exact = exact and not 0 <= arrived - self._slow.get(node, -SLOW) < SLOW
        return self._clocks[node].measure(sent, arrived, exact, self.bound)

    def told(self, node: str, arrived: int, events: Iterable[Event]) -> None:
        """Events of `node` are stored: whether messages wait for its disk."""
        for event in events:
            if event.kind != DISK or event.entity != f"node:{node}" or node not in self._clocks:
                continue
            self._clocks[node].forget_windows()
            self._slow.pop(node, None)
            if event.data.get("state") == "active":
                self._slow[node] = arrived

    def record(self, node: str, arrived: int, newest: int | None) -> None:
        """A message of `node` is stored; newest: event time of its last telemetry, None for events alone."""
        self.arrivals[node] = arrived  # not the latest: a clock of ours that was set back would hide all arrivals
        if newest is not None:
            before = self.newest.get(node, newest)
            if newest > before or node not in self._intervals:
                self._intervals[node] = newest - before if node in self._heard else self._intervals.get(node, 0)
            self.newest[node], self._heard[node] = max(newest, before), arrived
        self._changed.add(node)

    def passed(self, now: int, lateness: int) -> int | None:
        """Event time that every sender that is alive has passed, and at least `lateness` before the newest.

        A sender without a message for a while holds nothing up, nor does one whose clock is wrong: neither is waited
        for, and a wrong clock takes the lateness from no other that is alive. Nor does one whose messages lie further
        apart than `lateness`: it would hold up every frame for so long, and what it sends comes as soon as it is
        measured. None before the first telemetry.
        """
        alive = {node: time for node, time in self.newest.items() if self._alive(node, now)}
        right = {node: time for node, time in alive.items() if not self._is_wrong(node)} or alive
        if not right:
            right = {n: time for n, time in self.newest.items() if not self._is_wrong(n)} or self.newest
        if not right:
            return None
        least = max(right.values()) - lateness
        waited = (time for node, time in right.items() if node in alive and self._intervals.get(node, 0) <= lateness)
        return max(least, min(waited, default=least))

    def _is_wrong(self, node: str) -> bool:
        return node in self._clocks and self._clocks[node].error != 0

    def _alive(self, node: str, now: int) -> bool:
        """A time of hearing that lies in the future is of before our clock was set back."""
        heard = self._heard.get(node)
        return heard is not None and -ALIVE <= now - heard <= max(ALIVE, LOOKS * self._intervals.get(node, 0))

    def _witness(self, node: str) -> int:
        """How long after its last message (us) a sender counts for what most senders say of our clock."""
        return max(WITNESS, LOOKS * self.interval(node))

    def _make_room(self) -> None:
        while len(self._clocks) >= MOST:
            oldest = min(self._clocks, key=lambda node: self.arrivals.get(node, 0))
            for known in (self._clocks, self.arrivals, self.newest, self._intervals, self._heard, self._slow):
                known.pop(oldest, None)
            self._changed.discard(oldest)
            self._forgotten.append(oldest)

    def save(self, connection: duckdb.DuckDBPyConnection, now: int) -> bool:
        """Writes what changed, at most every SAVE_EVERY; whether it did. `saved` follows once that is durable."""
        if not self._changed or abs(now - self._saved) < SAVE_EVERY:
            return False
        nodes, fresh = sorted(self._changed), SenderClock()
        columns = {
            "node": nodes,
            "arrived": times([self.arrivals[node] for node in nodes]),
            "newest": times([self.newest.get(node, 0) for node in nodes]),
            "clock_error": [self._clocks.get(node, fresh).error for node in nodes],
            "apart": [self.interval(node) for node in nodes],
        }
        renew = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "node")
        insert(connection, "sender", columns, f"ON CONFLICT (node) DO UPDATE SET {renew}")
        if self._forgotten:
            connection.execute("DELETE FROM sender WHERE list_contains(?, node)", [self._forgotten])
        return True

    def saved(self, now: int) -> None:
        """The last `save` is durable."""
        self._changed.clear()
        self._forgotten.clear()
        self._saved = now

    def _restore(self, database: Database, now: int) -> None:
        """Every node that ever sent telemetry, as the store has it: a restart must not forget which nodes exist."""
        each = " UNION ALL ".join(
            f"SELECT d.node, l.time FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}'"
            for c in CLASSES
        )
        with database.lock:
            rows = database.connection.execute(f"""
                SELECT node, epoch_us(greatest(s.arrived, d.newest)), epoch_us(greatest(s.newest, d.newest)),
                       coalesce(s.clock_error, 0), coalesce(s.apart, 0)
                FROM sender s FULL JOIN (SELECT node, max(time) AS newest FROM ({each}) GROUP BY node) d USING (node)
                ORDER BY 2 DESC LIMIT {MOST}""").fetchall()
            disks = database.connection.execute(
                """SELECT entity[6:], epoch_us(max(time)) FROM events WHERE kind = ? AND starts_with(entity, 'node:')
                GROUP BY entity HAVING json_extract_string(arg_max(data, time), '$.state') = 'active'
                ORDER BY 2 DESC LIMIT ?""",
                [DISK, MOST],
            ).fetchall()
        self._slow = dict(disks)
        for node, arrived, newest, error, apart in rows:
            # later times are of our own clock, which came back
            heard = now if arrived > now + self.bound else arrived
            newest = now if newest is not None and newest > now + self.bound else newest
            self._clocks[node], self.arrivals[node] = SenderClock(error), heard
            if newest:
                self.newest[node] = newest
            if apart:
                self._intervals[node] = apart
        self._reported = {e: round(s * SECOND) for e, s in clock_errors(database).items()}
        self._expect_the_last(now)

    def _expect_the_last(self, now: int) -> None:
        """Who was alive when the last pipeline ended is alive for ALIVE: the first one heard is not all there are."""
        last = max((self.arrivals[node] for node in self.newest), default=0)
        self._heard = dict.fromkeys((n for n in self.newest if last - self.arrivals[n] <= ALIVE + SAVE_EVERY), now)


def _clock_event(now: int, entity: str, error: int, common: tuple[int, int] | None) -> EventBatch:
    """What is stored of one clock; of an error that senders share, also how many they are."""
    data: dict[str, object] = {"seconds": error / SECOND}
    if entity == ALL and common is not None:
        data["senders"] = common[1]
    return EventBatch(Origin("", entity.partition(":")[2], b""), (Event(now, entity, KIND, data),))
