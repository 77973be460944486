"""Gaps: missing sequence numbers of a sender. A message that arrives late is removed from its gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.store.append import insert_columns, register_columns, to_timestamps

UNEXPLAINED = "lost before it was stored"
"""Cause of a gap until a `gap` event of its sender gives the cause."""
MAX_GAPS = 100_000
"""Newest gaps kept in memory so that they can heal: about 30 MB. Older ones stay counted. Chosen."""
Sender = tuple[str, str, str]
"""(topic, node, epoch) of one spool."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Sequence numbers [first, after) of a sender, found missing at `time` (UTC us)."""

    first: int
    after: int
    cause: str
    time: int

    def split_at(self, sequence: int) -> list[Gap]:
        """The rest of the gap without `sequence`: up to two gaps."""
        parts = ((self.first, sequence), (sequence + 1, self.after))
        return [Gap(first, after, self.cause, self.time) for first, after in parts if first < after]


def load_gaps(connection: duckdb.DuckDBPyConnection) -> dict[Sender, list[Gap]]:
    """The newest MAX_GAPS non-empty gaps by sender, in order of sequence number."""
    rows = connection.execute(
        "SELECT topic, source, epoch, first_sequence, next_sequence, cause, epoch_us(time) FROM "
        "(FROM gaps WHERE next_sequence > first_sequence ORDER BY time DESC LIMIT ?) ORDER BY first_sequence",
        [MAX_GAPS],
    ).fetchall()
    out: dict[Sender, list[Gap]] = {}
    for topic, source, epoch, first, after, cause, time in rows:
        out.setdefault((topic, source, epoch), []).append(Gap(first, after, cause, time))
    return out


def insert_gaps(connection: duckdb.DuckDBPyConnection, gaps: Sequence[tuple[Sender, Gap]]) -> None:
    """Inserts rows into `gaps`."""
    if gaps:
        insert_columns(
            connection,
            "gaps",
            {
                "time": to_timestamps([gap.time for _, gap in gaps]),
                "topic": [sender[0] for sender, _ in gaps],
                "source": [sender[1] for sender, _ in gaps],
                "epoch": [sender[2] for sender, _ in gaps],
                "first_sequence": [gap.first for _, gap in gaps],
                "next_sequence": [gap.after for _, gap in gaps],
                "cause": [gap.cause for _, gap in gaps],
            },
        )


def replace_gaps(
    connection: duckdb.DuckDBPyConnection,
    before: Mapping[Sender, Sequence[Gap]],
    now: Mapping[Sender, Sequence[Gap]],
) -> None:
    """Replaces the stored gaps of the senders in `now`; `before` is what the store has."""
    old = {(sender, gap) for sender in now for gap in before.get(sender, ())}
    new = {(sender, gap) for sender, gaps in now.items() for gap in gaps}
    removed = sorted(old - new, key=lambda pair: (pair[0], pair[1].first))
    if removed:
        _delete_gaps(connection, removed)
    insert_gaps(connection, sorted(new - old, key=lambda pair: (pair[0], pair[1].first)))


def _delete_gaps(connection: duckdb.DuckDBPyConnection, gaps: Sequence[tuple[Sender, Gap]]) -> None:
    keys = {
        "topic": [sender[0] for sender, _ in gaps],
        "source": [sender[1] for sender, _ in gaps],
        "epoch": [sender[2] for sender, _ in gaps],
        "first_sequence": [gap.first for _, gap in gaps],
        "next_sequence": [gap.after for _, gap in gaps],
    }
    names = ", ".join(keys)
    with register_columns(connection, "healed_gaps", keys):
        connection.execute(f"DELETE FROM gaps WHERE ({names}) IN (SELECT ({names}) FROM healed_gaps)")


def explain_gaps(connection: duckdb.DuckDBPyConnection) -> None:
    """Sets the cause of unexplained gaps from the `gap` events of their senders."""
    connection.execute(
        """
        UPDATE gaps SET cause = reported.cause FROM (
            SELECT node, json_extract_string(data, '$.topic') AS topic, json_extract_string(data, '$.epoch') AS epoch,
                   TRY_CAST(json_extract_string(data, '$.first') AS BIGINT) AS first,
                   TRY_CAST(json_extract_string(data, '$.next') AS BIGINT) AS after,
                   json_extract_string(data, '$.cause') AS cause
            FROM events WHERE kind = 'gap') reported
        WHERE gaps.cause = ? AND reported.cause IS NOT NULL AND gaps.source = reported.node
          AND gaps.topic = reported.topic AND gaps.epoch = reported.epoch
          AND gaps.first_sequence < reported.after AND gaps.next_sequence > reported.first""",
        [UNEXPLAINED],
    )
