"""Ingest: messages become rows, dead letters, gaps and offsets in one DuckDB transaction; each is stored exactly once.

Messages of all partitions are merged by event time, so that few rows wait for their peers. A commit has whole messages
of up to COMMIT_ROWS rows of the fullest table. The state in memory advances only when the commit is durable.

A commit costs milliseconds, however few rows it has. Telemetry that is read to its end is therefore read again only
after `wait`, all of it in one commit. Events are read and committed in every step.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb

from pipeline.ingest.admission import Admission
from pipeline.ingest.clocks import BOUND
from pipeline.ingest.columns import ColumnLimits
from pipeline.ingest.foreign import (
    FOREIGN_COUNTERS,
    AgentPresence,
    ForeignDecoder,
    ForeignInventory,
    build_foreign_rows,
)
from pipeline.ingest.messages import NEWER, Arrival, DeadLetter, ForeignBatch, Item, build_rows, decode_item, list_times
from pipeline.ingest.offsets import Offsets
from pipeline.ingest.ownership import load_owners
from pipeline.ingest.progress import Progress
from pipeline.ingest.rejections import LetterLimits, Rejections, count_letter_bytes, load_newer_letters
from pipeline.ingest.senders import CatchUp, Senders
from pipeline.ingest.topic_lag import TopicLags
from pipeline.ingest.transaction import TransactionWrites
from pipeline.model.errors import GapError, Offline, Retryable, WireError
from pipeline.model.records import EVENTS, OTLP, SECOND, Event, EventBatch, Rows
from pipeline.store.append import NEVER
from pipeline.store.database import Database, explain_error, is_message_fault
from pipeline.store.devices import Devices
from pipeline.store.hot_tables import HotTables
from pipeline.store.latest import CurrentValues, LatestRows
from pipeline.transport import Message, Partition, Transport, wire

log = logging.getLogger("fleetpulse.ingest")

COMMIT_ROWS = 122_880
"""Maximum rows of the fullest table per commit: one DuckDB row group is written without the write-ahead log."""
COMMIT_MESSAGES = 30_000
"""Maximum messages per commit, since dead letters have no rows: twice those that fill a row group with 8-GPU nodes."""
COMMIT_BYTES = 256 << 20  # maximum per commit, of messages and their decompressed bodies, or of dead letters
COMMIT_SAMPLES = 8_000_000  # maximum decoded values per commit: 64 MB as float64
_FETCH_BYTES = 64 << 20  # maximum fetched bytes over all partitions; decoded up to 8 times as large
_FETCH_MESSAGES = 256
_SHAPES = 4096  # cached shapes of valid messages
MAX_UNANSWERED = 300 * SECOND
"""How long a partition without a response holds the watermark while others respond (us); then frames close without it,
and its data will be late. Chosen: brokers elect a new leader within 30 s, so a longer outage needs a person."""
MAX_OFFLINE = 10 * SECOND
"""The same for a partition without a leader (us): its brokers may be away for hours. Chosen: as long as a silent sender
holds the watermark; brokers with other replicas elect a leader immediately."""
_ATTEMPTS = 3  # of one commit before the poison message is searched for


@dataclass(slots=True)
class Committed:
    """The result of one commit, for the framer and the topology."""

    rows: list[Rows] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    messages: int = 0
    gaps: int = 0


class Ingest:
    """Reads one transport into one database. For one thread.

    `clock` returns UTC microseconds; `lateness` and `bound` (clock_bound) are those of [pipeline], in microseconds.
    `wait`: how long telemetry waits for more (s), measured by `monotonic`; 0: a step commits what it reads.
    `step` raises Retryable if nothing can be committed now (disk full, out of memory, invalid store): nothing is lost,
    and everything is read again.
    """

    shed_seconds = 0.0
    _shed_since: float | None = None  # only events are stored; when the time since then was counted last

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
        wait: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        foreign: ForeignDecoder | None = None,
    ) -> None:
        self.database, self.transport, self.devices, self.clock = database, transport, devices, clock
        with database.lock:
            self.offsets = Offsets(database.connection)
            self.letter_limits = LetterLimits.from_store(database.connection, letter_bytes)
            self.tables = HotTables(database.connection)
        self.admission = admission or Admission(owners=load_owners(database))
        self._foreign, self._inventory = foreign or ForeignDecoder(), ForeignInventory()
        self._agents, self.rejections, self.lags = AgentPresence.load(database), Rejections(), TopicLags()
        # rejected: dead letters by admission rule; of them those of other senders
        self.counters, self.rejected, self.foreign_rejected = Counter(FOREIGN_COUNTERS), Counter[str](), Counter[str]()
        self._queues, self._at_end = dict[Partition, deque[Item]](), dict[Partition, bool]()
        self._newest, self._newest_dropped = dict[Partition, int](), 0  # event times by partition; of those gone
        self._latest = LatestRows(database, clock(), clock() + bound)
        self._wait, self._monotonic = wait, monotonic
        self._is_reading, self._read_at = True, 0.0  # telemetry is read until all its queues are empty; start of that
        self.senders, self._catch_up, self._lateness = Senders(database, clock(), bound), CatchUp(lateness), lateness
        self._passed_time: int | None = None
        self._newer_spools: set[Partition] = set()  # spools blocked by a message of a newer version
        self._gaps: dict[Partition, GapError] = {}
        self._unanswered_since, self._offline = dict[Partition, int](), set[Partition]()  # the latter without a leader
        self._all_unanswered_at = 0  # when last no partition responded
        self._fetch_bytes, self._closed, self._committed = _FETCH_BYTES, NEVER, Committed()
        self._valid_shapes, self._columns = set[wire.Shape](), ColumnLimits(self.tables.types_of)
        self._letters_reread, self._last_letter = False, -1  # all letters were read again; row of the last one
        self._has_stepped = False  # whether a step succeeded; before that, the backlog is unknown
        self._publish()

    # --- state of the input -----------------------------------------------------------------------------------------

    def backlog(self) -> int | None:
        """Event time of the oldest input that is not stored yet; None if everything was read.

        A sender that is catching up over Kafka counts as unread, from its newest event time. 0 until the first step
        succeeded, and while a partition that was never read does not respond: its data may be old. A partition without
        a response while others respond is ignored after MAX_UNANSWERED, without a leader after MAX_OFFLINE.
        """
        if not self._has_stepped:
            return 0
        held = self._catch_up.limit_watermark(self.clock(), self.senders.newest)
        waiting = [queue[0].time for queue in self._queues.values() if queue] + ([] if held is None else [held])
        unanswered = {
            p
            for p, since in self._unanswered_since.items()
            if self.clock() - max(since, self._all_unanswered_at)
            > (MAX_OFFLINE if p in self._offline else MAX_UNANSWERED)
        }
        at_end = {p for p, ended in self._at_end.items() if ended} | unanswered | self._newer_spools
        unread = [t for p, t in self._newest.items() if p not in at_end and not self._queues.get(p)]
        unknown = [0 for p in self._unanswered_since if p not in self._newest and p not in unanswered]
        return min(waiting + unread + unknown, default=None)

    def newest(self) -> int | None:
        """Newest event time committed over all partitions."""
        return max((*self._newest.values(), self._newest_dropped)) or None

    # --- one commit -------------------------------------------------------------------------------------------------

    def step(self, closed: int = NEVER) -> Committed | None:
        """Commits available messages, at most one full commit; None if there are none, or none but those that wait.

        closed: frames before it are closed; stored with each row and event that came too late.

        After a failure everything that is not durable is fetched again. What a failed step made durable is part of the
        next result.
        """
        self._closed, self._passed_time = closed, self.senders.find_passed_time(self.clock(), self._lateness)
        try:
            self._shed_telemetry(self.database.check_space())
            self._reread_letters()
            self._fetch()
            items = self._merge()
            if items or self._gaps:
                self._commit(items, {p: gap for p, gap in self._gaps.items() if not self._queues.get(p)})
            self._latest.write_due(self.database, self.clock())
            if not any(self._queues.values()):
                self._is_reading = False
            self._has_stepped = True
        except (duckdb.Error, MemoryError) as error:
            self._discard_fetched()
            raise Retryable(f"cannot commit: {explain_error(self.database.path, error)}", after_s=1.0) from error
        except BaseException:
            self._discard_fetched()
            raise
        finally:
            self._publish()
        done, self._committed = self._committed, Committed()
        return done if done.messages or done.gaps else None

    def _publish(self) -> None:
        known, unanswered = self.senders, min(self._unanswered_since.items(), key=lambda item: item[1], default=None)
        self.progress = Progress(
            backlog=self.backlog(),
            newest=self.newest(),
            passed=self._passed_time,
            nodes=dict(known.newest),
            arrivals=dict(known.arrivals),
            clock_errors=known.clock_errors,
            unanswered=unanswered,
            newer=tuple(sorted({partition.name for partition in self._newer_spools})),
        )

    def apply_retention(self, before: int) -> None:
        """Updates memory after retention removed gaps found before `before` (us), dead letters and empty tables."""
        self.offsets.drop_gaps(before)
        with self.database.lock:
            self.tables.load(self.database.connection)
            self.letter_limits.stored = count_letter_bytes(self.database.connection)

    def read_current(self, device_class: str, columns: Sequence[str] | None = None) -> CurrentValues:
        """Returns the newest value of each device, from memory; for any thread. columns: None: all."""
        return self._latest.read(device_class, self.devices, columns)

    def write_latest(self) -> None:
        """Writes the newest row of each device now; afterwards committed rows may leave the hot tables."""
        self._latest.write_now(self.database, self.clock())

    def _shed_telemetry(self, shed: bool) -> None:
        """Leaves telemetry in the transport while the disk has space for events only."""
        now = self._monotonic()
        if shed and self._shed_since is not None:
            self.shed_seconds += now - self._shed_since
        if self._shed_since is not None and not shed:
            self._is_reading = True
        self._shed_since = now if shed else None
        for partition in [p for p in self._queues if shed and p.topic != EVENTS]:
            self._queues[partition].clear()
            self._gaps.pop(partition, None)
            self.offsets.fetched.pop(partition, None)
            self._at_end[partition] = False

    def _reread_letters(self) -> None:
        """Once after a start: stores dead letters of a newer version that this pipeline can read now."""
        while not self._letters_reread:
            with self.database.lock:
                messages, self._last_letter = load_newer_letters(self.database.connection, self._last_letter)
            now = self.clock()
            found = [self._decode(message, self._arrival_of(message, now, False)) for message in messages]
            if readable := [item for item in found if not isinstance(item.body, DeadLetter)]:
                self._commit(readable, {})
                self.counters["letters_reread"] += len(readable)
            self._letters_reread = not messages

    def _discard_fetched(self) -> None:
        """Drops fetched messages that are not stored; the next step reads from the stored offsets."""
        self._queues.clear()
        self._at_end.clear()
        self._gaps.clear()
        self._unanswered_since.clear()
        self.offsets.fetched.clear()
        self._last_letter = -1
        self._is_reading = True

    def _fetch(self) -> None:
        """Fills the empty queues: those of events, and at most every `wait` those of all partitions."""
        now = self._monotonic()
        if self._shed_since is None and not self._is_reading and now - self._read_at < self._wait:
            for partition, queue in self._queues.items():
                if partition.topic == EVENTS and not queue:
                    self._fetch_partition(partition)
            return
        self._is_reading, self._read_at = True, now
        self._fetch_all()

    def _fetch_all(self) -> None:
        partitions = self.transport.partitions()
        if len(self._valid_shapes) > _SHAPES:
            self._valid_shapes.clear()
        self._fetch_bytes = min(1 << 20, max(64 << 10, _FETCH_BYTES // max(1, len(partitions))))
        self._drop_partitions(set(partitions))
        for partition in [p for p in partitions if self._shed_since is None or p.topic == EVENTS]:
            if not self._queues.setdefault(partition, deque()):
                self._fetch_partition(partition)
        if len(self._unanswered_since) == len(partitions):
            self._all_unanswered_at = self.clock()

    def _drop_partitions(self, present: set[Partition]) -> None:
        """Drops partitions that disappeared, when all fetched messages are stored."""
        for partition in [p for p, queue in self._queues.items() if p not in present and not queue]:
            del self._queues[partition]
            self._at_end.pop(partition, None)
        for partition in [p for p in self._newest if p not in present and not self._queues.get(p)]:
            # it must not count as unread for ever
            self._newest_dropped = max(self._newest.pop(partition), self._newest_dropped)
        self._unanswered_since = {p: since for p, since in self._unanswered_since.items() if p in present}
        self._newer_spools &= present
        self._offline &= present

    def _fetch_partition(self, partition: Partition) -> None:
        """Fetches and decodes the next messages of a partition; stops at a gap, which the next commit records."""
        if partition in self._gaps or partition in self._newer_spools:
            return
        live, self._at_end[partition] = self._at_end.get(partition, False), False
        self._unanswered_since.setdefault(partition, self.clock())
        try:
            start = self.offsets.next_offset(partition, self.transport)
            messages = self.transport.read(partition, start, _FETCH_MESSAGES, self._fetch_bytes)
        except Retryable as error:  # find_problem() reports why; the other partitions continue
            if isinstance(error, Offline):
                self._offline.add(partition)  # until it responds
            return
        except GapError as gap:
            self._gaps[partition], self._unanswered_since[partition] = gap, self.clock()
            self._offline.discard(partition)
            self.offsets.fetched[partition] = gap.next_offset
            return
        self._unanswered_since.pop(partition, None)
        self._offline.discard(partition)
        self._at_end[partition] = not messages
        size, now, queue = 0, self.clock(), self._queues[partition]
        arrival: Arrival | None = None
        for message in messages:
            if arrival is None or message.appended not in (0, arrival.time):  # all messages of a spool arrive now
                arrival = self._arrival_of(message, now, live)
            item = self._decode(message, arrival)
            if partition.spooled and isinstance(item.body, DeadLetter) and item.body.rule == NEWER:
                self._newer_spools.add(partition)
                break
            queue.append(item)
            size += item.size
            if size > 8 * self._fetch_bytes:
                break  # highly compressed messages are decoded a few at a time
        if queue:
            self.offsets.fetched[partition] = queue[-1].message.offset + 1

    def _decode(self, message: Message, arrival: Arrival) -> Item:
        confirm = self.admission.sender_check.check_sender
        if message.partition.topic == OTLP:
            return self._foreign.decode(message, arrival, confirm)
        measure = self.senders.measure_clock
        return decode_item(message, self._columns, self._valid_shapes, arrival, measure, confirm)

    def _arrival_of(self, message: Message, now: int, live: bool) -> Arrival:
        """Arrival time of a message: the broker's, else now. live: everything before it was read already."""
        time = message.appended or now
        return Arrival(time, time + self.senders.bound, live or message.appended > 0)

    def _merge(self) -> list[Item]:
        """Removes whole messages from the queues, in order of event time, up to one commit."""
        heap = [(queue[0].time, i, queue) for i, queue in enumerate(self._queues.values()) if queue]
        heapq.heapify(heap)
        taken: list[Item] = []
        rows = Counter[str]()
        samples = size = 0
        while heap and len(taken) < COMMIT_MESSAGES and size < COMMIT_BYTES:
            _, i, queue = heap[0]
            item = queue[0]
            full = False
            for device_class, count in item.rows.items():
                rows[device_class] += count
                full |= rows[device_class] > COMMIT_ROWS
            if taken and (full or samples + item.samples > COMMIT_SAMPLES):
                break
            size += item.size
            taken.append(queue.popleft())
            samples += item.samples
            if not queue:
                self._fetch_partition(item.message.partition)
            if queue:
                heapq.heapreplace(heap, (queue[0].time, i, queue))
            else:
                heapq.heappop(heap)
        return taken

    def _commit(self, items: list[Item], gaps: Mapping[Partition, GapError]) -> None:
        """Stores items, then gaps. A message whose content the store refuses becomes a dead letter.

        Raises any error that is not caused by a message; then no message is searched for or dropped.
        """
        refusal: Exception | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._write_transaction(items, gaps)
            except Exception as error:
                if not is_message_fault(error):
                    raise
                refusal = error
                text = "commit of %d messages refused (attempt %d of %d): %s"
                ours = not isinstance(error, (duckdb.Error, WireError))
                log.warning(text, len(items), attempt, _ATTEMPTS, error, exc_info=ours)
        if len(items) > 1:
            half = len(items) // 2
            self._commit(items[:half], {})
            return self._commit(items[half:], gaps)
        if not items or isinstance(items[0].body, DeadLetter):
            raise Retryable(f"store {self.database.path}: refuses the gaps: {refusal}", after_s=5.0) from refusal
        return self._commit(
            [Item.from_dead_letter(DeadLetter(items[0].message, f"the store refused it: {refusal}"))], gaps
        )

    def _write_transaction(self, items: list[Item], gaps: Mapping[Partition, GapError]) -> None:
        writes = TransactionWrites(self.offsets, self.clock(), self.letter_limits, self._agents, self._inventory)
        self.letter_limits.begin(writes.now)
        self.admission.begin(writes.now)
        fresh = writes.accept_items(items, self.admission)
        for partition, gap in gaps.items():
            writes.record_lost(partition, gap)
        events = [item.body for item in fresh if isinstance(item.body, EventBatch)]
        clocks, refused = self.senders.clock_events(writes.now), self.rejections.due_events(writes.now)
        found = self._inventory.due_events(writes.now)
        events += clocks + refused + writes.admit_inventories(found, self.admission)
        rows = self._build_rows(fresh)
        writes.counters["samples"] += sum(len(block.time) * len(block.columns) for block in rows)
        writes.counters["commits"] += 1
        with self.database.transaction() as connection:
            writes.check_offsets(connection)
            self.tables.begin(connection)
            self.devices.save(connection)
            self.admission.save_owners(connection)
            writes.write_all(connection, self.tables, rows, events, self._closed)
            self._latest.cover(connection, rows)
            saved = self.senders.save(connection, writes.now)
        self.tables.commit()
        self._latest.commit(rows)
        self.devices.mark_saved()
        self.admission.commit()
        self.senders.mark_reported(clocks)
        self.rejections.mark_reported(refused)
        self._inventory.mark_reported(found)
        self.letter_limits.commit()
        if saved:
            self.senders.mark_saved(writes.now)
        self.offsets.advance(
            writes.next_offsets, writes.marks, writes.last, writes.sent, writes.gaps, writes.dropped_spools
        )
        self._committed.rows += rows
        self._committed.events += [event for batch in events for event in batch.events]
        self._committed.messages += len(items)
        self._committed.gaps += len(gaps)
        self._update_memory(fresh, writes)

    def _build_rows(self, fresh: Iterable[Item]) -> list[Rows]:
        """Rows of messages, built together for messages with the same excluded entities (usually none)."""
        alike: defaultdict[frozenset[str], list[wire.Body]] = defaultdict(list)
        for item in fresh:
            if isinstance(item.body, wire.Body):
                alike[item.excluded].append(item.body)
        found = [rows for excluded, bodies in alike.items() for rows in build_rows(bodies, self.devices, excluded)]
        return found + build_foreign_rows([i.body for i in fresh if isinstance(i.body, ForeignBatch)], self.devices)

    def _update_memory(self, fresh: list[Item], writes: TransactionWrites) -> None:
        """Updates the state in memory after a durable commit."""
        self.counters.update(writes.counters)
        self.rejected.update(writes.rejected)
        self.foreign_rejected.update(writes.foreign_rejected)
        known = self.senders.arrivals.keys()
        self.rejections.record_commit(writes.rejected_messages, writes.measured, known, writes.now)
        self.lags.record(fresh, writes.now)
        for letter, _ in writes.letters:
            self.transport.send_dead_letter(letter.message, letter.reason)
        self.counters["messages_moved"] += sum(item.shift != 0 for item in fresh)
        self._record_newest(fresh)
        if any(item.message.appended for item in fresh):  # append times are compared between senders, in their order
            self._catch_up.record_messages(list_times(fresh), writes.now, self.senders.newest)
        for sender, run in writes.accepted:
            self._record_run(sender[1], run) if sender else self._record_times(run[0])
        for partition, next_offset in writes.next_offsets.items():
            if partition in self._gaps and self._gaps[partition].next_offset == next_offset:
                del self._gaps[partition]
            self.transport.commit_offset(partition, next_offset)

    def _record_newest(self, fresh: Iterable[Item]) -> None:
        """Records the event times of stored telemetry for its partitions. Letters arrived long before."""
        last: dict[int, Item] = {}  # by identity: a partition's hash costs as much as all of this
        for item in fresh:
            if item.newest is not None:
                known = last.get(at := id(item.message.partition))
                if known is None or item.newest > (known.newest or 0):
                    last[at] = item
        for item in last.values():
            partition, newest = item.message.partition, item.newest or 0
            if not item.is_letter:
                self._newest[partition] = max(self._newest.get(partition, newest), newest)

    def _record_run(self, node: str, run: Sequence[Item]) -> None:
        """Records the event times of stored telemetry of one spool for its sender."""
        arrived = run[-1].arrived
        times = [item.newest for item in run if item.newest is not None]
        ticks = [tick for item in run if item.newest != item.time and (tick := item.tick)]
        self._agents.record(node, arrived)
        self.senders.record_telemetry(node, arrived, times, ticks[-1] if ticks else 0)

    def _record_times(self, item: Item) -> None:
        """Records the event times of a stored message for its sender."""
        if item.is_letter:
            return
        if isinstance(item.body, EventBatch):
            self.senders.record_disk_events(item.body.origin.node, item.arrived, item.body.events)
            self.senders.record_message(item.body.origin.node, item.arrived, None)
        elif isinstance(item.body, ForeignBatch):
            for samples in item.body.nodes:
                self.senders.record_message(samples.part.layout.node, item.arrived, int(samples.times[-1]))
        elif isinstance(item.body, wire.Body):
            node = item.body.layout.node
            self._agents.record(node, item.arrived)
            self.senders.record_message(node, item.arrived, item.newest, item.tick)
