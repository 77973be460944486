"""Queries the store's file itself, read-only and through the same sandbox as the API, when no pipeline runs."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from pipeline.api.query import Queries
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, Unreachable
from pipeline.store.database import open_file


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
        connection = open_file(path, {"enable_external_access": "false"}, read_only=True)
    except FleetpulseError as error:
        raise Unreachable(f"{away}; and {error}") from error
    with connection:
        connection.execute("SET GLOBAL TimeZone = 'UTC'")
        connection.execute("SET GLOBAL lock_configuration = true")
        with contextlib.closing(Queries(connection.cursor, config.api)) as queries:
            found = json.loads(queries.run(text).body)
    return (
        found["columns"],
        [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]],
        found["truncated"],
    )
