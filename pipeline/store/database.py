"""The DuckDB file: opened by one process, written under one lock, read through cursors.

It is opened without file-system access and with a locked configuration: no query can read files, attach or
reconfigure. The file is checked before it is opened, so that a wrong path is not reported as damage.

What an error of the store means:

    held by another process           Unreachable   stop it, or use another [store] path
    no disk space, no memory          Unreachable   free space; a larger [store] memory_limit
    no permission                     UsageError    another [store] path
    written by a newer DuckDB         UsageError    upgrade
    damaged file or log               DamagedStore  docs/store.md explains how to recover
"""

from __future__ import annotations

import contextlib
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb

from pipeline.model.errors import DamagedStore, FleetpulseError, Retryable, Unreachable, UsageError, WireError
from pipeline.model.signals import CATALOGUE, Signal
from pipeline.runtime import private_files
from pipeline.store import schema

RECOVERY = "docs/store.md, section Recovery"
_OF_MESSAGE = (
    *(WireError, duckdb.DataError, duckdb.IntegrityError),  # what is checked here and by the store
    *(ValueError, TypeError, LookupError, ArithmeticError),  # what NumPy, Arrow and our code raise on values
)
_SIGNS_OF_DAMAGE = ("Corrupt", "corrupt", "Could not read enough bytes", "replaying WAL", "deserializ")


def is_of_message(error: Exception) -> bool:
    """Whether the content of a message can be the reason, so that looking for that message makes sense.

    All else (disk, memory, locks, an invalid database, what nobody foresaw) says nothing of any message: it is tried
    again, and no message is given up for it. A full disk at COMMIT is a TransactionException, a failed checkpoint a
    FatalException, a damaged block a bare duckdb.Error.
    """
    return isinstance(error, _OF_MESSAGE)


def explained(path: Path, error: Exception) -> FleetpulseError:
    """What an error of DuckDB on this file means, and what to do."""
    text = " ".join(str(error).split())
    if isinstance(error, FleetpulseError):
        return error
    if "lock on file" in text:
        holder = re.search(r"PID (\d+)", text)
        who = f"process {holder[1]}" if holder else "another process"
        return Unreachable(
            f"store {path}: {who} has it open; is another 'fleetpulse pipeline' running on it? Stop it, or set another "
            f"[store] path ({text})"
        )
    if "No space left" in text or "Disk quota" in text:
        return Unreachable(f"store {path}: its disk is full; free space: df -h {path.parent} ({text})")
    if "Permission denied" in text or "Read-only file system" in text:
        return UsageError(f"[store] path = '{path}': cannot be written by this user ({text})")
    if isinstance(error, duckdb.OutOfMemoryException):
        return Unreachable(f"store {path}: out of memory; raise [store] memory_limit ({text})")
    if "newer version of DuckDB" in text or "storage version" in text:
        return UsageError(f"[store] path = '{path}': written by a newer DuckDB; upgrade fleetpulse ({text})")
    if damaged(error):
        return DamagedStore(_damage(path, text))
    return Unreachable(f"store {path}: cannot be used: {text}")


def damaged(error: Exception) -> bool:
    """Whether DuckDB found bytes in the file or its log that cannot be right."""
    text = str(error)
    return isinstance(error, duckdb.Error) and any(sign in text for sign in _SIGNS_OF_DAMAGE)


def _damage(path: Path, text: str) -> str:
    log = path.with_name(path.name + ".wal")
    if "WAL" in text:
        return (
            f"store {path}: its write-ahead log {log} is damaged ({text}). The file itself opens without it: stop the "
            f"pipeline, move {log.name} aside; what was committed since the last checkpoint is lost. {RECOVERY}"
        )
    return (
        f"store {path}: the file is damaged ({text}). Check the disk; stop the pipeline, move {path.name} and "
        f"{log.name} aside, put a copy back or start with a new store. {RECOVERY}"
    )


MAGIC, MAGIC_AT = b"DUCK", 8
_HEAD = 64  # bytes that tell what a file is
_FOREIGN = {b"SQLite format 3\0": "an SQLite database", b"PAR1": "a Parquet file", b"\x1f\x8b": "a gzip file"}


def open_file(path: Path, settings: Mapping[str, str], read_only: bool = False) -> duckdb.DuckDBPyConnection:
    """A connection to the store's file; `read_only` changes nothing. Raises UsageError, or what faults.py lists."""
    _check_file(path)
    try:
        return duckdb.connect(str(path), read_only=read_only, config=dict(settings))
    except duckdb.Error as error:
        raise explained(path, error) from error


def _check_file(path: Path) -> None:
    """Raises UsageError if what lies at `path` cannot be a store of ours; an absent file can."""
    where = f"[store] path = '{path}'"
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            raise UsageError(f"{where}: is a pipe, and opening it would wait for ever; set another path")
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
            f"store {path}: the file is empty although its log {log} is there, so it was cut off. Check the disk; move "
            f"{path.name} and {log.name} aside, put a copy back or start with a new store. {RECOVERY}"
        )
    if not head:
        raise UsageError(f"{where}: is empty: it holds nothing, remove it: rm {path}")
    if head[MAGIC_AT : MAGIC_AT + len(MAGIC)] == MAGIC:
        return
    kind = next((name for magic, name in _FOREIGN.items() if head.startswith(magic)), None)
    found = f"is {kind}" if kind else f"is not a DuckDB file (it begins with {head[:16]!r})"
    raise UsageError(f"{where}: {found}: set another path; if it was the store, it is damaged: {RECOVERY}")


FREE_BYTES = 256 << 20
"""Default of [store] free_bytes: room for the largest commit, and for what DuckDB writes anew at a checkpoint."""
_FREE_SHARE = 20  # at most a twentieth of the disk is kept free, so that a small disk can be used too; chosen


class Database:
    """One open store. Raises what pipeline/store/database.py lists, and UsageError if its schema is newer.

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
