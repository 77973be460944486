"""Pages of each detector and the node-days in which they were sent: from the store."""

from __future__ import annotations

import duckdb

from pipeline.incidents.wrong_pages import read_watched
from pipeline.model.records import SECOND

_DAY = 86_400 * SECOND
_PAGES = """SELECT detector, count(*) FROM incidents WHERE severity = 'page' AND opened > make_timestamptz($1::BIGINT)
            GROUP BY detector"""


def count_pages(cursor: duckdb.DuckDBPyConnection, now: int, days: float) -> tuple[dict[str, int], float | None]:
    """Returns detector -> incidents with a page that opened in the last `days`, and the node-days of these days; None
    until the store has watched a day.

    Nodes are those known now; a shorter time counts if the store has not watched as long.
    """
    nodes, watched = read_watched(cursor, now)
    counted = cursor.execute(_PAGES, [now - int(days * _DAY)]).fetchall()
    seen = min(watched, days)
    return {str(name): int(number) for name, number in counted}, nodes * seen if nodes and seen >= 1 else None
