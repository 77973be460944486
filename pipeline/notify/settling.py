"""Results of messages, written in batches: one transaction for many messages empties a long queue within seconds.

A crash before a batch is written sends its messages again with the same idempotency keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.notify.held_messages import GROUP_PREFIX, Store

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
_SETTLE_PARTS = """
WITH said AS (
    SELECT alert ->> '$.fingerprint' AS fingerprint, alert ->> '$.status' = 'resolved' AS has_ended
    FROM (SELECT unnest(from_json(payload -> '$.alerts', '["JSON"]')) AS alert FROM outbox WHERE id = $6)),
parts AS (
    SELECT o.id, o.number, o.incident, fingerprint, (o.kind = 'resolved') = has_ended AS is_said
    FROM outbox o JOIN said ON fingerprint = o.payload ->> '$.alerts[0].fingerprint'
    WHERE o.receiver = $1 AND o.part_of = $2 AND o.state = 'grouped' AND epoch_us(o.created) <= $3),
said_last AS (
    SELECT *, max(number) FILTER (is_said) OVER (PARTITION BY incident, fingerprint) AS newest FROM parts),
found AS (
    SELECT id, is_said AND number > coalesce(max(number) FILTER (NOT is_said AND number < newest)
               OVER (PARTITION BY incident, fingerprint), -1) AS is_newest
    FROM said_last WHERE number <= newest)
UPDATE outbox SET state = CASE WHEN is_newest THEN $4 ELSE 'muted' END,
    answer = CASE WHEN is_newest THEN $5 ELSE 'replaced by a later message' END
FROM found WHERE outbox.id = found.id
"""
"""What was in a message has its result: a row that fires an alert if the message fires it, a row that ends it if the
message ends it. What another row replaced before it was in a message is in none. The others wait in the group, as what
an inhibition kept out of it does."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one message. tried: whether it counts as an attempt.  later: its next attempt (UTC us).

    reference: what the receiver calls it.  now: when (UTC us).
    """

    id: str
    incident: str
    created: int
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
                if r.state != "pending" and r.incident.startswith(GROUP_PREFIX):
                    connection.execute(_SETTLE_PARTS, [self._receiver, r.incident, r.created, r.state, r.answer, r.id])
        self._waiting, self._works = [], True
