"""The process of one SQL query, limited in memory and time. Started by `QueryHost`.

`main` opens an empty database once and then forks for each query, which takes milliseconds instead of a second. It has
one thread, because a fork copies only the calling thread. The fork parses, checks and runs the query in the in-memory
database, without access to files. Each scan of a table of the store requests columns and rows from the pipeline, as
Arrow (`StoreTable`).
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import duckdb
import pyarrow as pa
import pyarrow.dataset

from pipeline.api import result_formats, sandbox
from pipeline.api.query_channel import Channel
from pipeline.api.store_reads import lower_priority
from pipeline.model.errors import FleetpulseError, InvalidQuery, OverLimit, Refused

Term = tuple[str, str, str, str]
"""Column, comparison, kind of the value (time, text or number) and the value as text. Only whole numbers: pyarrow may
print others rounded."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]| and |[^"() ]+| ', re.DOTALL)
_COMPARISON = re.compile(
    r'\((?P<column>\w+) (?P<operator>==|>=|<=|>|<) (?:"(?P<text>[^"\\]*)"'
    r"|(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?Z)|(?P<number>-?\d{1,30}))\)"
)


class StoreTable(pyarrow.dataset.Dataset):  # type: ignore[misc]
    """A table of the store as an Arrow dataset, so that DuckDB passes the columns and the filter of each scan."""

    def __init__(self, name: str, schema: pa.Schema, channel: Channel) -> None:
        self._name, self._own_schema, self._channel = name, schema, channel

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of the table."""
        return self._own_schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> RemoteScan:
        """Requests a scan of these columns; applies the whole filter, which DuckDB does not apply again."""
        names = self._own_schema.names if columns is None else list(columns)
        text = "" if filter is None else str(filter)
        needed = {*names, *filter_words(text)}
        ours, theirs = socket.socketpair()
        with theirs:
            wanted = [name for name in self._own_schema.names if name in needed]
            self._channel.send({"scan": self._name, "columns": wanted, "where": parse_terms(text)}, theirs.fileno())
        return RemoteScan(ours, pa.schema([self._own_schema.field(name) for name in names]), filter)


class RemoteScan:
    """The rows of one scan, as they arrive from the pipeline."""

    def __init__(self, source: socket.socket, schema: pa.Schema, condition: Any) -> None:
        self._source, self._schema, self._condition = source, schema, condition

    def to_reader(self) -> pa.RecordBatchReader:
        """Returns the rows as record batches; called by DuckDB."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with self._source, self._source.makefile("rb") as file:
            for batch in pa.ipc.open_stream(file):
                passed = batch if self._condition is None else batch.filter(self._condition)
                yield passed.select(self._schema.names)


def filter_words(text: str) -> set[str]:
    """Returns the words of a filter outside quoted values: its columns, and other words."""
    return {word for token in _TOKEN.findall(text) if token[0] != '"' for word in re.findall(r"\w+", token)}


def parse_terms(text: str) -> list[Term]:
    """Returns comparisons that all rows of a filter's result pass; the store applies them before it sends rows.

    text: a pyarrow expression as `str` writes it, `((time >= 2026-01-31 08:00:00Z) and (entity == "gpu:n1.0"))`;
    pyarrow has no other way to read one. Other terms are left out: the scan applies the whole filter anyway.
    """
    found: list[Term] = []
    for part in _conjunction(text):
        if (match := _COMPARISON.fullmatch(part)) is not None:
            kind = next(kind for kind in ("text", "time", "number") if match[kind] is not None)
            found.append((match["column"], match["operator"].replace("==", "="), kind, match[kind]))
    return found


def _conjunction(text: str) -> Iterator[str]:
    """Yields the parts that are joined by `and`, at any depth of parentheses."""
    waiting = [text]
    while waiting:
        part = waiting.pop()
        halves = _halves(part)
        if halves is None:
            yield part
        else:
            waiting.extend(halves)


def _halves(text: str) -> tuple[str, str] | None:
    """Splits `(left and right)`; None for any other text."""
    depth = place = 0
    for token in _TOKEN.findall(text):
        if token == " and " and depth == 1:
            return text[1:place], text[place + len(token) : -1]
        depth += {"(": 1, ")": -1}.get(token, 0)
        place += len(token)
    return None


ERROR_KINDS: dict[str, type[FleetpulseError]] = {"wrong": InvalidQuery, "limit": OverLimit, "refused": Refused}
"""Name of an error in messages between the processes -> its class."""
BATCH_ROWS = 2048
"""Rows per batch: DuckDB's vector size, so that at most one vector is computed past the limit."""
DUCKDB_SHARE = 0.5
"""DuckDB's memory limit as a share of the query's. Chosen: DuckDB does not count texts that functions build, nor the
JSON of the answer; measured, these doubled the memory."""
THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Threads of one query. Chosen: half of the cores stay free for ingest; beyond 8 the Arrow scan is the limit."""
OUT_OF_MEMORY_FIRST = 1000
"""oom_score_adj, the maximum: if the machine runs out of memory, the kernel kills a query first."""
NO_PROCESS = -1
"""Sent instead of a pid when the fork failed."""
DETAIL_CHARACTERS = 2000
"""Longest error text (chosen: DuckDB quotes the line of the query, up to 64 kB)."""


def main(handle: int) -> NoReturn:
    """Forks a process for each request; when the pipeline closes the channel, kills them all and exits."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the pipeline ends this process
        signal.signal(number, signal.SIG_IGN)
    channel, children = Channel(socket.socket(fileno=handle)), set[int]()
    try:
        connection = _database()
        while True:
            request, given = channel.receive()
            if given is not None:
                pid = _fork(connection, channel, given)
                os.close(given)
                children.update({pid} - {NO_PROCESS})
                channel.send({"pid": pid})
            elif request["end"] in children:
                os.kill(request["end"], signal.SIGKILL)
            children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
    except (EOFError, OSError):
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # the pid stays ours until waitpid
    finally:
        os._exit(0)


def _fork(connection: duckdb.DuckDBPyConnection, parent: Channel, handle: int) -> int:
    """Forks a query process; returns its pid, or NO_PROCESS if the kernel cannot create one."""
    try:
        pid = os.fork()
    except OSError:
        return NO_PROCESS
    if pid == 0:
        try:
            parent.socket.close()
            _work(connection, Channel(socket.socket(fileno=handle)))
        finally:
            os._exit(0)
    return pid


def _work(connection: duckdb.DuckDBPyConnection, channel: Channel) -> None:
    """Receives one query, runs it and sends the answer or the error."""
    request, _ = channel.receive()
    lower_priority()  # before DuckDB starts threads, which inherit it
    try:
        connection.execute(f"SET GLOBAL memory_limit = '{int(request['memory'] * DUCKDB_SHARE)}B'")
        connection.execute(f"SET GLOBAL threads = {THREADS}")
        connection.execute("SET GLOBAL lock_configuration = true")
        _limit(request["memory"], request["seconds"])
        body, truncated = _run(connection, channel, request)
        channel.send({"bytes": sum(map(len, body)), "truncated": truncated}, parts=body)
    except FleetpulseError as error:
        kind = next((kind for kind, cls in ERROR_KINDS.items() if isinstance(error, cls)), "wrong")
        _report(channel, kind, str(error))
    except (MemoryError, duckdb.OutOfMemoryException):
        _report(channel, "limit", _memory_error(request))
    except (duckdb.Error, pa.ArrowException, OSError, UnicodeError, RecursionError, ValueError) as error:
        # an Arrow stream wraps errors that DuckDB raises during the read
        if "Out of Memory Error" in str(error):
            _report(channel, "limit", _memory_error(request))
        else:
            _report(channel, "wrong", str(error))


def _memory_error(request: dict[str, Any]) -> str:
    return f"the query needs more memory than {request['memory'] >> 20} MiB, which is the limit"


def _report(channel: Channel, kind: str, detail: str) -> None:
    text = detail.encode(errors="replace").decode()
    channel.send({"error": kind, "detail": text[:DETAIL_CHARACTERS]})


def _database() -> duckdb.DuckDBPyConnection:
    """Opens an empty in-memory database without file access or background threads."""
    connection = duckdb.connect(
        config={
            "enable_external_access": "false",
            "python_enable_replacements": "false",
            "temp_directory": "",
            "threads": "1",
            "async_threads": "0",
        }
    )
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


def _limit(memory: int, seconds: float) -> None:
    """Sets kernel limits on memory, time and files until the process ends. The pipeline's own time limit is shorter."""
    base = next((int(line.split()[1]) << 10 for line in _status() if line.startswith("VmData:")), None)
    if base is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (base + memory, base + memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_FIRST))


def _status() -> list[str]:
    """Reads /proc/self/status; empty if it cannot be read: then only DuckDB limits memory."""
    try:
        return Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []


def _run(connection: duckdb.DuckDBPyConnection, channel: Channel, request: dict[str, Any]) -> tuple[list[bytes], bool]:
    """Runs the query; returns the answer in parts, and whether it is truncated."""
    checked = sandbox.check_query(connection, request["query"])
    if checked.tables:
        channel.send({"tables": sorted(checked.tables)})
        schemas, _ = channel.receive()
        for name, text in schemas.items():
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
            connection.register(name, StoreTable(name, schema, channel))
    reader = connection.sql(checked.statement).to_arrow_reader(BATCH_ROWS)
    encode = result_formats.write_arrow if request["arrow"] else result_formats.write_json
    return encode(reader, request["rows"], request["bytes"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
