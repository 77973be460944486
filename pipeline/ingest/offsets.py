"""Positions of ingest in its input, as stored: next offsets of partitions, sequence marks and gaps of senders."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import duckdb

from pipeline.store.gaps import MAX_GAPS, Gap, Sender, load_gaps
from pipeline.transport import Partition, Transport

MAX_SPOOLS = 16
"""Most recent spools kept per node and topic. A new spool is created only after a lost disk or a cloned machine; a node
that makes up more loses its own. Chosen."""
MAX_STREAMS = 400_000
"""Most recent (topic, node) pairs kept: 100 MB. Chosen: twice the senders (senders.py), each with two topics."""


class Offsets:
    """Next offset of each partition; highest sequence number and gaps of each sender.

    sent: newest `sent` time of each sender, UTC us; None if stored by an older version.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._next_offsets = load_offsets(connection)
        marks = connection.execute(
            "SELECT topic, node, epoch, sequence, sent FROM producer_mark ORDER BY updated NULLS FIRST"
        ).fetchall()
        self.marks: dict[Sender, int] = {(topic, node, epoch): mark for topic, node, epoch, mark, _ in marks}
        self.sent: dict[Sender, int | None] = {(topic, node, epoch): sent for topic, node, epoch, _, sent in marks}
        self._spools: dict[tuple[str, str], dict[str, None]] = {}  # epochs by (topic, node), the newest last
        self._track_spools(self.marks)
        self.last: dict[tuple[str, str], int] = {}
        for (topic, node, _), sequence in self.marks.items():
            self.last[topic, node] = max(sequence, self.last.get((topic, node), -1))
        self.gaps = load_gaps(connection)
        self._gap_count = sum(map(len, self.gaps.values()))
        self.fetched: dict[Partition, int] = {}
        self.durable: dict[Partition, int] = dict(self._next_offsets)

    def next_offset(self, partition: Partition, transport: Transport) -> int:
        """Offset to fetch from. A new partition is read from its start."""
        if partition not in self.fetched:
            start = self._next_offsets.get(partition)
            self.fetched[partition] = self._first_offset(partition, transport) if start is None else start
            self.durable.setdefault(partition, self.fetched[partition])
        return self.fetched[partition]

    def _first_offset(self, partition: Partition, transport: Transport) -> int:
        """First offset of a partition that is not in the store; one with a known name was recreated."""
        replaced = any(p.topic == partition.topic and p.name == partition.name for p in self._next_offsets)
        return transport.bounds(partition)[0] if replaced else 0

    def advance(
        self,
        next_offsets: Mapping[Partition, int],
        marks: Mapping[Sender, int],
        last: Mapping[tuple[str, str], int],
        sent: Mapping[Sender, int],
        gaps: Mapping[Sender, list[Gap]],
        dropped: Iterable[Sender] = (),
    ) -> None:
        """Applies a durable commit. dropped: spools removed from the store."""
        self.durable.update(next_offsets)
        self._next_offsets.update(next_offsets)
        self.marks.update(marks)
        self.last.update(last)
        self.sent.update(sent)
        self._track_spools(marks)
        for sender in dropped:
            self._drop_spool(sender)
        for sender, left in gaps.items():
            self._gap_count += len(left) - len(self.gaps.pop(sender, ()))
            if left:
                self.gaps[sender] = left
        while self._gap_count > MAX_GAPS:  # drops those of the sender without a new gap for longest; they stay counted
            self._gap_count -= len(self.gaps.pop(next(iter(self.gaps))))

    def spools_over_limit(self, marks: Iterable[Sender]) -> list[Sender]:
        """Spools to drop when `marks` are added: above MAX_SPOOLS of a node, and MAX_STREAMS in total."""
        fresh: dict[tuple[str, str], dict[str, None]] = {}
        for topic, node, epoch in marks:
            if (topic, node, epoch) not in self.marks:
                known = fresh.setdefault((topic, node), dict(self._spools.get((topic, node), ())))
                known[epoch] = None
        more = len(self._spools) + sum(stream not in self._spools for stream in fresh) - MAX_STREAMS
        oldest = itertools.islice((s for s in self._spools if s not in fresh), max(0, more))
        dropped = [(*stream, epoch) for stream in oldest for epoch in self._spools[stream]]
        return dropped + [(*stream, epoch) for stream, known in fresh.items() for epoch in [*known][:-MAX_SPOOLS]]

    def _track_spools(self, marks: Iterable[Sender]) -> None:
        for topic, node, epoch in marks:
            known = self._spools.pop((topic, node), {})
            known.pop(epoch, None)
            known[epoch] = None
            self._spools[topic, node] = known

    def _drop_spool(self, sender: Sender) -> None:
        topic, node, epoch = sender
        self.marks.pop(sender, None)
        self.sent.pop(sender, None)
        known = self._spools.get((topic, node), {})
        known.pop(epoch, None)
        if not known:
            self._spools.pop((topic, node), None)
            self.last.pop((topic, node), None)

    def drop_gaps(self, before: int) -> None:
        """Drops gaps found before `before` (us), which retention removed: they can no longer heal."""
        for sender, gaps in list(self.gaps.items()):
            kept = [gap for gap in gaps if gap.time >= before]
            self._gap_count -= len(gaps) - len(kept)
            if kept:
                self.gaps[sender] = kept
            else:
                del self.gaps[sender]


def load_offsets(connection: duckdb.DuckDBPyConnection) -> dict[Partition, int]:
    """Next offset of every partition, from the store."""
    rows = connection.execute("SELECT topic, partition, incarnation, next_offset FROM partition_offset").fetchall()
    return {Partition(topic, name, incarnation): offset for topic, name, incarnation, offset in rows}
