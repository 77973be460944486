"""Senders: last arrival, newest event time and clock error of every node, and which senders hold the watermark.

After a broker outage the watermark waits until agents that were cut off together have sent their backlog. Kafka does
not show what an agent still has to send. It shows when the brokers appended a message: if a message is older than the
lateness, its sender is catching up. The watermark stays at the slowest sender that fell silent at the same time, until
all have caught up or stay silent; otherwise all but the fastest would be late and never be evaluated.

A sender that does not gain on the clock is not waited for: a stopped, slow or reset clock is not a backlog.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.ingest.clocks import BOUND, CommonClock, SenderClock
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.model.signals import CLASSES
from pipeline.store.append import insert_columns, to_timestamps
from pipeline.store.database import Database
from pipeline.store.events import load_clock_errors

MAX_SENDERS = 100_000
"""Maximum senders; above it, those with the oldest message are dropped. Chosen: eight times a fleet of 12,500 nodes,
100 MB."""
TRANSIT = 5 * SECOND
"""How long a message may take after its sender's linger (us); chosen."""
ALIVE = 5 * SECOND + TRANSIT
"""A sender with a message within this time is alive, or within its own linger and TRANSIT: agents join the ticks of 5 s
([agent] linger), at most 10 s."""
INTERVALS = 3
"""Slower senders are alive for so many of their intervals; chosen: one message may be late, one lost."""
KIND = "clock_error"
ALL_SITES = "site:all"
"""Entity of an error that most senders share."""
MAX_REPORTED = 256
"""Maximum wrong clocks reported at a time, in order of detection; chosen: a person reads fewer. All are corrected and
counted (`fleetpulse_clocks_wrong`); made-up senders cannot store more events or open more tickets than this."""
CLOCK_EXPIRY = 3600 * SECOND
"""After this silence the clock of a sender is no longer reported; chosen."""
DISK = "disk_slow"
SLOW_DISK = 3600 * SECOND
"""How long after a disk_slow event messages do not prove that a clock is behind: all wait for the disk. Chosen: an
agent that is killed never reports the end."""
WITNESS = 60 * SECOND
"""How long a sender counts in the majority about our clock, or INTERVALS of its messages; chosen: as an agent counts
as present."""
SAVE_EVERY = 10 * SECOND
"""Minimum time between two writes of sender state; chosen: a sixth of the silence timeout."""


class Senders:
    """State of all senders, by node. For one thread; `bound` is [pipeline] clock_bound in us.

    arrivals: arrival time of the newest message (UTC us, our clock or the brokers').
    newest:   newest event time of telemetry; none for a node that only sent events.
    """

    def __init__(self, database: Database, now: int, bound: int = BOUND) -> None:
        self.bound, self._saved = bound, now
        self.arrivals: dict[str, int] = {}
        self.newest: dict[str, int] = {}
        self._intervals: dict[str, int] = {}  # event time between the last two messages of telemetry
        self._ticks: dict[str, int] = {}  # event time between the ticks of the last message that had several
        self._telemetry_at: dict[str, int] = {}  # arrival of the newest telemetry
        self._clocks: dict[str, SenderClock] = {}
        self._slow_disks: dict[str, int] = {}  # senders with a slow disk, and since when
        self._reported: dict[str, int] = {}  # entity -> clock error in its last event
        self._common = CommonClock(bound)
        self._changed: set[str] = set()
        self._dropped: list[str] = []
        self._restore(database, now)

    def interval_of(self, node: str) -> int:
        """Event time between the last two telemetry messages of a node (us); 0 if unknown."""
        return self._intervals.get(node, 0)

    @property
    def clock_errors(self) -> dict[str, int]:
        """Node -> measured clock error (us), for wrong clocks only."""
        return {node: clock.error for node, clock in self._clocks.items() if clock.error}

    def clock_events(self, now: int) -> list[EventBatch]:
        """Events `clock_error` for clocks that became wrong, changed, or became right; one of ALL_SITES for an error
        that most senders share."""
        errors = {n: e for n, e in self.clock_errors.items() if now - self.arrivals.get(n, now) < CLOCK_EXPIRY}
        arrivals = self._telemetry_at.items() if errors else ()
        alive = {n: self.interval_of(n) for n, last in arrivals if -ALIVE <= now - last <= self._witness_time(n)}
        common, own = self._common.split_errors(errors, alive, now)
        due = {f"node:{node}": error for node, error in own.items()}
        # a reported clock stays reported until it is right or the error is shared
        shared = {n for n in errors if common is not None and abs(errors[n] - common[0]) <= self.bound}
        due |= {e: errors[n] for n in errors if (e := f"node:{n}") in self._reported and n not in shared}
        due |= {} if common is None else {ALL_SITES: common[0]}
        over = self._reported.keys() - due.keys()
        fresh = sorted(due.keys() - self._reported.keys())[: max(0, MAX_REPORTED - len(self._reported) + len(over))]
        fresh = [*fresh, *({ALL_SITES} & due.keys() - self._reported.keys() - set(fresh))]
        changed = {e: due[e] for e in fresh if abs(due[e]) > self.bound}
        changed |= {e: n for e, n in due.items() if e in self._reported and abs(n - self._reported[e]) > self.bound}
        changed |= dict.fromkeys(over, 0)
        return [_clock_event(now, entity, error, common) for entity, error in sorted(changed.items())]

    def mark_reported(self, batches: Iterable[EventBatch]) -> None:
        """Records that events of `clock_events` are stored."""
        for event in (event for batch in batches for event in batch.events):
            self._reported[event.entity] = round(event.data["seconds"] * SECOND)
            if not self._reported[event.entity]:
                del self._reported[event.entity]

    def measure_clock(self, node: str, sent: int, arrived: int, exact: bool) -> int:
        """How far the times of a message are moved back (us): see `SenderClock.measure_message`."""
        clock = self._clocks.get(node)
        if clock is None:
            self._make_room()
            clock = self._clocks[node] = SenderClock()
        if exact and self._slow_disks:
            exact = not 0 <= arrived - self._slow_disks.get(node, -SLOW_DISK) < SLOW_DISK
        return clock.measure_message(sent, arrived, exact, self.bound)

    def record_disk_events(self, node: str, arrived: int, events: Iterable[Event]) -> None:
        """Records stored disk_slow events of `node`."""
        for event in events:
            if event.kind != DISK or event.entity != f"node:{node}" or node not in self._clocks:
                continue
            self._clocks[node].reset_windows()
            self._slow_disks.pop(node, None)
            if event.data.get("state") == "active":
                self._slow_disks[node] = arrived

    def record_message(self, node: str, arrived: int, newest: int | None, tick: int = 0) -> None:
        """Records a stored message of `node`. newest: event time of its last telemetry, None for events.

        tick: event time between its ticks, 0 if it has one.
        """
        if newest is not None:
            self.record_telemetry(node, arrived, (newest,), tick)
        self.arrivals[node] = arrived  # not the maximum: if our clock was set back, that would hide all arrivals
        self._changed.add(node)

    def record_telemetry(self, node: str, arrived: int, times: Sequence[int], tick: int = 0) -> None:
        """Records stored telemetry of `node` with the newest event times `times`, the last of which arrived then.

        tick: as in `record_message`, of the last message with several.
        """
        before, apart, known = self.newest.get(node, times[0]), self._intervals.get(node), node in self._telemetry_at
        for newest in times:
            if newest > before or apart is None:
                apart = newest - before if known else apart or 0
            before, known = max(newest, before), True
        self.arrivals[node] = self._telemetry_at[node] = arrived
        self.newest[node], self._intervals[node] = before, apart or 0
        if tick:
            self._ticks[node] = tick
        self._changed.add(node)

    def find_passed_time(self, now: int, lateness: int) -> int | None:
        """Event time that every alive sender has passed, but at least the newest minus `lateness`.

        Silent senders and wrong clocks are not waited for, and a wrong clock does not shorten the lateness of others. A
        sender with an interval over `lateness` is not waited for either: it would delay every frame, and its samples
        arrive as soon as they are measured. None before the first telemetry.
        """
        alive = {node: time for node, time in self.newest.items() if self._is_alive(node, now)}
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

    def _is_alive(self, node: str, now: int) -> bool:
        """Whether a sender is alive. An arrival in the future is from before our clock was set back."""
        last = self._telemetry_at.get(node)
        if last is None:
            return False
        apart, tick = self._intervals.get(node, 0), self._ticks.get(node, 0)
        joins = 0 < tick < apart  # then messages are apart by its linger, not by its interval
        longest = max(INTERVALS * tick, apart + TRANSIT) if joins else INTERVALS * apart
        return -ALIVE <= now - last <= max(ALIVE, longest)

    def _witness_time(self, node: str) -> int:
        """How long after its last message (us) a sender counts in the majority about our clock."""
        return max(WITNESS, INTERVALS * self.interval_of(node))

    def _make_room(self) -> None:
        while len(self._clocks) >= MAX_SENDERS:
            oldest = min(self._clocks, key=lambda node: self.arrivals.get(node, 0))
            for known in (
                self._clocks,
                self.arrivals,
                self.newest,
                self._intervals,
                self._ticks,
                self._telemetry_at,
                self._slow_disks,
            ):
                known.pop(oldest, None)
            self._changed.discard(oldest)
            self._dropped.append(oldest)

    def save(self, connection: duckdb.DuckDBPyConnection, now: int) -> bool:
        """Writes changed senders, at most every SAVE_EVERY; returns whether it did. Call `mark_saved` when durable."""
        if not self._changed or abs(now - self._saved) < SAVE_EVERY:
            return False
        nodes, fresh = sorted(self._changed), SenderClock()
        columns = {
            "node": nodes,
            "arrived": to_timestamps([self.arrivals[node] for node in nodes]),
            "newest": to_timestamps([self.newest.get(node, 0) for node in nodes]),
            "clock_error": [self._clocks.get(node, fresh).error for node in nodes],
            "apart": [self.interval_of(node) for node in nodes],
        }
        renew = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "node")
        insert_columns(connection, "sender", columns, f"ON CONFLICT (node) DO UPDATE SET {renew}")
        if self._dropped:
            connection.execute("DELETE FROM sender WHERE list_contains(?, node)", [self._dropped])
        return True

    def mark_saved(self, now: int) -> None:
        """Records that the last `save` is durable."""
        self._changed.clear()
        self._dropped.clear()
        self._saved = now

    def _restore(self, database: Database, now: int) -> None:
        """Loads every node that ever sent telemetry: after a restart all nodes must still be known."""
        each = " UNION ALL ".join(
            f"SELECT d.node, l.time FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}'"
            for c in CLASSES
        )
        with database.lock:
            rows = database.connection.execute(f"""
                SELECT node, epoch_us(greatest(s.arrived, d.newest)), epoch_us(greatest(s.newest, d.newest)),
                       coalesce(s.clock_error, 0), coalesce(s.apart, 0)
                FROM sender s FULL JOIN (SELECT node, max(time) AS newest FROM ({each}) GROUP BY node) d USING (node)
                ORDER BY 2 DESC LIMIT {MAX_SENDERS}""").fetchall()
            disks = database.connection.execute(
                """SELECT entity[6:], epoch_us(max(time)) FROM events WHERE kind = ? AND starts_with(entity, 'node:')
                GROUP BY entity HAVING json_extract_string(arg_max(data, time), '$.state') = 'active'
                ORDER BY 2 DESC LIMIT ?""",
                [DISK, MAX_SENDERS],
            ).fetchall()
        self._slow_disks = dict(disks)
        for node, arrived, newest, error, apart in rows:
            # later times are from our own clock before it was set back
            last = now if arrived > now + self.bound else arrived
            newest = now if newest is not None and newest > now + self.bound else newest
            self._clocks[node], self.arrivals[node] = SenderClock(error), last
            if newest:
                self.newest[node] = newest
            if apart:
                self._intervals[node] = apart
        self._reported = {e: round(s * SECOND) for e, s in load_clock_errors(database).items()}
        self._restore_alive(now)

    def _restore_alive(self, now: int) -> None:
        """Treats senders that were alive at the last stop as alive for ALIVE: the first message is not from all."""
        last = max((self.arrivals[node] for node in self.newest), default=0)
        self._telemetry_at = dict.fromkeys(
            (n for n in self.newest if last - self.arrivals[n] <= ALIVE + SAVE_EVERY), now
        )


def _clock_event(now: int, entity: str, error: int, common: tuple[int, int] | None) -> EventBatch:
    """The event of one clock; for a shared error also the number of senders."""
    data: dict[str, object] = {"seconds": error / SECOND}
    if entity == ALL_SITES and common is not None:
        data["senders"] = common[1]
    return EventBatch(Origin("", entity.partition(":")[2], b""), (Event(now, entity, KIND, data),))


MAX_WAIT = 10 * SECOND
"""How long a sender is waited for, from the return of the first and from its own last message; within this time it
must also gain on the clock (us). Chosen: clients reconnect within 1 s (kafka_clients.RECONNECT_MS), then send without a
pause."""
OUTAGE_SPREAD = 60 * SECOND
"""Senders whose last messages are this close together fell silent together (us); also the silence timeout."""


@dataclass(slots=True)
class _CatchingUp:
    """A sender that is waited for: its last message, and start and event time of the present measurement."""

    last_message: int
    since: int
    event_time: int


class CatchUp:
    """Senders that are catching up. Times in UTC us; `lateness` as in [pipeline]. For one thread."""

    def __init__(self, lateness: int) -> None:
        self._lateness = lateness
        self._newest: int | None = None  # newest event time, except of clocks that are ahead
        self._catching_up: dict[str, _CatchingUp] = {}

    def record_messages(self, messages: Sequence[tuple[str, int, int]], now: int, known: Mapping[str, int]) -> None:
        """Records the messages of a commit in their order: (node, newest event time, append time; 0: unknown).

        known: newest event time of every node before them.
        """
        delays = [(newest, appended - newest) for _, newest, appended in messages if appended]
        late = any(delay > self._lateness for _, delay in delays)
        if self._newest is not None and not self._catching_up and not late:
            self._newest = max([self._newest, *(newest for newest, delay in delays if delay >= -self._lateness)])
            return
        newest_of = dict(known)
        for node, newest, appended in messages:
            if appended:
                self.record_message(node, newest, appended, now, newest_of)
            newest_of[node] = max(newest, newest_of.get(node, newest))

    def record_message(self, node: str, newest: int, appended: int, now: int, known: Mapping[str, int]) -> None:
        """Records a message of `node` with event times up to `newest`, appended by the broker at `appended`.

        known: newest event time of every node before this message.
        """
        if self._newest is None:
            self._newest = max((time for time in known.values() if time <= now), default=0)
        late = appended - newest > self._lateness
        if late and not self._catching_up and known.get(node, 0) >= self._newest - OUTAGE_SPREAD:
            together = (other for other, time in known.items() if time >= (self._newest or 0) - OUTAGE_SPREAD)
            self._catching_up = {other: _CatchingUp(now, now, known[other]) for other in together}
        if node in self._catching_up and not (late and self._is_gaining(self._catching_up[node], newest, now)):
            del self._catching_up[node]
        if newest <= appended + self._lateness:  # otherwise its clock is ahead, and all others would look cut off
            self._newest = max(self._newest, newest)

    def limit_watermark(self, now: int, newest: Mapping[str, int]) -> int | None:
        """Upper bound of the watermark (event time); None if no sender is waited for."""
        for node in [node for node, sender in self._catching_up.items() if now - sender.last_message > MAX_WAIT]:
            del self._catching_up[node]
        return min((newest[node] for node in self._catching_up), default=None)

    @staticmethod
    def _is_gaining(sender: _CatchingUp, newest: int, now: int) -> bool:
        """Whether the sender gained on the clock within the last MAX_WAIT."""
        sender.last_message = now
        if now - sender.since < MAX_WAIT:
            return True
        gained = newest - sender.event_time > now - sender.since
        sender.since, sender.event_time = now, newest
        return gained
