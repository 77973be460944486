"""What one transaction of ingest stores besides rows: offsets, marks of senders, gaps found or healed, letters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import duckdb
import pyarrow as pa

from pipeline import wire
from pipeline.errors import GapError, Retryable, WireError
from pipeline.intake import DeadLetter, Item
from pipeline.offsets import Offsets, stored_offsets
from pipeline.records import Event, EventBatch, Rows
from pipeline.signals import Signal, column_of
from pipeline.store import schema
from pipeline.store.append import append_rows, insert, times
from pipeline.store.events import write_events
from pipeline.store.gaps import UNEXPLAINED, Gap, Sender, explain_gaps, insert_gaps, replace_gaps
from pipeline.transport import Partition

_LAST = 1 << 62  # sequences that a store can hold
_LETTER_BYTES = 64 << 10  # of a dead letter's payload are kept
_TYPE_OF_SQL = {sql: code for code, sql in schema.SQL_TYPES.items()}


@dataclass(slots=True)
class Writes:
    """Everything that one transaction stores besides rows; nothing of it counts before it is durable."""

    offsets: Offsets
    now: int
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    next_offsets: dict[Partition, int] = field(default_factory=dict)
    marks: dict[Sender, int] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    gaps: dict[Sender, list[Gap]] = field(default_factory=dict)
    notes: list[tuple[Sender, Gap]] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
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

    def accept(self, item: Item) -> bool:
        """True if the message is new and sound; duplicates are counted, letters and gaps kept."""
        message, body = item.message, item.body
        self._passed(message.partition, message.offset, message.offset + 1)
        if isinstance(body, DeadLetter):
            self.letters.append(body)
            if message.partition.spooled:
                self._mark_passed(message.partition, message.offset)
            self.counters["dead_letters"] += 1
            return False
        envelope = wire.peek(message.value)
        node = body.layout.node if isinstance(body, wire.Body) else body.origin.node
        if not self._is_new((message.partition.topic, node, envelope.epoch.hex()), envelope.sequence):
            self.counters["duplicates"] += 1
            return False
        self.counters["messages"] += 1
        self.counters["samples"] += item.samples
        for event in body.events if isinstance(body, EventBatch) else ():
            if event.kind == "gap":
                self.told = True
                self._tell(node, event)
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
        if not (isinstance(topic, str) and isinstance(epoch, str) and isinstance(cause, str)):
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

    def write(self, connection: duckdb.DuckDBPyConnection, rows: Iterable[Rows], events: list[EventBatch]) -> None:
        """Rows, events, inventory, letters, gaps, marks and offsets."""
        total = 0
        for block in rows:
            Writes.ensure_columns(connection, block)
            append_rows(connection, block)
            total += len(block.time)
        if events:
            write_events(connection, events)
        self._write_losses(connection)
        if self.gaps or self.told:
            explain_gaps(connection)
        if self.marks:
            topics, nodes, epochs = zip(*self.marks, strict=True)
            columns = {"topic": topics, "node": nodes, "epoch": epochs, "sequence": list(self.marks.values())}
            insert(connection, "producer_mark", columns, "ON CONFLICT DO UPDATE SET sequence = excluded.sequence")
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

    def _write_losses(self, connection: duckdb.DuckDBPyConnection) -> None:
        insert_gaps(connection, self.notes)
        replace_gaps(connection, self.offsets.gaps, self.gaps)
        if self.letters:
            insert(
                connection,
                "dead_letter",
                {
                    "time": times([self.now] * len(self.letters)),
                    "topic": [letter.message.partition.topic for letter in self.letters],
                    "partition": [letter.message.partition.name for letter in self.letters],
                    "offset": [letter.message.offset for letter in self.letters],
                    "reason": [letter.reason for letter in self.letters],
                    "payload": pa.array([bytes(x.message.value[:_LETTER_BYTES]) for x in self.letters], pa.binary()),
                },
            )

    @staticmethod
    def column_types(connection: duckdb.DuckDBPyConnection, device_class: str) -> dict[str, str]:
        """Wire type of every signal column of a class that has a table."""
        rows = connection.execute(
            "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ?", [f"hot_{device_class}"]
        ).fetchall()
        return {name: _TYPE_OF_SQL[kind] for name, kind in rows if name not in ("time", "device")}

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
