"""The DuckDB file: opened by one process, written under one lock, read through cursors.

Opened without file-system access and with its configuration locked: no query can read files, attach or reconfigure.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb

from pipeline.model.errors import FleetpulseError, Retryable, UsageError
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.runtime import private_files
from pipeline.store import schema
from pipeline.store.faults import explained
from pipeline.store.opening import open_file

FREE_BYTES = 256 << 20
"""Default of [store] free_bytes: room for the largest commit, and for what DuckDB writes anew at a checkpoint."""
_FREE_SHARE = 20  # at most a twentieth of the disk is kept free, so that a small disk can be used too; chosen


class Database:
    """One open store. Raises what pipeline/store/faults.py lists, and UsageError if its schema is newer.

    broken: why DuckDB will not work before `reopen`; None if it works. `free_bytes`: see `short_of_room`.
    """

    def __init__(
        self,
        path: Path,
        memory_limit: str = "2GB",
        catalogue: Mapping[str, Signal] = CATALOGUE,
        free_bytes: int = 0,
    ) -> None:
        try:
            private_files.make_folder(path.parent)
        except OSError as error:
            raise UsageError(f"[store] path = {str(path)!r}: its folder cannot be made: {error.strerror}") from error
        self.path, self._memory_limit, self._free_bytes = path, memory_limit, free_bytes
        self.lock = threading.RLock()
        self.broken: str | None = None
        self.connection = self._connected()
        try:
            with self.transaction() as connection:
                schema.create(connection, catalogue)
        except duckdb.Error as error:
            self.connection.close()
            raise explained(path, error) from error
        except FleetpulseError:
            self.connection.close()
            raise

    def _connected(self) -> duckdb.DuckDBPyConnection:
        settings = {
            "enable_external_access": "false",
            "python_enable_replacements": "false",
            "memory_limit": self._memory_limit,
        }
        connection = open_file(self.path, settings)
        try:
            connection.execute("SET GLOBAL TimeZone = 'UTC'")
            connection.execute("SET GLOBAL lock_configuration = true")
        except duckdb.Error as error:
            connection.close()
            raise explained(self.path, error) from error
        return connection

    def reopen(self) -> None:
        """Opens the file again after a fatal error; what is in memory of it must be read anew.

        A checkpoint that fails is fatal to DuckDB though nothing that was committed is lost. Raises Retryable while it
        cannot be opened: the disk is still full, or a reader still holds a cursor of before.
        """
        with self.lock:
            self.connection.close()
            try:
                self.connection = self._connected()
                self.connection.execute("SELECT count(*) FROM meta").fetchall()
            except (duckdb.Error, FleetpulseError) as error:
                raise Retryable(str(explained(self.path, error)), after_s=1.0) from error
            self.broken = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The writing connection inside BEGIN ... COMMIT, under the write lock; ROLLBACK on any exception."""
        with self.lock:
            try:
                self.connection.execute("BEGIN")
                yield self.connection
                self.connection.execute("COMMIT")
            except BaseException as error:
                if isinstance(error, duckdb.FatalException):
                    self.broken = str(error)
                # a failed COMMIT has already ended the transaction, and then ROLLBACK is the error of the two
                with contextlib.suppress(duckdb.Error):
                    self.connection.execute("ROLLBACK")
                raise

    def short_of_room(self) -> str | None:
        """Why no telemetry is stored now: the disk has less than `free_bytes` free, or 5 % of it if that is less.

        Space that the file has to spare inside counts as free. What is kept free serves the rest: incidents, deletion
        by age, and checkpoints, which DuckDB does not survive without room.
        """
        disk = shutil.disk_usage(self.path.parent)
        least = min(self._free_bytes, disk.total // _FREE_SHARE)
        if disk.free >= least or disk.free + self._spare() >= least:
            return None
        return (
            f"store {self.path}: {disk.free >> 20} MiB free on its disk, minimum {least >> 20} MiB ([store] "
            "free_bytes): nothing is stored until there is room; free space or lower [store] hot_hours"
        )

    def _spare(self) -> int:
        """Bytes of blocks in the file that hold nothing; 0 where it is not known, as the file is being opened again."""
        with contextlib.suppress(duckdb.Error), contextlib.closing(self.cursor()) as cursor:
            [(size, spare)] = cursor.execute("SELECT block_size, free_blocks FROM pragma_database_size()").fetchall()
            return int(size * spare)
        return 0

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of its own for one thread; the caller closes it."""
        return self.connection.cursor()

    def close(self) -> None:
        """Checkpoints and lets go of the file; may be called twice."""
        with self.lock:
            self.connection.close()
