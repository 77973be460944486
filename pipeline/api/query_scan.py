"""The pipeline's side of a query: reads the columns and rows that its process asks for, one thread for each scan."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.api.sandbox import TABLES
from pipeline.model.errors import OverLimit, Refused

TOGETHER = 32
"""Scans that one query may have open (chosen: the longest documented query reads 4 tables; each takes a thread)."""
SCAN_BYTES = 1 << 20
"""Rough size of one batch of rows on its way (chosen: larger batches were no faster, and each scan holds about two)."""
_COMPARISONS = frozenset({"=", ">", ">=", "<", "<="})
_END_SECONDS = 0.5
"""How long the end of a query waits for all its scans. Chosen: an interrupted scan ends within one vector of rows."""


class Scans:
    """All scans of one query. They read only: plain columns of our own tables, with plain comparisons."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection]) -> None:
        self._cursor = cursor
        self._running: dict[threading.Thread, duckdb.DuckDBPyConnection] = {}
        self._schemas: dict[str, pa.Schema] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.failure: Exception | None = None

    def schemas(self, tables: Iterable[str]) -> dict[str, str]:
        """Arrow schema of each table, serialised, in base64."""
        with contextlib.closing(self._cursor()) as cursor:
            for table in TABLES.intersection(tables):
                self._schemas[table] = cursor.sql(f'FROM "{table}" LIMIT 0').to_arrow_reader(1).schema
        return {name: base64.b64encode(schema.serialize()).decode() for name, schema in self._schemas.items()}

    def start(self, request: Mapping[str, Any], handle: int) -> None:
        """Sends the rows of one scan as an Arrow stream to the open file `handle`, which it closes."""
        target = socket.socket(fileno=handle)
        try:
            text = select(self._schemas, request["scan"], request["columns"], request["where"])
            with self._lock:
                if len(self._running) >= TOGETHER:
                    raise OverLimit(f"the query reads more than {TOGETHER} tables at once")
                cursor = self._cursor()
                columns = len(request["columns"])
                thread = threading.Thread(
                    target=self._send, args=(cursor, text, columns, target), name="query scan", daemon=True
                )
                self._running[thread] = cursor
            thread.start()
        except BaseException:
            target.close()
            raise

    def end(self) -> None:
        """Ends what still runs."""
        with self._lock:
            self._ended = True
            running = list(self._running)
            for cursor in self._running.values():
                cursor.interrupt()
        until = time.monotonic() + _END_SECONDS
        for thread in running:
            thread.join(max(0.0, until - time.monotonic()))

    def _send(self, cursor: duckdb.DuckDBPyConnection, text: str, columns: int, target: socket.socket) -> None:
        try:
            with target, target.makefile("wb", buffering=0) as file:
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                rows = max(2048, SCAN_BYTES // (8 * columns))
                batches = cursor.sql(text).to_arrow_reader(rows)
                with pa.ipc.new_stream(file, batches.schema) as writer:
                    for batch in batches:
                        if self._ended:
                            return
                        writer.write_batch(batch)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the query needs no more rows
        except Exception as error:  # noqa: BLE001 - whatever it was, the query must not take the rest for all rows
            self.failure = self.failure or error
        finally:
            with self._lock:
                del self._running[threading.current_thread()]
                cursor.close()


def select(schemas: Mapping[str, pa.Schema], table: str, columns: Sequence[str], where: Iterable[Sequence[str]]) -> str:
    """The SELECT of one scan. Raises Refused for anything but columns of a table that the query named."""
    known = set(schemas[table].names) if table in schemas else set()
    conditions = [_condition(*term) for term in where]
    if not columns or not known.issuperset(columns) or not known.issuperset(term[0] for term in where):
        raise Refused(f"{table}: no such table or column")
    names = ", ".join(map(_quoted, columns))
    return f"SELECT {names} FROM {_quoted(table)}" + (f" WHERE {' AND '.join(conditions)}" if conditions else "")


def _condition(column: str, comparison: str, kind: str, value: str) -> str:
    if comparison not in _COMPARISONS:
        raise Refused(f"{comparison!r} is no comparison of a scan")
    literal = "'" + value.replace("'", "''") + "'"
    types = {"time": "TIMESTAMPTZ", "number": "HUGEINT", "text": "VARCHAR"}
    return f"{_quoted(column)} {comparison} {literal}::{types[kind]}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
