"""What one transaction of ingest stores besides rows: offsets, marks of senders, gaps found or healed, letters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import duckdb
import pyarrow as pa

from pipeline.ingest.admission import Admission
from pipeline.ingest.messages import DeadLetter, Item
from pipeline.ingest.offsets import Offsets, stored_offsets
from pipeline.ingest.rejections import LetterLimits, remove_letters
from pipeline.ingest.sequences import Sequences
from pipeline.model.errors import GapError, Retryable, WireError
from pipeline.model.names import clean_text
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Event, EventBatch, Rows
from pipeline.model.signals import Signal, column_of
from pipeline.store import schema
from pipeline.store.append import append_rows, insert, registered, times
from pipeline.store.events import write_events
from pipeline.store.gaps import UNEXPLAINED, Gap, Sender, explain_gaps, insert_gaps, replace_gaps
from pipeline.transport import Message, Partition, wire

_LAST = 1 << 62  # sequences that a store can hold
_REASON = 1000  # characters of a dead letter's reason; chosen: it may quote what was sent
_TOPICS = (TELEMETRY, EVENTS)
_AHEAD = 30 * SECOND  # of a sender's clock, beyond which it says nothing of the order of messages; chosen: the lateness
_TYPE_OF_SQL = {sql: code for code, sql in schema.SQL_TYPES.items()}


@dataclass(slots=True)
class Writes:
    """Everything that one transaction stores besides rows; nothing of it counts before it is durable."""

    offsets: Offsets
    now: int
    limits: LetterLimits
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    next_offsets: dict[Partition, int] = field(default_factory=dict)
    marks: dict[Sender, int] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    sent: dict[Sender, int] = field(default_factory=dict)  # newest time at which a message was made, UTC us
    gaps: dict[Sender, list[Gap]] = field(default_factory=dict)
    notes: list[tuple[Sender, Gap]] = field(default_factory=list)
    letters: list[tuple[DeadLetter, bytes]] = field(default_factory=list)  # those kept, with the payload that is kept
    reread: list[Message] = field(default_factory=list)  # letters that leave the table, as they can be read now
    counters: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)  # letters by rule of admission
    gone: list[Sender] = field(default_factory=list)  # spools that are forgotten, as their node has so many
    refused: list[tuple[Message, str]] = field(default_factory=list)  # whole messages, with the rule
    told: bool = False  # whether an agent says that it gave messages up

    def lost(self, partition: Partition, gap: GapError) -> None:
        """Counts offsets that the transport says are gone."""
        self._passed(partition, gap.first, gap.next_offset)
        source = (partition.topic, partition.name, partition.incarnation)
        self.notes.append((source, Gap(gap.first, gap.next_offset, gap.cause, self.now)))
        self.counters["gaps"] += 1
        if partition.spooled:
            self.counters["gap_messages"] += gap.next_offset - gap.first
            self._mark_passed(partition, gap.next_offset - 1)

    def accept(self, item: Item, admission: Admission) -> Item | None:
        """What is stored of a message, None if nothing; duplicates are counted, letters and gaps kept."""
        message, body = item.message, item.body
        if item.is_letter:
            self.reread.append(message)
        else:
            self._passed(message.partition, message.offset, message.offset + 1)
        if isinstance(body, DeadLetter):
            self.refused.append((message, body.rule))
            if not self._reject(body):
                self._not_kept(body)
            if message.partition.spooled:
                self._mark_passed(message.partition, message.offset)
            return None
        node = body.layout.node if isinstance(body, wire.Body) else body.origin.node
        if not self._is_first(message, node, admission.sequences):
            return None
        admitted = admission.admit(message, body, self.now)
        for rejected in admitted.rejected:
            self._reject(DeadLetter(message, str(rejected), rejected.rule))
        if admitted.body is None:
            self.refused += [(message, rejected.rule) for rejected in admitted.rejected[:1]]
            return None
        self.counters["messages"] += 1
        for event in admitted.body.events if isinstance(admitted.body, EventBatch) else ():
            if event.kind == "gap":
                self.told = True
                self._tell(node, event)
        whole = admitted.body is body and not admitted.barred
        return item if whole else replace(item, body=admitted.body, barred=admitted.barred)

    def _reject(self, letter: DeadLetter) -> bool:
        """Whether the letter is kept; counted it is in any case."""
        self.rejected[letter.rule] += 1
        self.counters["dead_letters"] += 1
        payload = self.limits.payload(letter)
        if payload is not None:
            self.letters.append((replace(letter, reason=clean_text(letter.reason, _REASON)), payload))
        else:
            self.counters["dead_letters_not_kept"] += 1
        return payload is not None

    def _not_kept(self, letter: DeadLetter) -> None:
        """A message of which not even a letter is kept is a gap; such messages in a row are one."""
        partition, offset = letter.message.partition, letter.message.offset
        source, cause = (partition.topic, partition.name, partition.incarnation), f"dead letter not kept: {letter.rule}"
        if self.notes and self.notes[-1][0] == source:
            last = self.notes[-1][1]
            if (last.after, last.cause) == (offset, cause):
                self.notes[-1] = (source, Gap(last.first, offset + 1, cause, self.now))
                return
        self.notes.append((source, Gap(offset, offset + 1, cause, self.now)))
        self.counters["gaps"] += 1

    def _is_first(self, message: Message, node: str, sequences: Sequences) -> bool:
        """Whether a message never came. One that never came under a sequence that did is stored, and is a letter."""
        envelope = wire.unpack_envelope(message.value)
        sender, sequence = (message.partition.topic, node, envelope.epoch.hex()), envelope.sequence
        newest = self.sent.get(sender, self.offsets.sent.get(sender))
        latest = (message.appended or self.now) + _AHEAD
        made = envelope.sent if envelope.sent <= latest else None
        if self._is_new(sender, sequence):
            sequences.add(sender, sequence, message.value)
        elif sequences.repeats(sender, sequence, message.value, made, newest):
            self.counters["duplicates"] += 1
            return False
        else:
            reason = f"sequence: another message of {node} had sequence {sequence} of {message.partition.topic} before"
            self._reject(DeadLetter(message, f"{reason}; both are stored", "sequence"))
        self.sent[sender] = max(min(envelope.sent, latest), newest or 0)
        return True

    def _is_new(self, sender: Sender, sequence: int) -> bool:
        """Whether a message never came; its place in a gap is taken away, and what was passed over becomes one."""
        before = self._mark(sender)
        if sequence <= before:
            return self._healed(sender, sequence)
        self._note_gap(sender, before, sequence)
        self.marks[sender] = self.last[sender[:2]] = sequence
        return True

    def _passed(self, partition: Partition, first: int, after: int) -> None:
        self.first_offsets.setdefault(partition, first)
        self.next_offsets[partition] = after

    def _mark_passed(self, partition: Partition, sequence: int) -> None:
        """In a spool the offset is the sequence: what comes next must not look as if something were missing."""
        sender = (partition.topic, partition.name, partition.incarnation)
        self.marks[sender] = self.last[sender[:2]] = max(sequence, self._mark(sender))

    def _mark(self, sender: Sender) -> int:
        return self.marks.get(sender, self.offsets.marks.get(sender, -1))

    def _gaps_of(self, sender: Sender) -> list[Gap]:
        if sender not in self.gaps:
            self.gaps[sender] = list(self.offsets.gaps.get(sender, ()))
        return self.gaps[sender]

    def _healed(self, sender: Sender, sequence: int) -> bool:
        """Messages overtake one another where a sender sent again, or where its partition changed."""
        known: Sequence[Gap] = self.gaps[sender] if sender in self.gaps else self.offsets.gaps.get(sender, [])
        at = bisect_right(known, sequence, key=lambda gap: gap.first) - 1
        if at < 0 or sequence >= known[at].after:
            return False
        self._gaps_of(sender)[at : at + 1] = known[at].without(sequence)
        self.counters["healed"] += 1
        return True

    def _note_gap(self, sender: Sender, before: int, sequence: int) -> None:
        """Counts sequences that did not come. A spool made anew ends the old one, by how much nobody knows."""
        last = self.last.get(sender[:2], self.offsets.last.get(sender[:2]))
        if before >= 0:
            self._gap(sender, before + 1, sequence, UNEXPLAINED)
        elif last is not None:
            cause = f"new spool; the old one was stored up to sequence {last}"
            self.notes.append((sender, Gap(0, 0, cause, self.now)))
            self.counters["gaps"] += 1
            self._gap(sender, 0, sequence, UNEXPLAINED)
        else:
            self._gap(sender, 0, sequence, "sent before this store existed")

    def _tell(self, node: str, event: Event) -> None:
        """A sender says that it gave messages up: they are a gap with its cause, whether or not anything follows."""
        topic, epoch, cause = (event.data.get(name) for name in ("topic", "epoch", "cause"))
        first, after = event.data.get("first"), event.data.get("next")
        if topic not in _TOPICS or not (isinstance(epoch, str) and isinstance(cause, str)):
            return
        if not (isinstance(first, int) and isinstance(after, int) and 0 <= first < after <= _LAST):
            return
        sender = (topic, node, epoch)
        before = self._mark(sender)
        if after - 1 > before:
            self._note_gap(sender, before, max(first, before + 1))
            self._gap(sender, max(first, before + 1), after, cause)
            self.marks[sender] = self.last[sender[:2]] = after - 1

    def _gap(self, sender: Sender, first: int, after: int, cause: str) -> None:
        if first >= after:
            return
        self._gaps_of(sender).append(Gap(first, after, cause, self.now))
        self.counters["gaps"] += 1
        self.counters["gap_messages"] += after - first

    # --- inside the transaction ---------------------------------------------------------------------------------

    def check(self, connection: duckdb.DuckDBPyConnection) -> None:
        """The store must stand where memory thinks it stands, in every partition. Raises Retryable if it does not.

        Another writer moved it then; what else memory holds, such as ids of devices, is stale too. Only a restart,
        which reads it all again, goes on from there.
        """
        durable = self.offsets.durable
        moved = (
            (p, found, durable.get(p)) for p, found in stored_offsets(connection).items() if found != durable.get(p)
        )
        skipped = ((p, durable[p], first) for p, first in self.first_offsets.items() if first != durable.get(p, first))
        for partition, found, wanted in itertools.chain(moved, skipped):
            raise Retryable(
                f"{partition.topic}/{partition.name}: the store stands at offset {found}, wanted {wanted}: another "
                "pipeline wrote to it"
            )

    def write(
        self, connection: duckdb.DuckDBPyConnection, rows: Iterable[Rows], events: list[EventBatch], closed: int
    ) -> None:
        """Rows, events, inventory, letters, gaps, marks and offsets. closed: frames before it are closed."""
        total = 0
        for block in rows:
            Writes.ensure_columns(connection, block)
            append_rows(connection, block, closed)
            total += len(block.time)
        if events:
            write_events(connection, events, closed)
        self._write_losses(connection)
        if self.gaps or self.told:
            explain_gaps(connection)
        self._write_marks(connection)
        partitions = list(self.next_offsets)
        insert(
            connection,
            "ingest_commit",
            {
                "topic": [p.topic for p in partitions],
                "partition": [p.name for p in partitions],
                "incarnation": [p.incarnation for p in partitions],
                "first_offset": [self.first_offsets[p] for p in partitions],
                "next_offset": [self.next_offsets[p] for p in partitions],
                "rows": [total] * len(partitions),
                "committed": times([self.now] * len(partitions)),
            },
        )

    def _write_marks(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.gone = self.offsets.over(self.marks)
        if known := [sender for sender in self.gone if sender in self.offsets.marks]:
            spools = dict(zip(("topic", "node", "epoch"), zip(*known, strict=True), strict=True))
            with registered(connection, "forgotten_spools", spools):
                connection.execute(
                    "DELETE FROM producer_mark WHERE (topic, node, epoch) IN (SELECT (topic, node, epoch) "
                    "FROM forgotten_spools)"
                )
        forgotten = set(self.gone)
        senders = [sender for sender in self.marks | self.sent if sender not in forgotten]
        if not senders:
            return
        topics, nodes, epochs = zip(*senders, strict=True)
        columns = {
            "topic": topics,
            "node": nodes,
            "epoch": epochs,
            "sequence": [self._mark(s) for s in senders],
            "sent": pa.array([self.sent.get(s, self.offsets.sent.get(s)) for s in senders], pa.int64()),
            "updated": times([self.now] * len(senders)),
        }
        renew = "sequence = excluded.sequence, sent = excluded.sent, updated = excluded.updated"
        insert(connection, "producer_mark", columns, f"ON CONFLICT (topic, node, epoch) DO UPDATE SET {renew}")

    def _write_losses(self, connection: duckdb.DuckDBPyConnection) -> None:
        remove_letters(connection, self.reread)
        insert_gaps(connection, self.notes)
        replace_gaps(connection, self.offsets.gaps, self.gaps)
        if self.letters:
            letters, payloads = zip(*self.letters, strict=True)
            insert(
                connection,
                "dead_letter",
                {
                    "time": times([self.now] * len(letters)),
                    "topic": [letter.message.partition.topic for letter in letters],
                    "partition": [letter.message.partition.name for letter in letters],
                    "offset": [letter.message.offset for letter in letters],
                    "reason": [letter.reason for letter in letters],
                    "rule": [letter.rule for letter in letters],
                    "payload": pa.array(payloads, pa.binary()),
                    "key": pa.array([letter.message.key for letter in letters], pa.binary()),
                    "signature": pa.array([letter.message.signature for letter in letters], pa.binary()),
                },
            )

    @staticmethod
    def column_types(connection: duckdb.DuckDBPyConnection, device_class: str) -> dict[str, str]:
        """Wire type of every signal column of a class that has a table."""
        rows = connection.execute(
            "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ?", [f"hot_{device_class}"]
        ).fetchall()
        return {name: _TYPE_OF_SQL[kind] for name, kind in rows if name not in schema.RESERVED}

    @staticmethod
    def ensure_columns(connection: duckdb.DuckDBPyConnection, rows: Rows) -> None:
        """Columns for signals that no batch had before."""
        known = Writes.column_types(connection, rows.device_class)
        new = []
        for name, values in rows.columns.items():
            code, column = f"{values.dtype.kind}{values.dtype.itemsize}", column_of(name, rows.device_class)
            if known.get(column, code) != code:
                raise WireError(f"{name}: values of type {code}, wanted {known[column]}: senders disagree")
            if column not in known:
                new.append(Signal(name, "1", "gauge", rows.device_class, code, "not in the catalogue"))
        if new or not known:
            schema.ensure_class(connection, rows.device_class, new)
