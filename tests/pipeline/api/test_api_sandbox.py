"""The SQL sandbox: queries over our tables are answered, all others are refused and change nothing."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.api import sandbox
from pipeline.api import sandbox as functions
from pipeline.api.query import QueryRunner
from pipeline.config.sections import Api
from pipeline.model.errors import InvalidQuery, OverLimit, Refused, Retryable
from pipeline.store.database import Database
from tests.examples import examples

GOOD = """
SELECT count(*), count(DISTINCT entity), max(time) FROM gpu
SELECT count(*) FROM node n JOIN entities e USING (entity) WHERE NOT e.simulated
FROM gpu
FROM "GPU" SELECT entity
TABLE gpu
VALUES (1), (2)
SELECT 1;
/* a comment */ SELECT 1 -- and one more; DROP TABLE gpu
WITH a AS (SELECT 1 x), b AS MATERIALIZED (SELECT * FROM a) SELECT * FROM b
WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT x + 1 FROM t WHERE x < 10) SELECT * FROM t
WITH gpu AS (SELECT 1) SELECT * FROM gpu
SELECT * FROM range(5) r(i), LATERAL (SELECT i + 1), unnest([1, 2, 3]), generate_series(1, 3)
SELECT [x * 2 FOR x IN [1, 2]], list_transform([1], lambda y: y + 1), {'a': 1}, map {'a': 1}
SELECT CASE WHEN x = 1 THEN CAST(x AS VARCHAR) ELSE x::VARCHAR END, TRY_CAST(x AS INT) FROM (VALUES (1)) v(x)
SELECT x::DECIMAL(10, 2), [x]::INT[], x::VARCHAR::ENUM('1', '2') FROM (VALUES (1)) v(x)
SELECT count(*) FILTER (x > 1), grouping(x) FROM (VALUES (1)) v(x) GROUP BY CUBE (x) HAVING count(*) > 0
SELECT DISTINCT ON (entity) entity, time FROM gpu ORDER BY entity, time DESC
SELECT entity, avg(power) OVER (PARTITION BY entity ORDER BY time ROWS 3 PRECEDING) FROM gpu
SELECT * EXCLUDE (time), columns('sm.*') FROM gpu QUALIFY row_number() OVER (PARTITION BY entity) = 1
SELECT * FROM gpu UNION ALL BY NAME SELECT * FROM nic LIMIT 10 OFFSET 2
SELECT 1 INTERSECT SELECT 1 EXCEPT SELECT 2
SELECT EXISTS (SELECT 1), (SELECT max(x) FROM (VALUES (1)) t(x)), 1 = ANY (SELECT 1)
SELECT * FROM gpu ASOF JOIN node USING (entity, time)
SELECT * FROM gpu TABLESAMPLE 10%
SELECT data->>'a', json_extract(data, '$.a') FROM events
SELECT time_bucket(INTERVAL '1 minute', time), arg_max(sm_clock, time) FROM gpu GROUP BY 1
SELECT coalesce(1, 2), ifnull(1, 2), nullif(1, 2), current_timestamp, NOT true, position('a' IN 'b'), trim('a')
SELECT now() AT TIME ZONE 'UTC', extract(hour FROM now()), current_date
SELECT 'abc'[1:2], 'a' LIKE 'b' ESCAPE 'c', 1 BETWEEN 0 AND 2, -5 // 2, 'x' COLLATE NOCASE
SELECT id, state FROM incidents JOIN history ON incident = id
""".strip().splitlines()

HOSTILE = """
DROP TABLE gpu
DROP VIEW gpu
DELETE FROM findings
UPDATE incidents SET state = 'resolved'
INSERT INTO events VALUES (now(), 'a', 'b', '{}', 's', 'n', false)
TRUNCATE events
CREATE TABLE x (i INT)
CREATE TEMP TABLE x AS SELECT 1
CREATE MACRO f(x) AS x + 1
CREATE VIEW v AS SELECT 1
CREATE SECRET (TYPE http)
ALTER TABLE events ADD COLUMN x INT
SELECT 1; DROP VIEW gpu
SELECT 1; SELECT 2
SELECT 1;; DELETE FROM findings
/* SELECT 1 */ DROP VIEW gpu
SELECT 1 /* */ ; /* */ DELETE FROM findings --
COPY (SELECT 1) TO '{folder}/out.csv'
COPY events TO '{folder}/out.parquet'
COPY events FROM '/etc/passwd'
EXPORT DATABASE '{folder}/out'
IMPORT DATABASE '{folder}'
ATTACH '{folder}/x.db'
ATTACH ':memory:' AS m
DETACH main
USE memory
SET threads = 1
SET enable_external_access = true
RESET threads
PRAGMA threads = 1
PRAGMA database_list
PRAGMA enable_profiling
CALL pragma_version()
CALL force_checkpoint()
CHECKPOINT
VACUUM
ANALYZE
BEGIN
COMMIT
ROLLBACK
INSTALL httpfs
LOAD httpfs
PREPARE p AS SELECT 1
EXECUTE p
DEALLOCATE p
EXPLAIN SELECT 1
EXPLAIN ANALYZE SELECT 1
DESCRIBE gpu
SUMMARIZE gpu
SHOW TABLES
SHOW ALL TABLES
SELECT * FROM (DESCRIBE gpu)
SELECT * FROM (SHOW TABLES)
SELECT * FROM (SUMMARIZE gpu)
FROM (SHOW DATABASES)
WITH a AS (INSERT INTO gaps VALUES (now(), 't', 's', 'e', 1, 2, 'c') RETURNING *) SELECT * FROM a
WITH a AS (DELETE FROM findings RETURNING *) SELECT * FROM a
WITH a AS (UPDATE incidents SET state = 'x' RETURNING *) SELECT * FROM a
SELECT * FROM (WITH a AS (DELETE FROM findings RETURNING *) SELECT * FROM a)
SELECT * FROM read_csv('/etc/passwd')
SELECT * FROM READ_CSV_AUTO('/etc/passwd')
SELECT * FROM "read_csv"('/etc/passwd')
SELECT * FROM main.read_csv('/etc/passwd')
SELECT * FROM system.main.read_csv('/etc/passwd')
SELECT * FROM read_text('/etc/passwd')
SELECT * FROM read_blob('/etc/passwd')
SELECT * FROM read_parquet('x.parquet')
SELECT * FROM parquet_metadata('x.parquet')
SELECT * FROM read_json('x.json')
SELECT * FROM read_duckdb('x.duckdb')
SELECT * FROM sniff_csv('/etc/passwd')
SELECT * FROM glob('/*')
SELECT * FROM '/etc/passwd'
SELECT * FROM 'file.csv'
SELECT * FROM "file.parquet"
SELECT * FROM 'https://example.org/x.csv'
SELECT 1 WHERE EXISTS (FROM read_text('/etc/passwd'))
SELECT (SELECT content FROM read_text('/etc/passwd'))
SELECT * FROM gpu WHERE entity IN (SELECT content FROM read_text('/etc/passwd'))
SELECT * FROM gpu, LATERAL (SELECT * FROM glob('/*'))
SELECT * FROM gpu JOIN glob('/*') ON true
SELECT * FROM range((SELECT count(*) FROM glob('/*')))
SELECT 1 ORDER BY (SELECT count(*) FROM glob('/*'))
SELECT 1 LIMIT (SELECT count(*) FROM glob('/*'))
SELECT 1 GROUP BY (SELECT count(*) FROM glob('/*'))
SELECT 1 HAVING (SELECT count(*) FROM glob('/*')) > 0
SELECT sum(1) OVER (ORDER BY (SELECT count(*) FROM glob('/*')))
SELECT count(*) FILTER ((SELECT count(*) FROM glob('/*')) > 0)
SELECT list(1 ORDER BY (SELECT count(*) FROM glob('/*')))
SELECT CASE WHEN true THEN (SELECT count(*) FROM glob('/*')) END
SELECT list_transform([1], lambda x: (SELECT count(*) FROM glob('/*')))
SELECT * REPLACE ((SELECT count(*) FROM glob('/*')) AS entity) FROM gpu
VALUES ((SELECT count(*) FROM glob('/*')))
SELECT 1 UNION SELECT count(*) FROM glob('/*')
WITH a AS (SELECT * FROM glob('/*')) SELECT 1
WITH RECURSIVE t AS (SELECT 1 x UNION ALL SELECT count(*) FROM t, glob('/*')) SELECT * FROM t
SELECT * FROM query('DROP VIEW gpu')
SELECT * FROM query_table('meta')
SELECT * FROM json_execute_serialized_sql('{}')
SELECT json_serialize_sql('SELECT 1')
SELECT getenv('HOME')
SELECT current_setting('threads')
SELECT getvariable('x')
SELECT nextval('s')
SELECT setseed(0.5)
SELECT write_log('x')
SELECT sleep_ms(1000)
SELECT pg_sleep(1)
SELECT version()
SELECT current_query()
SELECT list_sum(range(1000000000))
SELECT repeat('x', 1000000000)
SELECT lpad('x', 1000000000, 'y')
SELECT format('{:1000000000}', 1)
SELECT printf('%1000000000d', 1)
SELECT list_resize([1], 1000000000)
SELECT sum(length(replace(replace(replace({long} || range, 'a', {long}), 'a', {long}), 'a', {long}))) FROM range(40)
SELECT length(regexp_replace(regexp_replace({long}, 'a', {long}, 'g'), 'a', {long}, 'g'))
SELECT length(list_reduce([{long}, 'b', 'c'], lambda x, y: x || x))
SELECT length(bin(bin(bin(bin(bin(bin(bin(bin({long})))))))))
SELECT length(hex(hex(to_hex(to_base64(encode(regexp_escape({long})))))))
SELECT levenshtein({long}, {long}) + editdist3({long}, {long})
SELECT jaro_similarity({long}, {long}) + jaro_winkler_similarity({long}, {long})
SELECT reservoir_quantile(range, 0.5, 2000000000) FROM range(10)
SELECT list_aggregate([1], 'reservoir_quantile', 0.5, 2000000000)
SELECT * FROM repeat('x', 10)
SELECT * FROM duckdb_settings()
SELECT * FROM duckdb_tables()
SELECT * FROM duckdb_secrets()
SELECT * FROM duckdb_logs()
SELECT * FROM pragma_table_info('meta')
SELECT * FROM pragma_storage_info('gpu')
SELECT * FROM duckdb_tables
SELECT * FROM sqlite_master
SELECT * FROM pg_catalog.pg_class
SELECT * FROM information_schema.tables
SELECT * FROM main.gpu
SELECT * FROM store.main.gpu
SELECT * FROM meta
SELECT * FROM snapshot
SELECT * FROM hot_gpu
SELECT * FROM secret_rows
WITH duckdb_tables AS (SELECT * FROM duckdb_tables) SELECT * FROM duckdb_tables
SELECT * FROM (WITH meta AS (SELECT 1) SELECT * FROM meta), meta
WITH a AS (SELECT * FROM meta), meta AS (SELECT 1) SELECT * FROM a
SELECT * FROM gpu AT (TIMESTAMP => now())
SELECT $1
SELECT ?
SELECT $name
PIVOT gpu ON entity USING avg(power)
SELECT * FROM test_all_types()
SELECT * FROM summary(1)
SELECT * FROM arrow_scan(1, 2, 3)
SELECT * FROM pandas_scan(1)
SELECT * FROM python_map_function(1)
SELECT * FROM enable_logging()
SELECT * FROM no_such_table
SELECT no_such_column FROM gpu
SELECT no_such_function(1)
SELECT
nonsense
;
--
""".strip().splitlines()
secret_rows = pa.table({"secret": [1]})


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One database for all tests of this file: they show that nothing changes it."""
    opened = Database(tmp_path_factory.mktemp("sandbox") / "store.duckdb")
    with opened.transaction() as connection:
        connection.execute("INSERT INTO gaps VALUES (to_timestamp(0), 'telemetry.v1', 'n1', 'e', 1, 5, 'test')")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def queries(database: Database) -> Iterator[QueryRunner]:
    made = QueryRunner(database.cursor, Api(sql_seconds=10.0, sql_rows=1000))
    yield made
    made.close()


def run_query(queries: QueryRunner, text: str) -> tuple[list[str], list[list[object]], bool]:
    """Returns columns, rows, and whether rows are missing."""
    found = json.loads(queries.run(text).body)
    return found["columns"], found["rows"], found["truncated"]


def _state(database: Database) -> list[object]:
    """Returns everything that a statement could have changed: objects, rows, settings."""
    return [
        database.connection.execute(query).fetchall()
        for query in (
            "SELECT table_name, estimated_size, column_count FROM duckdb_tables() ORDER BY ALL",
            "SELECT view_name, sql FROM duckdb_views() ORDER BY ALL",
            "SELECT count(*) FROM duckdb_functions()",
            "SELECT name, value FROM duckdb_settings() WHERE name <> 'username' ORDER BY ALL",
            "SELECT database_name FROM duckdb_databases() ORDER BY ALL",
            "SELECT topic, source, first_sequence FROM gaps",
        )
    ]


def _is_refused(act: Callable[[], object]) -> bool:
    try:
        act()
    except (Refused, InvalidQuery) as error:
        return bool(str(error))
    return False


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("query", GOOD)
def test_a_select_over_our_tables_is_answered(queries: QueryRunner, query: str) -> None:
    columns, _, truncated = run_query(queries, query)
    assert columns
    assert not truncated


@pytest.mark.slow
def test_every_hostile_statement_is_refused_and_changes_nothing(database: Database, queries: QueryRunner) -> None:
    folder = database.path.parent
    before, files = _state(database), sorted(p.name for p in folder.iterdir())
    words = {"{folder}": str(folder), "{long}": f"'{'a' * 1000}'"}
    hostile = [re.sub(r"\{folder\}|\{long\}", lambda found: words[found[0]], query) for query in ("", *HOSTILE)]
    assert [query for query in hostile if not _is_refused(partial(queries.run, query))] == []
    assert _state(database) == before
    assert sorted(p.name for p in folder.iterdir()) == files


@pytest.mark.slow
def test_the_parser_check_alone_refuses_statements_that_the_locked_database_would_also_refuse() -> None:
    only_by_database = {"SELECT no_such_column FROM gpu"}
    with duckdb.connect() as connection:
        passed = {query for query in HOSTILE if not _is_refused(partial(sandbox.check_query, connection, query))}
    assert passed == only_by_database


def test_a_write_that_passes_the_parser_check_fails_in_a_read_only_transaction(database: Database) -> None:
    cursor = database.cursor()
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    with pytest.raises(duckdb.TransactionException, match="read-only"):
        cursor.execute("DELETE FROM gaps")
    cursor.execute("ROLLBACK")
    cursor.close()


def test_a_python_variable_is_not_a_table(database: Database) -> None:
    cursor = database.cursor()
    assert secret_rows.num_rows == 1
    with pytest.raises(duckdb.CatalogException):
        cursor.execute("SELECT * FROM secret_rows")
    cursor.close()


def test_every_function_served_exists_in_duckdb_and_none_reads_files_or_the_network() -> None:
    with duckdb.connect() as connection:
        rows = connection.execute("SELECT DISTINCT function_name, function_type FROM duckdb_functions()").fetchall()
    known = {name for name, _ in rows}
    assert functions.SCALARS - known == {"->"}  # the parser's name for json_extract
    forbidden = ("read_", "duckdb_", "pragma_", "pg_", "current_setting", "getenv", "query", "sleep", "write_", "sniff")
    assert not [name for name in functions.SCALARS if name.startswith(forbidden)]


@pytest.mark.parametrize(
    "name",
    """replace regexp_replace regexp_escape bin to_binary hex to_hex base64 to_base64 levenshtein damerau_levenshtein
    editdist3 jaro_similarity jaro_winkler_similarity reservoir_quantile list_reduce reduce array_reduce aggregate
    list_aggregate list_aggr array_aggregate array_aggr""".split(),  # noqa: SIM905
)
def test_a_function_whose_single_call_can_exceed_every_limit_is_not_served(queries: QueryRunner, name: str) -> None:
    with pytest.raises(Refused, match="is not served in expressions"):
        queries.run(f"SELECT {name}('a')")


WORDS = st.sampled_from(
    """SELECT FROM WHERE ( ) , ; * gpu meta 'x.csv' read_csv glob('/*') WITH a AS INSERT INTO gaps VALUES (1) DELETE
    UPDATE SET threads = 1 UNION ALL JOIN ON true LATERAL -- /* */ $1 ? DROP VIEW x COPY TO ATTACH PRAGMA CALL range(3)
    [1] {'a':1} lambda x : x + 1 NULL CASE WHEN THEN END OVER PARTITION BY ORDER LIMIT 1 PIVOT RETURNING""".split()  # noqa: SIM905
)


@settings(max_examples=examples(80), deadline=None)
@given(words=st.lists(WORDS, max_size=14), start=st.sampled_from(["", "SELECT", "WITH a AS (SELECT 1)", "FROM gpu"]))
def test_a_random_sequence_of_words_is_answered_or_refused_and_changes_nothing(
    database: Database, queries: QueryRunner, words: list[str], start: str
) -> None:
    _is_refused(lambda: queries.run(" ".join([start, *words])))
    assert database.connection.execute("SELECT count(*) FROM gaps").fetchall() == [(1,)]


@settings(max_examples=examples(50), deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_is_answered_or_refused(queries: QueryRunner, text: str) -> None:
    _is_refused(lambda: queries.run("SELECT '" + text))


@pytest.mark.parametrize("text", ["SELECT '\ud800'", "SELECT '\x00'"])
def test_invalid_unicode_is_refused(queries: QueryRunner, text: str) -> None:
    with pytest.raises(InvalidQuery):
        queries.run(text)


@pytest.mark.parametrize("text", ["SELECT " + "(" * 3000 + "1" + ")" * 3000, "SELECT " + "NOT " * 15000 + "true"])
def test_a_too_deeply_nested_expression_is_over_a_limit(queries: QueryRunner, text: str) -> None:
    """DuckDB's message recommends a setting that is locked here."""
    with pytest.raises(OverLimit, match="nested too deeply"):
        queries.run(text)


def test_subqueries_900_deep_are_refused(queries: QueryRunner) -> None:
    with pytest.raises(OverLimit, match="deep"):
        queries.run("SELECT * FROM " + "(SELECT * FROM " * 900 + "gpu" + ")" * 900)


def test_a_query_longer_than_the_limit_is_refused(queries: QueryRunner) -> None:
    with pytest.raises(OverLimit, match="characters"):
        queries.run("SELECT 1 -- " + "x" * sandbox.QUERY_CHARACTERS)


def test_rows_beyond_the_limit_are_cut_and_reported_as_truncated(queries: QueryRunner) -> None:
    _, rows, truncated = run_query(queries, "SELECT * FROM range(100000000000)")
    assert (len(rows), truncated) == (1000, True)
    _, rows, truncated = run_query(queries, "SELECT * FROM range(1000)")
    assert (len(rows), truncated) == (1000, False)


def test_queries_beyond_the_slots_are_refused_and_a_stop_interrupts_the_running_ones(database: Database) -> None:
    queries, outcomes = QueryRunner(database.cursor, Api(sql_seconds=60.0)), list[BaseException | None]()
    begun = threading.Barrier(5)

    def run() -> None:
        begun.wait()
        try:
            queries.run("SELECT sum(a.range * b.range) FROM range(100000000) a, range(100000000) b")
            outcomes.append(None)
        except Retryable as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(5)]
    for thread in threads:
        thread.start()
    while not outcomes:  # the fifth is refused immediately; the others run for a minute unless interrupted
        threads[0].join(0.01)
    assert "4 queries" in str(outcomes[0])
    queries.close()
    for thread in threads:
        thread.join()
    assert [type(o) for o in outcomes] == [Retryable] * 5
    with pytest.raises(Retryable, match="stopping"):
        queries.run("SELECT 1")


@pytest.mark.slow
def test_every_served_table_exists_and_is_documented(queries: QueryRunner) -> None:
    text = (Path(__file__).parents[3] / "docs" / "sql.md").read_text()
    tables = sorted(sandbox.TABLES)
    for table in tables:
        shown = re.sub(r"^(rollup_\d+|latest)_.*", r"\1_CLASS", table)
        assert f"`{shown}`" in text
    for some in (tables[i : i + 8] for i in range(0, len(tables), 8)):  # each query is a process
        _, rows, _ = run_query(queries, "SELECT " + ", ".join(f"(SELECT count(*) FROM {t})" for t in some))
        assert len(rows[0]) == len(some)


def test_the_examples_of_the_documentation_are_answered(queries: QueryRunner) -> None:
    text = (Path(__file__).parents[3] / "docs" / "sql.md").read_text()
    examples = [part.partition(";")[0] for part in text.split("    -- ")[1:]]
    assert len(examples) == 3
    for example in examples:
        queries.run(example.partition("\n")[2])


def test_a_query_with_very_many_calls_is_refused() -> None:
    query = "SELECT length(" + "||".join(["entity"] * (sandbox.MAX_CALLS + 2)) + ") FROM gpu"
    with duckdb.connect() as connection, pytest.raises(OverLimit, match=f"at most {sandbox.MAX_CALLS}"):
        sandbox.check_query(connection.cursor(), query)


INVALID = """
SELEC 1
SELECT
nonsense
--
SELECT * FROM no_such_table
SELECT no_such_column FROM gpu
SELECT no_such_function(1)
SELECT CAST('x' AS INT)
SELECT a FROM gpu WHERE
""".strip().splitlines()


@pytest.mark.parametrize("query", INVALID)
def test_invalid_sql_is_distinguished_from_refused_sql(queries: QueryRunner, query: str) -> None:
    with pytest.raises(InvalidQuery):
        queries.run(query)


@pytest.mark.parametrize(
    "query",
    ["DROP TABLE gpu", "SELECT 1; SELECT 2", "FROM read_csv('/etc/passwd')", "FROM '/etc/passwd'", "FROM meta",
     "FROM hot_gpu", "FROM duckdb_tables", "FROM main.gpu", "SELECT repeat('x', 5)", "SHOW TABLES", "SELECT $1"],
)  # fmt: skip
def test_refused_sql_is_not_reported_as_invalid(queries: QueryRunner, query: str) -> None:
    with pytest.raises(Refused):
        queries.run(query)


def test_every_table_of_the_store_is_served_or_listed_as_internal(database: Database) -> None:
    rows = database.connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
    names = {name for (name,) in rows if not name.startswith(("hot_", "latest_"))}
    assert names <= sandbox.TABLES | sandbox.INTERNAL
