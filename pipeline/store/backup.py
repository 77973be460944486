"""Backups of a store: a folder with the DuckDB file, the state of the detectors and the sealed history of one moment.

    TARGET/MANIFEST.json      what it is: schema, site, time, partitions with their next offsets
    TARGET/SHA256SUMS         checksums of all other files, for `sha256sum -c`
    TARGET/store.duckdb       the file, with everything that was committed
    TARGET/state/NAME         the state of the detectors
    TARGET/history/...        the sealed files that the store names

The DuckDB file is copied byte by byte while the pipeline writes. Between two checkpoints DuckDB never overwrites a
block that its header or its log needs, since a crash must find them. So the log up to a commit, with the file as it is
read later, is the store of that commit, as long as no checkpoint came in between. `Checkpoints` holds checkpoints back
for that time, by a transaction with an update that is never committed (measured: DuckDB 2.0 checkpoints beside inserts
and deletes of others, not beside updates). The header shows whether it did. Ingest waits only while the transaction
begins. Commits go on; the log grows, up to MAX_LOG_BYTES.

Secrets are not in it: no configuration, token, key or password file, and the store holds none.

Everything is written to TARGET.partial, which gets its name when it is complete and on the disk. A second run goes on
with the sealed files that are there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
import time as clocks
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import duckdb

from pipeline.model.errors import Refused, Unreachable, UsageError
from pipeline.model.records import iso
from pipeline.runtime import private_files
from pipeline.store import history_files
from pipeline.store.detector_state import state_folder
from pipeline.transport.segments import sync_folder

FORMAT = 1
MANIFEST, SUMS, STORE = "MANIFEST.json", "SHA256SUMS", "store.duckdb"
PARTIAL, UNFINISHED = ".partial", ".unfinished"
"""Suffixes of a backup and of a file of it that are being written."""
LEASE_S = 1800.0
"""Time after which checkpoints go on although the copy did not end (s). Chosen: 180 GB at 100 MB/s."""
MAX_LOG_BYTES = 1 << 30
"""Size of the log from which they go on. Chosen: a start replays it in seconds; a row group leaves 7 KB in it."""
ATTEMPTS = 3
"""Copies that are begun before a backup fails, since the pipeline restarted in each. Chosen."""
HEAD_BYTES = 12_288
"""Bytes of the three headers of a DuckDB file: a checkpoint changes one of them."""
_HOLD = "UPDATE meta SET value = value WHERE key = 'schema_version'"  # a row that nothing else changes
_OFFSETS = "SELECT topic, partition, incarnation, next_offset FROM partition_offset ORDER BY ALL"
_OFFSETS_OF_1 = "SELECT topic, partition, incarnation, max(next_offset) FROM ingest_commit GROUP BY ALL ORDER BY ALL"
"""Of schema version 1, where the commits are kept. Later ones expire: a partition without new messages has none."""
_PIECE = 1 << 20  # bytes of one read; chosen
_FICLONE = 0x40049409  # ioctl(2): share the blocks of another file, where the file system can
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StoreMoment:
    """One moment of a store. time: UTC us; bytes: sizes of file and log then; state: file of the detectors, or "".

    history: (path below the history folder, bytes).  offsets: topic, partition, incarnation, next offset.
    """

    id: str
    store: str
    site: str
    duckdb: str
    time: int
    schema_version: int
    store_bytes: int
    log_bytes: int
    state: str
    history: tuple[tuple[str, int], ...]
    offsets: tuple[tuple[str, str, str, int], ...]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoreMoment:
        """Reads the form of `asdict`."""
        lists = {name: tuple(tuple(row) for row in data[name]) for name in ("history", "offsets")}
        return cls(**{**data, **lists})


class Source(Protocol):
    """The store that is copied: through the API of its pipeline, or opened here."""

    def describe(self) -> StoreMoment:
        """Returns the present moment; nothing is held."""
        ...

    def begin(self) -> StoreMoment:
        """Holds checkpoints back and returns the moment that is copied now."""
        ...

    def end(self, moment: str) -> bool:
        """Lets checkpoints go on; returns whether they were held until now."""
        ...


def log_path(store: Path) -> Path:
    """Returns the write-ahead log of a store."""
    return store.with_name(f"{store.name}.wal")


class Checkpoints:
    """Holds the checkpoints of an open store back for one backup at a time. A `Source`, for any thread.

    lock: that of the store's writers.  cursor: opens a connection to it.
    """

    def __init__(
        self,
        store: Path,
        lock: threading.RLock,
        cursor: Callable[[], duckdb.DuckDBPyConnection],
        site: str,
        clock: Callable[[], int],
        monotonic: Callable[[], float] = clocks.monotonic,
        lease_s: float = LEASE_S,
    ) -> None:
        self._lease_s = lease_s
        self._store, self._lock, self._cursor = store, lock, cursor
        self._site, self._clock, self._monotonic = site, clock, monotonic
        self._held: tuple[str, duckdb.DuckDBPyConnection, float] | None = None

    def describe(self) -> StoreMoment:
        """See `Source.describe`."""
        with self._lock, contextlib.closing(self._cursor()) as cursor:
            return self._read_moment(cursor, "")

    def begin(self) -> StoreMoment:
        """See `Source.begin`. Raises Refused while another backup is made."""
        self.expire()
        with self._lock:
            if self._held is not None:
                since = self._monotonic() - self._held[2]
                raise Refused(
                    f"another backup of {self._store} has been running for {since:.0f} s; wait until it is complete"
                )
            cursor = self._cursor()
            try:
                cursor.execute("BEGIN")
                cursor.execute(_HOLD).fetchall()
                moment = self._read_moment(cursor, secrets.token_hex(8))
            except BaseException:
                cursor.close()
                raise
            self._held = (moment.id, cursor, self._monotonic())
            return moment

    def end(self, moment: str) -> bool:
        """See `Source.end`."""
        self.expire()
        with self._lock:
            held = self._held is not None and self._held[0] == moment
            if held:
                self.release()
            return held

    def expire(self) -> None:
        """Lets checkpoints go on after `lease_s` or MAX_LOG_BYTES; the copy is then begun again, or fails."""
        if (held := self._held) is None:
            return
        log = log_path(self._store)
        full = log.stat().st_size > MAX_LOG_BYTES if log.exists() else False
        if full or self._monotonic() - held[2] > self._lease_s:
            self.release()

    def release(self) -> None:
        """Lets checkpoints go on."""
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                held[1].close()

    def _read_moment(self, cursor: duckdb.DuckDBPyConnection, id_: str) -> StoreMoment:
        log = log_path(self._store)
        version = read_schema_version(cursor)
        tables = {name for (name,) in cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        state = cursor.execute("SELECT state FROM snapshot WHERE key = 'judge'").fetchall()
        history = cursor.execute("SELECT path, bytes FROM sealed ORDER BY path") if "sealed" in tables else None
        files = tuple((str(path), int(size)) for path, size in history.fetchall()) if history else ()
        offsets = cursor.execute(_OFFSETS if "partition_offset" in tables else _OFFSETS_OF_1).fetchall()
        named = str(state[0][0]) if state and str(state[0][0]).endswith(".state") else ""
        return StoreMoment(
            *(id_, str(self._store.absolute()), self._site, duckdb.__version__, self._clock(), version),
            *(self._store.stat().st_size, log.stat().st_size if log.exists() else 0, named, files, tuple(offsets)),
        )


def read_schema_version(connection: duckdb.DuckDBPyConnection) -> int:
    """Returns the schema version of a store."""
    [(version,)] = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchall()
    return int(version)


# --- making a backup --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BackupWriter:
    """Writes one backup. For one thread.

    free_bytes: kept free on the disk of the target.  link: share files that never change, if the disk is the same.
    step: called after each step with its name; tests let it fail.  report: progress, for people.  each_piece: called
    for each MiB read; what it raises ends the backup.
    """

    target: Path
    free_bytes: int = 0
    link: bool = True
    memory_limit: str = "1GB"
    report: Report = lambda _: None
    step: Report = lambda _: None
    each_piece: Callable[[], None] = lambda: None
    monotonic: Callable[[], float] = clocks.monotonic
    _origin: str = ""
    _sums: dict[str, str] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)
    _reported: float = 0.0

    @property
    def folder(self) -> Path:
        """The folder while it is incomplete."""
        return self.target.with_name(f"{self.target.name}{PARTIAL}")

    def write(self, source: Source) -> StoreMoment:
        """Makes the backup. Raises UsageError, Unreachable and Refused; then TARGET.partial stays for the next run."""
        if self.target.exists():
            raise UsageError(f"{self.target}: exists; expected a folder that does not: choose another name")
        try:
            private_files.make_folder(self.folder)
        except OSError as error:
            raise UsageError(
                f"{self.folder}: cannot be created: {error.strerror}; expected a writable place"
            ) from error
        with self._lock_folder():
            first = source.describe()
            self._resume()
            self.check_space(first)
            self._copy_history(first)
            self.step("history")
            moment = self._copy_store(source)
            self._copy_history(moment)
            self._drop_others(moment)
            self._settle(moment)
            self.step("settled")
            self._finish(moment)
        return moment

    @contextlib.contextmanager
    def _lock_folder(self) -> Iterator[None]:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise Refused(f"{self.folder}: another process writes this backup; wait until it is complete") from error
        except OSError as error:
            raise Unreachable(
                f"{self.folder}: cannot be written: {error.strerror or error}; run the command again: it goes on"
            ) from error
        finally:
            os.close(handle)

    def close(self) -> None:
        """Closes the store's file; only when its connection in this process is closed: that would drop its lock."""
        for handle in self._open:
            os.close(handle)
        self._open.clear()

    def _resume(self) -> None:
        """Reads the checksums of sealed files that an earlier run copied; removes the rest of it, and foreign files."""
        journal = self.folder / (SUMS + UNFINISHED)
        for line in journal.read_text(errors="replace").splitlines() if journal.exists() else ():
            digest, _, path = line.partition("  ")
            if len(digest) == 64 and path.startswith("history/") and (self.folder / path).is_file():
                self._sums[path] = digest
        if self._sums:
            self.report(f"goes on with {len(self._sums)} files of an earlier run")
        for file in sorted(self.folder.rglob("*")):
            known = file == journal or str(file.relative_to(self.folder)) in self._sums
            if not known and (file.is_symlink() or not file.is_dir()):
                file.unlink(missing_ok=True)

    def check_space(self, moment: StoreMoment) -> None:
        """Raises Unreachable if the disk of the target has no space for the missing files."""
        shared = self.link and self.folder.stat().st_dev == Path(moment.store).parent.stat().st_dev
        history = 0 if shared else sum(b for path, b in moment.history if f"history/{path}" not in self._sums)
        state = state_folder(Path(moment.store)) / moment.state
        needed = moment.store_bytes + 2 * moment.log_bytes + history
        needed += state.stat().st_size if moment.state and state.exists() else 0
        free = shutil.disk_usage(self.folder).free - self.free_bytes
        if needed > free:
            raise Unreachable(
                f"{self.target}: needs {needed >> 20} MiB, its disk has {max(0, free) >> 20} MiB beside the reserve "
                f"free ([store] free_bytes); free space, or choose another disk"
            )

    # --- files ------------------------------------------------------------------------------------------------------

    def _copy_history(self, moment: StoreMoment) -> None:
        """Copies sealed files that are not there yet; one that was replaced during the backup is in no later list."""
        folder = history_files.history_folder(Path(moment.store))
        left = [(path, size) for path, size in moment.history if f"history/{path}" not in self._sums]
        done, total = 0, sum(size for _, size in left)
        for path, size in left:
            name = f"history/{path}"
            with contextlib.suppress(FileNotFoundError):
                self._sums[name] = self._copy(folder / path, name, size, link=self.link)
                with open(self.folder / (SUMS + UNFINISHED), "a", opener=private_files.open_private) as journal:
                    journal.write(f"{self._sums[name]}  {name}\n")
            done += size
            self._report_due(f"history: {done >> 20} of {total >> 20} MiB")

    def _copy_store(self, source: Source) -> StoreMoment:
        """Copies file, log and state of one moment, while checkpoints are held back."""
        for _ in range(ATTEMPTS):
            moment = source.begin()
            self.step("begun")
            complete = False
            try:
                complete = self._copy_moment(moment)
            finally:
                held = source.end(moment.id)
            self.step("store")
            if complete and held:
                return moment
            self.report("the store changed while it was copied (checkpoint, restart or new state): once more")
        raise Unreachable(
            f"{self.target}: the copy was begun {ATTEMPTS} times, and each time the pipeline restarted, or the copy "
            f"took longer than {LEASE_S / 60:.0f} min or {MAX_LOG_BYTES >> 30} GiB of log; use a faster disk"
        )

    def _copy_moment(self, moment: StoreMoment) -> bool:
        """Copies file, log and state; returns whether all existed, and no checkpoint came in between."""
        store, state = Path(moment.store), f"state/{moment.state}"
        self.report(f"store: {(moment.store_bytes + moment.log_bytes) >> 20} MiB")
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        (self.folder / f"{STORE}.wal").unlink(missing_ok=True)
        self._sums = {name: digest for name, digest in self._sums.items() if name.startswith("history/")}
        handle = self.open_once(store)
        before = os.pread(handle, HEAD_BYTES, 0)
        self._origin = "" if moment.log_bytes else identify(handle)
        try:
            self._copy_handle(handle, STORE, moment.store_bytes, "store")  # `_settle` makes its checksum
            if moment.log_bytes:
                self._copy_handle(self.open_once(log_path(store)), f"{STORE}.wal", moment.log_bytes, "log")
            if moment.state:
                self._sums[state] = self._copy(state_folder(store) / moment.state, state, link=self.link)
        except (FileNotFoundError, EOFError):
            return False
        return os.pread(handle, HEAD_BYTES, 0) == before

    def open_once(self, path: Path) -> int:
        """Opens a file of the store for reading until `close`."""
        handle = os.open(path, os.O_RDONLY)
        self._open.append(handle)
        return handle

    def _copy(self, source: Path, name: str, size: int = -1, link: bool = False) -> str:
        """Copies or links a file that never changes; returns its checksum. Raises FileNotFoundError without it."""
        handle = os.open(source, os.O_RDONLY)
        try:
            found = os.fstat(handle).st_size
            if size not in (-1, found):
                raise Unreachable(f"{source}: has {found} bytes, the store names {size}: the history is damaged")
            target = self.folder / name
            private_files.make_folder(target.parent)
            target.unlink(missing_ok=True)
            if link:
                with contextlib.suppress(OSError):
                    os.link(source, target)
                    return checksum(handle, found, self.each_piece)
            return self._copy_handle(handle, name, found)
        finally:
            os.close(handle)

    def _copy_handle(self, source: int, name: str, size: int, what: str = "") -> str:
        """Writes the first bytes of an open file to a new one, on the disk; returns its checksum, "" of one that is
        shared and has a `what`, which is not read. Raises EOFError."""
        target, digest, at = self.folder / name, hashlib.sha256(), 0
        unfinished = target.with_name(target.name + UNFINISHED)
        with open(unfinished, "wb", opener=private_files.open_private) as file:
            with contextlib.suppress(OSError):
                fcntl.ioctl(file.fileno(), _FICLONE, source)
                file.truncate(size)
            shared = os.fstat(file.fileno()).st_size == size > 0
            while at < size and not (shared and what):
                self.each_piece()
                piece = os.pread(source if not shared else file.fileno(), min(_PIECE, size - at), at)
                if not piece:
                    raise EOFError(f"{name}: has {at} bytes, expected {size}")
                digest.update(piece)
                if not shared:
                    file.write(piece)
                at += len(piece)
                if what:
                    self._report_due(f"{what}: {at >> 20} of {size >> 20} MiB")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
        return digest.hexdigest()

    def _report_due(self, text: str) -> None:
        """Reports progress every 5 s."""
        if self.monotonic() - self._reported >= 5.0:
            self._reported = self.monotonic()
            self.report(text)

    # --- completion -------------------------------------------------------------------------------------------------

    def _drop_others(self, moment: StoreMoment) -> None:
        """Removes sealed files that the store replaced while others were copied. Raises Unreachable if one lacks."""
        named = {f"history/{path}" for path, _ in moment.history}
        if lacking := sorted(named - self._sums.keys()):
            raise Unreachable(
                f"{self.target}: {len(lacking)} sealed files disappeared while they were copied, such as {lacking[0]}; "
                "run the command again: it goes on"
            )
        for name in [name for name in self._sums if name.startswith("history/") and name not in named]:
            (self.folder / name).unlink(missing_ok=True)
            del self._sums[name]

    def _settle(self, moment: StoreMoment) -> None:
        """Opens the copy, so that its log becomes part of the file, and compares what it has. Raises Unreachable."""
        path = self.folder / STORE
        try:
            with duckdb.connect(str(path), config={"memory_limit": self.memory_limit}) as connection:
                connection.execute("CHECKPOINT")
                found = Checkpoints(path, threading.RLock(), connection.cursor, "", lambda: 0).describe()
        except duckdb.Error as error:
            raise Unreachable(
                f"{path}: the copy of the store cannot be opened: {error}; run the command again"
            ) from error
        for name in ("schema_version", "history", "offsets"):
            if getattr(found, name) != getattr(moment, name):
                raise Unreachable(f"{path}: the copy has other {name} than the store had; run the command again")
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            self.report("checksum of the copy")
            self._sums[STORE] = checksum(handle, path.stat().st_size, self.each_piece)
        finally:
            os.close(handle)

    def _finish(self, moment: StoreMoment) -> None:
        """Writes manifest and checksums, and gives the folder its name."""
        named = {key: value for key, value in asdict(moment).items() if key not in ("id", "store_bytes", "log_bytes")}
        manifest = {"format": FORMAT, **named, "time": iso(moment.time), "origin": self._origin}
        self._sums[MANIFEST] = self._write_text(MANIFEST, json.dumps(manifest, indent=1) + "\n")
        self._write_text(SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(self._sums.items())))
        (self.folder / (SUMS + UNFINISHED)).unlink(missing_ok=True)
        for parent, _, _ in os.walk(self.folder):
            sync_folder(Path(parent))
        self.step("written")
        os.rename(self.folder, self.target)
        sync_folder(self.target.parent)
        self.step("named")

    def _write_text(self, name: str, text: str) -> str:
        with open(self.folder / name, "w", opener=private_files.open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return hashlib.sha256(text.encode()).hexdigest()


def identify(store: int) -> str:
    """Returns what an open DuckDB file without a log is known by: each checkpoint changes its headers, and a restored
    file is another one."""
    return f"{os.fstat(store).st_ino}:{hashlib.sha256(os.pread(store, HEAD_BYTES, 0)).hexdigest()}"


def checksum(handle: int, size: int, each_piece: Callable[[], None] = lambda: None) -> str:
    """Returns the SHA-256 of the first bytes of an open file, in hexadecimal."""
    digest, at = hashlib.sha256(), 0
    while at < size and (piece := os.pread(handle, _PIECE, at)):
        each_piece()
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()
