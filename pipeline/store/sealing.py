"""Sealing: moves each full hour of the hot tables to Parquet files, and merges the files of a day.

An hour of a class is sealed in one transaction on a separate connection:

    copied    the rows that its snapshot sees are written to PATH.partial, sorted by entity and time
    synced    the file is on the disk
    renamed   it has its name
    deleted   the same rows are deleted from the hot tables
    named     the file is in the table `sealed`, and the view of the class shows it
    committed

A kill before `committed` leaves the rows hot and a file without a name, which the next start removes; after it, the
rows are in the file only. Rows that arrive during it are not in the snapshot: they stay hot until the next pass, which
writes another file for the hour. The copy runs in a thread and takes no lock; the rest takes milliseconds in the loop
of the pipeline. What ingest and retention commit during the copy may conflict with it: a new signal or set of signals
replaces the view of the class, retention deletes rows. Such a conflict ends the transaction without effect, and the
next call copies again. It is counted, and an error only after CONFLICTS in a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import duckdb

from pipeline.config.sections import Store
from pipeline.model.records import SECOND, iso
from pipeline.model.signals import CLASSES
from pipeline.runtime import private_files
from pipeline.store import history_files, schema
from pipeline.store.append import register_columns
from pipeline.store.database import Database
from pipeline.store.history_files import PARTIAL, SealedFile
from pipeline.store.rollups import roll_up_sorted, select_rollup

log = logging.getLogger("fleetpulse.store")

HOUR = 3600 * SECOND
DAY = 24 * HOUR
EVERY = 600 * SECOND
"""Time between two searches for full hours (us). Chosen: the late rows of so long make a file of their own."""
MAX_MERGED = 1 << 30
"""Bytes of files that are merged into one. Chosen: larger ones cost no query a noticeable time to open."""
CONFLICTS = 5
"""Conflicts in a row after which sealing reports a problem. Chosen: new sets of signals come in bursts, with agents."""
_INTERRUPT_EVERY = 0.1
"""Seconds until a thread that must stop is interrupted again: between two statements an interrupt has no effect."""
_OPTIONS = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2, DICTIONARY_SIZE_LIMIT 1000"
"""Of COPY. A column that is read every tenth row has few values for its rows, and DuckDB would put each into a
dictionary: 8.5 bytes a counter instead of 5. Chosen: files of an agent's stream are 10 % smaller than without; 200 and
4,000 are worse."""
_HOUR_LEVEL, _DAY_LEVEL = 3, 14
"""zstd levels of an hour, which is merged soon, and of a day. Chosen: 14 needs 6 % fewer bytes and 60 % more CPU to
write than 3, of an agent's stream; 13 needs 3 % fewer than 3, and 19 needs 3 % fewer than 14 for twice its CPU."""
_GROUP_ROWS, _GROUP_VALUES = (122_880, 491_520), 20_000_000
"""Least and most rows of a row group, and its values: the writer holds one (160 MB). Chosen: in larger groups the
counters of NVLinks and ports need 10 % fewer bytes; a group is what a reader of one device decodes."""
_MAX_FOLDER = 255
"""Bytes of a folder's name; that of ext4 and XFS (NAME_MAX)."""
Step = Callable[[str], None]


@dataclass(slots=True)
class _Job:
    """One transaction that exchanges rows or files for new files.

    replaced: paths of files whose rows are in the new ones.  span: the hour whose hot rows are, if any.  lost: values
    that do not fit the signed type.
    """

    cursor: duckdb.DuckDBPyConnection
    device_class: str
    span: tuple[int, int] | None = None
    replaced: list[str] = field(default_factory=list)
    files: list[SealedFile] = field(default_factory=list)
    lost: int = 0


def _ignore(_: str) -> None:
    """No step is observed."""


class Sealer:
    """Seals hours, merges days and removes expired files. For the loop of the pipeline, which calls `advance`.

    step: called after each step of a transaction with its name; tests let it fail.
    """

    def __init__(self, database: Database, store: Store, clock: Callable[[], int], step: Step = _ignore) -> None:
        self._database, self._store, self._clock, self._step = database, store, clock, step
        self._folder = history_files.history_folder(database.path)
        self._running: Future[_Job | None] | None = None
        self._cursor: duckdb.DuckDBPyConnection | None = None  # of the newest transaction
        self._searched: int | None = None
        self._unnamed: list[tuple[int, str]] = []
        self.sealed_rows = self.lost_values = self.conflicts = 0
        self._conflicts_in_a_row = 0

    # --- called by the loop -----------------------------------------------------------------------------------------

    def advance(self, before: int, cover_latest: Callable[[], None] = lambda: None) -> bool:
        """Starts or finishes one transaction; returns whether one was committed. Raises duckdb.Error, OSError.

        before: rows from then on stay hot.  cover_latest: writes the newest row of each device, which a start would
        search in the hot tables only.
        """
        now = self._clock()
        if self._running is None and (self._searched is None or abs(now - self._searched) >= EVERY):
            self._remove_replaced(now)
            self._running = Future()
            threading.Thread(target=self._work, args=(self._running, before), name="sealing", daemon=True).start()
        if self._running is None or not self._running.done():
            return False
        done, self._running = self._running, None
        self._searched = now
        job = done.result()
        if job is None:
            return False
        self._searched = None  # there may be more
        try:
            self._commit(job, cover_latest)
        except duckdb.TransactionException as error:
            self._count_conflict(error)
            return False
        self._conflicts_in_a_row = 0
        return True

    def _count_conflict(self, error: duckdb.TransactionException) -> None:
        """Counts a conflict with what others committed during the copy. Raises the error if it is no conflict (a full
        disk), or one of many in a row."""
        if "conflict" not in str(error).lower():
            raise error
        self.conflicts += 1
        self._conflicts_in_a_row += 1
        if self._conflicts_in_a_row >= CONFLICTS:
            raise error
        log.debug("store: not sealed, copied again: %s", error)

    def stop(self) -> None:
        """Ends a transaction that runs, without effect, and waits for its thread."""
        running, self._running = self._running, None
        if running is None:
            return
        while True:
            if self._cursor is not None:
                with contextlib.suppress(duckdb.Error):  # it may have ended
                    self._cursor.interrupt()
            try:
                job = running.result(_INTERRUPT_EVERY)
            except TimeoutError:
                continue
            except (duckdb.Error, OSError):
                return
            if job is not None:
                self._abandon(job.cursor, job)
            return

    def seal(self, before: int) -> int:
        """Seals and merges everything that is due, in this thread; returns the number of transactions."""
        number = 0
        while (job := self._prepare(before)) is not None:
            self._commit(job, lambda: None)
            number += 1
        return number

    def expire(self, now: int) -> None:
        """Drops files over [store] telemetry_days, rollup_days and telemetry_bytes; they are removed a little later."""
        days = int(self._store.telemetry_days * DAY), int(self._store.rollup_days * DAY)
        most = min(self._store.telemetry_bytes, shutil.disk_usage(self._database.path.parent).total // 2)
        with self._database.transaction() as connection:
            paths = history_files.find_expired(connection, now - days[0], now - days[1], most)
            if paths:
                self._exchange(connection, paths, ())
                for device_class in {path.partition("/")[0] for path in paths} & set(CLASSES):
                    schema.show_sealed(connection, device_class)
        if paths:
            log.info("store: %d sealed files expired", len(paths))
            self._unnamed += ((self._clock(), path) for path in paths)

    def count(self) -> dict[str, float]:
        """Returns the counters by the name of their metric."""
        return {
            "fleetpulse_store_sealed_rows_total": float(self.sealed_rows),
            "fleetpulse_store_sealed_values_lost_total": float(self.lost_values),
            "fleetpulse_store_sealing_conflicts_total": float(self.conflicts),
        }

    def _remove_replaced(self, now: int) -> None:
        """Removes files that were replaced a while ago: no reader has them in a plan any more."""
        due = [path for since, path in self._unnamed if abs(now - since) >= history_files.KEEP_UNNAMED]
        for path in due:
            (self._folder / path).unlink(missing_ok=True)
        self._unnamed = [entry for entry in self._unnamed if entry[1] not in due]

    # --- a transaction ----------------------------------------------------------------------------------------------

    def _work(self, outcome: Future[_Job | None], before: int) -> None:
        try:
            outcome.set_result(self._prepare(before))
        except BaseException as error:  # noqa: BLE001 - raised in the loop
            outcome.set_exception(error)

    def _prepare(self, before: int) -> _Job | None:
        """Begins the transaction of the next job and writes its files; None if nothing is due."""
        self._cursor = cursor = self._database.cursor()
        job: _Job | None = None
        try:
            cursor.execute("BEGIN")
            job = self._find_hour(cursor, before) or self._find_day(cursor, before)
            if job is None:
                cursor.close()
                return None
            for file in self._write_hour(job) if job.span is not None else self._write_day(job):
                job.files.append(file)
            return job
        except BaseException:
            self._abandon(cursor, job)
            raise

    def _commit(self, job: _Job, cover_latest: Callable[[], None]) -> None:
        """Deletes the copied rows and names the files, in the transaction that copied them."""
        try:
            cover_latest()
            with self._database.lock:
                if job.span is not None:
                    self._delete_rows(job, sum(file.rows for file in job.files if not file.step))
                self._exchange(job.cursor, job.replaced, job.files)
                schema.show_sealed(job.cursor, job.device_class)
                self._step("named")
                self._end(job.cursor)
        except BaseException:
            self._abandon(job.cursor, job)
            raise
        self._step("committed")
        self._unnamed += ((self._clock(), path) for path in job.replaced)
        self.sealed_rows += sum(file.rows for file in job.files if not file.step) if job.span else 0
        self.lost_values += job.lost
        log.info("store: sealed %s: %d files", job.device_class, len(job.files))

    def _end(self, cursor: duckdb.DuckDBPyConnection) -> None:
        try:
            cursor.execute("COMMIT")
        except duckdb.FatalException as error:
            self._database.broken = str(error)
            raise
        finally:
            cursor.close()

    def _abandon(self, cursor: duckdb.DuckDBPyConnection, job: _Job | None) -> None:
        """Ends a transaction that failed, and removes its files unless they are named.

        A failed checkpoint makes COMMIT fail although it is durable: then only the next start knows.
        """
        cursor.close()  # rolls back
        if job is None or self._database.broken is not None:
            return
        with contextlib.closing(self._database.cursor()) as reader:
            for file in job.files:
                if not reader.execute("SELECT 1 FROM sealed WHERE path = ?", [file.path]).fetchall():
                    (self._folder / file.path).unlink(missing_ok=True)

    def _exchange(self, connection: duckdb.DuckDBPyConnection, old: Iterable[str], new: Iterable[SealedFile]) -> None:
        for path in old:
            connection.execute("DELETE FROM sealed WHERE path = ?", [path])
        for file in new:
            file.insert(connection)

    def _delete_rows(self, job: _Job, copied: int) -> None:
        first, until = job.span or (0, 0)
        known = f"device IN (SELECT id FROM device WHERE class = '{job.device_class}')"
        deleted = sum(
            job.cursor.execute(
                f'DELETE FROM "{table}" WHERE time >= make_timestamptz({first}) AND time < make_timestamptz({until}) '
                f"AND {known}"
            ).fetchall()[0][0]
            for table in _hot_tables(job.cursor, job.device_class)
        )
        if deleted != copied:
            raise duckdb.DataError(f"{job.device_class}: {copied} rows were copied, {deleted} deleted: not sealed")
        if job.lost:
            job.cursor.execute(
                """INSERT INTO losses VALUES ('value', ?, 'counter of 2^63 or more in a sealed hour', ?, 0,
                       make_timestamptz(?), make_timestamptz(?))
                   ON CONFLICT (kind, topic, cause) DO UPDATE SET number = losses.number + excluded.number,
                       first = least(losses.first, excluded.first), last = greatest(losses.last, excluded.last)""",
                [job.device_class, job.lost, first, until],
            )
        self._step("deleted")

    # --- hours ------------------------------------------------------------------------------------------------------

    def _find_hour(self, cursor: duckdb.DuckDBPyConnection, before: int) -> _Job | None:
        """The oldest full hour before that has rows of known devices."""
        until = before // HOUR * HOUR
        oldest: tuple[int, str] | None = None
        for table in schema.list_hot_tables(cursor):
            device_class = schema.class_of_table(table)
            [(first,)] = cursor.execute(
                f'SELECT epoch_us(min(time)) FROM "{table}" WHERE time < make_timestamptz({until}) '
                f"AND device IN (SELECT id FROM device WHERE class = '{device_class}')"
            ).fetchall()
            if first is not None and (oldest is None or (first, device_class) < oldest):
                oldest = first, device_class
        if oldest is None:
            return None
        hour = oldest[0] // HOUR * HOUR
        return _Job(cursor, oldest[1], (hour, hour + HOUR))

    def _write_hour(self, job: _Job) -> Iterator[SealedFile]:
        """Writes the hour, a file for each site and its rollups."""
        first, until = job.span or (0, 0)
        source, types = _select_hot(job.cursor, job.device_class, first, until)
        device = f"FROM device WHERE class = '{job.device_class}'"
        big = [f'coalesce(("{c}" >= 9223372036854775808)::INTEGER, 0)' for c, t in types.items() if t == "UBIGINT"]
        if big:
            [(lost,)] = job.cursor.execute(f"SELECT sum({' + '.join(big)}) FROM ({source})").fetchall()
            job.lost = int(lost or 0)
        columns = "".join(f", {history_files.select_signed(c, t, 'h.')}" for c, t in types.items())
        for (site,) in job.cursor.execute(f"SELECT DISTINCT site {device} ORDER BY ALL").fetchall():
            query = (
                f"SELECT h.time, d.entity, d.node, d.simulated, h.late{columns} FROM ({source}) h "
                "JOIN (SELECT id, entity, node, simulated, row_number() OVER (ORDER BY entity) AS place "
                f"{device} AND site = {_text(site)}) d ON d.id = h.device ORDER BY d.place, h.time"
            )
            yield from self._write_files(job, site, first, query, 5 + len(types))

    def _write_files(self, job: _Job, site: str, first: int, query: str, width: int) -> Iterator[SealedFile]:
        """Writes rows of so many columns and their rollups; nothing if the query has no rows."""
        rows = self._write(job, 0, site, first, query, width)
        if rows is None:
            return
        yield rows
        source = rows
        for step in history_files.STEPS:
            columns = _columns_of(job.cursor, self._folder / source.path)
            rolled = roll_up_sorted(self._folder / source.path, columns, step, job.device_class, again=source.step > 0)
            with register_columns(job.cursor, "rolled_up", rolled):
                rollup = self._write(job, step, site, first, "FROM rolled_up")
            assert rollup is not None
            yield rollup
            source = rollup

    def _write(
        self, job: _Job, step: int, site: str, first: int, query: str, width: int = _GROUP_VALUES
    ) -> SealedFile | None:
        """Writes one file. width: columns of the query, of which the size of a row group depends."""
        day, hour = iso(first)[:10], iso(first)[11:13] if job.span is not None else "day"
        parts = [f"rollup_{step}"] if step else []
        parts += [
            job.device_class,
            _site_folder(site),
            f"day={day}",
            f"{hour}-{secrets.token_hex(4)}.parquet",
        ]
        path = "/".join(parts)
        target = self._folder / path
        private_files.make_folder(target.parent)
        partial = target.with_name(target.name + PARTIAL)
        try:
            level = _DAY_LEVEL if job.span is None else _HOUR_LEVEL
            rows = min(max(_GROUP_VALUES // width, _GROUP_ROWS[0]), _GROUP_ROWS[1])
            options = f"{_OPTIONS}, COMPRESSION_LEVEL {level}, ROW_GROUP_SIZE {rows}"
            copied = job.cursor.execute(f"COPY ({query}) TO {_text(str(partial.absolute()))} ({options})").fetchall()
            self._step("copied")
            if not copied[0][0]:
                return None
            # before it has its name: a stop interrupts statements, and would leave a file that no row names
            [(oldest, newest)] = job.cursor.execute(
                f"SELECT epoch_us(min(time)), epoch_us(max(time)) FROM read_parquet({_text(str(partial.absolute()))})"
            ).fetchall()
            partial.chmod(0o600)
            _sync(partial)
            self._step("synced")
            partial.rename(target)
            _sync(target.parent)
        finally:
            partial.unlink(missing_ok=True)
        self._step("renamed")
        size = target.stat().st_size
        return SealedFile(path, job.device_class, step, site, day, oldest, newest, copied[0][0], size)

    # --- days -------------------------------------------------------------------------------------------------------

    def _find_day(self, cursor: duckdb.DuckDBPyConnection, before: int) -> _Job | None:
        """The next day of a class and site, of rows or a rollup, that is over and has several files to merge."""
        found = cursor.execute(
            """SELECT class, list(path ORDER BY first, path) FROM sealed WHERE bytes < $most // 2
               GROUP BY class, step, site, day
               HAVING count(*) > 1 AND sum(bytes) <= $most AND day < make_timestamptz($until)::DATE
               ORDER BY day, class, step, site LIMIT 1""",
            {"most": MAX_MERGED, "until": before},
        ).fetchall()
        return _Job(cursor, found[0][0], None, found[0][1]) if found else None

    def _write_day(self, job: _Job) -> Iterator[SealedFile]:
        """Writes the rows of several files of one day into one."""
        [(step, site, first)] = job.cursor.execute(
            "SELECT step, site, epoch_us(day::TIMESTAMPTZ) FROM sealed WHERE path = ?", [job.replaced[0]]
        ).fetchall()
        columns: dict[str, str] = {}
        for path in job.replaced:
            columns = _columns_of(job.cursor, self._folder / path) | columns
        query = history_files.select_files(self._folder, job.replaced, columns)
        if step:
            query = select_rollup(query, columns, step, job.device_class, again=True)
        else:
            query += " ORDER BY entity, time"
        file = self._write(job, step, site, first, query, len(columns))
        assert file is not None
        yield file


def _hot_tables(connection: duckdb.DuckDBPyConnection, device_class: str) -> list[str]:
    return [t for t in schema.list_hot_tables(connection) if schema.class_of_table(t) == device_class]


def _select_hot(
    connection: duckdb.DuckDBPyConnection, device_class: str, first: int, until: int
) -> tuple[str, dict[str, str]]:
    """SQL for the hot rows of a class in [first, until), and the SQL types of their signals."""
    span = f"WHERE time >= make_timestamptz({first}) AND time < make_timestamptz({until})"
    types: dict[str, str] = {}
    parts = []
    for table in _hot_tables(connection, device_class):
        if connection.execute(f'SELECT 1 FROM "{table}" {span} LIMIT 1').fetchall():
            types |= schema.column_types(connection, table)
            parts.append(f'SELECT * FROM "{table}" {span}')
    return " UNION ALL BY NAME ".join(parts), {c: t for c, t in types.items() if c not in schema.RESERVED}


def _columns_of(connection: duckdb.DuckDBPyConnection, path: Path) -> dict[str, str]:
    found = connection.sql(f"FROM read_parquet({_text(str(path.absolute()))}, hive_partitioning = false) LIMIT 0")
    return dict(zip(found.columns, map(str, found.types), strict=True))


def _site_folder(site: str) -> str:
    """Folder name of a site. A quoted name over the limit of file systems is cut at a character, and has its hash."""
    name = f"site={quote(site, safe='')}"
    if len(name) <= _MAX_FOLDER:
        return name
    end = f"-{hashlib.sha256(site.encode()).hexdigest()[:16]}"
    most = next(n for n in range(len(site), -1, -1) if len(f"site={quote(site[:n], safe='')}{end}") <= _MAX_FOLDER)
    return f"site={quote(site[:most], safe='')}{end}"


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _sync(path: Path) -> None:
    """Waits until a file or the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
