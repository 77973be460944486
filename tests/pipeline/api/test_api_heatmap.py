"""Heatmaps of the fleet, the devices furthest from their peers, and the bounds of reads that may be heavy."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import duckdb
import httpx
import numpy as np
import pytest

from pipeline.api import history, models, store_reads
from pipeline.api.heatmap import FleetNames, find_furthest, find_signals, read_range, select_current
from pipeline.api.history import Span
from pipeline.api.map_before import _read_slots
from pipeline.api.store_reads import NICENESS, StoreReads
from pipeline.model.errors import OverLimit, Retryable, UsageError
from pipeline.model.records import SECOND, Rows, iso
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from pipeline.store.history_files import STEPS
from pipeline.store.sealing import HOUR
from tests.pipeline.api.conftest import CLOCKS, StoreBackend
from tests.pipeline.test_sealing import GPUS, T0, Seal

HEAVY = "SELECT sum(a.range * b.range) FROM range(1000000000) a, range(1000000000) b"
HEATMAP, FURTHEST = "/api/v1/heatmap", "/api/v1/furthest"
POWER, ENERGY = CATALOGUE["gpu.power"], CATALOGUE["gpu.energy"]


def heatmap(client: httpx.Client, query: str) -> models.Heatmap:
    answer = client.get(f"{HEATMAP}?{query}")
    assert answer.status_code == 200, answer.text
    return models.Heatmap.model_validate(answer.json())


def test_a_heatmap_has_the_newest_value_of_each_device_and_null_where_it_is_old(client: httpx.Client, now: int) -> None:
    found = heatmap(client, "signal=gpu.sm_clock")
    assert found.entities == list(CLOCKS)
    assert (found.as_of, found.start, found.step, found.by) == (iso(now), None, None, "device")
    assert found.signals[0].values == [1000, 1100, 1200, 1300, None, None]  # n3 is silent for 5 minutes
    assert found.signals[0].missing == 2
    assert heatmap(client, "signal=gpu.sm_clock&max_age=600").signals[0].values[4:] == [500, 600]


def test_a_heatmap_by_node_has_mean_minimum_and_maximum_of_its_devices(client: httpx.Client) -> None:
    found = heatmap(client, "signal=gpu.sm_clock&by=node")
    assert found.entities == ["node:n1", "node:n2", "node:n3"]
    (clock,) = found.signals
    assert (clock.values, clock.low, clock.high) == ([1050, 1250, None], [1000, 1200, None], [1100, 1300, None])


def test_a_heatmap_of_several_signals_has_one_list_each(client: httpx.Client) -> None:
    found = heatmap(client, "signal=gpu.sm_clock&signal=gpu.temperature&max_age=600")
    assert [s.signal.name for s in found.signals] == ["gpu.sm_clock", "gpu.temperature"]
    assert found.signals[1].values == [None] * 6


def test_a_heatmap_over_time_has_means_last_states_and_rates(client: httpx.Client, now: int) -> None:
    span = f"from={iso(now - 600 * SECOND)}&to={iso(now)}"
    found = heatmap(client, f"signal=gpu.energy&{span}")
    assert (found.start, found.to, found.step) == (iso(now - 600 * SECOND), iso(now), 0)
    assert found.signals[0].values == [None, *[pytest.approx(3000)] * 5]  # the first was reset
    assert found.signals[0].signal.unit.endswith("/s")
    assert heatmap(client, f"signal=gpu.temperature&{span}").signals[0].values == [40] * 6
    assert heatmap(client, "signal=gpu.energy").signals[0].values == [None, *[pytest.approx(3000)] * 3, None, None]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("signal=gpu.invented", "not in the catalogue"),
        ("signal=gpu.power&signal=coolant.flow", "one class"),
        ("signal=gpu.pcie_tx_bytes", "wraps"),
        ("signal=gpu.power&by=rack", "by"),
        ("signal=gpu.power&from=2020-01-01", "from before to"),
    ],
)
def test_a_wrong_heatmap_is_refused_with_the_reason(client: httpx.Client, query: str, reason: str) -> None:
    answer = client.get(f"{HEATMAP}?{query}")
    assert (answer.status_code, reason in answer.json()["detail"]) == (400, True), answer.text


def test_more_signals_than_the_bound_are_refused() -> None:
    names = [s.name for s in CATALOGUE.values() if s.device_class == "gpu"][:17]
    with pytest.raises(UsageError, match="expected 1 to 16"):
        find_signals(names)


# --- furthest from their peers --------------------------------------------------------------------------------------


def test_the_devices_furthest_from_their_peers_come_first_with_the_band_of_the_peers(client: httpx.Client) -> None:
    answer = client.get(f"{FURTHEST}?signal=gpu.sm_clock&k=2&max_age=600")
    found = models.Furthest.model_validate(answer.json())
    assert (found.compared, found.missing, found.peers) == (6, 0, "auto")
    assert found.devices[0].entity in ("gpu:n1.0", "gpu:n2.1")
    first = found.devices[0]
    others = sorted(CLOCKS[e] for e in ("gpu:n1.0", "gpu:n1.1", "gpu:n2.0", "gpu:n2.1") if e != first.entity)
    assert first.median == np.median(others)
    assert first.low == pytest.approx(np.quantile(others, 0.1))
    assert first.high == pytest.approx(np.quantile(others, 0.9))
    assert (first.peers, first.node) == (3, first.entity[4:6])
    assert abs(found.devices[0].deviation) >= abs(found.devices[1].deviation)


def test_a_state_has_no_distance_from_its_peers(client: httpx.Client) -> None:
    assert client.get(f"{FURTHEST}?signal=gpu.generation").status_code == 400


def test_one_outlier_in_each_of_many_groups_is_found_whatever_the_level_of_its_group() -> None:
    random = np.random.default_rng(3)
    names = [f"gpu:n{n:03d}.{i}" for n in range(100) for i in range(8)]
    devices = FakeDevices(names)
    values = random.normal(400, 3, 800) + np.repeat(random.uniform(0, 300, 25), 32)
    values[np.arange(0, 800, 32) + 5] -= 40
    found = select_current_of(values)
    topology = Topology(
        {**{g: (f"node:{g[4:8]}",) for g in names}, **{f"node:n{n:03d}": (f"rack:r{n // 4}",) for n in range(100)}}
    )
    answer = find_furthest(found, FleetNames(), devices, topology, "rack", 25)
    assert {d["entity"] for d in answer["devices"]} == {names[i] for i in np.arange(0, 800, 32) + 5}
    assert all(-20 < d["deviation"] < -8 for d in answer["devices"])


class FakeDevices:
    """Names of devices without a store."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def names(self, device_class: str) -> list[str]:
        return self._names

    def origins(self, device_class: str) -> list[tuple[str, str, bool]]:
        return [("local", name[4:8], False) for name in self._names]


def select_current_of(values: np.ndarray) -> Any:
    from pipeline.api.heatmap import DeviceValues

    return DeviceValues(POWER, values, np.ones(len(values), bool))


# --- a range of sealed and recent rows --------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    made = Seal(tmp_path)
    number = 240 * GPUS
    made.add(
        T0,
        240,
        power=(np.arange(number) % 37).astype("f4"),
        energy=np.repeat(np.arange(240, dtype="u8") * 600, GPUS),
        generation=np.full(number, 5, "u4"),
        sm_clock=(np.arange(number) % 1900).astype("u2"),
    )
    yield made
    made.sealer.stop()
    made.database.close()


def values_of(store: Seal, name: str, hours: float) -> list[float | None]:
    with store.database.cursor() as cursor:
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        found = read_range(cursor, store.devices, CATALOGUE[name], Span(T0, T0 + int(hours * HOUR), 1))
    return [round(float(v), 3) if known else None for v, known in zip(found.values, found.known, strict=True)]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", ["gpu.power", "gpu.energy", "gpu.sm_clock"])
@pytest.mark.parametrize("hours", [0.5, 3, 4])
def test_a_range_is_the_same_from_recent_rows_and_while_and_after_hours_are_sealed(store, name, hours):
    before = values_of(store, name, hours)
    assert None not in before
    job = store.sealer._prepare(T0 + 2 * HOUR)
    assert values_of(store, name, hours) == before  # files are written, and not yet named
    store.sealer._commit(job, lambda: None)
    assert values_of(store, name, hours) == pytest.approx(before, rel=0.01)
    store.sealer.seal(T0 + 3 * HOUR)
    assert values_of(store, name, hours) == pytest.approx(before, rel=0.01)


def list_slots(store: Seal, moment: int) -> list[int]:
    with store.database.cursor() as cursor:
        parts = list(_read_slots(cursor, store.devices, "gpu", moment - 60 * SECOND, moment, STEPS[0]))
    return sorted({int(slot) for part in parts for slot in part})


def test_the_devices_that_sent_data_are_the_same_from_recent_rows_and_after_their_hour_is_sealed(store):
    before, minute = list_slots(store, T0 + HOUR // 2), 60 * SECOND
    assert before == list(range(GPUS))
    store.sealer.seal(T0 + 2 * HOUR)
    assert list_slots(store, T0 + HOUR // 2) == before
    assert list_slots(store, T0 - minute) == []


@pytest.mark.slow
def test_late_rows_of_a_sealed_hour_are_counted_once(store):
    store.sealer.seal(T0 + 2 * HOUR)
    store.add(T0 + 30 * SECOND, 60, power=np.full(60 * GPUS, 1000, "f4"))
    wanted = store.run(
        f"""SELECT avg(power) FROM gpu WHERE time < make_timestamptz({T0 + 2 * HOUR})
            GROUP BY entity ORDER BY entity DESC"""
    )
    assert values_of(store, "gpu.power", 2) == pytest.approx([v for (v,) in wanted], abs=0.01)
    store.sealer.seal(T0 + 2 * HOUR)
    assert values_of(store, "gpu.power", 2) == pytest.approx([v for (v,) in wanted], abs=0.01)


def test_a_counter_of_another_generation_has_no_rate_over_the_range(store):
    store.add(T0 + 4 * HOUR, 1, energy=np.full(GPUS, 1 << 40, "u8"), generation=np.full(GPUS, 6, "u4"))
    assert values_of(store, "gpu.energy", 4) == [10.0] * GPUS
    assert values_of(store, "gpu.energy", 5) == [None] * GPUS


def test_values_of_devices_that_came_meanwhile_are_null(backend: StoreBackend) -> None:
    found = backend.read_current("gpu", ["sm_clock"])
    names = FakeDevices([*CLOCKS, "gpu:n9.0"])
    values = select_current(found, names, CATALOGUE["gpu.sm_clock"], 0, SECOND)
    assert len(values.known) == 7
    assert not values.known[6]


@pytest.mark.slow
def test_sql_reads_the_newest_row_of_each_device(client: httpx.Client) -> None:
    query = "SELECT entity, sm_clock FROM latest_gpu WHERE entity LIKE 'gpu:n1%' ORDER BY 1"
    answer = client.post("/api/v1/sql", json={"query": query}).json()
    assert answer["rows"] == [["gpu:n1.0", 1000], ["gpu:n1.1", 1100]]
    every = client.post("/api/v1/sql", json={"query": "SELECT * FROM latest_gpu"}).json()
    assert (every["columns"][:2], len(every["rows"])) == (["time", "entity"], 6)


@pytest.mark.slow
def test_sql_reads_the_newest_rows_from_memory_before_they_are_written(
    client: httpx.Client, backend: StoreBackend, now: int
) -> None:
    rows = Rows("gpu", np.array([now]), np.array([0], np.int32), {"gpu.sm_clock": np.array([1234], np.uint16)})
    backend.latest.commit([rows])
    query = "SELECT sm_clock, temperature FROM latest_gpu WHERE entity = 'gpu:n1.0'"
    assert client.post("/api/v1/sql", json={"query": query}).json()["rows"] == [[1234, None]]
    stored = backend.database.connection.execute("SELECT sm_clock FROM latest_gpu WHERE device = 0").fetchall()
    assert stored == [(1000,)]


def test_a_series_of_very_many_rows_reads_fewer_peers(store, monkeypatch):
    monkeypatch.setattr(history, "MAX_ROWS", 100)
    monkeypatch.setattr(history, "LEAST_PEERS", 1)
    found = history.read_series(
        store.database.cursor(), Topology(), "gpu:local.1", "gpu.power", Span(T0, T0 + HOUR, 10), "class"
    )
    assert found["peers"] == 1


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def connection():
    made = duckdb.connect(config={"threads": "1"})
    yield made
    made.close()


def test_a_heavy_read_runs_at_low_priority_and_the_caller_keeps_its_own(connection):
    seen = []
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    reads = StoreReads(connection.cursor, 10.0)
    answer = reads.run(lambda cursor: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) or 5)
    assert (answer, seen) == (5, [max(NICENESS, before)])
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.slow
def test_a_read_over_the_time_limit_is_interrupted_and_its_place_is_free_again(connection):
    reads = StoreReads(connection.cursor, 0.2)
    begun = time.monotonic()
    for _ in range(store_reads.READS + 1):
        with pytest.raises(OverLimit, match="which is the limit"):
            reads.run(lambda cursor: cursor.execute(HEAVY).fetchall())
    assert time.monotonic() - begun < 10
    assert reads.run(lambda cursor: cursor.execute("SELECT 1").fetchall()) == [(1,)]


def test_more_reads_than_places_wait_and_then_are_told_when_to_retry(connection, monkeypatch):
    monkeypatch.setattr(store_reads, "QUEUE_SECONDS", 0.05)
    reads, release = StoreReads(connection.cursor, 30.0), threading.Event()
    running = [threading.Thread(target=reads.run, args=(lambda _: release.wait(20),)) for _ in range(store_reads.READS)]
    for thread in running:
        thread.start()
    while reads._slots._value:
        time.sleep(0.001)
    with pytest.raises(Retryable, match="the maximum"):
        reads.run(lambda cursor: None)
    release.set()
    for thread in running:
        thread.join()
    assert reads.run(lambda cursor: 7) == 7


def test_an_error_of_a_read_is_raised_where_it_was_asked_for(connection):
    with pytest.raises(duckdb.CatalogException):
        StoreReads(connection.cursor, 5.0).run(lambda cursor: cursor.execute("FROM nothing"))
