"""Rollups: the same numbers as the rows, from files and recent rows, and series that read them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.api.history import Span, choose_step, read_series
from pipeline.api.query import QueryRunner
from pipeline.config.sections import Api
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.store import rollups
from pipeline.store.sealing import DAY, HOUR
from tests.examples import examples
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


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("step", [60, 600])
def test_a_rollup_is_the_same_from_recent_and_sealed_rows_and_merged_days(store, step):
    wanted = expected(store, step)
    assert rolled(store, step) == wanted
    store.sealer.seal(T0 + 2 * HOUR)
    assert rolled(store, step) == wanted
    store.sealer.seal(T0 + 2 * DAY)
    assert rolled(store, step) == wanted


@pytest.mark.slow
def test_late_rows_of_a_sealed_interval_are_added_up(store):
    store.sealer.seal(T0 + 2 * HOUR)
    store.add(T0 + 30 * SECOND, 60, temperature=np.full(60 * GPUS, 99, "f4"))
    wanted = expected(store, 600)
    assert rolled(store, 600) == wanted
    store.sealer.seal(T0 + 2 * HOUR)
    assert rolled(store, 600) == wanted


@pytest.mark.slow
def test_sql_reads_rollups(store):
    store.sealer.seal(T0 + 2 * HOUR)
    runner = QueryRunner(store.database.cursor, Api(sql_seconds=60.0))
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


@pytest.mark.sample(every=3)
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


@pytest.mark.slow
def test_rows_are_read_for_points_finer_than_a_rollup_and_rollups_where_rows_have_expired(store):
    store.sealer.seal(T0 + 3 * HOUR)
    fine = Span(T0, T0 + HOUR, 1000)
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], fine) == 0
    store.database.connection.execute("DELETE FROM sealed WHERE step = 0")
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], fine) == 60
    assert sum(p["value"] is not None for p in series(store, "gpu.sm_clock", 240)) >= MINUTES - 60
    recent = Span(T0 + 3 * HOUR, T0 + 4 * HOUR, 10)
    assert choose_step(store.database.connection, CATALOGUE["gpu.sm_clock"], recent) == 0


@pytest.fixture(scope="module")
def wrapping(tmp_path_factory):
    """An empty store for all examples, each in another hour."""
    made = Seal(tmp_path_factory.mktemp("wraps"))
    yield made, itertools.count()
    made.database.close()


@settings(max_examples=examples(15), deadline=None)
@given(rises=st.lists(st.integers(0, (1 << 32) - 1), min_size=2, max_size=30), start=st.integers(0, (1 << 32) - 1))
def test_the_rate_of_a_32_bit_counter_is_right_after_each_wrap(wrapping, rises, start):
    made, examples = wrapping
    begun = T0 + next(examples) * HOUR
    total = start + np.concatenate([[0], np.cumsum(rises, dtype=np.int64)])
    made.add(begun, len(total), pcie_tx_bytes=np.repeat(total % (1 << 32), GPUS).astype("u8"))
    wanted = [None, *(pytest.approx(rise / 60) for rise in rises)]
    span = Span(begun, begun + len(total) * 60 * SECOND, len(total))
    found = read_series(made.database.cursor(), Topology(), "gpu:local.1", "gpu.pcie_tx_bytes", span, "class")
    assert [p["value"] for p in found["points"]] == wanted
    query = Path("docs/sql.md").read_text().split("every 4 GiB\n")[1].split(";")[0]
    query = query.replace("now() - INTERVAL '10 minutes'", f"make_timestamptz({begun - 1})")
    rates = made.run(f"SELECT rate FROM ({query}) WHERE entity = 'gpu:local.1' ORDER BY time")
    assert [rate for (rate,) in rates] == wanted


def test_a_64_bit_counter_of_the_same_signal_that_falls_was_reset(tmp_path):
    made = Seal(tmp_path)
    values = np.repeat(np.array([5 << 32, 6 << 32, 1000], "u8"), GPUS)
    made.add(T0, 3, pcie_rx_bytes=values)
    span = Span(T0, T0 + 180 * SECOND, 3)
    found = read_series(made.database.cursor(), Topology(), "gpu:local.1", "gpu.pcie_rx_bytes", span, "class")
    assert [p["value"] for p in found["points"]] == [None, pytest.approx((1 << 32) / 60), None]
    made.database.close()


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_rollup_of_a_sorted_file_equals_the_one_that_sql_computes(tmp_path, monkeypatch, data):
    """Any gaps, missing values, infinities and batch borders; both steps, and the longer one from the shorter."""
    monkeypatch.setattr(rollups, "BATCH_VALUES", data.draw(st.integers(1, 4)) * 2048 * 5)
    number = data.draw(st.sampled_from([1, 7, 3000]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    columns = {
        "time": "TIMESTAMP WITH TIME ZONE",
        "entity": "VARCHAR",
        "energy": "BIGINT",
        "power": "FLOAT",
        "temperature": "FLOAT",
    }
    power = random.choice(np.array([1.5, -2, np.nan, np.inf, 7], "f4"), number)
    rows = pa.table(
        {
            "time": pa.array(np.sort(random.integers(T0, T0 + HOUR, number))).cast(pa.timestamp("us", "UTC")),
            "entity": np.sort(random.choice(["gpu:a.0", "gpu:a.1", "gpu:b.0"], number)),
            "energy": pa.array(random.integers(0, 1 << 62, number), mask=random.random(number) < 0.3),
            "power": pa.array(power, mask=random.random(number) < 0.3),
            "temperature": pa.nulls(number, pa.float32()),
        }
    ).sort_by([("entity", "ascending"), ("time", "ascending")])
    connection, source = duckdb.connect(), ""
    connection.execute("SET TimeZone = 'UTC'")
    for step, again in ((60, False), (600, True), (600, False)):
        if not again:
            pq.write_table(rows, tmp_path / "rows.parquet")
            source, path, kinds = "rows", tmp_path / "rows.parquet", columns
        wanted = connection.sql(rollups.select_rollup(f"FROM {source}", kinds, step, "gpu", again)).to_arrow_table()
        found = rollups.roll_up_sorted(path, kinds, step, "gpu", again).read_all()
        assert found.column_names == wanted.column_names
        for name in wanted.column_names:
            assert found[name].is_null().equals(wanted[name].is_null())
            ours, theirs = (t[name].drop_null().to_pylist() for t in (found, wanted))
            if name.endswith("_mean"):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)
            else:
                assert ours == theirs, name
        sixty = wanted
        path = tmp_path / "sixty.parquet"
        pq.write_table(sixty, path)
        source, kinds = "sixty", {n: str(t) for n, t in zip(*_described(connection, "sixty", sixty), strict=True)}


def _described(connection, name, table):
    connection.register(name, table)
    found = connection.sql(f"FROM {name} LIMIT 0")
    return found.columns, found.types


@pytest.mark.slow
def test_thirty_days_of_one_device_in_a_thousand_points_are_read_from_the_coarsest_rollup_and_show_gaps(tmp_path):
    made = Seal(tmp_path)
    begun = T0 // DAY * DAY
    for day in range(0, 30, 3):
        made.add(begun + day * DAY, 60, power=np.full(60 * GPUS, 300 + day, "f4"))
    try:
        made.sealer.seal(begun + 30 * DAY)
        span = Span(begun, begun + 30 * DAY, 1000)
        cursor = made.database.cursor()
        assert choose_step(cursor, CATALOGUE["gpu.power"], span) == 600
        points = read_series(cursor, Topology(), "gpu:local.1", "gpu.power", span, "class")["points"]
        assert len(points) == 1000
        measured = {p["time"][8:13]: p["value"] for p in points if p["value"] is not None}
        assert len(measured) == 10
        assert list(measured.values()) == [300 + day for day in range(0, 30, 3)]
        assert sum(p["value"] is not None for p in points) <= 20  # an hour is two or three points of 43 minutes
    finally:
        made.database.close()
