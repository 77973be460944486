"""How long messages, and groups of alerts, are kept."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from pipeline.incidents.ledger import NOT_CONFIGURED
from pipeline.model.records import SECOND
from pipeline.notify.groups import GROUP_PREFIX
from pipeline.store.retention import FIRES, SENT_KEPT

RETENTION_S = SENT_KEPT // SECOND
"""Retention of delivered and dead payloads of resolved incidents, and of pending payloads for a receiver that is down
(s); resolves of alerts that it received are kept for longer. Chosen."""
EXPIRED = "older than 7 days; "
"""Begins the answer of a message that waited for its receiver for too long: nothing else held it back."""
_REMOVED = f"""
UPDATE outbox SET state = 'dead',
    answer = '{NOT_CONFIGURED}' || CASE WHEN attempts > 0 OR answer <> '' THEN concat('; ', answer) ELSE '' END
WHERE state IN ('pending', 'held') AND NOT list_contains($1::VARCHAR[], receiver)
AND (NOT starts_with(incident, '{GROUP_PREFIX}') OR epoch_us(created) < $2)
"""
"""Messages of groups wait for a week: their receiver may be configured again, and the group knows them as sent.
One that was tried keeps its answer: the receiver may have taken it."""
_FORGET_SILENCES = "DELETE FROM notify_silences WHERE NOT list_contains($1::VARCHAR[], receiver)"
_EXPIRE = f"""
UPDATE outbox SET state = 'dead', answer = concat('{EXPIRED}', answer)
WHERE state = 'pending' AND epoch_us(created) < $1 AND (receiver, incident) NOT IN
    (SELECT (receiver, incident) FROM outbox WHERE kind = 'firing' AND state = 'delivered')
"""
_EXPIRE_PARTS = """
UPDATE outbox SET state = 'dead', answer = m.answer FROM (SELECT id, answer FROM outbox WHERE state = 'dead') m
WHERE outbox.part_of = m.id AND outbox.state = 'grouped'
"""
_FORGET_GROUPS = """
DELETE FROM notify_groups WHERE NOT list_contains($1::VARCHAR[], receiver)
AND NOT list_has_any(json_extract_string(state, '$.alerts.*.incident'),
    (SELECT coalesce(list(id), []) FROM incidents WHERE resolved IS NULL OR epoch_us(resolved) >= $2))
"""
"""Groups of a receiver that is configured no more, a week after their incidents: if it is again, they end there."""
_PRUNE = f"""
DELETE FROM outbox WHERE state <> 'pending' AND epoch_us(created) < $1
AND incident NOT IN (SELECT id FROM incidents WHERE resolved IS NULL OR epoch_us(resolved) >= $1)
AND NOT {FIRES}
AND (receiver, incident) NOT IN (SELECT (receiver, incident) FROM outbox WHERE state = 'pending')
"""


def clean(connection: duckdb.DuckDBPyConnection, receivers: Sequence[str], now: int) -> None:
    """Marks payloads of receivers that are not among these, and payloads that wait for too long, as dead; deletes old
    ones, and the state of such receivers."""
    old = now - RETENTION_S * SECOND
    connection.execute(_REMOVED, [list(receivers), old])
    connection.execute(_FORGET_SILENCES, [list(receivers)])
    connection.execute(_FORGET_GROUPS, [list(receivers), old])
    connection.execute(_EXPIRE, [old])
    connection.execute(_EXPIRE_PARTS)
    connection.execute(_PRUNE, [old])
