"""Titles of incidents with the affected job or GPUs, in every answer of the API that has one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import duckdb

from pipeline.model.entity_names import add_to_title

_AFFECTED = """SELECT incident, detail ->> '$.title' AS title FROM impact
WHERE incident IN (SELECT unnest($1::VARCHAR[])) AND title <> ''"""


def add_affected(
    cursor: duckdb.DuckDBPyConnection, rows: Iterable[dict[str, Any]], key: str = "summary"
) -> list[dict[str, Any]]:
    """Returns rows with `id` of an incident and its title as `key`, each title with the affected job or GPUs of now."""
    found = list(rows)
    if not found:
        return []
    affected = dict(cursor.execute(_AFFECTED, [[row["id"] for row in found]]).fetchall())
    return [{**row, key: add_to_title(row[key], affected.get(row["id"], ""))} for row in found]
