"""Queries of held messages and of groups, in the tables `outbox` and `notify_groups`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import duckdb

from pipeline.incidents.ledger import skip_silenced
from pipeline.notify.groups import read_group
from pipeline.notify.inhibited_messages import HeldMessage, Settlement, parse_held

_STATE = "SELECT count(*), bit_xor(hash(id)) FROM outbox WHERE receiver = $1 AND state = 'held'"
_IDS = "SELECT id FROM outbox WHERE receiver = $1 AND state = 'held'"
_ROWS = """
SELECT id, incident, kind, payload, epoch_us(created), number FROM outbox
WHERE id IN (SELECT unnest($1::VARCHAR[])) AND state = 'held' ORDER BY created, incident, number
"""
_SENT_ALONE = """
SELECT incident FROM outbox WHERE receiver = $1 AND kind <> 'update' AND state IN ('pending', 'delivered')
AND part_of IS NULL AND incident IN (SELECT unnest($2::VARCHAR[])) GROUP BY incident
HAVING arg_max(kind, number) = 'firing'
"""
_UNSENT = """
SELECT incident, list(CASE WHEN state = 'grouped' THEN split_part(part_of, '.', 1) ELSE incident END) FROM outbox
WHERE receiver = $1 AND state IN ('pending', 'grouped') AND incident IN (SELECT unnest($2::VARCHAR[])) GROUP BY incident
"""
_PENDING = """
SELECT DISTINCT incident FROM outbox WHERE receiver = $1 AND state = 'pending'
AND incident IN (SELECT unnest($2::VARCHAR[]))
"""
_FIRING = """
SELECT o.incident, arg_max(o.payload ->> '$.alerts[#-1].fingerprint', o.number) FROM outbox o
JOIN incidents i ON i.id = o.incident
WHERE o.receiver = $1 AND o.incident IN (SELECT unnest($2::VARCHAR[])) AND o.kind <> 'update' AND o.state <> 'muted'
AND i.resolved IS NULL AND coalesce(json_array_length(i.life, '$.silenced_by'), 0) = 0 GROUP BY o.incident
"""
_IN_OLD_GROUP = """
receiver = $1 AND state = 'grouped' AND part_of NOT IN (SELECT id FROM outbox WHERE receiver = $1)
"""
"""Rows whose `part_of` is a group, not its message: an older version wrote them."""
_OVERTAKEN = """
receiver = $1 AND state = 'held' AND kind = 'firing' AND number < (
    SELECT max(number) FROM outbox n WHERE n.receiver = $1 AND n.incident = outbox.incident AND n.kind <> 'update'
    AND n.state <> 'held')
"""
"""Held rows that fire below a newer one about which was decided: an older version left some."""
_HOLD_AGAIN = f"""
UPDATE outbox SET state = CASE WHEN n.message IS NULL THEN 'held' ELSE state END, part_of = n.message
FROM (SELECT o.id, (SELECT arg_max(m.id, m.number) FROM outbox m WHERE m.receiver = $1 AND m.incident = o.part_of
                    AND m.state = 'pending' AND m.created >= o.created AND m.kind <> 'update') AS message
      FROM (SELECT id, part_of, created FROM outbox WHERE {_IN_OLD_GROUP}) o) n
WHERE outbox.id = n.id
"""
_FORGET_ROUTES = """
UPDATE outbox SET payload = json_merge_patch(json_merge_patch(payload, '{"groupLabels": null}'), json_object(
    'groupKey', concat('{}:{incident="', incident, '"}'), 'groupLabels', json_object('incident', incident),
    'fleetpulse', json_object('route', NULL)))
WHERE receiver = $1 AND state = 'held' AND payload ->> '$.fleetpulse.route' IS NOT NULL
"""
"""Rows of an older version had the group of a route, which decides again."""
_MUTE_OVERTAKEN = f"UPDATE outbox SET state = 'muted', answer = $2 WHERE {_OVERTAKEN}"
_SETTLE = """
UPDATE outbox SET state = n.state, answer = CASE WHEN n.state = 'muted' THEN n.reason ELSE answer END,
    part_of = CASE WHEN n.state = 'grouped' THEN n.reason END,
    kind = CASE WHEN n.kind = '' THEN outbox.kind ELSE n.kind END,
    payload = CASE WHEN n.body = '' THEN payload ELSE n.body END, next_attempt = make_timestamptz($6::BIGINT)
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::VARCHAR[]) AS state, unnest($3::VARCHAR[]) AS reason,
             unnest($4::VARCHAR[]) AS kind, unnest($5::VARCHAR[]) AS body) n
WHERE outbox.id = n.id
"""
_JOIN_SAID = """
UPDATE outbox SET part_of = m.id, state = CASE WHEN m.state = 'pending' THEN 'grouped' ELSE m.state END,
    answer = m.answer
FROM (SELECT unnest($2::VARCHAR[]) AS id, unnest($3::VARCHAR[]) AS thread) n JOIN (
    SELECT incident, max_by(id, number) AS id, max_by(state, number) AS state, max_by(answer, number) AS answer
    FROM outbox WHERE receiver = $1 AND kind = 'firing' AND incident IN (SELECT unnest($3::VARCHAR[])) GROUP BY incident
) m ON m.incident = n.thread
WHERE outbox.id = n.id
"""
_SAVE = """
INSERT OR REPLACE INTO notify_groups SELECT $1, unnest($2::VARCHAR[]), unnest($3::VARCHAR[])
"""
_DELETE = "DELETE FROM notify_groups WHERE receiver = $1 AND id IN (SELECT unnest($2::VARCHAR[]))"


def read_state(cursor: duckdb.DuckDBPyConnection, receiver: str) -> object:
    """Returns what changes when a row is held, or is held no longer."""
    return cursor.execute(_STATE, [receiver]).fetchone()


def list_ids(cursor: duckdb.DuckDBPyConnection, receiver: str) -> set[str]:
    """Returns the ids of the held rows."""
    return {id_ for (id_,) in cursor.execute(_IDS, [receiver]).fetchall()}


def load_rows(cursor: duckdb.DuckDBPyConnection, ids: Collection[str]) -> list[HeldMessage]:
    """Returns held rows, the oldest first."""
    return [parse_held(*row) for row in cursor.execute(_ROWS, [list(ids)]).fetchall()] if ids else []


def find_sent_alone(cursor: duckdb.DuckDBPyConnection, receiver: str, incidents: Sequence[str]) -> set[str]:
    """Returns the incidents of which the newest message outside of groups fires."""
    return {one for (one,) in cursor.execute(_SENT_ALONE, [receiver, list(incidents)]).fetchall()}


def find_unsent(cursor: duckdb.DuckDBPyConnection, receiver: str, incidents: Sequence[str]) -> dict[str, set[str]]:
    """Returns incident -> where messages that wait for their receiver have it: alone (itself), or in groups."""
    return {one: set(threads) for one, threads in cursor.execute(_UNSENT, [receiver, list(incidents)]).fetchall()}


def find_pending(cursor: duckdb.DuckDBPyConnection, receiver: str, groups: Sequence[str]) -> set[str]:
    """Returns those of the groups of which a message waits for its receiver."""
    return {one for (one,) in cursor.execute(_PENDING, [receiver, list(groups)]).fetchall()} if groups else set()


def find_firing(cursor: duckdb.DuckDBPyConnection, receiver: str, incidents: Collection[str]) -> dict[str, str]:
    """Returns the newest fingerprint that the receiver has, or will get, of each incident that fires: is neither
    resolved nor silenced."""
    return dict(cursor.execute(_FIRING, [receiver, list(incidents)]).fetchall()) if incidents else {}


def load_groups(cursor: duckdb.DuckDBPyConnection, receiver: str) -> list[str]:
    """Returns the stored groups."""
    rows = cursor.execute("SELECT state FROM notify_groups WHERE receiver = $1 ORDER BY id", [receiver]).fetchall()
    return [state for (state,) in rows]


def list_group_incidents(cursor: duckdb.DuckDBPyConnection, receiver: str, group: str) -> list[str]:
    """Returns the incidents of which a group fires alerts at its receiver now; none once it has ended."""
    query = "SELECT state FROM notify_groups WHERE receiver = $1 AND id = $2"
    found = [read_group(state) for (state,) in cursor.execute(query, [receiver, group]).fetchall()]
    return sorted({one.incident for known in found for one in known.alerts.values() if not one.has_ended})


def is_outdated(cursor: duckdb.DuckDBPyConnection, receiver: str) -> bool:
    """Returns whether there are rows that `renew` changes."""
    query = f"SELECT 1 FROM outbox WHERE ({_IN_OLD_GROUP}) OR ({_OVERTAKEN}) LIMIT 1"
    return cursor.execute(query, [receiver]).fetchone() is not None


def renew(connection: duckdb.DuckDBPyConnection, receiver: str, reason: str) -> None:
    """Holds rows in groups of an older version again, but for those that a message says which waits for its receiver;
    mutes what is overtaken, for a reason."""
    connection.execute(_HOLD_AGAIN, [receiver])
    connection.execute(_FORGET_ROUTES, [receiver])
    connection.execute(_MUTE_OVERTAKEN, [receiver, reason])


def settle(connection: duckdb.DuckDBPyConnection, settled: Sequence[Settlement], now: int) -> None:
    """Writes the new states of rows."""
    if settled:
        rows = [(one.id, one.state, one.reason, one.kind, one.body) for one in settled]
        connection.execute(_SETTLE, [*(list(column) for column in zip(*rows, strict=True)), now])
        skip_silenced(connection, [one.id for one in settled if one.state == "pending"])


def join_said(connection: duckdb.DuckDBPyConnection, receiver: str, groups: Mapping[str, str]) -> None:
    """Makes rows a part of the newest message of the group that said them. groups: row -> group."""
    if groups:
        connection.execute(_JOIN_SAID, [receiver, list(groups), list(groups.values())])


def save_groups(connection: duckdb.DuckDBPyConnection, receiver: str, groups: Mapping[str, str]) -> None:
    """Stores groups, by id."""
    if groups:
        connection.execute(_SAVE, [receiver, list(groups), list(groups.values())])


def delete_groups(connection: duckdb.DuckDBPyConnection, receiver: str, ids: Sequence[str]) -> None:
    """Deletes groups."""
    if ids:
        connection.execute(_DELETE, [receiver, list(ids)])
