"""The audit: one row per write of a person or program, and per attempt that was refused. Rows are never changed.

Each row has the hash of the row before it, so that a removed or changed row is found (`check_chain`). A row is written
in the transaction of what it records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from pipeline.model.records import Caller, Incident, iso, to_json

Outcome = Literal["done", "refused"]
MAX_TEXT = 4000
"""Characters of a reason or a target that are kept. Chosen: the longest comment."""
MAX_ACTION = 200
"""Characters of an action that are kept. Chosen: longer than the path of any route."""
MOST_ROWS = 10_000
"""Most rows of one answer. Chosen: a day of a busy site."""
PART, BATCH = 20_000, 1000
"""Rows that are checked in one read, and that are in memory at a time. Chosen: 0.2 s of CPU a part, so that a million
rows never reach the time limit of a read."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One row: who (with role), from where, what (action and target), why, and the values before and after."""

    who: str
    action: str
    target: str
    reason: str = ""
    outcome: Outcome = "done"
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    id: str = ""
    """Set where the same act may be recorded twice, such as one of another process: the second row is dropped."""


_COLUMNS = ("number", "time", "actor", "role", "origin", "action", "target", "reason", "outcome", "before", "after")


def describe_incident(incident: Incident) -> Mapping[str, Any]:
    """Returns what a row keeps of an incident before and after a change: its state and life."""
    return {"state": incident.state, "severity": incident.severity, **incident.life.as_json()}


def write_audit(connection: duckdb.DuckDBPyConnection, entries: Sequence[AuditEntry], time: int) -> None:
    """Adds rows at the end of the chain."""
    for entry in entries:
        if entry.id and connection.execute("SELECT 1 FROM audit WHERE id = $1", [entry.id]).fetchone():
            continue
        last = connection.execute("SELECT number, hash FROM audit ORDER BY number DESC LIMIT 1").fetchone()
        number, previous = (1, "") if last is None else (int(last[0]) + 1, str(last[1]))
        who = entry.who
        role, origin = (who.role, who.origin) if isinstance(who, Caller) else ("", "")
        row = [number, time, str(who), role, origin, entry.action[:MAX_ACTION]]
        row += [entry.target[:MAX_TEXT], entry.reason[:MAX_TEXT], entry.outcome]
        row += [_encode(entry.before), _encode(entry.after)]
        values = ", ".join(f"${place}" for place in range(3, len(row) + 3))
        statement = f"INSERT INTO audit VALUES ($1, make_timestamptz($2::BIGINT), {values})"
        connection.execute(statement, [*row, entry.id or None, _hash(previous, row)])


def list_audit(
    cursor: duckdb.DuckDBPyConnection,
    since: int = 0,
    actor: str | None = None,
    target: str | None = None,
    most: int = 500,
) -> list[dict[str, Any]]:
    """Returns the newest rows since a time, newest first, in the form of the API."""
    rows = cursor.execute(
        """SELECT number, epoch_us(time), actor, role, origin, action, target, reason, outcome, before, after FROM audit
           WHERE time >= make_timestamptz($1::BIGINT) AND ($2 IS NULL OR actor = $2) AND ($3 IS NULL OR target = $3)
           ORDER BY number DESC LIMIT $4""",
        [since, actor, target, min(most, MOST_ROWS)],
    ).fetchall()
    return [
        {
            **dict(zip(_COLUMNS, row, strict=True)),
            "time": iso(row[1]),
            "before": None if row[9] is None else json.loads(row[9]),
            "after": None if row[10] is None else json.loads(row[10]),
        }
        for row in rows
    ]


class ChainCheck:
    """Checks the chain in parts, each with a read of its own, so that other reads have their turn.

    The oldest row is taken as it is: retention removes rows only from that end, also between two parts.
    broken: the number of the first row that was changed or whose predecessor is missing; None: none so far.
    """

    def __init__(self) -> None:
        self.broken: int | None = None
        self._last = 0
        self._hash: str | None = ""

    def check_part(self, cursor: duckdb.DuckDBPyConnection) -> bool:
        """Checks the next PART rows. Returns whether there may be more."""
        first, newest = cursor.execute("SELECT min(number), max(number) FROM audit").fetchone() or (None, None)
        if first is None:
            return False
        if self._last < first - 1:
            self._last, self._hash = first - 1, None
        end = self._last + PART
        rows = cursor.execute(
            """SELECT number, epoch_us(time), actor, role, origin, action, target, reason, outcome, before, after, hash
               FROM audit WHERE number > $1 AND number <= $2 ORDER BY number""",
            [self._last, end],
        )
        while batch := rows.fetchmany(BATCH):
            for row in batch:
                if not self._follows(row):
                    self.broken = int(row[0])
                    return False
                self._last, self._hash = int(row[0]), str(row[-1])
        if self._last < min(end, newest):  # so none of the part follows the last one
            found = cursor.execute("SELECT min(number) FROM audit WHERE number > $1", [self._last]).fetchone()
            self.broken = None if found is None else found[0]
            return False
        return bool(self._last < newest)

    def _follows(self, row: Sequence[Any]) -> bool:
        is_next = bool(row[0] == self._last + 1)
        return is_next and (self._hash is None or _hash(self._hash, row[:-1]) == str(row[-1]))


def check_chain(cursor: duckdb.DuckDBPyConnection) -> int | None:
    """Returns the number of the first row that was changed or whose predecessor is missing; None if there is none."""
    check = ChainCheck()
    while check.check_part(cursor):
        pass
    return check.broken


def _hash(previous: str, row: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps([previous, *row], separators=(",", ":")).encode()).hexdigest()


def _encode(values: Mapping[str, Any] | None) -> str | None:
    return None if values is None else json.dumps(to_json(dict(values)))
