"""Rows of wrong pages: those that ended without harm or action, and those that a person marked; they cost budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import duckdb

from pipeline.incidents.desk import ACTOR
from pipeline.judging.page_budget import LOGGED, family_of
from pipeline.model.records import SECOND, Incident

_WATCHED_SINCE = "watched_since"
"""Row of `meta` with the time (UTC us) since which pages are counted."""
_DAY = 86_400 * SECOND


def add_unneeded_pages(connection: duckdb.DuckDBPyConnection, ended: Sequence[tuple[Incident, int]]) -> None:
    """Counts those of the incidents that were pages and ended without an action of a person and without a second family
    that saw harm. ended: with the time (UTC us). All are looked up together: a storm may end in one moment."""
    pages = {i.id: (i, time) for i, time in ended if i.severity == "page" and not i.simulated and not i.is_held_back}
    if not pages:
        return
    acted = connection.execute(
        "SELECT DISTINCT incident FROM history WHERE incident IN (SELECT unnest($1::VARCHAR[])) AND actor <> $2",
        [list(pages), ACTOR],
    ).fetchall()
    found = connection.execute(
        """SELECT incident, list(DISTINCT detector) FROM findings
           WHERE incident IN (SELECT unnest($1::VARCHAR[])) AND level IN ('ticket', 'page') GROUP BY incident""",
        [list(pages)],
    ).fetchall()
    names = {id_: {incident.detector} for id_, (incident, _) in pages.items()}
    for id_, detectors in found:
        names[id_] |= set(detectors)
    for (id_,) in acted:
        del names[id_]
    rows = [
        (id_, pages[id_][0].detector, pages[id_][1])
        for id_, own in names.items()
        if not own & LOGGED and len({family_of(name) for name in own}) == 1
    ]
    if rows:
        connection.execute(
            """INSERT OR IGNORE INTO wrong_pages
               SELECT unnest($1::VARCHAR[]), unnest($2::VARCHAR[]), make_timestamptz(unnest($3::BIGINT[])),
                      'ended without harm or action'""",
            [list(column) for column in zip(*rows, strict=True)],
        )


def add_wrong_page(connection: duckdb.DuckDBPyConnection, incident: Incident, time: int, reason: str) -> None:
    """Counts a page against the budget of its detector, once; other severities cost nothing."""
    if incident.severity == "page" and not incident.simulated:
        connection.execute(
            "INSERT OR IGNORE INTO wrong_pages VALUES ($1, $2, make_timestamptz($3::BIGINT), $4)",
            [incident.id, incident.detector, time, reason],
        )


def remove_wrong_page(connection: duckdb.DuckDBPyConnection, id_: str) -> None:
    """Forgets that an incident was counted as a wrong page."""
    connection.execute("DELETE FROM wrong_pages WHERE incident = $1", [id_])


def count_wrong_pages(
    connection: duckdb.DuckDBPyConnection, now: int, days: float, resets: Mapping[str, int]
) -> tuple[dict[str, int], float]:
    """Returns the wrong pages of each detector in the window, and its node-days; since a reset of the detector."""
    connection.execute("INSERT OR IGNORE INTO meta VALUES ($1, $2)", [_WATCHED_SINCE, str(now)])
    nodes, watched = read_watched(connection, now)
    rows = connection.execute(
        "SELECT detector, epoch_us(time) FROM wrong_pages WHERE time > make_timestamptz($1::BIGINT)",
        [now - int(days * _DAY)],
    ).fetchall()
    counted = Counter(str(name) for name, time in rows if time > resets.get(name, 0))
    return dict(counted), max(nodes, 1) * min(max(watched, 1.0), days)


def read_watched(cursor: duckdb.DuckDBPyConnection, now: int) -> tuple[int, float]:
    """Returns the known nodes, and for how many days the store has watched them; 0 before the first count."""
    since = cursor.execute("SELECT value FROM meta WHERE key = $1", [_WATCHED_SINCE]).fetchone()
    nodes = cursor.execute("SELECT count(*) FROM entity WHERE kind = 'node'").fetchone()
    return int(nodes[0]) if nodes else 0, 0.0 if since is None else (now - int(since[0])) / _DAY
