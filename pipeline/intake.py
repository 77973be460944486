"""What ingest decides about one message: is it sound, is it new, which rows and which records of loss does it leave."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa

from pipeline import wire
from pipeline.errors import GapError, Retryable, WireError
from pipeline.offsets import Offsets, stored_offsets
from pipeline.records import EventBatch, Rows
from pipeline.signals import CATALOGUE, CLASSES, Signal, column_of
from pipeline.store import schema
from pipeline.store.append import append_rows, insert, times
from pipeline.store.devices import Devices
from pipeline.store.events import write_events
from pipeline.transport import Message, Partition

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_EARLIEST, _LATEST = 946_684_800_000_000, 7_258_118_400_000_000  # years 2000 to 2200: else a clock is broken
_COLUMNS = 512  # bound of columns of one class
_LETTER_BYTES = 64 << 10  # of a dead letter's payload are kept
_TYPE_OF_SQL = {sql: code for code, sql in schema.SQL_TYPES.items()}
Types = Callable[[str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that can never be stored, with the reason."""

    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Item:
    """A fetched message: its content, and what the merge needs to know of it. `rows`: class -> number of rows."""

    message: Message
    body: wire.Body | EventBatch | DeadLetter
    time: int
    newest: int | None
    rows: Mapping[str, int]
    samples: int

    @classmethod
    def dead(cls, letter: DeadLetter) -> Item:
        return cls(letter.message, letter, 0, None, {}, 0)


def decode_item(message: Message, types: Types, sound: set[wire.Shape]) -> Item:
    """The message opened and checked; a DeadLetter if that fails.

    types: class -> wire types of its columns.  sound: shapes that passed before; those found sound are added.
    """
    try:
        if wire.peek(message.value).kind == wire.EVENTS_KIND:
            return _event_item(message, wire.decode_events(message.value))
        body = wire.open_telemetry(message.value)
        if body.layout.shape not in sound:
            _check_shape(body.layout.shape, types)
            sound.add(body.layout.shape)
        return _telemetry_item(message, body)
    except WireError as error:
        return Item.dead(DeadLetter(message, str(error)))


def _event_item(message: Message, batch: EventBatch) -> Item:
    stamps = [event.time for event in batch.events] or [0]
    _check_times(min(stamps) if batch.events else _EARLIEST, max(stamps) if batch.events else _EARLIEST)
    return Item(message, batch, stamps[0], None, {"events": len(batch.events)}, 0)


def _check_shape(shape: wire.Shape, types: Types) -> None:
    for device_class, _, signals in shape.blocks:
        _check_block(device_class, signals, types(device_class) if device_class in CLASSES else {})


def _telemetry_item(message: Message, body: wire.Body) -> Item:
    shape = body.layout.shape
    stamps = np.frombuffer(body.data, "<i8", body.ticks)
    first, last = int(stamps.min()), int(stamps.max())
    _check_times(first, last)
    rows = {device_class: devices * body.ticks for device_class, devices, _ in shape.blocks}
    return Item(message, body, first, last, rows, shape.samples * body.ticks)


def _check_times(first: int, last: int) -> None:
    if first < _EARLIEST or last > _LATEST:
        raise WireError(f"event times from {first} to {last} us, wanted years 2000 to 2200: the node's clock is broken")


def _check_block(device_class: str, signals: Sequence[tuple[str, str]], known: Mapping[str, str]) -> None:
    """The class must be ours, names fit for columns, and a signal must have the type of its column."""
    if device_class not in CLASSES:
        raise WireError(f"device class {device_class!r}: wanted one of {', '.join(CLASSES)}: upgrade the pipeline")
    if len({column_of(name, device_class) for name, _ in signals}) < len(signals):
        raise WireError(f"class {device_class}: two signals would share one column")
    for name, code in signals:
        wanted = known.get(column_of(name, device_class))
        if wanted is None and not _NAME.fullmatch(name):
            raise WireError(f"signal {name!r}: wanted lower-case words and dots, at most 64 characters")
        if wanted is not None and wanted != code:
            raise WireError(f"{name}: values of type {code}, wanted {wanted}: upgrade the older side")
        if column_of(name, device_class) in ("time", "entity", "device"):
            raise WireError(f"signal {name!r}: this name is taken by the store")
    if len(known) + len(signals) > _COLUMNS + len(CATALOGUE):
        raise WireError(f"class {device_class}: more than {_COLUMNS} columns")


def to_rows(bodies: Sequence[wire.Body], devices: Devices) -> list[Rows]:
    """Rows of the bodies, one Rows per block of each shape; values are copied once, into contiguous columns."""
    out = []
    for joined in wire.join(bodies):
        messages, ticks = joined.times.shape
        for device_class, names, columns in joined.blocks:
            width = len(names[0])
            if not width:
                continue
            ids = np.stack(
                [
                    devices.ids(device_class, b.layout.site, b.layout.node, b.envelope.simulated, entities)
                    for b, entities in zip(joined.bodies, names, strict=True)
                ]
            )
            time = np.repeat(joined.times.reshape(-1), width)
            device = np.broadcast_to(ids[:, None, :], (messages, ticks, width)).reshape(-1)
            out.append(Rows(device_class, time, device, {n: v.reshape(-1) for n, v in columns.items()}))
    return out


@dataclass(slots=True)
class Writes:
    """Everything that one transaction stores besides rows; nothing of it counts before it is durable."""

    offsets: Offsets
    now: int
    first_offsets: dict[Partition, int] = field(default_factory=dict)
    next_offsets: dict[Partition, int] = field(default_factory=dict)
    marks: dict[tuple[str, str, str], int] = field(default_factory=dict)
    last: dict[tuple[str, str], int] = field(default_factory=dict)
    gaps: list[tuple[str, str, str, int, int, str]] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)

    def lost(self, partition: Partition, gap: GapError) -> None:
        """Counts offsets that the transport says are gone. In a spool offsets are sequence numbers."""
        self._passed(partition, gap.first, gap.next_offset)
        self._gap(partition.topic, partition.name, partition.incarnation, gap.first, gap.next_offset, gap.cause)
        mark = (partition.topic, partition.name, partition.incarnation)
        self.marks[mark] = max(gap.next_offset - 1, self._mark(mark))
        self.last[mark[:2]] = gap.next_offset - 1

    def accept(self, item: Item) -> bool:
        """True if the message is new and sound; duplicates are counted, letters and holes kept."""
        message, body = item.message, item.body
        self._passed(message.partition, message.offset, message.offset + 1)
        if isinstance(body, DeadLetter):
            self.letters.append(body)
            mark = (message.partition.topic, message.partition.name, message.partition.incarnation)
            # in a spool the offset is the sequence: what comes next must not look as if something were missing
            self.marks[mark] = self.last[mark[:2]] = max(message.offset, self._mark(mark))
            self.counters["dead_letters"] += 1
            return False
        envelope = wire.peek(message.value)
        node = body.layout.node if isinstance(body, wire.Body) else body.origin.node
        mark = (message.partition.topic, node, envelope.epoch.hex())
        before = self._mark(mark)
        if envelope.sequence <= before:
            self.counters["duplicates"] += 1
            return False
        self._hole(mark, before, envelope.sequence)
        self.marks[mark] = self.last[mark[:2]] = envelope.sequence
        self.counters["messages"] += 1
        self.counters["samples"] += item.samples
        return True

    def _passed(self, partition: Partition, first: int, after: int) -> None:
        self.first_offsets.setdefault(partition, first)
        self.next_offsets[partition] = after

    def _mark(self, mark: tuple[str, str, str]) -> int:
        return self.marks.get(mark, self.offsets.marks.get(mark, -1))

    def _hole(self, mark: tuple[str, str, str], before: int, sequence: int) -> None:
        """Counts sequence numbers that never came. A spool made anew ends the old one, by how much nobody knows."""
        topic, node, epoch = mark
        last = self.last.get((topic, node), self.offsets.last.get((topic, node)))
        if before >= 0 or (last is not None and sequence > last):
            expected = (before if before >= 0 else last or 0) + 1
            if sequence > expected:
                self._gap(topic, node, epoch, expected, sequence, "lost before the transport")
        elif last is not None:
            self._gap(topic, node, epoch, 0, 0, f"new spool; the old one was stored up to sequence {last}")
        elif sequence > 0:
            self._gap(topic, node, epoch, 0, sequence, "sent before this store existed")

    def _gap(self, topic: str, source: str, epoch: str, first: int, after: int, cause: str) -> None:
        self.gaps.append((topic, source, epoch, first, after, cause))
        self.counters["gaps"] += 1
        self.counters["gap_messages"] += after - first

    # --- inside the transaction ---------------------------------------------------------------------------------

    def check(self, connection: duckdb.DuckDBPyConnection) -> None:
        """The store must stand where memory thinks it stands. Raises Retryable if another writer moved it."""
        stored = stored_offsets(connection)
        for partition, first in self.first_offsets.items():
            wanted = self.offsets.durable.get(partition, first)
            found = stored.get(partition, wanted)
            if found != wanted or first != wanted:
                raise Retryable(
                    f"{partition.topic}/{partition.name}: the store stands at offset {found}, wanted {wanted} to store "
                    f"from {first}: another pipeline wrote to it"
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
        if self.gaps:
            names = ("topic", "source", "epoch", "first_sequence", "next_sequence", "cause")
            columns = dict(zip(names, map(list, zip(*self.gaps, strict=True)), strict=True))
            insert(connection, "gaps", {"time": times([self.now] * len(self.gaps)), **columns})
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
