"""Limits of SQL queries: time, memory, scans and answers, while telemetry is stored."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from pipeline.api import query
from pipeline.api.query import MAX_SCANS, QueryHost, QueryRunner, build_select
from pipeline.api.query_process import filter_words, parse_terms
from pipeline.config.sections import Api
from pipeline.model.errors import OverLimit, Refused, Retryable
from pipeline.store.database import Database
from tests.until import until

ROOT = Path(__file__).parents[3]
SECONDS = 2.0
MEMORY = 128 << 20
BASE = 160 << 20
"""Memory of a query's process at the start: libraries, most of it shared with the process that forked it."""
LONG = f"'{'a' * 50_000}'"
HOSTILE = {
    "cross join": "SELECT sum(a.temperature * b.temperature) FROM gpu a, gpu b",
    "recursion without end": "WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t",
    "text that doubles": "WITH RECURSIVE t AS (SELECT 'aaaaaaaa' x, 1 n UNION ALL"
    " SELECT x || x, n + 1 FROM t WHERE n < 34) SELECT max(length(x)) FROM t",
    "one call over long text": "SELECT sum(length(list_sort(string_split(x || x || x, ''))::VARCHAR))"
    f" FROM (SELECT {LONG} || range x FROM range(2000))",
    "one huge map": "SELECT length(map_from_entries(list_zip(l, l))::VARCHAR)"
    " FROM (SELECT list(range) l FROM range(3000000))",
    "regular expression": "SELECT sum(length(regexp_extract(x, '(a*)*(a*)*b')))"
    f" FROM (SELECT {LONG} || range x FROM range(9000))",
    "aggregate of all": "SELECT length(list(hash(range))::VARCHAR) FROM range(100000000)",
    "sort of all": "SELECT * FROM range(100000000) ORDER BY hash(range)",
    "window": "SELECT sum(x) FROM (SELECT median(temperature) OVER (ORDER BY time, entity"
    " ROWS BETWEEN 100000 PRECEDING AND CURRENT ROW) x FROM gpu)",
    "huge cells": "SELECT a, range FROM (SELECT string_agg(entity, '') a FROM gpu), range(100000)",
}

OFTEN = ("cross join", "regular expression", "huge cells")
"""One query that takes time, one that DuckDB cannot interrupt, one that takes memory: `make test` runs these."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    opened = Database(tmp_path_factory.mktemp("limits") / "store.duckdb", memory_limit="256MB")
    with opened.transaction() as connection:
        connection.execute(
            """INSERT INTO device SELECT 'gpu', i, 'local', 'gpu:n' || i, 'n' || i, false FROM range(100) r(i)"""
        )
        connection.execute(
            """INSERT INTO hot_gpu (time, device, sm_clock, temperature)
               SELECT make_timestamptz(1700000000000000 + (i // 100) * 1000000), i % 100, i % 60000, i % 90
               FROM range(500000) r(i)"""
        )
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def queries(database: Database) -> Iterator[QueryRunner]:
    made = QueryRunner(database.cursor, Api(sql_seconds=SECONDS, sql_memory_bytes=MEMORY))
    until(lambda: has_free_slot(made))  # on a busy machine its process takes longer to start than a query may
    yield made
    made.close()


@pytest.fixture(scope="module")
def default_queries(database: Database) -> Iterator[QueryRunner]:
    """Queries with the default limits, for tests of other behaviour."""
    made = QueryRunner(database.cursor, Api())
    yield made
    made.close()


class MemoryWatch(threading.Thread):
    """Records the peak memory of any query process, and checks that none is left at the end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stop_asked = 0, threading.Event()

    def run(self) -> None:
        while not self._stop_asked.wait(0.01):
            self.peak = max([self.peak, *(resident_bytes(pid) for pid in grandchildren())])

    def end(self) -> None:
        self._stop_asked.set()
        self.join()


def grandchildren() -> list[int]:
    """Returns the processes whose parent's parent is this one: those of queries."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid() and resident_bytes(pid)]


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE]
)
def test_a_hostile_query_ends_in_time_and_memory_while_telemetry_is_stored(
    database: Database, queries: QueryRunner, name: str
) -> None:
    """In the pipeline's own process some of these ran for minutes and took more than 16 GB."""
    watch, stop, stored = MemoryWatch(), threading.Event(), list[float]()

    def ingest() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            with database.transaction() as connection:
                connection.execute("INSERT INTO gaps VALUES (now(), 't', 'n1', 'e', 1, 5, 'test')")
            stored.append(time.monotonic() - begun)
            stop.wait(0.05)

    writer = threading.Thread(target=ingest)
    watch.start()
    writer.start()
    begun = time.monotonic()
    with contextlib.suppress(OverLimit):
        queries.run(HOSTILE[name]).release()
    took = time.monotonic() - begun
    stop.set()
    writer.join()
    watch.end()
    assert took < SECONDS + 1.0
    assert 0 < watch.peak < MEMORY + BASE
    assert stored  # some of these end within one of its pauses
    until(lambda: not grandchildren(), 5.0)


def test_many_concurrent_hostile_queries_end_in_time_or_are_refused(database: Database, queries: QueryRunner) -> None:
    outcomes = list[str]()

    def run(text: str) -> None:
        try:
            queries.run(text).release()
            outcomes.append("answered")
        except (OverLimit, Retryable) as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=run, args=(text,)) for text in [*HOSTILE.values()] * 2]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun < SECONDS + 3.0
    assert len(outcomes) == len(threads)
    assert outcomes.count("Retryable") >= len(threads) - 2 * Api().sql_queries
    queries.run("SELECT 1").release()


@pytest.mark.slow
def test_a_query_that_crashes_its_process_is_refused_and_the_next_one_is_answered(database: Database) -> None:
    with contextlib.closing(QueryRunner(database.cursor, Api(sql_seconds=60.0))) as queries:  # found late if busy
        until(lambda: has_free_slot(queries))
        until(lambda: not grandchildren())
        killer = threading.Thread(target=lambda: os.kill(wait_for_one(), signal.SIGKILL))
        killer.start()
        with pytest.raises(OverLimit, match="ended without an answer"):
            queries.run("SELECT count(*) FROM range(100000000000)")
        killer.join()
        queries.run("SELECT 1").release()


def wait_for_one() -> int:
    while not (found := grandchildren()):
        time.sleep(0.01)  # polls real processes
    time.sleep(0.2)
    return found[0]


@pytest.mark.slow
def test_a_query_is_answered_although_the_forking_process_died_before_it(database: Database) -> None:
    before = query_hosts()
    with contextlib.closing(QueryRunner(database.cursor, Api(sql_seconds=60.0))) as queries:
        queries.run("SELECT 1").release()
        (host,) = query_hosts() - before
        os.kill(host, signal.SIGKILL)
        queries.run("SELECT 1").release()
        (second,) = query_hosts() - before
        assert second != host


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["SELECT 1", HOSTILE["cross join"]], ids=["cheap", "hostile"])
def test_a_process_that_hangs_before_it_forks_costs_the_client_no_more_than_the_limit(
    database: Database, asked: str
) -> None:
    """On a machine that was too busy to fork, answers took 16.6 s instead of the promised 11."""
    made, before = QueryRunner(database.cursor, Api(sql_seconds=1.0, sql_memory_bytes=MEMORY)), query_hosts()
    until(lambda: has_free_slot(made))  # only on an idle machine the forking process starts within the limit
    (host,) = query_hosts() - before
    os.kill(host, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(Retryable, match="no process for the query within 1 s"):
            made.run(asked)
        assert time.monotonic() - begun < 2.0
    finally:
        os.kill(host, signal.SIGCONT)
    until(lambda: has_free_slot(made))  # it forks for the earlier requests, without use
    made.close()


@pytest.mark.slow
def test_a_store_that_does_not_answer_costs_the_client_no_more_than_the_limit_and_the_query_keeps_its_slot(
    database: Database,
) -> None:
    """A commit on a slow disk delays the start of other transactions."""
    disk = threading.Event()
    disk.set()

    def cursor() -> duckdb.DuckDBPyConnection:
        disk.wait()
        return database.cursor()

    made = QueryRunner(cursor, Api(sql_seconds=1.0, sql_memory_bytes=MEMORY, sql_queries=1))
    until(lambda: has_free_slot(made))
    disk.clear()
    begun = time.monotonic()
    with pytest.raises(OverLimit, match="ran for 1 s"):
        made.run("SELECT count(*) FROM gpu")
    assert time.monotonic() - begun < 2.0
    with pytest.raises(Retryable, match="are running"):
        made.run("SELECT 1")
    disk.set()
    until(lambda: has_free_slot(made), 10.0)
    made.close()


def has_free_slot(made: QueryRunner) -> bool:
    """Returns whether a slot is free again, and a process within the limit."""
    with contextlib.suppress(Retryable, OverLimit):
        made.run("SELECT 1").release()
        return True
    return False


def query_hosts() -> set[int]:
    """Returns the children of this process that fork processes for queries."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if (
                b"pipeline.api.query_process" in Path(f"/proc/{name}/cmdline").read_bytes()
                and int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            ):
                found.add(int(name))
    return found


@pytest.mark.slow
def test_the_stop_does_not_wait_for_a_process_that_hangs() -> None:
    host = QueryHost()
    pid, channel = host.fork(time.monotonic() + 30.0)
    channel.close()
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGSTOP)
    refused: list[BaseException] = []

    def wait() -> None:
        try:
            host.fork(time.monotonic() + 30.0)
        except Retryable as error:
            refused.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)  # until it waits for an answer that does not come
    began = time.monotonic()
    host.close()
    waiting.join(10.0)
    assert time.monotonic() - began < 5.0
    assert len(refused) == 1
    with pytest.raises(Retryable):
        host.fork(time.monotonic() + 30.0)


@pytest.mark.slow
def test_nothing_is_left_when_the_pipeline_is_killed() -> None:
    program = """
import duckdb, os, sys, threading, time
from pipeline.api.query import QueryRunner
from pipeline.api.query import QueryHost
from pipeline.config.sections import Api
queries = QueryRunner(duckdb.connect().cursor, Api(sql_seconds=60.0))
text = "SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b"
threading.Thread(target=queries.run, args=(text,), daemon=True).start()
queries.run("SELECT 1")
print("ready", flush=True)
time.sleep(60)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        mine = {pid for pid in descendants(process.pid) if pid != process.pid}
        assert len(mine) >= 2
        process.kill()
        process.wait()
    until(lambda: not any(resident_bytes(pid) for pid in mine), 10.0)


def descendants(pid: int) -> set[int]:
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) in found:
                    found.add(int(name))
    return found


@pytest.mark.slow
def test_a_query_over_more_tables_than_the_limit_is_refused(queries: QueryRunner) -> None:
    text = " UNION ALL ".join(["SELECT count(*) FROM gpu JOIN node USING (entity)"] * MAX_SCANS)
    more = " ".join(f"JOIN gpu a{i} USING (time, entity)" for i in range(1, MAX_SCANS + 2))
    joined = f"SELECT count(*) FROM gpu a0 {more}"
    with contextlib.suppress(OverLimit):  # one after the other they may be read, if time allows
        queries.run(text).release()
    with pytest.raises(OverLimit):
        queries.run(joined)


def test_an_answer_over_its_byte_limit_is_truncated(queries: QueryRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "ANSWER_BYTES", 100_000)
    for arrow in (False, True):
        found = queries.run("SELECT range, 'x' || range FROM range(100000)", arrow)
        assert found.truncated
        assert 50_000 < len(found.body) < 101_000
        rows = pa.ipc.open_stream(found.body).read_all().num_rows if arrow else len(json.loads(found.body)["rows"])
        assert 0 < rows < 100_000


PREDICATES = [
    "entity = 'gpu:n7'",
    "entity = 'no'') OR (1 = 1'",
    """entity = 'a") and (time > 2099-01-01 00:00:00Z'""",
    "time > '2023-11-14 22:30:00' AND entity < 'gpu:n2'",
    "time BETWEEN '2023-11-14 22:20:00' AND '2023-11-14 22:30:00'",
    "temperature > 33.3 AND sm_clock <= 1000",
    "temperature IN (3, 4) OR entity IN ('gpu:n1', 'gpu:n2')",
    "temperature IS NULL",
    "NOT (temperature >= 5) AND entity LIKE 'gpu:n1%'",
    "sm_clock = 17 AND power IS NULL",
    "entity >= 'gpu:n5' AND entity <= 'gpu:n6' AND time >= '2023-11-14 22:13:21' AND temperature <> 7",
    "time > now() - INTERVAL 20 YEAR",
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("predicate", PREDICATES)
def test_a_filter_applied_before_rows_are_sent_gives_the_result_of_the_store(
    database: Database, default_queries: QueryRunner, predicate: str
) -> None:
    text = f"SELECT count(*), coalesce(sum(sm_clock), 0)::BIGINT, count(DISTINCT entity) FROM gpu WHERE {predicate}"
    with contextlib.closing(database.cursor()) as cursor:
        expected = [list(row) for row in cursor.execute(text).fetchall()]
    assert json.loads(default_queries.run(text).body)["rows"] == expected


def test_a_filter_is_parsed_where_that_is_safe_and_dropped_elsewhere() -> None:
    text = '((((time >= 2026-01-31 08:00:00.5Z) and (entity == "gpu:n1")) and is_valid(power)) and (x > 2.5))'
    assert sorted(parse_terms(text)) == [
        ("entity", "=", "text", "gpu:n1"),
        ("time", ">=", "time", "2026-01-31 08:00:00.5Z"),
    ]
    assert {"time", "entity", "power", "x"} <= filter_words(text)
    assert parse_terms('((a > 1) or (entity == "x"))') == []
    assert parse_terms('(entity == "a\\") and (time > 2099-01-01 00:00:00Z")') == []


def test_a_scan_reads_plain_columns_of_the_tables_in_the_query() -> None:
    schemas = {"gpu": pa.schema([("time", pa.timestamp("us", "UTC")), ("entity", pa.string())])}
    found = build_select(schemas, "gpu", ["entity"], [("entity", "=", "text", "it's")])
    assert found == """SELECT "entity" FROM "gpu" WHERE "entity" = 'it''s'::VARCHAR"""
    for table, columns, where in [
        ("meta", ["value"], []),
        ("gpu", ["count(*)"], []),
        ("gpu", [], []),
        ("gpu", ["time"], [("entity", "OR 1 =", "text", "1")]),
        ("gpu", ["time"], [("node", "=", "text", "1")]),
    ]:
        with pytest.raises(Refused):
            build_select(schemas, table, columns, where)


def test_a_process_that_ends_twice_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query.sys, "executable", "/bin/false")
    with pytest.raises(Retryable, match="the query did not run; try again in 5 s"):
        QueryHost().fork(time.monotonic() + 30.0)
