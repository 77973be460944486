"""Runs each checked SELECT in a separate process with limits on time, rows, bytes, memory and concurrent queries.

DuckDB inside this process could enforce none of them: it checks for an interrupt only between vectors, does not count
the memory of values that a function builds, and shares one memory limit with the writer.

QueryHost starts the process that forks one process per query. TableScans sends the columns and rows that a query
process requests, with one thread per scan. QueryRunner enforces the limits.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.api.query_channel import Channel
from pipeline.api.query_process import ERROR_KINDS, NO_PROCESS
from pipeline.api.sandbox import LATEST, TABLES
from pipeline.api.store_reads import lower_priority
from pipeline.config.sections import Api
from pipeline.model.errors import OverLimit, Refused, Retryable
from pipeline.model.records import from_iso
from pipeline.model.signals import CLASSES
from pipeline.store import rollups, schema
from pipeline.store.latest import CurrentValues

_ROOT = Path(__file__).parents[2]
_ENVIRON = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Limits the process to one thread: a fork copies only the calling thread."""

_ENDED = (
    "the process that starts queries ended twice, so the query did not run; try again in 5 s. "
    "If it fails again, check the free memory of the pipeline's host and its kernel log"
)


class QueryHost:
    """The process that forks query processes. Starts with `start` or the first query, and again after it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._closed = False
        self._stop: weakref.finalize[..., QueryHost] | None = None

    def start(self) -> None:
        """Starts the process unless it runs; it is ready after about 1 s, and a query waits for it."""
        with self._lock:
            if self._channel is None and not self._closed:
                self._start()

    def fork(self, deadline: float) -> tuple[int, Channel]:
        """Forks a query process; returns its pid and the channel to it. Raises Retryable.

        If the forking process had ended, starts it again and tries once more: the query had not begun.
        """
        try:
            try:
                return self._fork_with_channel(deadline)
            except (BrokenPipeError, ConnectionResetError, EOFError):  # killed since the last query, as by the kernel
                return self._fork_with_channel(deadline)
        except (BrokenPipeError, ConnectionResetError, EOFError) as error:
            raise Retryable(_ENDED, after_s=5.0) from error
        except OSError as error:
            raise Retryable(f"no process for the query: {error}; try again in 5 s", after_s=5.0) from error

    def _fork_with_channel(self, deadline: float) -> tuple[int, Channel]:
        ours, theirs = socket.socketpair()  # one for each try: a fork of the ended process may still have the other
        with theirs:
            try:
                return self._fork(theirs.fileno(), deadline), Channel(ours)
            except BaseException:
                ours.close()
                raise

    def end(self, pid: int) -> None:
        """Kills a query process if it still runs. Does not block."""
        with contextlib.suppress(OSError):
            if (channel := self._channel) is not None:
                channel.send({"end": pid})

    def close(self) -> None:
        """Ends the process and all its forks, also while a query waits for it."""
        self._closed = True
        if (stop := self._stop) is not None:
            stop()
        with self._lock:
            self._close()

    def _fork(self, handle: int, deadline: float) -> int:
        with self._lock:
            if self._closed:
                raise OSError("closed")
            if time.monotonic() >= deadline:  # the previous query used up the time; the process may still answer
                raise OSError("the process that forks query processes does not respond")
            if self._channel is None:
                self._start()
            assert self._channel is not None
            try:
                self._channel.send({}, handle)
                pid: int = self._channel.receive(deadline)[0]["pid"]
            except (OSError, EOFError):  # it ended or hangs; a late answer would be read as that of the next query
                self._close()
                raise
        if pid == NO_PROCESS:
            raise OSError("the machine has no more processes or no memory for one")
        return pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.api.query_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRON, "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an aborting library prints text of the query
            )
        self._channel = Channel(ours)
        self._stop = weakref.finalize(self, _stop, self._channel, process)

    def _close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._channel = self._stop = None


def _stop(channel: Channel, process: subprocess.Popen[bytes]) -> None:
    channel.close()
    process.kill()
    process.wait()


MAX_SCANS = 32
"""Scans that one query may have open (chosen: the longest documented query reads 4 tables; each takes a thread)."""
SCAN_BYTES = 1 << 20
"""Rough size of one batch of rows on its way (chosen: larger batches were no faster, and each scan holds about two)."""
ReadCurrent = Callable[[str, Sequence[str]], CurrentValues]
_Scan = tuple[str, Sequence[str], Sequence[Sequence[str]]]
_COMPARISONS = frozenset({"=", ">", ">=", "<", "<="})
_END_SECONDS = 0.5
"""How long the end of a query waits for all its scans. Chosen: an interrupted scan ends within one vector of rows."""


class TableScans:
    """All scans of one query: read-only, plain columns of the store's tables, simple comparisons.

    current: the newest values, from memory; None for a store that no pipeline has open: its tables have them.
    """

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection], current: ReadCurrent | None = None) -> None:
        self._cursor, self._current = cursor, current
        self._running: dict[threading.Thread, duckdb.DuckDBPyConnection] = {}
        self._schemas: dict[str, pa.Schema] = {}
        self._lock = threading.Lock()
        self._ended = False
        self.failure: Exception | None = None

    def schemas(self, tables: Iterable[str]) -> dict[str, str]:
        """Returns the Arrow schema of each table, serialized, in base64."""
        with contextlib.closing(self._cursor()) as cursor:
            for table in TABLES.intersection(tables):
                self._schemas[table] = _find_schema(cursor, table)
        return {name: base64.b64encode(schema.serialize()).decode() for name, schema in self._schemas.items()}

    def start(self, request: Mapping[str, Any], handle: int) -> None:
        """Sends the rows of one scan as an Arrow stream to the open file `handle`, then closes it."""
        target = socket.socket(fileno=handle)
        try:
            wanted = request["scan"], request["columns"], request["where"]
            build_select(self._schemas, *wanted)
            with self._lock:
                if len(self._running) >= MAX_SCANS:
                    raise OverLimit(f"the query has more than {MAX_SCANS} table scans open")
                cursor = self._cursor()
                columns = len(request["columns"])
                thread = threading.Thread(
                    target=self._send, args=(cursor, wanted, columns, target), name="query scan", daemon=True
                )
                self._running[thread] = cursor
            thread.start()
        except BaseException:
            target.close()
            raise

    def end(self) -> None:
        """Interrupts the scans that still run and waits for their threads."""
        with self._lock:
            self._ended = True
            running = list(self._running)
            for cursor in self._running.values():
                cursor.interrupt()
        until = time.monotonic() + _END_SECONDS
        for thread in running:
            thread.join(max(0.0, until - time.monotonic()))

    def _send(self, cursor: duckdb.DuckDBPyConnection, wanted: _Scan, columns: int, target: socket.socket) -> None:
        lower_priority()
        try:
            with target, target.makefile("wb", buffering=0) as file:
                newest = self._provide_newest(cursor, *wanted) if wanted[0] in LATEST else ""
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                text = build_select(self._schemas, *wanted, source=find_source(cursor, *wanted, newest=newest))
                rows = max(2048, SCAN_BYTES // (8 * columns))
                batches = cursor.sql(text).to_arrow_reader(rows)
                with pa.ipc.new_stream(file, batches.schema) as writer:
                    for batch in batches:
                        if self._ended:
                            return
                        writer.write_batch(batch)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the query needs no more rows
        except Exception as error:  # noqa: BLE001 - on any error the query must fail, not return part of the rows
            self.failure = self.failure or error
        finally:
            with self._lock:
                del self._running[threading.current_thread()]
                cursor.close()

    def _provide_newest(
        self, cursor: duckdb.DuckDBPyConnection, table: str, columns: Sequence[str], where: Iterable[Sequence[str]]
    ) -> str:
        """Returns the name of a table with the newest rows of a class: those in memory, if a pipeline has them.

        The devices in memory are durable, so a transaction that begins afterwards knows them.
        """
        if self._current is None:
            return _quoted(table)
        schema_ = self._schemas[table]
        names = dict.fromkeys([*columns, *(term[0] for term in where)])
        types = pa.schema([schema_.field(name) for name in names if name not in ("time", "entity")])
        rows = self._current(table.removeprefix("latest_"), types.names).as_table(types)
        cursor.register(_NEWEST, rows)
        return _NEWEST


_NEWEST = "newest_rows"

_ARROW = {
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", "UTC"),
    "VARCHAR": pa.string(),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
}
_FIXED_SCHEMAS: dict[str, pa.Schema] = {}
"""Tables whose columns change only with the version of the store."""


def _find_schema(cursor: duckdb.DuckDBPyConnection, table: str) -> pa.Schema:
    """Returns the columns of a table. DuckDB would bind the view of a class for it, which takes 10 ms, of a rollup
    190 ms."""
    device_class = table.removeprefix("latest_")
    if device_class in CLASSES or table in rollups.VIEWS:
        types = (
            rollups.view_types(cursor, table) if table in rollups.VIEWS else schema.class_types(cursor, device_class)
        )
        return pa.schema([(name, _ARROW[kind]) for name, kind in types.items()])
    if table not in _FIXED_SCHEMAS:
        _FIXED_SCHEMAS[table] = cursor.sql(f"FROM {_quoted(table)} LIMIT 0").to_arrow_reader(1).schema
    return _FIXED_SCHEMAS[table]


def build_select(
    schemas: Mapping[str, pa.Schema],
    table: str,
    columns: Sequence[str],
    where: Iterable[Sequence[str]],
    source: str | None = None,
) -> str:
    """Returns the SELECT of one scan. Raises Refused for anything but columns of a table that the query named.

    source: SQL after FROM that has these columns of the table.
    """
    known = set(schemas[table].names) if table in schemas else set()
    conditions = [_condition(*term) for term in where]
    if not columns or not known.issuperset(columns) or not known.issuperset(term[0] for term in where):
        raise Refused(f"{table}: no such table or column")
    names = ", ".join(map(_quoted, columns))
    return f"SELECT {names} FROM {source or _quoted(table)}" + (
        f" WHERE {' AND '.join(conditions)}" if conditions else ""
    )


def find_source(
    cursor: duckdb.DuckDBPyConnection,
    table: str,
    columns: Sequence[str],
    where: Iterable[Sequence[str]],
    newest: str = "",
) -> str:
    """Returns SQL after FROM for the scan of a checked table: of a class only the sealed files of the time asked for.

    Run it in the transaction of the scan. newest: the table with the rows of one of LATEST.
    """
    start, end = find_time_range(where)
    needed = dict.fromkeys([*columns, *(term[0] for term in where)])
    if table in LATEST:
        return f"({schema.select_latest(table.removeprefix('latest_'), needed, newest)})"
    if table in rollups.VIEWS:
        return f"({rollups.select_view(cursor, table, needed, start, end)})"
    return f"({schema.select_class(cursor, table, needed, start, end)})" if table in CLASSES else _quoted(table)


def find_time_range(where: Iterable[Sequence[str]]) -> tuple[int | None, int | None]:
    """Returns [start, end) in UTC us that comparisons with the column `time` allow; None: without limit."""
    start: int | None = None
    end: int | None = None
    for column, comparison, kind, value in where:
        if column == "time" and kind == "time":
            try:
                moment = from_iso(value)
            except ValueError:  # the year 0
                continue
            if comparison in ("=", ">=", ">"):
                start = moment if start is None else max(start, moment)
            if comparison in ("=", "<=", "<"):
                end = moment + 1 if end is None else min(end, moment + 1)
    return start, end


def _condition(column: str, comparison: str, kind: str, value: str) -> str:
    if comparison not in _COMPARISONS:
        raise Refused(f"{comparison!r} is not a comparison of a scan")
    literal = "'" + value.replace("'", "''") + "'"
    types = {"time": "TIMESTAMPTZ", "number": "HUGEINT", "text": "VARCHAR"}
    return f"{_quoted(column)} {comparison} {literal}::{types[kind]}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


ANSWER_BYTES = 64 << 20
"""Maximum size of an answer (chosen: 100,000 rows of 80 columns as Arrow); a longer one is truncated."""
GRACE = 0.5
"""Seconds past the time limit after which the kernel kills a query and the caller gets its error. Chosen: the pipeline
normally ends the query before that."""
START_SECONDS = 30.0
"""Time limit of the forking process (s). Chosen: it starts within 0.8 s, on a busy machine within 8 s."""


class QueryAnswer:
    """The body of one answer. Its query slot is in use until `release` or until the answer is garbage-collected."""

    def __init__(self, body: bytes, truncated: bool, release: Callable[[], None]) -> None:
        self.body, self.truncated = body, truncated
        self.release = weakref.finalize(self, release)


@dataclass
class _RunningQuery:
    """A running query; it has its own thread. channel: None until its process is forked."""

    scans: TableScans
    deadline: float
    outcome: Future[QueryAnswer] = field(default_factory=Future)
    channel: Channel | None = None


class QueryRunner:
    """Runs the SQL of API callers within the limits. `close` ends running queries and rejects new ones."""

    def __init__(
        self, cursor: Callable[[], duckdb.DuckDBPyConnection], api: Api, current: ReadCurrent | None = None
    ) -> None:
        """current: see `TableScans`."""
        self._cursor, self._current, self._api, self._host = cursor, current, api, QueryHost()
        self._slots = threading.BoundedSemaphore(api.sql_queries)
        self._closed = threading.Event()
        self._running: set[Channel] = set()

    def run(self, query: str, arrow: bool = False) -> QueryAnswer:
        """Runs a query; returns the answer as JSON or an Arrow stream.

        Raises InvalidQuery, Refused or OverLimit (errors of the caller), or Retryable.
        """
        if not self._slots.acquire(blocking=False):
            raise Retryable(
                f"{self._api.sql_queries} queries are running, the maximum; retry when one has ended", after_s=1.0
            )
        running = _RunningQuery(TableScans(self._cursor, self._current), time.monotonic() + self._api.sql_seconds)
        try:
            threading.Thread(target=self._work, args=(running, query, arrow), name="query", daemon=True).start()
        except BaseException:
            self._slots.release()
            raise
        return self._outcome(running)

    def _outcome(self, running: _RunningQuery) -> QueryAnswer:
        """Waits for the outcome, at most the time limit plus GRACE.

        The query's thread may wait longer, for a lock of the store or a slow fork, and keeps the slot until then.
        """
        try:
            return running.outcome.result(running.deadline + GRACE - time.monotonic())
        except TimeoutError as error:
            if running.channel is None:
                raise Retryable(
                    f"no process for the query within {self._api.sql_seconds:g} s: the machine is too busy", after_s=5.0
                ) from error
            raise self._too_long() from error

    def _work(self, running: _RunningQuery, query: str, arrow: bool) -> None:
        """Runs one query and sets its outcome; the caller may no longer wait for it."""
        try:
            body, truncated = self._run(running, query, arrow)
        except BaseException as error:  # noqa: BLE001 - re-raised in the caller's thread
            self._slots.release()
            running.outcome.set_exception(error)
            return
        running.outcome.set_result(QueryAnswer(body, truncated, self._slots.release))

    def _too_long(self) -> OverLimit:
        return OverLimit(f"the query ran for {self._api.sql_seconds:g} s, which is the limit")

    def prepare(self) -> None:
        """Starts the forking process, so that the first query need not wait for it. Does not block."""
        self._host.start()

    def close(self) -> None:
        """Ends every running query and rejects new ones."""
        self._closed.set()
        for channel in list(self._running):
            channel.close()
        self._host.close()

    def _run(self, running: _RunningQuery, query: str, arrow: bool) -> tuple[bytes, bool]:
        self._refuse_if_closed()
        pid, running.channel = self._host.fork(time.monotonic() + START_SECONDS)
        self._running.add(running.channel)
        try:
            self._refuse_if_closed()
            return self._follow(running, running.channel, query, arrow)
        except TimeoutError as error:
            raise self._too_long() from error
        except (EOFError, OSError) as error:
            self._refuse_if_closed()
            limit = f"{self._api.sql_memory_bytes >> 20} MiB of memory, or the depth of nesting"
            raise OverLimit(f"the process of the query ended without an answer; probably over {limit}") from error
        finally:
            self._host.end(pid)
            running.channel.close()
            self._running.discard(running.channel)
            running.scans.end()

    def _follow(self, running: _RunningQuery, channel: Channel, query: str, arrow: bool) -> tuple[bytes, bool]:
        """Serves the requests of the query process until the result arrives."""
        scans, api = running.scans, self._api
        limits = {"rows": api.sql_rows, "bytes": ANSWER_BYTES, "memory": api.sql_memory_bytes}
        channel.send({"query": query, "arrow": arrow, "seconds": api.sql_seconds + GRACE, **limits})
        while True:
            message, handle = channel.receive(running.deadline)
            if handle is not None:
                scans.start(message, handle)
            elif "tables" in message:
                channel.send(scans.schemas(message["tables"]))
            else:
                return self._result(message, running, channel)

    def _result(self, message: dict[str, Any], running: _RunningQuery, channel: Channel) -> tuple[bytes, bool]:
        if running.scans.failure is not None:
            raise running.scans.failure
        if "error" in message:
            raise ERROR_KINDS[message["error"]](message["detail"])
        return channel.read(message["bytes"], running.deadline), message["truncated"]

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise Retryable("the pipeline is stopping", after_s=5.0)
