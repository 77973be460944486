"""Hot tables: one per set of signals, behind one view per class, in which a store of version 1 is read too.

Latest rows: written at most every ten seconds, and complete after a kill.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.engine.restart import count_later_rows, read_since
from pipeline.ingest.ingest import Ingest
from pipeline.ingest.offsets import load_offsets
from pipeline.model.errors import WireError
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Event, Origin, Rows
from pipeline.model.signals import CLASSES, signals_of_class
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.hot_tables import MAX_TABLES, HotTables
from pipeline.store.latest import WRITE_EVERY
from pipeline.store.retention import delete_old_rows
from pipeline.store.schema import class_of_table, list_hot_tables
from pipeline.transport import Partition, wire
from pipeline.transport.spool import SpoolTransport
from tests.examples import examples
from tests.pipeline.conftest import NOW, Site

T0 = 1_780_000_000 * SECOND
GOLDEN = Path(__file__).parent / "golden" / "store-1.duckdb.zst"


@pytest.fixture
def database(tmp_path):
    made = Database(tmp_path / "store.duckdb")
    yield made
    made.close()


def gpu_rows(*signals, time=T0, value=1.0, device=0):
    return Rows("gpu", np.array([time]), np.array([device], np.int32), {s: np.array([value], "f4") for s in signals})


def append(database, *blocks, closed=-1):
    tables = HotTables(database.connection)
    with database.transaction() as connection:
        tables.append(connection, blocks, closed)
    return tables


def narrow(database):
    return [table for table in list_hot_tables(database.connection) if table.startswith("hot_gpu_")]


def columns_of(database, table):
    found = database.connection.execute(f'DESCRIBE "{table}"').fetchall()
    return [name for name, *_ in found if name not in ("time", "device", "late")]


def numbered(start, number):
    return [f"gpu.s{i}" for i in range(start, start + number)]


# --- tables ---------------------------------------------------------------------------------------------------------


def test_no_name_of_a_class_has_an_underscore_because_names_of_tables_are_split_there():
    assert [name for name in CLASSES if "_" in name or class_of_table(f"hot_{name}_3") != name] == []


def test_each_set_of_signals_has_a_table_with_its_own_columns_and_one_view_shows_all(database):
    fast, slow = numbered(0, 3), numbered(10, 30)
    database.connection.execute("INSERT INTO device VALUES ('gpu', 0, 'local', 'gpu:n1.0', 'n1', false)")
    append(database, gpu_rows(*fast, value=2.0), gpu_rows(*slow, time=T0 + SECOND, value=3.0))
    assert [columns_of(database, table) for table in narrow(database)] == [
        [f"s{i}" for i in range(3)],
        [f"s{i}" for i in range(10, 40)],
    ]
    query = "SELECT epoch_us(time), entity, s0, s2, s10, s39, temperature FROM gpu ORDER BY 1"
    assert database.connection.execute(query).fetchall() == [
        (T0, "gpu:n1.0", 2.0, 2.0, None, None, None),
        (T0 + SECOND, "gpu:n1.0", None, None, 3.0, 3.0, None),
    ]


def test_the_view_of_a_class_has_the_same_columns_whatever_tables_it_has(database):
    wanted = ["time", "entity", *(s.column for s in signals_of_class("gpu"))]
    append(database, gpu_rows("gpu.temperature", "gpu.memory_temperature"), gpu_rows("gpu.power"))
    assert [name for name, *_ in database.connection.execute("DESCRIBE gpu").fetchall()] == wanted


def test_sets_that_differ_by_few_signals_share_a_table(database):
    append(database, gpu_rows(*numbered(0, 20)), gpu_rows(*numbered(0, 15)), gpu_rows(*numbered(5, 20)))
    assert [columns_of(database, table) for table in narrow(database)] == [[f"s{i}" for i in range(25)]]
    assert database.connection.execute("SELECT count(s0), count(s12), count(s24) FROM hot_gpu_1").fetchall() == [
        (2, 3, 1)
    ]


@pytest.mark.slow
def test_all_rows_of_a_commit_for_one_table_are_one_statement(database, monkeypatch):
    made, insert = [], HotTables._insert
    monkeypatch.setattr(HotTables, "_insert", lambda self, *a: (made.append(a[1]), insert(self, *a)))
    append(database, *(gpu_rows(*numbered(0, 20 - i), device=i) for i in range(5)), gpu_rows(*numbered(50, 60)))
    assert sorted(made) == ["hot_gpu_1", "hot_gpu_2"]
    assert database.connection.execute("SELECT count(*), count(s0), count(s19) FROM hot_gpu_1").fetchall() == [
        (5, 5, 1)
    ]


@pytest.mark.slow
def test_the_number_of_tables_is_bounded_and_further_sets_go_to_the_wide_one(database):
    sets = [numbered(100 * i, 20) for i in range(MAX_TABLES + 3)]
    append(database, *(gpu_rows(*signals) for signals in sets))
    assert len(narrow(database)) == MAX_TABLES
    assert database.connection.execute("SELECT count(*) FROM hot_gpu").fetchall() == [(3,)]
    tables = append(database, gpu_rows(*sets[0][:1]))  # a table that has it, however wide, before the widest
    assert database.connection.execute("SELECT count(*) FROM hot_gpu").fetchall() == [(3,)]
    assert tables.types_of("gpu")["s100"] == "f4"


def test_tables_of_a_failed_transaction_are_forgotten_with_it(database):
    tables = HotTables(database.connection)
    mixed = Rows("gpu", np.array([T0]), np.zeros(1, np.int32), {"gpu.new": np.array([1], "u1")})
    with pytest.raises(WireError), database.transaction() as connection:
        tables.append(connection, [gpu_rows("gpu.new"), mixed])
    with database.transaction() as connection:
        tables.begin(connection)
        tables.append(connection, [gpu_rows("gpu.new")])
    tables.commit()
    assert narrow(database) == ["hot_gpu_1"]
    assert database.connection.execute("SELECT count(new) FROM hot_gpu_1").fetchall() == [(1,)]


def test_a_signal_with_another_type_than_its_column_is_refused(database):
    tables = append(database, gpu_rows("gpu.new"))
    other = Rows("gpu", np.array([T0]), np.zeros(1, np.int32), {"gpu.new": np.array([1], "u1")})
    with pytest.raises(WireError, match="values of type u1, expected f4"), database.transaction() as connection:
        tables.append(connection, [other])


@pytest.mark.slow
def test_an_empty_table_is_dropped_with_its_old_rows_and_its_signals_stay_in_the_view(site):
    site.send("n1", T0)
    ingest = site.open()
    ingest.step()
    assert site.rows("SELECT table_name FROM duckdb_tables() WHERE starts_with(table_name, 'hot_gpu_')") == [
        ("hot_gpu_1",)
    ]
    assert delete_old_rows(site.database, T0 + SECOND) == 2
    ingest.apply_retention(0)
    assert site.rows("SELECT table_name FROM duckdb_tables() WHERE starts_with(table_name, 'hot_gpu_')") == []
    assert site.rows("SELECT temperature FROM gpu") == []
    site.send("n1", T0 + 2 * SECOND, first=7.0)
    ingest.step(closed=T0 + 3 * SECOND)
    assert site.rows("SELECT temperature FROM gpu") == [(7.0,), (7.0,)]
    assert site.rows("SELECT class, entity FROM late_rows ORDER BY 2") == [("gpu", "gpu:n1.0"), ("gpu", "gpu:n1.1")]


def test_a_restart_reads_the_rows_of_all_tables_but_the_late_ones(database):
    database.connection.execute("INSERT INTO device VALUES ('gpu', 0, 'local', 'gpu:n1.0', 'n1', false)")
    append(database, gpu_rows(*numbered(0, 3)), gpu_rows(*numbered(10, 30), time=T0 + SECOND))
    append(database, gpu_rows(*numbered(0, 3), time=T0 + 2 * SECOND), closed=T0 + 3 * SECOND)
    found = []
    read_since(database, T0, T0 + 60 * SECOND, lambda rows, events, until: found.extend(rows))
    assert sorted((len(rows.columns), rows.time.tolist()) for rows in found) == [(3, [T0]), (30, [T0 + SECOND])]
    assert count_later_rows(database, T0) == 2


# --- a store of version 1 -------------------------------------------------------------------------------------------


@pytest.fixture
def old_store(tmp_path):
    """A store of version 1: two nodes, two rhythms, a custom signal, late rows, a dead letter, an inventory."""
    path = tmp_path / "store.duckdb"
    path.write_bytes(zstandard.ZstdDecompressor().decompress(GOLDEN.read_bytes()))
    made = Database(path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_store_of_version_1_is_read_in_the_same_views(old_store):
    run = old_store.connection.execute
    assert run("SELECT value FROM meta WHERE key = 'schema_version'").fetchall() == [("4",)]
    assert run("SELECT count(*), sum(temperature), sum(energy), sum(made_by_others) FROM gpu").fetchall() == [
        (26, 1122.0, 15, 3)
    ]
    assert run("SELECT entity, rx_bytes FROM nic").fetchall() == [("port:n1.mlx5_0", 123)]
    assert run("SELECT entity FROM late_rows ORDER BY 1").fetchall() == [("gpu:n1.0",), ("gpu:n1.1",)]
    assert run("SELECT device, temperature, energy FROM latest_gpu ORDER BY 1").fetchall() == [
        (0, 46.0, None), (1, 46.0, None), (2, 54.0, None), (3, 54.0, None)
    ]  # fmt: skip
    assert run("SELECT count(*) FROM dead_letter").fetchall() == [(1,)]


def test_a_store_of_version_1_keeps_its_offsets(old_store):
    assert sorted((p.topic, p.name, offset) for p, offset in load_offsets(old_store.connection).items()) == [
        (EVENTS, "n1", 1), (TELEMETRY, "n1", 4), (TELEMETRY, "n2", 2)
    ]  # fmt: skip


@pytest.mark.slow
def test_new_rows_stand_beside_those_of_version_1_in_one_view(old_store):
    devices = Devices(old_store.connection)
    devices.assign_ids("gpu", "local", "n1", False, ("gpu:n1.0",))
    append(old_store, gpu_rows("gpu.temperature", time=T0 + 60 * SECOND, value=90.0))
    query = "SELECT count(*), max(temperature), sum(energy) FROM gpu WHERE entity = 'gpu:n1.0'"
    assert old_store.connection.execute(query).fetchall() == [(9, 90.0, 7)]
    assert delete_old_rows(old_store, T0 + 30 * SECOND) == 27
    assert old_store.connection.execute("SELECT temperature FROM gpu").fetchall() == [(90.0,)]


# --- latest rows ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_latest_rows_are_written_at_most_every_ten_seconds_and_found_again_after_a_kill(site):
    now = [NOW]
    ingest = opened(site, now)
    site.send("n1", T0, first=40.0)
    ingest.step()
    site.send("n1", T0 + SECOND, first=41.0)
    now[0] += WRITE_EVERY - 1
    ingest.step()
    assert latest(site) == [(T0, 40.0), (T0, 40.0)]
    now[0] += 1
    ingest.step()  # nothing arrived
    assert latest(site) == [(T0 + SECOND, 41.0), (T0 + SECOND, 41.0)]
    site.send("n1", T0 + 2 * SECOND, first=42.0)
    ingest.step()
    assert latest(site) == [(T0 + SECOND, 41.0), (T0 + SECOND, 41.0)]
    opened(site, now)  # as after a kill: nothing is written at the end
    assert latest(site) == [(T0 + 2 * SECOND, 42.0), (T0 + 2 * SECOND, 42.0)]


def opened(site: Site, now: list[int]) -> Ingest:
    site.shut()
    site.database = Database(site.folder / "store.duckdb")
    site.transport = SpoolTransport(site.folder / "spool")
    return Ingest(site.database, site.transport, Devices(site.database.connection), lambda: now[0])


def latest(site):
    return site.rows("SELECT epoch_us(time), temperature FROM latest_gpu ORDER BY device")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["fast", "fast", "slow"]), st.sampled_from("ab"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["commit", "wait", "kill"])),
    ),
    max_size=25,
)
NEWEST = """
SELECT d.id, epoch_us(max(g.time)), arg_max(g.temperature, g.time), arg_max(g.memory_temperature, g.time)
FROM gpu g JOIN device d USING (entity) GROUP BY ALL ORDER BY ALL"""


@pytest.mark.slow
@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_after_any_kills_the_latest_rows_are_those_of_the_store(new_site, steps):
    """Each device: its newest time, and of each signal its newest value. Each node measures in order of time."""
    site, now = new_site(), [NOW]
    ingest, times, value = opened(site, now), {"a": T0, "b": T0}, 0
    for kind, *arguments in steps:
        if kind in ("fast", "slow"):
            node, seconds = arguments
            times[node] += seconds * SECOND
            value += 1
            signal = {"fast": "gpu.temperature", "slow": "gpu.memory_temperature"}[kind]
            block = Block("gpu", (f"gpu:{node}.0",), {signal: np.array([[value]], "f4")} | filling(kind))
            send_block(site, node, times[node] + value, block)
        elif kind == "wait":
            now[0] += WRITE_EVERY
        elif kind == "kill":
            ingest = opened(site, now)
        else:
            ingest.step()
    ingest.step()
    opened(site, now)
    found = site.rows("SELECT device, epoch_us(time), temperature, memory_temperature FROM latest_gpu ORDER BY ALL")
    assert found == site.rows(NEWEST)
    assert site.rows("SELECT count(*) FROM meta WHERE key = 'latest_since'") == [(0,)]
    site.shut()
    for spool in site.spools.values():
        spool.close()


@pytest.mark.slow
def test_a_row_of_a_long_interval_is_not_older_than_a_later_one_of_other_signals(site):
    """Both are in one commit, the later one first."""
    ingest = opened(site, [NOW])
    for kind, second in (("fast", 0), ("fast", 3), ("slow", 2)):
        signal = {"fast": "gpu.temperature", "slow": "gpu.memory_temperature"}[kind]
        block = Block("gpu", ("gpu:n1.0",), {signal: np.array([[second]], "f4")} | filling(kind))
        send_block(site, "n1", T0 + second * SECOND, block)
    ingest.step()
    assert site.rows("SELECT epoch_us(time), temperature, memory_temperature FROM latest_gpu") == [
        (T0 + 3 * SECOND, 3.0, 2.0)
    ]


def send_block(site, node, time, block):
    site.send_raw(node, wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([time]), (block,))))


def filling(kind):
    """Signals that keep the two rhythms in tables of their own."""
    return {f"gpu.{kind}{i}": np.ones((1, 1), "f4") for i in range(20)}


# --- waiting --------------------------------------------------------------------------------------------------------


class Waiting:
    """An ingest that waits two seconds for more telemetry, by a clock that the test moves."""

    def __init__(self, site: Site) -> None:
        self.site, self.seconds = site, 0.0
        site.open()
        assert site.database is not None
        devices = Devices(site.database.connection)
        self.ingest = Ingest(
            site.database, site.transport, devices, lambda: NOW, wait=2.0, monotonic=lambda: self.seconds
        )

    def step(self, after: float = 0.0) -> int:
        """Returns the messages that a step commits, `after` seconds."""
        self.seconds += after
        done = self.ingest.step()
        return 0 if done is None else done.messages


@pytest.fixture
def waiting(site):
    return Waiting(site)


@pytest.mark.slow
def test_telemetry_of_two_seconds_is_one_commit(site, waiting):
    site.send("n1", T0)
    assert waiting.step() == 1
    for second in range(1, 5):
        site.send("n1", T0 + second * SECOND)
        assert waiting.step(after=0.4) == 0
    assert waiting.step(after=0.4) == 4
    assert site.rows("SELECT count(*) FROM ingest_commit") == [(2,)]


def test_an_event_is_committed_at_once_and_without_the_telemetry_that_waits(site, waiting):
    site.send("n1", T0)
    site.send_events("n1", Event(T0, "gpu:n1.0", "xid", {"code": 31}))
    assert waiting.step() == 2
    site.send("n1", T0 + SECOND)
    site.send_events("n1", Event(T0 + SECOND, "gpu:n1.0", "xid", {"code": 79}))
    assert waiting.step(after=0.1) == 1
    assert [json.loads(data)["code"] for (data,) in site.rows("SELECT data FROM events ORDER BY time")] == [31, 79]
    assert site.rows("SELECT count(*) FROM gpu") == [(2,)]
    assert waiting.step(after=1.9) == 1
    assert site.rows("SELECT count(*) FROM gpu") == [(4,)]


def test_a_backlog_is_committed_without_a_pause(site, waiting, monkeypatch):
    monkeypatch.setattr("pipeline.ingest.ingest.COMMIT_ROWS", 4)
    for second in range(5):
        site.send("n1", T0 + second * SECOND)
    assert [waiting.step() for _ in range(4)] == [2, 2, 1, 0]


def test_a_failed_step_is_repeated_without_a_pause(site, waiting, monkeypatch):
    site.send("n1", T0)
    with monkeypatch.context() as patched:
        patched.setattr(waiting.ingest, "_write_transaction", lambda *_: 1 / 0)
        patched.setattr("pipeline.ingest.ingest.is_message_fault", lambda _: False)
        with pytest.raises(ZeroDivisionError):
            waiting.step()
    assert waiting.step() == 1


@pytest.mark.slow
def test_the_offset_row_of_each_partition_is_the_newest_of_its_commits(site):
    for second in range(3):
        site.send("n1", T0 + second * SECOND)
        site.drain()
    [(name, incarnation, offset)] = site.rows("SELECT partition, incarnation, next_offset FROM partition_offset")
    assert (name, offset) == ("n1", 3)
    assert load_offsets(site.database.connection) == {Partition(TELEMETRY, "n1", incarnation): 3}
    assert site.rows("SELECT max(next_offset), count(*) FROM ingest_commit") == [(3, 3)]
