"""Sealing: full hours move to Parquet files and stay in the view of their class, each row once, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.api.query import QueryRunner, find_time_range
from pipeline.config.sections import Api, Store
from pipeline.model.records import SECOND, Rows
from pipeline.store import history_files, retention, schema
from pipeline.store.database import Database, open_file
from pipeline.store.devices import Devices
from pipeline.store.hot_tables import HotTables
from pipeline.store.sealing import CONFLICTS, DAY, EVERY, HOUR, Sealer

T0 = 1_780_000_000 * SECOND // DAY * DAY + 20 * HOUR
GPUS = 3
STEPS = ("copied", "synced", "renamed", "deleted", "named", "committed")


class Seal:
    """A store with a few devices, hours of rows and a sealer. The last hour of the day is T0 + 3 hours."""

    def __init__(self, folder: Path, **keys: float) -> None:
        self.path, self.now, self.keys = folder / "store.duckdb", T0 + 100 * HOUR, keys
        self.fails_at = ""
        self.open()

    def open(self) -> None:
        self.database = Database(self.path)
        self.devices = Devices(self.database.connection)
        self.tables = HotTables(self.database.connection)
        store = Store(path=self.path, **self.keys)
        self.sealer = Sealer(self.database, store, lambda: self.now, self.step)

    def step(self, name: str) -> None:
        if name == self.fails_at:
            raise KeyboardInterrupt

    def restart(self) -> None:
        self.database.close()
        self.open()

    def add(self, start: int, ticks: int, site: str = "local", **columns: np.ndarray) -> None:
        """Adds rows each minute; columns: values by signal, default a temperature and a counter."""
        ids = self.devices.assign_ids("gpu", site, "n1", True, tuple(f"gpu:{site}.{i}" for i in reversed(range(GPUS))))
        number = ticks * GPUS
        columns = columns or {
            "temperature": np.arange(number, dtype="f4"),
            "energy": np.arange(number, dtype="u8") * 1000 + (1 << 53) + 1,
            "sm_clock": (np.arange(number) % 2000).astype("u2"),
        }
        time = np.repeat(start + np.arange(ticks) * 60 * SECOND, GPUS)
        rows = Rows("gpu", time, np.tile(ids, ticks), {f"gpu.{name}": v for name, v in columns.items()})
        with self.database.transaction() as connection:
            self.devices.save(connection)
            self.tables.append(connection, [rows])
        self.devices.mark_saved()

    def run(self, query: str) -> list[tuple[object, ...]]:
        return self.database.connection.execute(query).fetchall()

    def view(self) -> list[tuple[object, ...]]:
        return self.run("SELECT epoch_us(time), entity, temperature, energy, sm_clock FROM gpu ORDER BY ALL")

    def files(self) -> list[str]:
        folder = history_files.history_folder(self.path)
        return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())

    def named(self, step: int = 0) -> list[str]:
        return [p for (p,) in self.run(f"SELECT path FROM sealed WHERE step = {step} ORDER BY path")]

    def read(self, path: str) -> pa.Table:
        return pq.read_table(history_files.history_folder(self.path) / path, partitioning=None)


@pytest.fixture
def store(tmp_path):
    made = Seal(tmp_path)
    yield made
    made.sealer.stop()
    made.database.close()


# --- rows move, the view does not change ----------------------------------------------------------------------------


@pytest.mark.slow
def test_full_hours_move_to_files_and_the_view_shows_the_same_rows(store):
    store.add(T0, 200)
    before, types = store.view(), store.database.connection.sql("FROM gpu LIMIT 0").types
    store.sealer.seal(T0 + 2 * HOUR + 5)
    assert [p.rpartition("-")[0] for p in store.named()] == [
        f"gpu/site=local/day={_day(T0)}/{hour}" for hour in (20, 21)
    ]
    assert store.run("SELECT epoch_us(min(time)) FROM recent_gpu") == [(T0 + 2 * HOUR,)]
    assert store.view() == before
    assert len(before) == 600
    found = store.database.connection.sql("FROM gpu LIMIT 0")
    assert (found.columns[:2], found.types) == (["time", "entity"], types)
    store.restart()
    assert store.view() == before


def test_a_file_is_read_by_pyarrow_sorted_and_has_signed_integers_only(store):
    store.add(T0, 60)
    expected = store.view()
    store.sealer.seal(T0 + HOUR)
    table = store.read(store.named()[0])
    assert [(t, e) for t, e, *_ in sorted(expected, key=lambda row: (row[1], row[0]))] == list(
        zip(table["time"].cast(pa.int64()).to_pylist(), table["entity"].to_pylist(), strict=True)
    )
    for path in store.files():
        table = store.read(path)
        assert [f for f in table.schema if pa.types.is_unsigned_integer(f.type)] == []
    read = store.read(store.named()[0])
    assert (read.schema.field("energy").type, read.schema.field("sm_clock").type) == (pa.int64(), pa.int32())
    assert set(read["simulated"].to_pylist()) == {True}
    assert set(read["node"].to_pylist()) == {"n1"}
    meta = pq.ParquetFile(history_files.history_folder(store.path) / store.named()[0]).metadata
    assert meta.row_group(0).column(0).compression == "ZSTD"


@pytest.mark.slow
def test_sites_have_separate_files_and_names_of_sites_are_escaped(store):
    store.add(T0, 5)
    store.add(T0, 5, site="a b/..")
    before = store.view()
    store.sealer.seal(T0 + HOUR)
    assert [p.split("/")[1] for p in store.named()] == ["site=a%20b%2F..", "site=local"]
    assert store.view() == before


@pytest.mark.slow
def test_late_rows_of_a_sealed_hour_are_shown_and_sealed_again(store):
    store.add(T0, 30)
    store.sealer.seal(T0 + HOUR)
    store.add(T0 + 30 * 60 * SECOND, 10)
    assert len(store.view()) == 40 * GPUS
    before = store.view()
    store.sealer.seal(T0 + HOUR)
    assert (len(store.named()), store.run("SELECT count(*) FROM recent_gpu")) == (2, [(0,)])
    assert store.view() == before


def test_rows_that_arrive_during_the_copy_stay_hot(store):
    store.add(T0, 10)
    job = store.sealer._prepare(T0 + HOUR)
    store.add(T0 + 20 * 60 * SECOND, 10)
    store.sealer._commit(job, lambda: None)
    assert store.run("SELECT count(*) FROM recent_gpu") == [(10 * GPUS,)]
    assert len(store.view()) == 20 * GPUS


@pytest.mark.slow
def test_a_new_signal_during_the_copy_ends_it_and_the_next_pass_seals(store):
    store.add(T0, 10)
    job = store.sealer._prepare(T0 + HOUR)
    store.add(T0, 10, power=np.ones(30, "f4"))
    before = store.run("SELECT epoch_us(time), entity, temperature, power FROM gpu ORDER BY ALL")
    with pytest.raises(duckdb.Error):
        store.sealer._commit(job, lambda: None)
    assert store.files() == []
    store.sealer.seal(T0 + HOUR)
    assert store.run("SELECT epoch_us(time), entity, temperature, power FROM gpu ORDER BY ALL") == before


def test_a_counter_of_2_to_the_63_is_null_and_counted(store):
    store.add(T0, 1, energy=np.array([1 << 63, (1 << 63) - 1, 5], "u8"))
    store.sealer.seal(T0 + HOUR)
    assert store.run("SELECT energy FROM gpu ORDER BY 1 NULLS FIRST") == [(None,), (5,), ((1 << 63) - 1,)]
    assert store.run("SELECT kind, topic, number FROM losses") == [("value", "gpu", 1)]
    assert store.sealer.lost_values == 1


@pytest.mark.slow
def test_a_file_without_a_new_column_has_null_there(store):
    store.add(T0, 1)
    store.sealer.seal(T0 + HOUR)
    store.add(T0 + HOUR, 1, invented=np.ones(3, "f4"))
    assert store.run("SELECT count(*), count(invented) FROM gpu") == [(6, 3)]
    store.sealer.seal(T0 + 2 * HOUR)
    assert store.run("SELECT count(*), count(invented) FROM gpu") == [(6, 3)]


# --- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("merging", [False, True])
def test_a_failure_at_any_step_leaves_every_row_once(store, step, merging):
    store.add(T0, 150)
    before = store.view()
    if merging:
        store.sealer.seal(T0 + 2 * HOUR)
    limit = T0 + (30 if merging else 2) * HOUR
    store.fails_at = step
    with pytest.raises(KeyboardInterrupt):
        store.sealer.seal(limit)
    assert store.view() == before
    store.fails_at = ""
    store.restart()
    assert store.view() == before
    assert set(store.files()) == {path for step in (0, 60, 600) for path in store.named(step)}
    store.sealer.seal(limit)
    assert store.view() == before


@pytest.mark.sample(every=5)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("merging", [False, True])
def test_a_kill_at_any_step_leaves_every_row_once(store, step, merging):
    store.add(T0, 150)
    before = store.view()
    if merging:
        store.sealer.seal(T0 + 2 * HOUR)
    limit = T0 + (30 if merging else 2) * HOUR
    store.database.close()
    program = f"""
        import os, signal
        from pathlib import Path
        from pipeline.config.sections import Store
        from pipeline.store.database import Database
        from pipeline.store.sealing import Sealer
        def end(name):
            if name == {step!r}:
                os.kill(os.getpid(), signal.SIGKILL)
        database = Database(Path({str(store.path)!r}))
        Sealer(database, Store(path=database.path), lambda: {store.now}, end).seal({limit})
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], env={"PYTHONPATH": _root()}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    store.open()
    assert store.view() == before
    assert set(store.files()) == {path for step in (0, 60, 600) for path in store.named(step)}
    store.sealer.seal(limit)
    assert store.view() == before


@pytest.mark.slow
def test_a_missing_file_is_counted_and_the_rest_stays_readable(store):
    store.add(T0, 120)
    store.sealer.seal(T0 + 2 * HOUR)
    gone, kept = store.named()
    store.database.close()
    (history_files.history_folder(store.path) / gone).unlink()
    store.open()
    assert store.named() == [kept]
    assert len(store.view()) == 60 * GPUS
    assert store.run("SELECT kind, topic, number, messages FROM losses") == [("history", "gpu", 1, 60 * GPUS)]


@pytest.mark.slow
def test_files_of_a_lost_store_are_kept_aside(store):
    store.add(T0, 60)
    store.sealer.seal(T0 + HOUR)
    files = store.files()
    store.database.close()
    store.path.unlink()
    store.open()
    assert (store.view(), store.files()) == ([], [])
    aside = store.path.with_name("store.duckdb.history.aside")
    assert sorted(str(p.relative_to(aside)) for p in aside.rglob("*.parquet")) == files


# --- in the loop of the pipeline ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_moved_store_reads_its_files_at_their_new_place(store, tmp_path):
    """Views name files by their whole path, and are not created again at each start."""
    store.add(T0, 60)
    store.sealer.seal(T0 + HOUR)
    before = store.view()
    store.sealer.stop()
    store.database.close()
    Database(store.path).close()  # what it creates is for the old place
    place = tmp_path / "moved" / store.path.name
    place.parent.mkdir()
    store.path.rename(place)
    history_files.history_folder(store.path).rename(history_files.history_folder(place))
    store.database = Database(place)
    assert store.view() == before
    assert len(before) == 60 * GPUS


def test_the_loop_seals_all_that_is_due_without_waiting(store):
    store.add(T0, 150)
    before, covered = store.view(), []
    while store.run("SELECT count(*) FROM sealed WHERE step = 0") != [(2,)]:
        store.sealer.advance(T0 + 2 * HOUR, lambda: covered.append(1))
        if store.sealer._running is not None:
            store.sealer._running.exception(60)
    assert len(covered) == 2
    assert store.view() == before
    assert store.sealer.sealed_rows == 120 * GPUS


def advance_with(store: Seal, change) -> None:
    """One copy, during which `change` is committed, and its end."""
    store.sealer.advance(T0 + 2 * HOUR)
    assert store.sealer._running is not None
    store.sealer._running.exception(60)
    change()
    store.sealer.advance(T0 + 2 * HOUR)


def add_signals(store: Seal, number: int) -> None:
    """Another set of signals of the class, as of an agent that starts: a separate table."""
    with store.database.transaction() as connection:
        schema.create_hot_table(connection, f"hot_gpu_{number:08x}", {"power": "FLOAT"})


def expire_first_hour(store: Seal) -> None:
    retention.delete_old_rows(store.database, T0 + HOUR)


@pytest.mark.parametrize(
    ("change", "rows"), [(lambda store: add_signals(store, 1), 120), (expire_first_hour, 60)], ids=["signals", "expiry"]
)
def test_what_ingest_or_retention_commit_during_the_copy_makes_it_copy_again_at_once_without_a_problem(
    store, change, rows, caplog
):
    store.add(T0, 120)
    advance_with(store, lambda: change(store))
    assert (store.sealer.conflicts, store.files()) == (1, [])
    while store.run("SELECT count(*) FROM recent_gpu") != [(0,)]:
        advance_with(store, lambda: None)
    assert (len(store.view()), store.sealer.sealed_rows) == (rows * GPUS, rows * GPUS)
    assert (store.sealer.conflicts, caplog.messages) == (1, [])


def test_a_conflict_at_each_of_many_copies_is_a_problem_and_loses_nothing(store):
    store.add(T0, 10)
    for number in range(CONFLICTS - 1):
        advance_with(store, lambda n=number: add_signals(store, n))
    with pytest.raises(duckdb.TransactionException, match="conflict"):
        advance_with(store, lambda: add_signals(store, CONFLICTS))
    assert (store.files(), len(store.view())) == ([], 10 * GPUS)
    advance_with(store, lambda: None)
    assert (len(store.named()), len(store.view())) == (1, 10 * GPUS)


def test_a_stop_during_the_copy_has_no_effect(store):
    store.add(T0, 60)
    store.sealer.advance(T0 + HOUR)
    store.sealer.stop()
    assert (store.files(), store.named(), len(store.view())) == ([], [], 60 * GPUS)
    store.database.reopen()
    assert len(store.view()) == 60 * GPUS


# --- days, expiry ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_of_a_day_that_is_over_are_merged_and_removed_later(store):
    store.add(T0, 239)
    store.add(T0 + 5 * HOUR, 5)
    before = store.view()
    store.sealer.seal(T0 + 50 * HOUR)
    assert store.named()[0].split("/")[2] == f"day={_day(T0)}"
    assert [p.rpartition("/")[2].partition("-")[0] for p in store.named()] == ["day", "01"]
    assert store.view() == before
    table = store.read(store.named()[0])
    keys = list(zip(table["entity"].to_pylist(), table["time"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    assert len(store.files()) > 6
    store.now += EVERY
    store.sealer._remove_replaced(store.now)
    assert len(store.files()) == 6
    assert store.view() == before


def test_files_expire_by_age_and_rollups_later(tmp_path):
    store = Seal(tmp_path, telemetry_days=2.0, rollup_days=3.0)
    store.add(T0, 120)
    store.sealer.seal(T0 + 2 * HOUR)
    store.sealer.expire(T0 + 2 * DAY + HOUR)
    assert ([p.split("/")[-1][:2] for p in store.named()], len(store.named(60))) == (["21"], 2)
    assert len(store.view()) == 60 * GPUS
    store.sealer.expire(T0 + 4 * DAY)
    assert store.run("SELECT count(*) FROM sealed") == [(0,)]
    assert store.view() == []
    store.database.close()


@pytest.mark.slow
def test_files_expire_by_bytes_the_oldest_rows_first(tmp_path):
    store = Seal(tmp_path)
    store.add(T0, 180)
    store.sealer.seal(T0 + 3 * HOUR)
    [(size,)] = store.run("SELECT sum(bytes) FROM sealed")
    store.keys = {"telemetry_bytes": size - 1}
    store.restart()
    store.sealer.expire(store.now)
    assert [p.split("/")[-1][:2] for p in store.named()] == ["21", "22"]
    assert len(store.named(60)) == len(store.named(600)) == 3
    store.keys = {"telemetry_bytes": 1}
    store.restart()
    store.sealer.expire(store.now)
    assert store.run("SELECT count(*) FROM sealed") == [(0,)]
    store.database.close()


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sql_reads_sealed_rows_and_no_file_by_itself(store):
    store.add(T0, 120)
    store.sealer.seal(T0 + HOUR)
    runner = QueryRunner(store.database.cursor, Api())
    try:
        start = "TIMESTAMPTZ '" + str(np.datetime64(T0, "us")) + "Z'"
        body = runner.run(f"SELECT count(*), count(DISTINCT entity), max(energy) FROM gpu WHERE time >= {start}").body
        assert b"[[360,3," in body
        for hostile in (
            f"FROM read_parquet('{store.path}.history/**')",
            f"FROM '{store.path}.history/{store.named()[0]}'",
            f"FROM glob('{store.path}.history/**')",
            "FROM sealed", "FROM recent_gpu", "FROM read_blob('/etc/passwd')",
            f"COPY (SELECT 1) TO '{store.path}.history/x'",
        ):  # fmt: skip
            with pytest.raises(Exception, match=r"served|not a SELECT|only SELECT|function"):
                runner.run(hostile)
    finally:
        runner.close()


@pytest.mark.slow
def test_a_scan_reads_only_the_files_of_its_time(store):
    store.add(T0, 180)
    store.sealer.seal(T0 + 3 * HOUR)
    where = [("time", ">=", "time", "2026-05-28 21:30:00Z"), ("time", "<", "time", "2026-05-28 22:00:00.5Z")]
    start, end = find_time_range(where)
    with store.database.transaction() as connection:
        files = history_files.list_files(connection, "gpu", 0, start, end)
    assert [path.split("/")[-1][:2] for path in files] == ["21", "22"]
    assert find_time_range([("time", ">", "time", "0000-01-01 00:00:00Z")]) == (None, None)


def test_no_connection_to_a_store_reads_or_writes_other_files(store, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    folder = history_files.history_folder(store.path)
    for query in (
        f"FROM read_csv('{secret}')",
        f"FROM read_csv('{folder}/../secret.csv')",
        f"FROM '{secret}'",
        f"COPY (SELECT 1) TO '{tmp_path}/x.csv'",
        f"ATTACH '{tmp_path}/x.duckdb'",
        "SET GLOBAL enable_external_access = true",
        f"SET GLOBAL allowed_directories = ['{tmp_path}']",
    ):
        with pytest.raises(duckdb.Error, match=r"disabled by configuration|locked|Cannot"):
            store.run(query)


@pytest.mark.slow
def test_the_store_opened_read_only_shows_sealed_rows(store):
    store.add(T0, 60)
    store.sealer.seal(T0 + HOUR)
    store.database.close()
    with open_file(store.path, {}, read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM gpu").fetchall() == [(60 * GPUS,)]
    store.open()


def _day(time: int) -> str:
    return str(np.datetime64(time, "us").astype("datetime64[D]"))


def _root() -> str:
    return str(Path(__file__).parents[2])
