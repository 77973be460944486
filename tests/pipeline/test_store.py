"""The store: one owner, one lock, migrated forward, and access to its own tables alone."""

import contextlib
import subprocess
import sys

import duckdb
import numpy as np
import pytest

from pipeline.config.sections import Store
from pipeline.engine.restart import CHUNK, read_since
from pipeline.incidents import ledger
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, EventBatch, Origin, Rows
from pipeline.model.signals import CATALOGUE, CLASSES, Signal, signals_of_class
from pipeline.store import retention, schema
from pipeline.store.append import insert_columns
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.store.events import write_events
from pipeline.store.hot_tables import HotTables
from pipeline.store.retention import DAY, HOUR, apply_bounds, delete_old_rows

T0 = 1_780_000_000 * SECOND


@pytest.fixture
def database(tmp_path):
    made = Database(tmp_path / "store.duckdb")
    yield made
    made.close()


def test_every_device_class_has_a_view_with_all_signals_of_the_catalogue(database):
    for device_class in CLASSES:
        wanted = ["time", "entity", *(s.column for s in signals_of_class(device_class))]
        found = [row[0] for row in database.connection.execute(f'DESCRIBE "{device_class}"').fetchall()]
        assert found == wanted


def test_no_two_signals_of_a_class_share_a_column():
    columns = [(s.device_class, s.column) for s in CATALOGUE.values()]
    assert len(set(columns)) == len(columns)


def test_a_failed_transaction_leaves_nothing_behind(database):
    def twice():
        with database.transaction() as connection:
            connection.execute("INSERT INTO meta VALUES ('a', '1')")
            connection.execute("INSERT INTO meta VALUES ('a', '2')")

    with pytest.raises(duckdb.ConstraintException):
        twice()
    assert database.connection.execute("SELECT count(*) FROM meta WHERE key = 'a'").fetchall() == [(0,)]
    with database.transaction() as connection:
        connection.execute("INSERT INTO meta VALUES ('a', '3')")
    assert database.connection.execute("SELECT value FROM meta WHERE key = 'a'").fetchall() == [("3",)]


def test_rows_are_inserted_under_a_name_that_stays_registered_also_after_a_rollback(database):
    key = {"key": ["a"], "value": ["1"]}
    for undone in (True, False, False):
        with contextlib.suppress(RuntimeError), database.transaction() as connection:
            insert_columns(connection, "meta", key, "ON CONFLICT (key) DO UPDATE SET value = excluded.value")
            assert connection.execute("SELECT count(*) FROM rows_of_meta").fetchall() == [(0,)]  # it keeps no rows
            if undone:
                raise RuntimeError
    assert database.connection.execute("SELECT value FROM meta WHERE key = 'a'").fetchall() == [("1",)]


def test_a_caught_error_inside_a_transaction_is_not_a_silent_loss(database):
    """COMMIT after a failed statement reports success and stores nothing."""
    count = "SELECT count(*) FROM partition_offset"

    def insert(times):
        with database.transaction() as connection:
            for _ in range(times):
                with contextlib.suppress(duckdb.ConstraintException):
                    connection.execute("INSERT INTO partition_offset VALUES ('t', '0', 'i', 1)")

    with pytest.raises(duckdb.Error, match="aborted"):
        insert(2)
    assert database.connection.execute(count).fetchone() == (0,)
    insert(1)
    assert database.connection.execute(count).fetchone() == (1,)


def test_a_second_process_gets_an_error_that_names_the_owner_of_the_store(database):
    names = "from pathlib import Path; from pipeline.store.database import Database;"
    program = f"{names} Database(Path({str(database.path)!r}))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert "is another 'fleetpulse pipeline' running on it?" in answer.stderr


def test_a_store_of_a_newer_schema_is_refused(tmp_path):
    path = tmp_path / "store.duckdb"
    first = Database(path)
    first.connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    first.close()
    with pytest.raises(UsageError, match="newer fleetpulse"):
        Database(path)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('/etc/hostname')",
        "ATTACH '/tmp/other.duckdb'",
        "COPY meta TO '/tmp/x.csv'",
        "SET threads = 1",
    ],
)
def test_the_connection_cannot_reach_files_or_settings(database, query):
    with pytest.raises(duckdb.Error):
        database.cursor().execute(query)


def test_python_variables_are_not_tables(database):
    secret = [1, 2, 3]
    with pytest.raises(duckdb.CatalogException):
        database.cursor().execute("SELECT * FROM secret")
    assert secret


def test_device_ids_are_dense_per_class_and_survive_a_restart(tmp_path):
    first = Database(tmp_path / "store.duckdb")
    devices = Devices(first.connection)
    assert devices.assign_ids("gpu", "local", "n1", True, ("gpu:n1.0", "gpu:n1.1")).tolist() == [0, 1]
    assert devices.assign_ids("nic", "local", "n1", True, ("port:n1.x",)).tolist() == [0]
    devices.save(first.connection)
    first.close()
    second = Database(tmp_path / "store.duckdb")
    again = Devices(second.connection)
    assert again.assign_ids("gpu", "local", "n1", True, ("gpu:n1.1", "gpu:n9.0")).tolist() == [1, 2]
    assert again.names("gpu") == ["gpu:n1.0", "gpu:n1.1", "gpu:n9.0"]
    assert again.is_simulated("gpu:n1.0")
    second.close()


def insert_rows(database, *samples):
    """Rows of one GPU from (second, temperature)."""
    devices = Devices(database.connection)
    devices.assign_ids("gpu", "local", "n1", False, ("gpu:n1.0",))
    time, value = zip(*samples, strict=True)
    stamps = T0 + np.array(time) * SECOND
    with database.transaction() as connection:
        devices.save(connection)
        rows = Rows("gpu", stamps, np.zeros(len(time), np.int32), {"gpu.temperature": np.array(value, "f4")})
        HotTables(connection).append(connection, [rows])


def test_mutes_from_before_the_column_ended_by_are_kept(tmp_path):
    path = tmp_path / "old.duckdb"
    old = Database(path)
    old.connection.execute(
        """DROP VIEW mutes;
        UPDATE meta SET value = '3' WHERE key = 'schema_version';
        CREATE TABLE mutes (id VARCHAR PRIMARY KEY, detector VARCHAR NOT NULL, scope VARCHAR NOT NULL,
            since TIMESTAMPTZ NOT NULL, "until" TIMESTAMPTZ NOT NULL, reason VARCHAR NOT NULL, "user" VARCHAR NOT NULL,
            ended TIMESTAMPTZ)"""
    )
    until = f"make_timestamptz({T0}), make_timestamptz({T0 + SECOND})"
    old.connection.execute(
        f"INSERT INTO mutes VALUES ('m1', 'straggler', 'rack:r1', {until}, 'new paste', 'ann', NULL)"
    )
    old.close()
    new = Database(path)
    (found,) = ledger.load_all_mutes(new.connection)
    assert (found.id, found.ended_by) == ("m1", None)
    ledger.end_mute(new.connection, "m1", "bob", T0)
    (found,) = ledger.load_all_mutes(new.connection)
    assert (found.ended, found.ended_by) == (T0, "bob")
    new.close()


def test_retention_removes_old_rows_and_commits_and_keeps_the_newest_offset(database):
    insert_rows(database, (0, 40.0), (100, 41.0))
    old, new = f"make_timestamptz({T0})", f"make_timestamptz({T0 + SECOND})"
    database.connection.execute(
        f"INSERT INTO ingest_commit VALUES ('t', 'n1', 'e', 0, 5, 1, {old}), ('t', 'n1', 'e', 5, 9, 1, {new})"
    )
    database.connection.execute("INSERT INTO partition_offset VALUES ('t', 'n1', 'e', 9)")
    assert delete_old_rows(database, T0 + 50 * SECOND) == 1
    assert database.connection.execute("SELECT temperature FROM gpu").fetchall() == [(41.0,)]
    apply_bounds(database, Store(), T0 + HOUR)
    assert database.connection.execute("SELECT next_offset FROM ingest_commit ORDER BY 1").fetchall() == [(5,), (9,)]
    apply_bounds(database, Store(), T0 + 2 * HOUR)
    assert database.connection.execute("SELECT next_offset FROM ingest_commit").fetchall() == [(9,)]
    assert database.connection.execute("SELECT next_offset FROM partition_offset").fetchall() == [(9,)]


def test_a_restart_reads_rows_and_events_again_in_chunks_of_time(database):
    insert_rows(database, (0, 40.0), (1, np.nan), (2 * CHUNK // SECOND, 42.0))
    xid = Event(T0 + SECOND, "gpu:n1.0", "xid", {"code": 79})
    write_events(database.connection, [EventBatch(Origin("local", "n1", b""), (xid,))])
    chunks = []
    read_since(database, T0 + SECOND, T0 + 10 * CHUNK, lambda rows, events, until: chunks.append((rows, events, until)))
    assert len(chunks) == 2
    (rows, events, until), (later, none, _) = chunks
    assert rows[0].time.tolist() == [T0 + SECOND]
    assert np.isnan(rows[0].columns["gpu.temperature"]).all()
    assert events == [(T0 + SECOND, Event(T0 + SECOND, "gpu:n1.0", "xid", {"code": 79}))]
    assert until % CHUNK == 0
    assert later[0].columns["gpu.temperature"].tolist() == [42.0]
    assert none == []


def test_a_new_signal_is_a_new_column_and_old_rows_have_null(database):
    insert_rows(database, (0, 40.0))
    schema.ensure_class(database.connection, "gpu", [Signal("gpu.brand_new", "1", "gauge", "gpu", "f4", "new")])
    assert database.connection.execute("SELECT temperature, brand_new FROM gpu").fetchall() == [(40.0, None)]


def test_a_store_of_a_catalogue_with_fewer_signals_keeps_its_rows_and_equals_a_new_one(tmp_path, database):
    fewer = {name: signal for name, signal in CATALOGUE.items() if not name.endswith("temperature")}
    assert len(fewer) < len(CATALOGUE) - 2
    old = Database(tmp_path / "old.duckdb", catalogue=fewer)
    old.connection.execute("INSERT INTO latest_gpu (time, device) VALUES (now(), 7)")
    old.close()
    again = Database(tmp_path / "old.duckdb")
    assert again.connection.execute("SELECT device, temperature FROM latest_gpu").fetchall() == [(7, None)]
    query = "SELECT table_name, column_name, data_type, is_nullable FROM duckdb_columns() ORDER BY ALL"
    assert again.connection.execute(query).fetchall() == database.connection.execute(query).fetchall()
    again.close()


def test_a_store_folder_that_cannot_be_created_is_reported_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"\[store\] path = .*cannot be created"):
        Database(tmp_path / "file" / "store.duckdb")


def test_events_are_kept_as_long_as_findings_and_routine_ones_for_a_day(database):
    now = T0 + 100 * DAY
    ages = {"xid": (1, 89, 91), "inventory": (0.9, 1.1), "digest": (0.9, 1.1)}
    for kind, days in ages.items():
        events = tuple(Event(now - int(age * DAY), "gpu:n1.0", kind, {}) for age in days)
        write_events(database.connection, [EventBatch(Origin("local", "n1", b""), events)])
    delete_old_rows(database, now)
    apply_bounds(database, Store(hot_hours=1.0), now)
    left = database.connection.execute("SELECT kind, count(*) FROM events GROUP BY ALL ORDER BY ALL").fetchall()
    assert left == [("digest", 1), ("inventory", 1), ("xid", 2)]


def test_of_more_events_than_the_bound_the_newest_are_kept(database, monkeypatch):
    monkeypatch.setattr(retention, "BOUNDS", {"events": retention.bound_events(most=3)})
    events = tuple(Event(T0 + i, "gpu:n1.0", "xid", {"code": i}) for i in range(5))
    write_events(database.connection, [EventBatch(Origin("local", "n1", b""), events)])
    apply_bounds(database, Store(), T0 + HOUR)
    assert database.connection.execute("SELECT data FROM events ORDER BY time").fetchall() == [
        ('{"code": 2}',),
        ('{"code": 3}',),
        ('{"code": 4}',),
    ]
