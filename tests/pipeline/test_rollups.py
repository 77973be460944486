"""Rollups: the same numbers as the rows, from files and recent rows, and series that read them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.api.history import Span, choose_step, read_series
from pipeline.api.query import QueryRunner
from pipeline.config.sections import Api
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.store import rollups
from pipeline.store.sealing import DAY, HOUR
from tests.pipeline.test_sealing import GPUS, T0, Seal

MINUTES = 240


@pytest.fixture
def store(tmp_path):
    """Four hours of rows each minute, the counter with a reset; a gauge is missing at times."""
    made = Seal(tmp_path)
    number = MINUTES * GPUS
    rise = np.arange(number, dtype="u8") * 700
    temperature = (np.arange(number) % 37).astype("f4")
    temperature[::5] = np.nan
    made.add(
        T0,
        MINUTES,
        temperature=temperature,
        energy=np.where(np.arange(number) < number // 2, rise, rise - rise[number // 2]),
        generation=np.where(np.arange(number) < number // 2, 5, 6).astype("u4"),
        sm_clock=np.where(temperature == 3, 65535, np.arange(number) % 1900).astype("u2"),
    )
    yield made
    made.sealer.stop()
    made.database.close()


def expected(store: Seal, step: int) -> list[tuple[object, ...]]:
    width = step * SECOND
    return store.run(
        f"""SELECT epoch_us(time) // {width} * {width}, entity, min(temperature), max(temperature),
                   round(avg(temperature), 3), count(temperature), arg_max(energy, time)
            FROM gpu GROUP BY ALL ORDER BY ALL"""
    )


def rolled(store: Seal, step: int) -> list[tuple[object, ...]]:
    view = rollups.select_view(store.database.connection, f"rollup_{step}_gpu")
    return store.run(
        f"""SELECT epoch_us(time), entity, temperature_min, temperature_max, round(temperature_mean, 3),
                   temperature_count, energy_last FROM ({view}) ORDER BY ALL"""
    )


@pytest.mark.parametrize("step", [60, 600])
def test_a_rollup_is_the_same_from_recent_and_sealed_rows_and_merged_days(store, step):
    wanted = expected(store, step)
    assert rolled(store, step) == wanted
    store.sealer.seal(T0 + 2 * HOUR)
    assert rolled(store, step) == wanted
    store.sealer.seal(T0 + 2 * DAY)
    assert rolled(store, step) == wanted


def test_late_rows_of_a_sealed_interval_are_added_up(store):
    store.sealer.seal(T0 + 2 * HOUR)
    store.add(T0 + 30 * SECOND, 60, temperature=np.full(60 * GPUS, 99, "f4"))
    wanted = expected(store, 600)
    assert rolled(store, 600) == wanted
    store.sealer.seal(T0 + 2 * HOUR)
    assert rolled(store, 600) == wanted


def test_sql_reads_rollups(store):
    store.sealer.seal(T0 + 2 * HOUR)
    runner = QueryRunner(store.database.cursor, Api())
    try:
        query = (
            "SELECT count(*), sum(temperature_count), max(sm_clock_max) FROM rollup_600_gpu "
            f"WHERE time >= make_timestamptz({T0 + HOUR}) AND time < '2026-05-29'"
        )
        [(values, highest)] = store.run(
            f"""SELECT count(temperature) FILTER (isfinite(temperature)), max(sm_clock) FROM gpu
                WHERE time >= make_timestamptz({T0 + HOUR})"""
        )
        assert json.loads(runner.run(query).body)["rows"] == [[18 * GPUS, values, highest]]
        query = "SELECT * FROM rollup_60_gpu LIMIT 1"
        columns = json.loads(runner.run(query).body)["columns"]
        assert columns[:2] == ["time", "entity"]
        assert {"power_min", "power_max", "power_mean", "power_count", "energy_last"} <= set(columns)
    finally:
        runner.close()


# --- series ---------------------------------------------------------------------------------------------------------


def series(store: Seal, signal: str, points: int) -> list[dict[str, object]]:
    cursor = store.database.cursor()
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    try:
        span = Span(T0, T0 + MINUTES * 60 * SECOND, points)
        return read_series(cursor, Topology(), "gpu:local.1", signal, span, "class")["points"]
    finally:
        cursor.close()


@pytest.mark.parametrize("signal", ["gpu.temperature", "gpu.sm_clock", "gpu.energy", "gpu.generation"])
@pytest.mark.parametrize("points", [24, 240])
def test_a_series_from_rollups_equals_that_from_rows(store, signal, points):
    before = series(store, signal, points)
    store.sealer.seal(T0 + 3 * HOUR)
    span = Span(T0, T0 + MINUTES * 60 * SECOND, points)
    coarsest = {"gpu.energy": {24: 60, 240: 0}}.get(signal, {24: 600, 240: 60})
    assert choose_step(store.database.connection, CATALOGUE[signal], span) == coarsest[points]
    after = series(store, signal, points)
    assert [p["time"] for p in after] == [p["time"] for p in before]
    for part in ("value", "median", "low", "high"):
        values = [[np.nan if p[part] is None else p[part] for p in found] for found in (after, before)]
        np.testing.assert_allclose(values[0], values[1], rtol=0.002)


def test_rows_are_read_for_points_finer_than_a_rollup_and_rollups_where_rows_have_expired(store):
    store.sealer.seal(T0 + 3 * HOUR)
    fine = Span(T0, T0 + HOUR, 1000)
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], fine) == 0
    store.database.connection.execute("DELETE FROM sealed WHERE step = 0")
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], fine) == 60
    assert sum(p["value"] is not None for p in series(store, "gpu.sm_clock", 240)) >= MINUTES - 60
    recent = Span(T0 + 3 * HOUR, T0 + 4 * HOUR, 10)
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], recent) == 0
