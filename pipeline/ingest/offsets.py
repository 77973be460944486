"""Where ingest stands in its input, as the store has it: offsets of partitions, sequences of spools."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import duckdb

from pipeline.store.gaps import HOLES, Gap, Sender, stored_gaps
from pipeline.transport import Partition, Transport

SPOOLS = 16
"""Spools that are known of one node and topic, those heard last. A spool is made anew only when its disk was lost or
its machine copied; beyond so many, who makes them up forgets its own. Chosen."""
STREAMS = 400_000
"""Nodes and topics of which spools are known, those heard last: 100 MB. Chosen: twice the senders (senders.py), as each
has two topics."""


class Offsets:
    """Where ingest stands: the next offset of each partition, the highest sequence and the gaps of each sender.

    sent: newest time at which each sender made a message, UTC us; None where an older version stored the sequence.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._next = stored_offsets(connection)
        marks = connection.execute(
            "SELECT topic, node, epoch, sequence, sent FROM producer_mark ORDER BY updated NULLS FIRST"
        ).fetchall()
        self.marks: dict[Sender, int] = {(topic, node, epoch): mark for topic, node, epoch, mark, _ in marks}
        self.sent: dict[Sender, int | None] = {(topic, node, epoch): sent for topic, node, epoch, _, sent in marks}
        self._spools: dict[tuple[str, str], dict[str, None]] = {}  # epochs by (topic, node), the newest last
        self._hear(self.marks)
        self.last: dict[tuple[str, str], int] = {}
        for (topic, node, _), sequence in self.marks.items():
            self.last[topic, node] = max(sequence, self.last.get((topic, node), -1))
        self.gaps = stored_gaps(connection)
        self._held = sum(map(len, self.gaps.values()))
        self.fetched: dict[Partition, int] = {}
        self.durable: dict[Partition, int] = dict(self._next)

    def next(self, partition: Partition, transport: Transport) -> int:
        """Offset to fetch from. A partition that begins anew is read from its start."""
        if partition not in self.fetched:
            start = self._next.get(partition)
            self.fetched[partition] = self._first(partition, transport) if start is None else start
            self.durable.setdefault(partition, self.fetched[partition])
        return self.fetched[partition]

    def _first(self, partition: Partition, transport: Transport) -> int:
        """Where a partition begins that the store does not know; one that it knows by name was made anew."""
        anew = any(p.topic == partition.topic and p.name == partition.name for p in self._next)
        return transport.bounds(partition)[0] if anew else 0

    def advance(
        self,
        next_offsets: Mapping[Partition, int],
        marks: Mapping[Sender, int],
        last: Mapping[tuple[str, str], int],
        sent: Mapping[Sender, int],
        gaps: Mapping[Sender, list[Gap]],
        gone: Iterable[Sender] = (),
    ) -> None:
        """Takes over what a commit made durable. gone: spools that left the store."""
        self.durable.update(next_offsets)
        self._next.update(next_offsets)
        self.marks.update(marks)
        self.last.update(last)
        self.sent.update(sent)
        self._hear(marks)
        for sender in gone:
            self._forget(sender)
        for sender, left in gaps.items():
            self._held += len(left) - len(self.gaps.pop(sender, ()))
            if left:
                self.gaps[sender] = left
        while self._held > HOLES:  # those of the sender that found none for longest; they stay counted
            self._held -= len(self.gaps.pop(next(iter(self.gaps))))

    def over(self, marks: Iterable[Sender]) -> list[Sender]:
        """Spools that are forgotten once `marks` are known too: beyond SPOOLS of a node, and STREAMS in all."""
        fresh: dict[tuple[str, str], dict[str, None]] = {}
        for topic, node, epoch in marks:
            if (topic, node, epoch) not in self.marks:
                known = fresh.setdefault((topic, node), dict(self._spools.get((topic, node), ())))
                known[epoch] = None
        more = len(self._spools) + sum(stream not in self._spools for stream in fresh) - STREAMS
        oldest = itertools.islice((s for s in self._spools if s not in fresh), max(0, more))
        gone = [(*stream, epoch) for stream in oldest for epoch in self._spools[stream]]
        return gone + [(*stream, epoch) for stream, known in fresh.items() for epoch in [*known][:-SPOOLS]]

    def _hear(self, marks: Iterable[Sender]) -> None:
        for topic, node, epoch in marks:
            known = self._spools.pop((topic, node), {})
            known.pop(epoch, None)
            known[epoch] = None
            self._spools[topic, node] = known

    def _forget(self, sender: Sender) -> None:
        topic, node, epoch = sender
        self.marks.pop(sender, None)
        self.sent.pop(sender, None)
        known = self._spools.get((topic, node), {})
        known.pop(epoch, None)
        if not known:
            self._spools.pop((topic, node), None)
            self.last.pop((topic, node), None)

    def forget_gaps(self, before: int) -> None:
        """Gaps found before then (us) left the store, counted in its totals: they no longer heal."""
        for sender, gaps in list(self.gaps.items()):
            kept = [gap for gap in gaps if gap.time >= before]
            self._held -= len(gaps) - len(kept)
            if kept:
                self.gaps[sender] = kept
            else:
                del self.gaps[sender]


def stored_offsets(connection: duckdb.DuckDBPyConnection) -> dict[Partition, int]:
    """Next offset of every partition, as the store has it."""
    rows = connection.execute(
        "SELECT topic, partition, incarnation, max(next_offset) FROM ingest_commit GROUP BY ALL"
    ).fetchall()
    return {Partition(topic, name, incarnation): offset for topic, name, incarnation, offset in rows}
