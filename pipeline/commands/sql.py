"""`fleetpulse sql`: queries the running pipeline, or the store file through the same sandbox if none runs."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from pipeline.api.query import QueryRunner
from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import FleetpulseError, Unreachable
from pipeline.store.database import open_file


def run_query(config: Config, text: str) -> tuple[list[str], list[dict[str, Any]], bool]:
    """Returns (columns, rows, truncated) from the pipeline, else from the file. Raises Unreachable without both."""
    try:
        columns, rows, truncated = client.query(config, text)
    except Unreachable as unreachable:
        return _from_file(config, text, unreachable)
    return columns, [dict(zip(columns, row, strict=True)) for row in rows], truncated


def _from_file(config: Config, text: str, unreachable: Unreachable) -> tuple[list[str], list[dict[str, Any]], bool]:
    path = config.store.path
    if not path.exists():
        raise Unreachable(f"{unreachable}; and there is no store {path}") from unreachable
    try:
        connection = open_file(path, {}, read_only=True)
    except FleetpulseError as error:
        raise Unreachable(f"{unreachable}; and {error}") from error
    with connection, contextlib.closing(QueryRunner(connection.cursor, config.api)) as queries:
        found = json.loads(queries.run(text).body)
    return (
        found["columns"],
        [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]],
        found["truncated"],
    )
