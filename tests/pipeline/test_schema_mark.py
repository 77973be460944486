"""When opening a store creates its tables and views, and when they are as this code would create them already."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.model.signals import CATALOGUE
from pipeline.store import schema, schema_mark
from pipeline.store.database import Database

VIEWS = "SELECT view_name, sql FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
COLUMNS = "SELECT table_name, column_name, data_type, is_nullable FROM duckdb_columns() ORDER BY ALL"


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that stores had from which all tables and views were created."""
    found: list[int] = []
    create_all = schema._create_all

    def counted(connection, catalogue, version):
        found.append(version)
        create_all(connection, catalogue, version)

    monkeypatch.setattr(schema, "_create_all", counted)
    return found


def test_opening_a_store_again_creates_nothing(tmp_path: Path, created: list[int]) -> None:
    path = tmp_path / "store.duckdb"
    Database(path).close()
    created.clear()
    Database(path).close()
    assert created == []


def test_a_copy_of_the_template_equals_a_store_that_was_created(tmp_path: Path, created: list[int]) -> None:
    """So the stores of tests are those of an installation (tests/template_store.py)."""
    copied = Database(tmp_path / "copied.duckdb")
    made = Database(tmp_path / "made.duckdb", catalogue=dict(CATALOGUE))
    assert created[-1:] == [0]
    for query in (VIEWS, COLUMNS):
        assert copied.connection.execute(query).fetchall() == made.connection.execute(query).fetchall()
    copied.close()
    made.close()


def test_a_store_of_other_signals_is_widened(tmp_path: Path, created: list[int]) -> None:
    path = tmp_path / "store.duckdb"
    Database(path, catalogue={name: s for name, s in CATALOGUE.items() if s.column != "temperature"}).close()
    created.clear()
    Database(path).close()
    assert created == [schema.SCHEMA_VERSION]


def test_a_table_of_a_new_set_of_signals_does_not_create_the_others_again(tmp_path: Path, created: list[int]) -> None:
    path = tmp_path / "store.duckdb"
    opened = Database(path)
    with opened.transaction() as connection:
        schema.create_hot_table(connection, "hot_gpu_1", {"temperature": "FLOAT"})
        connection.execute("INSERT INTO hot_gpu_1 (time, device, temperature) VALUES (now(), 7, 40)")
        connection.execute("INSERT INTO device VALUES ('gpu', 7, 'local', 'gpu:n1.0', 'n1', true)")
    opened.close()
    created.clear()
    again = Database(path)
    assert created == []
    assert again.connection.execute("SELECT entity, temperature FROM gpu").fetchall() == [("gpu:n1.0", 40.0)]
    again.close()


def test_a_store_that_an_older_version_opened_in_between_is_created_again(tmp_path: Path, created: list[int]) -> None:
    path = tmp_path / "store.duckdb"
    opened = Database(path)
    with opened.transaction() as connection:  # it creates all its views, which differ, and marks all layouts
        connection.execute("CREATE OR REPLACE VIEW late_rows AS SELECT 1 AS older")
        connection.execute("UPDATE meta SET value = 'older' || value WHERE starts_with(key, 'layout_')")
    opened.close()
    created.clear()
    again = Database(path)
    assert created == [schema.SCHEMA_VERSION]
    assert again.connection.execute("FROM late_rows").fetchall() == []
    again.close()


def test_a_store_without_a_mark_or_with_a_damaged_one_is_created_again(tmp_path: Path, created: list[int]) -> None:
    path = tmp_path / "store.duckdb"
    for change in (
        "DELETE FROM meta WHERE key = 'schema_mark'",
        "UPDATE meta SET value = '' WHERE key = 'schema_mark'",
    ):
        opened = Database(path)
        opened.connection.execute(change)
        assert not schema_mark.has_mark(opened.connection, CATALOGUE)
        opened.close()
        created.clear()
        Database(path).close()
        assert created == [schema.SCHEMA_VERSION]
