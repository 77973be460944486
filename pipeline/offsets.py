"""Where ingest stands in its input, as the store has it: offsets of partitions, sequences of spools."""

from __future__ import annotations

from collections.abc import Mapping

import duckdb

from pipeline.signals import CLASSES
from pipeline.store.database import Database
from pipeline.store.gaps import HOLES, Gap, Sender, stored_gaps
from pipeline.transport import Partition, Transport


class Offsets:
    """Where ingest stands: the next offset of each partition, the highest sequence and the gaps of each sender."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._next = stored_offsets(connection)
        self.marks: dict[Sender, int] = {
            (topic, node, epoch): sequence
            for topic, node, epoch, sequence in connection.execute(
                "SELECT topic, node, epoch, sequence FROM producer_mark"
            ).fetchall()
        }
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
        gaps: Mapping[Sender, list[Gap]],
    ) -> None:
        """Takes over what a commit made durable."""
        self.durable.update(next_offsets)
        self._next.update(next_offsets)
        self.marks.update(marks)
        self.last.update(last)
        for sender, left in gaps.items():
            self._held += len(left) - len(self.gaps.pop(sender, ()))
            if left:
                self.gaps[sender] = left
        while self._held > HOLES:  # those of the sender that found none for longest; they stay counted
            self._held -= len(self.gaps.pop(next(iter(self.gaps))))


def stored_offsets(connection: duckdb.DuckDBPyConnection) -> dict[Partition, int]:
    """Next offset of every partition, as the store has it."""
    rows = connection.execute(
        "SELECT topic, partition, incarnation, max(next_offset) FROM ingest_commit GROUP BY ALL"
    ).fetchall()
    return {Partition(topic, name, incarnation): offset for topic, name, incarnation, offset in rows}


def stored_senders(database: Database) -> dict[str, int]:
    """Newest event time of every node that ever sent telemetry: a restart must not forget who is silent."""
    each = " UNION ALL ".join(
        f"SELECT d.node, l.time FROM latest_{c} l JOIN device d ON d.id = l.device AND d.class = '{c}'" for c in CLASSES
    )
    with database.lock:
        rows = database.connection.execute(f"SELECT node, epoch_us(max(time)) FROM ({each}) GROUP BY node").fetchall()
    return dict(rows)
