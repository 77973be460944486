"""Queries the store's file itself, read-only and through the same sandbox as the API, when no pipeline runs."""

from __future__ import annotations

from typing import Any

import duckdb

from pipeline import client
from pipeline.api import answer
from pipeline.api.query import Queries
from pipeline.config import Config
from pipeline.errors import Unreachable


def query(config: Config, text: str) -> tuple[list[str], list[dict[str, Any]], bool]:
    """(columns, rows, truncated), of a running pipeline, else of the file. Raises Unreachable if neither answers."""
    try:
        columns, rows, truncated = client.query(config, text)
    except Unreachable as away:
        return _from_file(config, text, away)
    return columns, [dict(zip(columns, row, strict=True)) for row in rows], truncated


def _from_file(config: Config, text: str, away: Unreachable) -> tuple[list[str], list[dict[str, Any]], bool]:
    path = config.store.path
    if not path.exists():
        raise Unreachable(f"{away}; and there is no store {path}") from away
    try:
        connection = duckdb.connect(str(path), read_only=True, config={"enable_external_access": "false"})
    except duckdb.Error as error:
        raise Unreachable(f"{away}; and the store {path} cannot be opened: {error}") from error
    with connection:
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        connection.execute("SET GLOBAL lock_configuration = true")
        table, truncated = Queries(connection.cursor, config.api.sql_seconds, config.api.sql_rows).run(text)
    return table.column_names, answer.rows(table), truncated
