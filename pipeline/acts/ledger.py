"""Acts in the store: the newest state of each, its history, and the circuit breaker. History rows are never changed.

Each change is one transaction with its row of the audit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.acts.act import Act, encode_act, parse_act
from pipeline.incidents.audit import AuditEntry, write_audit
from pipeline.model.records import iso

MOST_ACTS = 1000
"""Most acts of one answer. Chosen: more than a fleet of 100,000 GPUs has in a week. Those that are not over are all in
it: a hold that is left out would be neither watched nor ours."""


@dataclass(frozen=True, slots=True)
class Step:
    """One row of an act's history."""

    number: int
    time: int
    state: str
    actor: str
    comment: str

    def as_json(self) -> dict[str, Any]:
        """Returns the row in the form of the API."""
        return {**{n: getattr(self, n) for n in self.__slots__}, "time": iso(self.time)}


def save_act(
    connection: duckdb.DuckDBPyConnection, act: Act, actor: str, comment: str, entries: Sequence[AuditEntry], now: int
) -> None:
    """Stores an act's state with a row of its history and of the audit."""
    connection.execute(
        """INSERT OR REPLACE INTO acts VALUES ($1, $2, $3, $4, $5, $6, $7, make_timestamptz($8::BIGINT),
           make_timestamptz($9::BIGINT), make_timestamptz($10::BIGINT), $11, $12, $13)""",
        [
            *(act.id, act.key or act.id, act.state, act.verb, list(act.targets), act.incident, act.requested_by),
            *(act.created, now, act.expires, act.version, act.is_open or act.is_in_force, encode_act(act)),
        ],
    )
    connection.execute(
        """INSERT INTO act_history SELECT $1, coalesce(max(number), 0) + 1, make_timestamptz($2::BIGINT), $3, $4, $5
           FROM act_history WHERE act = $1""",
        [act.id, now, act.state, str(actor), comment],
    )
    write_audit(connection, entries, now)


def save_break_glass(connection: duckdb.DuckDBPyConnection, id_: str, who: str, comment: str, now: int) -> None:
    """Stores in the history of an act, and in the audit, that a person approved it alone."""
    connection.execute(
        """INSERT INTO act_history SELECT $1, coalesce(max(number), 0) + 1, make_timestamptz($2::BIGINT),
           'break_glass', $3, $4 FROM act_history WHERE act = $1""",
        [id_, now, str(who), comment],
    )
    write_audit(connection, [AuditEntry(who, "break glass", id_, comment)], now)


def load_acts(
    cursor: duckdb.DuckDBPyConnection, only_open: bool = False, incident: str | None = None, most: int = MOST_ACTS
) -> list[Act]:
    """Returns the newest acts, newest first: all, or those that are not over (also holds in force)."""
    rows = cursor.execute(
        """SELECT document FROM acts WHERE ($1 IS NULL OR incident = $1) AND (active OR NOT $2)
           ORDER BY created DESC, id LIMIT $3""",
        [incident, only_open, None if only_open else most],
    ).fetchall()
    return [parse_act(json.loads(text)) for (text,) in rows]


def load_act(cursor: duckdb.DuckDBPyConnection, id_: str) -> Act:
    """Returns one act. Raises KeyError."""
    found = cursor.execute("SELECT document FROM acts WHERE id = $1", [id_]).fetchone()
    if found is None:
        raise KeyError(id_)
    return parse_act(json.loads(found[0]))


def load_diagnostics(cursor: duckdb.DuckDBPyConnection, targets: Sequence[str]) -> list[Act]:
    """Returns all diagnostics of any of the nodes that passed or failed, newest first."""
    rows = cursor.execute(
        """SELECT document FROM acts WHERE verb = 'diagnose' AND state IN ('verified', 'failed')
           AND list_has_any(targets, $1::VARCHAR[]) ORDER BY created DESC, id""",
        [list(targets)],
    ).fetchall()
    return [parse_act(json.loads(text)) for (text,) in rows]


def list_held_at(cursor: duckdb.DuckDBPyConnection, time: int) -> set[str]:
    """Returns the nodes that an act held at a time (UTC us).

    A target that is no longer held was so until a release of it was verified, else until the last change of its hold.
    """
    query = "SELECT document FROM acts WHERE verb IN ('hold', 'release') AND (active OR updated > make_timestamptz($1))"
    acts = [parse_act(json.loads(text)) for (text,) in cursor.execute(query, [time]).fetchall()]
    releases = [act for act in acts if act.verb == "release" and act.mode == "on" and act.state == "verified"]
    found = set()
    for act in acts:
        if act.verb != "hold" or act.mode != "on" or not 0 < act.began <= time:
            continue
        for target in act.targets:
            ends = [r.updated for r in releases if target in r.targets and r.updated > act.began]
            if target in act.held or min(ends, default=act.updated) > time:
                found.add(target)
    return found


def find_by_key(cursor: duckdb.DuckDBPyConnection, key: str) -> Act | None:
    """Returns the act that a request with this idempotency key made."""
    found = cursor.execute("SELECT document FROM acts WHERE key = $1", [key]).fetchone()
    return None if found is None else parse_act(json.loads(found[0]))


def load_steps(cursor: duckdb.DuckDBPyConnection, id_: str) -> list[Step]:
    """Returns the history of an act, oldest first."""
    rows = cursor.execute(
        "SELECT number, epoch_us(time), state, actor, comment FROM act_history WHERE act = $1 ORDER BY number", [id_]
    ).fetchall()
    return [Step(*row) for row in rows]


def find_begun(cursor: duckdb.DuckDBPyConnection, ids: Sequence[str]) -> dict[str, int]:
    """Returns when each of these acts last began to be carried out (UTC us); acts that never began are not in it."""
    return _find_last(cursor, ids, ["executing"])


def find_done(cursor: duckdb.DuckDBPyConnection, ids: Sequence[str]) -> dict[str, int]:
    """Returns when the scheduler had accepted each of these acts (UTC us); of one that failed on its way, when it last
    began. What ran before that moment did not run after the act."""
    return _find_last(cursor, ids, ["executing", "executed"])


def _find_last(cursor: duckdb.DuckDBPyConnection, ids: Sequence[str], states: Sequence[str]) -> dict[str, int]:
    """Returns when each act last entered one of the states (UTC us)."""
    rows = cursor.execute(
        """SELECT act, epoch_us(max(time)) FROM act_history
           WHERE list_contains($2::VARCHAR[], state) AND list_contains($1::VARCHAR[], act) GROUP BY act""",
        [list(ids), list(states)],
    ).fetchall()
    return dict(rows)


def count_steps(
    cursor: duckdb.DuckDBPyConnection,
    states: Sequence[str],
    since: int,
    actors: str = "",
    acts: str = "on",
    besides: str = "",
) -> int:
    """Returns how many acts entered one of the states since a time.

    actors: only those of this prefix.   acts: mode.   besides: an act that does not count.
    """
    found = cursor.execute(
        """SELECT count(DISTINCT h.act) FROM act_history h JOIN acts a ON a.id = h.act
           WHERE list_contains($1, h.state) AND h.time >= make_timestamptz($2::BIGINT)
           AND starts_with(a.requested_by, $3) AND a.document ->> '$.mode' = $4 AND a.id <> $5""",
        [list(states), since, actors, acts, besides],
    ).fetchone()
    return int(found[0]) if found else 0


def count_targets(cursor: duckdb.DuckDBPyConnection, since: int, actors: str) -> int:
    """Returns how many nodes acts of requesters with a prefix named since a time."""
    found = cursor.execute(
        """SELECT count(DISTINCT t) FROM (SELECT unnest(targets) AS t FROM acts
           WHERE created >= make_timestamptz($1::BIGINT) AND starts_with(requested_by, $2))""",
        [since, actors],
    ).fetchone()
    return int(found[0]) if found else 0


def count_proposed(cursor: duckdb.DuckDBPyConnection, who: str, since: int) -> int:
    """Returns how many acts one requester proposed since a time."""
    found = cursor.execute(
        "SELECT count(*) FROM acts WHERE requested_by = $1 AND created >= make_timestamptz($2::BIGINT)", [who, since]
    ).fetchone()
    return int(found[0]) if found else 0


def list_released(cursor: duckdb.DuckDBPyConnection, since: int) -> list[str]:
    """Returns the nodes that were released here since a time."""
    rows = cursor.execute(
        """SELECT DISTINCT unnest(a.targets) FROM acts a JOIN act_history h ON h.act = a.id
           WHERE a.verb = 'release' AND h.state = 'executed' AND a.document ->> '$.mode' = 'on'
             AND h.time >= make_timestamptz($1::BIGINT)""",
        [since],
    ).fetchall()
    return [str(node) for (node,) in rows]


def find_failed_release(cursor: duckdb.DuckDBPyConnection, target: str, since: int) -> str:
    """Returns the newest release of several nodes that began since a time, and failed; "" if there is none."""
    found = cursor.execute(
        """SELECT a.id FROM acts a JOIN act_history h ON h.act = a.id
           WHERE a.verb = 'release' AND a.state = 'failed' AND a.document ->> '$.mode' = 'on' AND len(a.targets) > 1
             AND list_contains(a.targets, $1) AND h.state = 'executing' AND h.time >= make_timestamptz($2::BIGINT)
           ORDER BY h.time DESC LIMIT 1""",
        [target, since],
    ).fetchone()
    return str(found[0]) if found else ""


def was_undone(cursor: duckdb.DuckDBPyConnection, targets: Sequence[str], since: int) -> bool:
    """Returns whether a person undid a hold of one of the nodes at the scheduler since a time."""
    found = cursor.execute(
        """SELECT 1 FROM audit WHERE action = 'hold undone' AND time >= make_timestamptz($1::BIGINT)
           AND list_contains($2::VARCHAR[], regexp_extract(reason, '^(node:[^ ]+): ', 1)) LIMIT 1""",
        [since, list(targets)],
    ).fetchone()
    return found is not None


# --- the circuit breaker ------------------------------------------------------------------------------


def open_breaker(connection: duckdb.DuckDBPyConnection, reason: str, now: int) -> None:
    """Opens the breaker: from now on only people act. Nothing if it is open."""
    if read_breaker(connection):
        return
    connection.execute(
        "INSERT INTO act_breaker VALUES (make_timestamptz($1::BIGINT), $2, NULL, NULL, NULL)", [now, reason]
    )
    write_audit(connection, [AuditEntry("fleetpulse", "open breaker", "acts", reason)], now)


def close_breaker(connection: duckdb.DuckDBPyConnection, who: str, reason: str, now: int) -> None:
    """Closes the breaker for a person, with the reason."""
    connection.execute(
        """UPDATE act_breaker SET closed = make_timestamptz($1::BIGINT), closed_by = $2, closing_reason = $3
           WHERE closed IS NULL""",
        [now, str(who), reason],
    )
    write_audit(connection, [AuditEntry(who, "close breaker", "acts", reason)], now)


def read_breaker(cursor: duckdb.DuckDBPyConnection) -> str:
    """Returns why automation is stopped; "" if it is not."""
    found = cursor.execute("SELECT reason FROM act_breaker WHERE closed IS NULL").fetchone()
    return str(found[0]) if found else ""


def read_breaker_closed(cursor: duckdb.DuckDBPyConnection) -> int:
    """Returns when a person last closed the breaker (UTC us), 0 if never: failures before it no longer count."""
    found = cursor.execute("SELECT epoch_us(max(closed)) FROM act_breaker").fetchone()
    return int(found[0]) if found and found[0] is not None else 0
