"""Signals and sites whose names are those of columns, or too long for a folder, stop neither sealing nor a start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.store import history_files
from pipeline.store.latest import LatestRows
from pipeline.store.sealing import HOUR
from tests.pipeline.test_sealing import GPUS, T0, Seal

TICKS = 5
LONG_SITES = ["数据中心" * 8, "数据中心" * 9, "Вычислительный центр Санкт-Петербург, корпус 2", "x" * 256]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Seal]:
    made = Seal(tmp_path)
    yield made
    made.database.close()


def add_signal(store: Seal, name: str) -> None:
    """Rows as a store of an older version may have them: such names were accepted."""
    values = np.arange(TICKS * GPUS, dtype="f4")
    store.add(T0, TICKS, **{"temperature": values, name: values + 100})


@pytest.mark.parametrize("name", ["id", "place", "at"])
def test_a_signal_with_the_name_of_a_column_of_the_query_is_sealed(store: Seal, name: str) -> None:
    add_signal(store, name)
    rows = f'SELECT epoch_us(time), entity, temperature, "{name}" FROM gpu ORDER BY ALL'
    before = store.run(rows)
    assert store.sealer.seal(T0 + HOUR) == 1
    assert store.run(rows) == before
    assert {row[3] for row in before} == set(range(100, 100 + TICKS * GPUS))


@pytest.mark.parametrize("name", ["node", "simulated"])
def test_a_signal_with_the_name_of_a_column_of_files_does_not_stop_sealing(store: Seal, name: str) -> None:
    add_signal(store, name)
    before = store.run("SELECT epoch_us(time), entity, temperature FROM gpu ORDER BY ALL")
    assert store.sealer.seal(T0 + HOUR) == 1
    assert store.run("SELECT epoch_us(time), entity, temperature FROM gpu ORDER BY ALL") == before
    file = pq.read_table(history_files.history_folder(store.path) / store.named()[0], partitioning=None)
    assert set(file["node"].to_pylist()) == {"n1"}
    assert set(file["simulated"].to_pylist()) == {True}
    assert file.column_names.count(name) == 1


@pytest.mark.parametrize("name", ["at", "id", "place", "node", "simulated"])
def test_a_pipeline_starts_with_newest_values_of_such_a_signal(store: Seal, name: str) -> None:
    add_signal(store, name)
    store.run(f"INSERT OR REPLACE INTO meta VALUES ('latest_since', '{T0}')")  # as ingest leaves it if it is killed
    store.restart()
    for _ in range(2):  # from the hot tables, then from the table of newest rows
        found = LatestRows(store.database, T0 + HOUR, T0 + HOUR).read("gpu", store.devices, ["temperature"])
        assert sorted(found.values["temperature"].tolist()) == [12.0, 13.0, 14.0]


@pytest.mark.parametrize("site", LONG_SITES)
def test_a_site_with_a_long_name_is_sealed_and_read_back(store: Seal, site: str) -> None:
    store.add(T0, TICKS, site=site)
    store.add(T0, TICKS, site=site + "2")
    before = store.view()
    store.sealer.seal(T0 + HOUR)
    assert store.view() == before
    assert store.run("SELECT DISTINCT site FROM sealed ORDER BY ALL") == sorted([(site,), (site + "2",)])
    folders = {Path(path).parts[1] for path in store.named()}
    assert len(folders) == 2
    assert all(len(os.fsencode(folder)) <= 255 for folder in folders)
    store.restart()
    assert store.view() == before
