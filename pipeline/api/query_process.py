"""A process for each query: it has the query's memory and time, and nothing else. Started by `query_host`.

`main` runs in a process that opens an empty database once and then forks for each query, which takes milliseconds
instead of a second. It has one thread, as a fork copies only the one that asks for it. The fork parses, checks and runs
the query in that database in memory, without access to files; rows of our tables come from the pipeline as Arrow
(`query_tables`).

The store's tables as a query process sees them: each scan asks the pipeline for its columns and rows as Arrow.
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
from pipeline.model.errors import FleetpulseError, InvalidQuery, OverLimit, Refused

Term = tuple[str, str, str, str]
"""Column, comparison, kind of the value (time, text or number) and the value as text. Numbers are whole: others may be
printed rounded."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()]| and |[^"() ]+| ', re.DOTALL)
_COMPARISON = re.compile(
    r'\((?P<column>\w+) (?P<operator>==|>=|<=|>|<) (?:"(?P<text>[^"\\]*)"'
    r"|(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?Z)|(?P<number>-?\d{1,30}))\)"
)


class StoreTable(pyarrow.dataset.Dataset):  # type: ignore[misc]
    """One table. DuckDB takes it for an Arrow dataset, so it passes the columns and the filter that a scan needs."""

    def __init__(self, name: str, schema: pa.Schema, channel: Channel) -> None:
        self._name, self._own_schema, self._channel = name, schema, channel

    @property
    def schema(self) -> pa.Schema:
        return self._own_schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> RemoteScan:
        """A scan of these columns whose rows all pass the filter; DuckDB does not apply it again."""
        names = self._own_schema.names if columns is None else list(columns)
        text = "" if filter is None else str(filter)
        needed = {*names, *filter_words(text)}
        ours, theirs = socket.socketpair()
        with theirs:
            wanted = [name for name in self._own_schema.names if name in needed]
            self._channel.send({"scan": self._name, "columns": wanted, "where": parse_terms(text)}, theirs.fileno())
        return RemoteScan(ours, pa.schema([self._own_schema.field(name) for name in names]), filter)


class RemoteScan:
    """The rows of one scan, as they arrive."""

    def __init__(self, source: socket.socket, schema: pa.Schema, condition: Any) -> None:
        self._source, self._schema, self._condition = source, schema, condition

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        with self._source, self._source.makefile("rb") as file:
            for batch in pa.ipc.open_stream(file):
                passed = batch if self._condition is None else batch.filter(self._condition)
                yield passed.select(self._schema.names)


def filter_words(text: str) -> set[str]:
    """The words of a filter outside its quoted values: its columns, and more that are none."""
    return {word for token in _TOKEN.findall(text) if token[0] != '"' for word in re.findall(r"\w+", token)}


def parse_terms(text: str) -> list[Term]:
    """The comparisons that every row of a filter's result passes, which the store may apply before it sends rows.

    text: a pyarrow expression as `str` writes it, `((time >= 2026-01-31 08:00:00Z) and (entity == "gpu:n1.0"))`;
    pyarrow offers no other way to look into one. What is not understood is left out: the scan applies the whole filter.
    """
    found: list[Term] = []
    for part in _conjunction(text):
        if (match := _COMPARISON.fullmatch(part)) is not None:
            kind = next(kind for kind in ("text", "time", "number") if match[kind] is not None)
            found.append((match["column"], match["operator"].replace("==", "="), kind, match[kind]))
    return found


def _conjunction(text: str) -> Iterator[str]:
    """The parts that are joined by `and`, in any depth of parentheses."""
    waiting = [text]
    while waiting:
        part = waiting.pop()
        halves = _halves(part)
        if halves is None:
            yield part
        else:
            waiting.extend(halves)


def _halves(text: str) -> tuple[str, str] | None:
    """Left and right of `(left and right)`."""
    depth = place = 0
    for token in _TOKEN.findall(text):
        if token == " and " and depth == 1:
            return text[1:place], text[place + len(token) : -1]
        depth += {"(": 1, ")": -1}.get(token, 0)
        place += len(token)
    return None


ERROR_KINDS: dict[str, type[FleetpulseError]] = {"wrong": InvalidQuery, "limit": OverLimit, "refused": Refused}
"""How an error of a query is named between the processes."""
BATCH_ROWS = 2048
"""Rows fetched at a time: DuckDB's own vector size, so that no more than one vector is computed past the limit."""
DUCKDB_SHARE = 0.5
"""Of a query's memory, what DuckDB may count as its own. Chosen: text that a function builds and the answer as JSON are
not counted by it; measured, they doubled what was."""
THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Of one query. Chosen: half of the machine is left to whoever ingests; beyond 8, an Arrow scan of one thread holds."""
NICENESS = 10
"""nice(2): whoever ingests goes first. Chosen: a tenth of the processor's time where both want all of it."""
OUT_OF_MEMORY_FIRST = 1000
"""oom_score_adj, the most there is: should the machine run out of memory, a query ends before anything else."""
NO_PROCESS = -1
"""Instead of a pid."""
DETAIL_CHARACTERS = 2000
"""Longest error text (chosen: DuckDB repeats the query's line in it, which may have 64 kB)."""


def main(handle: int) -> NoReturn:
    """Forks a process for each request until the pipeline's end is closed, then ends them all."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the pipeline ends us in its own time
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
            os.kill(pid, signal.SIGKILL)  # it is ours until it is waited for
    finally:
        os._exit(0)


def _fork(connection: duckdb.DuckDBPyConnection, parent: Channel, handle: int) -> int:
    """The pid of a new process; NONE where the kernel has no more of them, or no memory for one."""
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
    """One query from its request to its answer."""
    request, _ = channel.receive()
    try:
        connection.execute(f"SET GLOBAL memory_limit = '{int(request['memory'] * DUCKDB_SHARE)}B'")
        connection.execute(f"SET GLOBAL threads = {THREADS}")
        connection.execute("SET GLOBAL lock_configuration = true")
        _limit(request["memory"], request["seconds"])
        body, truncated = _run(connection, channel, request)
        channel.send({"bytes": sum(map(len, body)), "truncated": truncated}, parts=body)
    except FleetpulseError as error:
        kind = next((kind for kind, of in ERROR_KINDS.items() if isinstance(error, of)), "wrong")
        _report(channel, kind, str(error))
    except (MemoryError, duckdb.OutOfMemoryException):
        _report(channel, "limit", _needs(request))
    except (duckdb.Error, pa.ArrowException, OSError, UnicodeError, RecursionError, ValueError) as error:
        # an Arrow stream wraps whatever DuckDB raised while it was read
        if "Out of Memory Error" in str(error):
            _report(channel, "limit", _needs(request))
        else:
            _report(channel, "wrong", str(error))


def _needs(request: dict[str, Any]) -> str:
    return f"the query needs more memory than {request['memory'] >> 20} MiB, which is the limit"


def _report(channel: Channel, kind: str, detail: str) -> None:
    text = detail.encode(errors="replace").decode()
    channel.send({"error": kind, "detail": text[:DETAIL_CHARACTERS]})


def _database() -> duckdb.DuckDBPyConnection:
    """An empty database in memory, without files and without threads of its own."""
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
    """What the kernel holds from here on, whatever runs: memory, time, no files. The pipeline's clock comes first."""
    base = next((int(line.split()[1]) << 10 for line in _status() if line.startswith("VmData:")), None)
    if base is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (base + memory, base + memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OUT_OF_MEMORY_FIRST))


def _status() -> list[str]:
    """/proc/self/status; empty where there is none, and then DuckDB's own limit is the only one of memory."""
    try:
        return Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return []


def _run(connection: duckdb.DuckDBPyConnection, channel: Channel, request: dict[str, Any]) -> tuple[list[bytes], bool]:
    """The answer in parts, and whether rows are missing from its end."""
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
