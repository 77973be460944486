"""The DuckDB file: opened by one process, written under one lock, read through cursors.

DuckDB starts no threads here: each statement runs in the thread that executes it, and with its priority, so
that a heavy read never takes a core from ingest (pipeline/api/store_reads.py).

It is opened with a locked configuration and access to no files but the sealed ones beside it: no query can read other
files or reconfigure. The file is checked before it is opened, so that a wrong path is not reported as damage.

What an error of the store means:

    held by another process           Unreachable   stop it, or use another [store] path
    no disk space, no memory          Unreachable   free space; a larger [store] memory_limit
    no permission                     UsageError    another [store] path
    written by a newer DuckDB         UsageError    upgrade
    damaged file or log               DamagedStore  docs/store.md explains how to recover
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb

from pipeline.model.errors import (
    DamagedStore,
    FleetpulseError,
    HeldStore,
    Interrupted,
    Retryable,
    Unreachable,
    UsageError,
    WireError,
)
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.runtime import private_files
from pipeline.runtime.guides import guide
from pipeline.runtime.long_start import LongStart
from pipeline.store import backup, history_files, schema
from pipeline.store.append import forget_sources
from pipeline.store.migration_backup import back_up_before_migration, migration_backup

log = logging.getLogger("fleetpulse.store")

RECOVERY = guide("store.md", "Recovery")
_OF_MESSAGE = (
    *(WireError, duckdb.DataError, duckdb.IntegrityError),  # raised by our checks and by DuckDB
    *(ValueError, TypeError, LookupError, ArithmeticError),  # raised by NumPy, Arrow and our code on bad values
)
_SIGNS_OF_DAMAGE = ("Corrupt", "corrupt", "Could not read enough bytes", "replaying WAL", "deserializ")


def is_message_fault(error: Exception) -> bool:
    """Whether the content of a message may be the cause, so that a search for that message makes sense.

    Any other error (disk, memory, locks, an invalid database, anything unforeseen) says nothing about messages: the
    commit is retried, and no message is dropped. A full disk at COMMIT is a TransactionException, a failed checkpoint a
    FatalException, a damaged block a bare duckdb.Error.
    """
    return isinstance(error, _OF_MESSAGE)


def explain_error(path: Path, error: Exception) -> FleetpulseError:
    """Explains an error of DuckDB on this file, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, FleetpulseError):
        return error
    if "lock on file" in text:
        holder = re.search(r"PID (\d+)", text)
        owner = f"process {holder[1]}" if holder else "another process"
        said = (
            f"{owner} has it open; is another 'fleetpulse pipeline' running on it? Stop it, or set another [store] path"
        )
        return HeldStore(f"store {path}: {said} ({text})", owner)
    if "No space left" in text or "Disk quota" in text:
        return Unreachable(f"store {path}: its disk is full; free space: df -h {path.parent} ({text})")
    if "Permission denied" in text or "Read-only file system" in text:
        return UsageError(f"[store] path = '{path}': cannot be written by this user ({text})")
    if isinstance(error, duckdb.OutOfMemoryException):
        return Unreachable(f"store {path}: out of memory; raise [store] memory_limit ({text})")
    if "newer version of DuckDB" in text or "storage version" in text:
        return UsageError(f"[store] path = '{path}': written by a newer DuckDB; upgrade fleetpulse ({text})")
    if is_damaged(error):
        return DamagedStore(_describe_damage(path, text))
    return Unreachable(f"store {path}: cannot be used: {text}")


def is_damaged(error: Exception) -> bool:
    """Whether DuckDB found damage in the file or its log."""
    text = str(error)
    return isinstance(error, duckdb.Error) and any(sign in text for sign in _SIGNS_OF_DAMAGE)


def _describe_damage(path: Path, text: str) -> str:
    log = path.with_name(path.name + ".wal")
    if "WAL" in text:
        return (
            f"store {path}: its write-ahead log {log} is damaged ({text}). The file itself opens without it: stop the "
            f"pipeline, move {log.name} aside; commits since the last checkpoint are lost. {RECOVERY}"
        )
    return (
        f"store {path}: the file is damaged ({text}). Check the disk; stop the pipeline, move {path.name} and "
        f"{log.name} aside, restore a copy or start with a new store. {RECOVERY}"
    )


def restore_marker(path: Path) -> Path:
    """Returns the file that exists while a backup is restored to this path; the store cannot be opened then."""
    return path.with_name(f"{path.name}.restoring")


MAGIC, MAGIC_AT = b"DUCK", 8
_HEAD = 64  # bytes read to identify the file
_FOREIGN = {b"SQLite format 3\0": "an SQLite database", b"PAR1": "a Parquet file", b"\x1f\x8b": "a gzip file"}


def open_file(path: Path, settings: Mapping[str, str], read_only: bool = False) -> duckdb.DuckDBPyConnection:
    """Opens a connection to the store's file and its sealed files, no others. Raises as in the module docstring."""
    _check_file(path)
    try:
        connection = duckdb.connect(str(path), read_only=read_only, config=dict(settings))
    except duckdb.Error as error:
        raise explain_error(path, error) from error
    try:
        history_files.restrict_access(connection, path)
    except duckdb.Error as error:
        connection.close()
        raise explain_error(path, error) from error
    return connection


def _check_file(path: Path) -> None:
    """Raises UsageError if the file at `path` cannot be a store; a missing file is fine."""
    where = f"[store] path = '{path}'"
    if os.path.exists(marker := restore_marker(path)):
        raise UsageError(
            f"{where}: a restore was interrupted ({marker} exists): run fleetpulse restore with the same backup again"
        )
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise UsageError(f"{where}: is a pipe, which cannot be opened without waiting forever; set another path")
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(
            f"{where}: cannot be read: {error.strerror}; expected a file that this user may read and write"
        ) from error
    log = path.with_name(path.name + ".wal")
    if not head and log.exists():
        raise DamagedStore(
            f"store {path}: the file is empty although its log {log} exists, so it was truncated. Check the disk; move "
            f"{path.name} and {log.name} aside, restore a copy or start with a new store. {RECOVERY}"
        )
    if not head:
        raise UsageError(f"{where}: is empty: remove it: rm {path}")
    if head[MAGIC_AT : MAGIC_AT + len(MAGIC)] == MAGIC:
        return
    kind = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
    found = f"is {kind}" if kind else f"is not a DuckDB file (it begins with {head[:16]!r})"
    raise UsageError(f"{where}: {found}: set another path; if it was the store, it is damaged: {RECOVERY}")


EVENTS_SHARE = 4  # events are stored down to a quarter of free_bytes; chosen: a day of them is a few MB
_FREE_SHARE = 20  # at most a twentieth of the disk is kept free, so that small disks work; chosen


def reserved_bytes(free_bytes: int, total: int) -> int:
    """Returns the bytes that stay free on a disk of `total` bytes: `[store] free_bytes`, on small disks less."""
    return min(free_bytes, total // _FREE_SHARE)


class Database:
    """The open store. Raises the errors listed in the module docstring, and UsageError if its schema is newer.

    broken: why DuckDB needs `reopen`; None if it works. `free_bytes`: see `find_space_problem`. An older schema is
    migrated in one transaction; with `keep_older`, after a backup of the file. start: gets the progress of both, and
    ends them, which raises Interrupted.
    """

    def __init__(
        self,
        path: Path,
        memory_limit: str = "2GB",
        catalogue: Mapping[str, Signal] = CATALOGUE,
        free_bytes: int = 0,
        keep_older: bool = True,
        start: LongStart | None = None,
    ) -> None:
        start = start or LongStart()
        try:
            private_files.make_folder(path.parent)
        except OSError as error:
            raise UsageError(f"[store] path = {str(path)!r}: its folder cannot be created: {error.strerror}") from error
        self.path, self._memory_limit, self._free_bytes = path, memory_limit, free_bytes
        self.lock = threading.RLock()
        self.broken: str | None = None
        self.connection = self._connect()
        self._copied: backup.BackupWriter | None = None  # has the file open: closing it would drop DuckDB's lock
        try:
            found = schema.check_version(self.connection)
            if keep_older:
                self._back_up_older(found, start)
            if 0 < found < schema.SCHEMA_VERSION:
                start.tell(f"schema {found} of the store is migrated to {schema.SCHEMA_VERSION}")
            with start.interrupting(self.connection.interrupt), self.transaction() as connection:
                schema.create_tables(connection, found, catalogue)
        except duckdb.InterruptException as error:
            self.close()
            raise Interrupted(f"store {path}: stopped in the migration of schema {found}, which is undone") from error
        except duckdb.Error as error:
            self.close()
            raise explain_error(path, error) from error
        except (FleetpulseError, OSError):
            self.close()
            raise

    def _back_up_older(self, found: int, start: LongStart) -> None:
        """Makes a backup if schema `found` is older than ours. Raises Unreachable if there is no space for it."""
        if not 0 < found < schema.SCHEMA_VERSION:
            return
        target = migration_backup(self.path, found)
        log.warning("store %s: schema %d becomes %d; backup first: %s", self.path, found, schema.SCHEMA_VERSION, target)
        start.tell(f"schema {found} of the store: checkpoint before its backup")
        self.connection.execute("CHECKPOINT")
        source = backup.Checkpoints(  # there is no other writer yet: the copy may take as long as it does
            *(self.path, self.lock, self.cursor, "", lambda: time.time_ns() // 1000), lease_s=math.inf
        )
        try:
            self._copied = back_up_before_migration(source, self.path, found, self._free_bytes, start)
        except Unreachable as error:
            raise Unreachable(f"{error}. [store] migration_backup = false migrates without a backup") from error

    def _connect(self) -> duckdb.DuckDBPyConnection:
        settings = {"python_enable_replacements": "false", "memory_limit": self._memory_limit, "threads": "1"}
        return open_file(self.path, settings)

    def reopen(self) -> None:
        """Opens the file again after a fatal error; everything in memory about it must be loaded again.

        A failed checkpoint is fatal for DuckDB, although no commit is lost. Raises Retryable while the file cannot be
        opened: the disk is still full, or a reader still has an old cursor.
        """
        with self.lock:
            self.connection.close()
            try:
                self.connection = self._connect()
                self.connection.execute("SELECT count(*) FROM meta").fetchall()
            except (duckdb.Error, FleetpulseError) as error:
                raise Retryable(str(explain_error(self.path, error)), after_s=1.0) from error
            self.broken = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """The writing connection inside BEGIN ... COMMIT, under the write lock; ROLLBACK on any exception.

        Raises duckdb.Error if a statement failed and its error was caught: COMMIT would then report success and store
        nothing (seen with DuckDB 2.0.0).
        """
        with self.lock:
            try:
                self.connection.execute("BEGIN")
                yield self.connection
                self.connection.execute("SELECT 1")  # raises in an aborted transaction; 0.05 ms
                self.connection.execute("COMMIT")
            except BaseException as error:
                if isinstance(error, duckdb.FatalException):
                    self.broken = str(error)
                forget_sources(self.connection)
                # after a failed COMMIT the transaction has ended, and ROLLBACK fails
                with contextlib.suppress(duckdb.Error):
                    self.connection.execute("ROLLBACK")
                raise

    def find_space_problem(self, events: bool = False) -> str | None:
        """Describes why no telemetry is stored: less than `free_bytes` (at most 5 % of the disk) is free. None if
        enough. events: why no events are stored either: less than a quarter of that.

        Free blocks inside the file count as free. The reserve is for everything else: events, incidents, alerts,
        deletion by age, and checkpoints, which DuckDB does not survive without space.
        """
        disk = shutil.disk_usage(self.path.parent)
        least = reserved_bytes(self._free_bytes, disk.total)
        needed = least // EVENTS_SHARE if events else least
        if disk.free >= needed or disk.free + self._free_block_bytes() >= needed:
            return None
        return (
            f"store {self.path}: {disk.free >> 20} MiB free on its disk, minimum {least >> 20} MiB ([store] "
            f"free_bytes): no telemetry is stored until there is space, below {least // EVENTS_SHARE >> 20} MiB no "
            "events either; free space or lower [store] hot_hours"
        )

    def check_space(self) -> bool:
        """Returns whether the disk has space for events only. Raises Retryable if it has none for them either."""
        trouble = self.find_space_problem()
        if trouble and self.find_space_problem(events=True):
            raise Retryable(trouble, after_s=1.0)
        return trouble is not None

    def _free_block_bytes(self) -> int:
        """Bytes of free blocks in the file; 0 if unknown, while the file is being reopened."""
        with contextlib.suppress(duckdb.Error), contextlib.closing(self.cursor()) as cursor:
            [(size, spare)] = cursor.execute("SELECT block_size, free_blocks FROM pragma_database_size()").fetchall()
            return int(size * spare)
        return 0

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A new connection for one thread; the caller closes it."""
        return self.connection.cursor()

    def close(self) -> None:
        """Checkpoints and closes the file; may be called twice."""
        with self.lock:
            self.connection.close()
            if self._copied is not None:
                self._copied.close()
