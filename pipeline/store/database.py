"""The DuckDB file: opened by one process, written under one lock, read through cursors.

Opened without file-system access and with its configuration locked: no query can read files, attach or reconfigure.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb

from pipeline.errors import Unreachable, UsageError
from pipeline.signals import CATALOGUE, Signal
from pipeline.store import schema


class Database:
    """One open store. Raises Unreachable if another process holds the file, UsageError if its schema is newer."""

    def __init__(self, path: Path, memory_limit: str = "2GB", catalogue: Mapping[str, Signal] = CATALOGUE) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"[store] path = {str(path)!r}: its folder cannot be made: {error.strerror}") from error
        self.path = path
        self.lock = threading.RLock()
        try:
            self.connection = duckdb.connect(
                str(path),
                config={
                    "enable_external_access": "false",
                    "python_enable_replacements": "false",
                    "memory_limit": memory_limit,
                },
            )
        except duckdb.IOException as error:
            raise Unreachable(
                f"store {path}: cannot be opened: {error}; is another 'fleetpulse pipeline' running on it?"
            ) from error
        self.connection.execute("SET GLOBAL TimeZone = 'UTC'")
        self.connection.execute("SET GLOBAL lock_configuration = true")
        with self.transaction() as connection:
            schema.create(connection, catalogue)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The writing connection inside BEGIN ... COMMIT, under the write lock; ROLLBACK on any exception."""
        with self.lock:
            self.connection.execute("BEGIN")
            try:
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException:
                # a failed COMMIT has already ended the transaction, and then ROLLBACK is the error of the two
                with contextlib.suppress(duckdb.TransactionException):
                    self.connection.execute("ROLLBACK")
                raise

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of its own for one thread; the caller closes it."""
        return self.connection.cursor()

    def close(self) -> None:
        """Checkpoints and lets go of the file; may be called twice."""
        with self.lock:
            self.connection.close()
