"""Results of messages, written in batches: one transaction for many messages empties a long queue within seconds.

A crash before a batch is written sends its messages again with the same idempotency keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.notify.groups import GROUP_PREFIX
from pipeline.notify.held_messages import Store

MOST = 100
"""Results in one transaction. Chosen: it bounds what a crash sends again."""
LONGEST_S = 0.25
"""Longest wait of a result for its transaction (s). Chosen: pages see a delivery status that is a moment old."""
_SETTLE = """
UPDATE outbox SET state = n.state, attempts = attempts + n.tried, answer = n.answer,
    next_attempt = make_timestamptz(n.later)
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS state, unnest($3::VARCHAR[]) AS answer,
             unnest($4::BIGINT[]) AS later, unnest($5::INTEGER[]) AS tried) n
WHERE outbox.id = n.id
"""
_REFER = "INSERT OR REPLACE INTO notify_threads VALUES ($1, $2, $3, make_timestamptz($4::BIGINT))"
_FORGET = """
DELETE FROM notify_threads WHERE receiver = $1 AND thread IN (
    SELECT incident FROM outbox WHERE list_contains($2::VARCHAR[], id)
    AND kind <> 'update' AND payload ->> '$.status' = 'resolved'
    AND coalesce(payload ->> '$.fleetpulse.event', '') <> 'silenced')
"""
"""What fires again after its end is a new message there: an edit of the old one notifies no one. A silence ends nothing
for good: the message shows what becomes of it."""
_SETTLE_PARTS = """
UPDATE outbox SET state = n.state, answer = n.answer
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS state, unnest($3::VARCHAR[]) AS answer) n
WHERE outbox.part_of = n.id AND outbox.state = 'grouped'
"""
"""What a message of a group says has its result."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one message. tried: whether it counts as an attempt.  later: its next attempt (UTC us).

    reference: what the receiver calls it.  now: when (UTC us).
    """

    id: str
    incident: str
    state: str
    answer: str
    later: int
    tried: bool
    reference: str
    now: int


class Settlements:
    """Results of one receiver that are not written yet. The first is written immediately: a store that cannot write
    then stops the sending after one message."""

    def __init__(self, store: Store, receiver: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._receiver, self._monotonic = store, receiver, monotonic
        self._waiting: list[Result] = []
        self._since, self._works = 0.0, False

    def add(self, result: Result) -> None:
        """Adds a result; writes all if it is the first or no delivery, or after MOST results or LONGEST_S."""
        if not self._waiting:
            self._since = self._monotonic()
        self._waiting.append(result)
        late = self._monotonic() - self._since >= LONGEST_S
        if not self._works or result.state != "delivered" or len(self._waiting) >= MOST or late:
            self.write()

    def write(self) -> None:
        """Writes all results in one transaction."""
        if not self._waiting:
            return
        rows = [(r.id, r.state, r.answer, r.later, int(r.tried)) for r in self._waiting]
        with self._store.transaction() as connection:
            connection.execute(_SETTLE, [list(column) for column in zip(*rows, strict=True)])
            for r in self._waiting:
                if r.reference:
                    connection.execute(_REFER, [self._receiver, r.incident, r.reference, r.now])
            connection.execute(_FORGET, [self._receiver, [r.id for r in self._waiting if r.state == "delivered"]])
            done = [r for r in self._waiting if r.state != "pending" and r.incident.startswith(GROUP_PREFIX)]
            if parts := [(r.id, r.state, r.answer) for r in done]:
                connection.execute(_SETTLE_PARTS, [list(column) for column in zip(*parts, strict=True)])
        self._waiting, self._works = [], True
