"""Attempts of senders to speak for others, as rows of the audit: an event of a node that they do not own, a message
in another node's name, a wrong signature.

Ingest stores each as a dead letter (docs/admission.md). The audit gets one row per sender, rule and minute, since a
sender may repeat its attempt many times a second; the dead letters have them all, within their limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import duckdb

from pipeline.commands.service import PipelineService
from pipeline.incidents.audit import AuditEntry, write_audit
from pipeline.model.names import quote_text
from pipeline.model.records import SECOND, iso

RULES = ("owner", "sender", "signature")
"""Rules of admission that an honest sender with a right configuration never breaks."""
LOOK_BACK = 600 * SECOND
"""How far the first look goes back (us): what a stop of the pipeline left unrecorded. Chosen."""
MOST_SENDERS = 32
"""Most rows of one minute. Chosen: made-up senders are unlimited."""
MINUTE = 60 * SECOND
_NEW = """
SELECT rowid, epoch_us(time), partition, "key", rule, reason FROM dead_letter
WHERE list_contains($1, rule) AND rowid > $2 AND time >= make_timestamptz($3::BIGINT) ORDER BY rowid LIMIT 10000"""


class ForgeryAudit:
    """Called by the loop of the pipeline; costs a sum of three counters while nothing was rejected."""

    def __init__(self, service: PipelineService) -> None:
        self._service = service
        self._seen, self._row, self._since = -1, -1, service.clock() - LOOK_BACK

    def run(self) -> bool:
        """Records new attempts. Returns whether there were any."""
        service = self._service
        count = sum(service.ingest.rejected[rule] for rule in RULES)
        if count == self._seen:
            return False
        with contextlib.closing(service.database.cursor()) as cursor:
            rows = cursor.execute(_NEW, [list(RULES), self._row, self._since]).fetchall()
        if rows:
            with service.database.transaction() as connection:
                write_audit(connection, list_entries(connection, rows), service.clock())
            self._row = rows[-1][0]
        self._seen = count
        return bool(rows)


Letter = tuple[int, int, str, bytes | None, str, str]
"""rowid, time (us), partition, key, rule, reason of a dead letter."""


def list_entries(connection: duckdb.DuckDBPyConnection, letters: Iterable[Letter]) -> list[AuditEntry]:
    """Returns one row per sender, rule and minute that has none yet, at most MOST_SENDERS for one minute."""
    first: dict[tuple[int, str, str], Letter] = {}
    for letter in letters:
        _, time, partition, key, rule, _ = letter
        sender = key.decode("utf-8", "replace") if key else partition
        first.setdefault((time // MINUTE, sender, rule), letter)
    entries: dict[int, list[AuditEntry]] = {}
    for (minute, sender, rule), (_, _, _, _, _, reason) in first.items():
        start = f"rejected {iso(minute * MINUTE)[:16]} "
        known = entries.setdefault(minute, [])
        if len(known) + _count_known(connection, start) >= MOST_SENDERS:
            continue
        name = quote_text(sender)
        known.append(AuditEntry(f"agent {name}", "report", name, reason, "refused", id=f"{start}{rule} {sender}"))
    return [entry for known in entries.values() for entry in known]


def _count_known(connection: duckdb.DuckDBPyConnection, start: str) -> int:
    found = connection.execute("SELECT count(*) FROM audit WHERE starts_with(id, $1)", [start]).fetchone()
    return int(found[0]) if found else 0
