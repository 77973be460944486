"""Gaps: sequences of a sender that never came. What comes later after all takes its place in the gap away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from pipeline.store.append import insert, registered, times

UNEXPLAINED = "lost before it was stored"
"""Cause of a gap until its sender's `gap` event says why."""
HOLES = 100_000
"""Gaps kept in memory so that they can heal, newest first: about 30 MB. Older ones stay counted. Chosen."""
Sender = tuple[str, str, str]
"""(topic, node, epoch): one spool."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Sequences [first, after) of one sender, found missing at `time` (UTC us)."""

    first: int
    after: int
    cause: str
    time: int

    def without(self, sequence: int) -> list[Gap]:
        """What is left of it when a sequence in it has come."""
        parts = ((self.first, sequence), (sequence + 1, self.after))
        return [Gap(first, after, self.cause, self.time) for first, after in parts if first < after]


def stored_gaps(connection: duckdb.DuckDBPyConnection) -> dict[Sender, list[Gap]]:
    """The newest HOLES gaps with an extent, by sender, in order of sequence."""
    rows = connection.execute(
        "SELECT topic, source, epoch, first_sequence, next_sequence, cause, epoch_us(time) FROM "
        "(FROM gaps WHERE next_sequence > first_sequence ORDER BY time DESC LIMIT ?) ORDER BY first_sequence",
        [HOLES],
    ).fetchall()
    out: dict[Sender, list[Gap]] = {}
    for topic, source, epoch, first, after, cause, time in rows:
        out.setdefault((topic, source, epoch), []).append(Gap(first, after, cause, time))
    return out


def insert_gaps(connection: duckdb.DuckDBPyConnection, gaps: Sequence[tuple[Sender, Gap]]) -> None:
    """New rows of `gaps`."""
    if gaps:
        insert(
            connection,
            "gaps",
            {
                "time": times([gap.time for _, gap in gaps]),
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
    """Makes the rows of the senders in `now` what it says; `before` is what the store has of them."""
    old = {(sender, gap) for sender in now for gap in before.get(sender, ())}
    new = {(sender, gap) for sender, gaps in now.items() for gap in gaps}
    gone = sorted(old - new, key=lambda pair: (pair[0], pair[1].first))
    if gone:
        _delete(connection, gone)
    insert_gaps(connection, sorted(new - old, key=lambda pair: (pair[0], pair[1].first)))


def _delete(connection: duckdb.DuckDBPyConnection, gaps: Sequence[tuple[Sender, Gap]]) -> None:
    keys = {
        "topic": [sender[0] for sender, _ in gaps],
        "source": [sender[1] for sender, _ in gaps],
        "epoch": [sender[2] for sender, _ in gaps],
        "first_sequence": [gap.first for _, gap in gaps],
        "next_sequence": [gap.after for _, gap in gaps],
    }
    names = ", ".join(keys)
    with registered(connection, "healed_gaps", keys):
        connection.execute(f"DELETE FROM gaps WHERE ({names}) IN (SELECT ({names}) FROM healed_gaps)")


def explain_gaps(connection: duckdb.DuckDBPyConnection) -> None:
    """Gaps that nobody explained get the cause that their sender's `gap` events tell."""
    connection.execute(
        """
        UPDATE gaps SET cause = told.cause FROM (
            SELECT node, json_extract_string(data, '$.topic') AS topic, json_extract_string(data, '$.epoch') AS epoch,
                   TRY_CAST(json_extract_string(data, '$.first') AS BIGINT) AS first,
                   TRY_CAST(json_extract_string(data, '$.next') AS BIGINT) AS after,
                   json_extract_string(data, '$.cause') AS cause
            FROM events WHERE kind = 'gap') told
        WHERE gaps.cause = ? AND told.cause IS NOT NULL AND gaps.source = told.node AND gaps.topic = told.topic
          AND gaps.epoch = told.epoch AND gaps.first_sequence < told.after AND gaps.next_sequence > told.first""",
        [UNEXPLAINED],
    )
