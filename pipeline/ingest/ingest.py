"""Ingest: messages -> rows, dead letters, gaps and offsets in one DuckDB transaction; each message stored exactly once.

Messages of all partitions are merged by event time, so that what waits for its peers stays small. A commit takes whole
messages up to COMMIT_ROWS rows of the fullest table; only when it is durable does memory advance.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import duckdb

from pipeline.ingest.admission import Admission
from pipeline.ingest.catch_up import CatchUp
from pipeline.ingest.clocks import BOUND
from pipeline.ingest.columns import Columns
from pipeline.ingest.messages import NEWER, Arrival, DeadLetter, Item, decode_item, to_rows
from pipeline.ingest.offsets import Offsets
from pipeline.ingest.ownership import load_owners
from pipeline.ingest.rejections import LetterLimits, Rejections, newer_letters, stored_bytes
from pipeline.ingest.senders import Senders
from pipeline.ingest.transaction import Writes
from pipeline.model.errors import GapError, Retryable, WireError
from pipeline.model.records import SECOND, Event, EventBatch, Rows
from pipeline.store.append import NEVER
from pipeline.store.database import Database, explained, is_of_message
from pipeline.store.devices import Devices
from pipeline.store.retention import clamp_latest
from pipeline.transport import Message, Partition, Transport, wire

log = logging.getLogger("fleetpulse.ingest")

COMMIT_ROWS = 122_880
"""Rows of the fullest table per commit: one DuckDB row group goes to the file without passing the write-ahead log."""
COMMIT_MESSAGES = 30_000
"""Bound of messages per commit: twice what fills a row group with ticks of a node of 8 GPUs. Letters have no rows."""
COMMIT_BYTES = 256 << 20  # bound of one commit's messages and what they decompress to, or of letters alone
COMMIT_SAMPLES = 8_000_000  # bound of one commit's decoded values: 64 MB as float64
_FETCH_BYTES = 64 << 20  # bound of fetched messages over all partitions; decoded they may be 8 times as large
_FETCH_MESSAGES = 256
_SHAPES = 4096  # shapes of messages remembered as sound
MUTE = 300 * SECOND
"""How long a partition that does not answer while others do holds the watermark; then the fleet is judged without it,
and what it holds will be late. Chosen: brokers choose a new leader within 30 s, so a longer silence wants a person."""
_TRIES = 3  # of one commit before its poison message is looked for


@dataclass(slots=True)
class Committed:
    """What one commit made durable, for the framer and the topology."""

    rows: list[Rows] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where ingest stood after its last step; other threads read this and nothing else of it.

    backlog: event time from which input waits.  newest: newest event time stored.  nodes: the same by sender.
    passed: event time that all alive senders had passed before the step (Senders.passed). Not after it: an event is
    sent before the telemetry of its tick, and may be read one step later.
    arrivals: when the newest message of each sender arrived (UTC us, our clock or the brokers', never the sender's).
    clock_errors: by how much (us) the clock of a sender is ahead, or behind if below 0; those whose clock is wrong.
    unanswered: the partition that has not answered for longest, and since when (UTC us).
    newer: nodes whose spools wait for an upgrade of the pipeline.
    """

    backlog: int | None = None
    newest: int | None = None
    passed: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)
    arrivals: Mapping[str, int] = field(default_factory=dict)
    clock_errors: Mapping[str, int] = field(default_factory=dict)
    unanswered: tuple[Partition, int] | None = None
    newer: tuple[str, ...] = ()


class Ingest:
    """Reads one transport into one database. One thread only.

    `clock` gives UTC microseconds, `lateness` and `bound` are those of [pipeline] (bound: clock_bound) in
    microseconds. Raises Retryable from `step` when nothing can be committed now (disk full, out of memory, store
    invalid): nothing is lost, and all is read again.
    """

    def __init__(
        self,
        database: Database,
        transport: Transport,
        devices: Devices,
        clock: Callable[[], int],
        lateness: int = 30 * SECOND,
        bound: int = BOUND,
        admission: Admission | None = None,
        letter_bytes: int = 256 << 20,
    ) -> None:
        self.database, self.transport, self.devices, self.clock = database, transport, devices, clock
        with database.lock:
            self.offsets = Offsets(database.connection)
            self.letters = LetterLimits.of_store(database.connection, letter_bytes)
        self.admission = admission or Admission(owners=load_owners(database))
        self.counters: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()  # dead letters by rule of admission
        self.rejections = Rejections()
        self._waiting: dict[Partition, deque[Item]] = {}
        self._at_end: dict[Partition, bool] = {}
        self._newest: dict[Partition, int] = {}  # event time reached in each partition that carries telemetry
        clamp_latest(database, clock(), clock() + bound)
        self.senders = Senders(database, clock(), bound)
        self._catch_up, self._lateness = CatchUp(lateness), lateness
        self._passed: int | None = None
        self._newer: set[Partition] = set()  # spools that stand at a message which only an upgrade can read
        self._gaps: dict[Partition, GapError] = {}
        self._unknown: dict[Partition, int] = {}  # since when their transport cannot say whether there is more
        self._all_mute = 0  # when none of them answered last
        self._fetch_bytes, self._closed = _FETCH_BYTES, NEVER
        self._sound: set[wire.Shape] = set()
        self._columns = Columns(self._types_of)
        self._done = Committed()
        self._reread, self._letter = False, -1  # whether all letters were read again, and the row of the last one
        self._begun = False  # whether a step has ended well: before that, nobody knows what lies unread
        self._publish()

    # --- what is known about the input ------------------------------------------------------------------------------

    def backlog(self) -> int | None:
        """Event time from which input still waits to be stored; None if everything was read to its end.

        A sender that is catching up over Kafka counts as unread, from what came of it last. 0 until the first step has
        ended, and while a partition of which nothing was read since the start cannot be asked: what it holds may be
        old. One that stays mute while others answer is waited for no longer than MUTE.
        """
        if not self._begun:
            return 0
        held = self._catch_up.hold(self.clock(), self.senders.newest)
        waiting = [queue[0].time for queue in self._waiting.values() if queue] + ([] if held is None else [held])
        mute = {p for p, since in self._unknown.items() if self.clock() - max(since, self._all_mute) > MUTE}
        at_end = {p for p, ended in self._at_end.items() if ended} | mute | self._newer
        unread = [t for p, t in self._newest.items() if p not in at_end and not self._waiting.get(p)]
        unknown = [0 for p in self._unknown if p not in self._newest and p not in mute]
        return min(waiting + unread + unknown, default=None)

    def newest(self) -> int | None:
        """Newest event time committed over all partitions."""
        return max(self._newest.values(), default=None)

    # --- one commit -------------------------------------------------------------------------------------------------

    def step(self, closed: int = NEVER) -> Committed | None:
        """Commits what is there, at most one full commit; None if there was nothing.

        closed: frames before it are closed, so that it is stored with each row and event that it came too late.

        After any failure everything that is not durable is fetched again; what a failed step did make durable comes
        with the next result.
        """
        self._closed, self._passed = closed, self.senders.passed(self.clock(), self._lateness)
        try:
            self._require_room()
            self._reread_letters()
            self._fetch()
            items = self._merge()
            if items or self._gaps:
                self._commit(items, {p: gap for p, gap in self._gaps.items() if not self._waiting.get(p)})
            self._begun = True
        except (duckdb.Error, MemoryError) as error:
            self._fetch_again()
            raise Retryable(f"cannot commit: {explained(self.database.path, error)}", after_s=1.0) from error
        except BaseException:
            self._fetch_again()
            raise
        finally:
            self._publish()
        done, self._done = self._done, Committed()
        return done if done.messages or done.gaps else None

    def _publish(self) -> None:
        known, unanswered = self.senders, min(self._unknown.items(), key=lambda item: item[1], default=None)
        self.progress = Progress(
            backlog=self.backlog(),
            newest=self.newest(),
            passed=self._passed,
            nodes=dict(known.newest),
            arrivals=dict(known.arrivals),
            clock_errors=known.clock_errors,
            unanswered=unanswered,
            newer=tuple(sorted({partition.name for partition in self._newer})),
        )

    def forget(self, before: int) -> None:
        """The store was trimmed: of gaps found before then (us), and of dead letters, less is there now."""
        self.offsets.forget_gaps(before)
        with self.database.lock:
            self.letters.size = stored_bytes(self.database.connection)

    def _require_room(self) -> None:
        """Raises Retryable if the disk has no room for a commit: what is not stored waits where it is."""
        if trouble := self.database.short_of_room():
            raise Retryable(trouble, after_s=1.0)

    def _reread_letters(self) -> None:
        """Once, after a start: stores what came in a newer version than the pipeline read then, and reads now."""
        while not self._reread:
            with self.database.lock:
                messages, self._letter = newer_letters(self.database.connection, self._letter)
            found = [self._decoded(message, self.clock(), False) for message in messages]
            if readable := [item for item in found if not isinstance(item.body, DeadLetter)]:
                self._commit(readable, {})
                self.counters["letters_reread"] += len(readable)
            self._reread = not messages

    def _fetch_again(self) -> None:
        """Forgets what was fetched and not stored: the next step reads on from where the store stands."""
        self._waiting.clear()
        self._at_end.clear()
        self._gaps.clear()
        self._unknown.clear()
        self.offsets.fetched.clear()
        self._letter = -1

    def _fetch(self) -> None:
        """Fills the queue of every partition whose queue is empty."""
        partitions = self.transport.partitions()
        if len(self._sound) > _SHAPES:
            self._sound.clear()
        self._fetch_bytes = min(1 << 20, max(64 << 10, _FETCH_BYTES // max(1, len(partitions))))
        self._forget(set(partitions))
        for partition in partitions:
            if not self._waiting.setdefault(partition, deque()):
                self._fill(partition)
        if len(self._unknown) == len(partitions):
            self._all_mute = self.clock()

    def _forget(self, present: set[Partition]) -> None:
        """Lets go of partitions that vanished once all that was fetched of them is stored."""
        for partition in [p for p, queue in self._waiting.items() if p not in present and not queue]:
            del self._waiting[partition]
            self._at_end.pop(partition, None)
        self._unknown = {p: since for p, since in self._unknown.items() if p in present}
        self._newer &= present

    def _fill(self, partition: Partition) -> None:
        """Fetches and decodes what comes next in one partition; stops at a gap, which the next commit counts."""
        if partition in self._gaps or partition in self._newer:
            return
        live, self._at_end[partition] = self._at_end.get(partition, False), False
        self._unknown.setdefault(partition, self.clock())
        try:
            start = self.offsets.next(partition, self.transport)
            messages = self.transport.read(partition, start, _FETCH_MESSAGES, self._fetch_bytes)
        except Retryable:  # reachable() says why; the other partitions go on
            return
        except GapError as gap:
            self._gaps[partition], self._unknown[partition] = gap, self.clock()
            self.offsets.fetched[partition] = gap.next_offset
            return
        self._unknown.pop(partition, None)
        self._at_end[partition] = not messages
        size, now = 0, self.clock()
        for message in messages:
            item = self._decoded(message, now, live)
            if partition.spooled and isinstance(item.body, DeadLetter) and item.body.rule == NEWER:
                self._newer.add(partition)
                break
            self._waiting[partition].append(item)
            self.offsets.fetched[partition] = message.offset + 1
            size += item.size
            if size > 8 * self._fetch_bytes:
                break  # messages that compress so well are decoded a few at a time

    def _decoded(self, message: Message, now: int, live: bool) -> Item:
        arrival, confirm = self._arrival(message, now, live), self.admission.sender_check.check_sender
        return decode_item(message, self._columns, self._sound, arrival, confirm)

    def _arrival(self, message: Message, now: int, live: bool) -> Arrival:
        """When a message arrived: as the brokers say; else it is read now. live: all before it was read already."""
        time, exact = message.appended or now, live or message.appended > 0
        return Arrival(
            time, time + self.senders.bound, lambda node, sent: self.senders.measure(node, sent, time, exact)
        )

    def _types_of(self, device_class: str) -> dict[str, str]:
        """Wire types of the columns that exist, by column."""
        with self.database.lock:
            return Writes.column_types(self.database.connection, device_class)

    def _merge(self) -> list[Item]:
        """Whole messages in order of event time, up to one commit; taken off their queues."""
        heap = [(queue[0].time, i, queue) for i, queue in enumerate(self._waiting.values()) if queue]
        heapq.heapify(heap)
        taken: list[Item] = []
        rows: Counter[str] = Counter()
        samples = size = 0
        while heap and len(taken) < COMMIT_MESSAGES and size < COMMIT_BYTES:
            _, i, queue = heap[0]
            item = queue[0]
            full = any(rows[c] + n > COMMIT_ROWS for c, n in item.rows.items())
            if taken and (full or samples + item.samples > COMMIT_SAMPLES):
                break
            size += item.size
            taken.append(queue.popleft())
            rows.update(item.rows)
            samples += item.samples
            if not queue:
                self._fill(item.message.partition)
            if queue:
                heapq.heapreplace(heap, (queue[0].time, i, queue))
            else:
                heapq.heappop(heap)
        return taken

    def _commit(self, items: list[Item], gaps: Mapping[Partition, GapError]) -> None:
        """Stores items, then gaps. A message whose content the store refuses becomes a dead letter by itself.

        Raises any error that is not of a message: none is looked for, and none given up.
        """
        refusal: Exception | None = None
        for attempt in range(1, _TRIES + 1):
            try:
                return self._transaction(items, gaps)
            except Exception as error:
                if not is_of_message(error):
                    raise
                refusal = error
                told = "commit of %d messages refused (try %d of %d): %s"
                ours = not isinstance(error, (duckdb.Error, WireError))
                log.warning(told, len(items), attempt, _TRIES, error, exc_info=ours)
        if len(items) > 1:
            half = len(items) // 2
            self._commit(items[:half], {})
            return self._commit(items[half:], gaps)
        if not items or isinstance(items[0].body, DeadLetter):
            raise Retryable(f"store {self.database.path}: refuses what was lost: {refusal}", after_s=5.0) from refusal
        return self._commit([Item.dead(DeadLetter(items[0].message, f"the store refused it: {refusal}"))], gaps)

    def _transaction(self, items: list[Item], gaps: Mapping[Partition, GapError]) -> None:
        writes = Writes(self.offsets, self.clock(), self.letters)
        self.letters.begin(writes.now)
        self.admission.begin(writes.now)
        fresh = [kept for item in items if (kept := writes.accept(item, self.admission)) is not None]
        for partition, gap in gaps.items():
            writes.lost(partition, gap)
        events = [item.body for item in fresh if isinstance(item.body, EventBatch)]
        clocks, refused = self.senders.clock_events(writes.now), self.rejections.events(writes.now)
        events += clocks + refused
        rows = self._rows(fresh)
        writes.counters["samples"] += sum(len(block.time) * len(block.columns) for block in rows)
        with self.database.transaction() as connection:
            writes.check(connection)
            self.devices.save(connection)
            self.admission.save(connection)
            writes.write(connection, rows, events, self._closed)
            saved = self.senders.save(connection, writes.now)
        self.devices.saved()
        self.admission.commit()
        self.senders.reported(clocks)
        self.rejections.told(refused)
        self.letters.commit()
        if saved:
            self.senders.saved(writes.now)
        self.offsets.advance(writes.next_offsets, writes.marks, writes.last, writes.sent, writes.gaps, writes.gone)
        self._done.rows += rows
        self._done.events += [event for batch in events for event in batch.events]
        self._done.messages += len(items)
        self._done.gaps += len(gaps)
        self._after(fresh, writes)

    def _rows(self, fresh: Iterable[Item]) -> list[Rows]:
        """Rows of messages, together for all that bar the same entities: most bar none."""
        alike: defaultdict[frozenset[str], list[wire.Body]] = defaultdict(list)
        for item in fresh:
            if isinstance(item.body, wire.Body):
                alike[item.barred].append(item.body)
        return [rows for barred, bodies in alike.items() for rows in to_rows(bodies, self.devices, barred)]

    def _after(self, fresh: list[Item], writes: Writes) -> None:
        """Memory follows what is durable now."""
        self.counters.update(writes.counters)
        self.rejected.update(writes.rejected)
        admitted = {item.body.layout.node for item in fresh if isinstance(item.body, wire.Body) and not item.is_letter}
        self.rejections.take(writes.refused, admitted, self.senders.arrivals.keys(), writes.now)
        for letter, _ in writes.letters:
            self.transport.send_dead_letter(letter.message, letter.reason)
        for item in fresh:
            self.counters["messages_moved"] += item.moved != 0
            self._reached(item, writes.now)
        for partition, next_offset in writes.next_offsets.items():
            if partition in self._gaps and self._gaps[partition].next_offset == next_offset:
                del self._gaps[partition]
            self.transport.commit_offset(partition, next_offset)

    def _reached(self, item: Item, now: int) -> None:
        """Moves on the event times of a message's partition and sender."""
        partition, newest = item.message.partition, item.newest
        if item.is_letter:  # it arrived long ago
            return
        if isinstance(item.body, EventBatch):
            self.senders.told(item.body.origin.node, item.arrived, item.body.events)
            self.senders.record(item.body.origin.node, item.arrived, None)
        if newest is None or not isinstance(item.body, wire.Body):
            return
        node = item.body.layout.node
        if item.message.appended:
            self._catch_up.heard(node, newest, item.message.appended, now, self.senders.newest)
        self._newest[partition] = max(self._newest.get(partition, newest), newest)
        self.senders.record(node, item.arrived, newest)
