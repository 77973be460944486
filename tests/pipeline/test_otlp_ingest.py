"""Telemetry of other senders in the store: each message once, by its offset; admission applies to it as to agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.sections import Limits
from pipeline.ingest.admission import Admission
from pipeline.ingest.foreign import FOREIGN_COUNTERS, INVENTORY_EVERY, TAKEOVER
from pipeline.ingest.ingest import Ingest
from pipeline.model.records import OTLP, SECOND
from pipeline.store.database import Database
from pipeline.store.devices import Devices
from pipeline.transport import Partition, wire
from tests.pipeline.otlp_requests import T0_NS, Request, gpu_request
from tests.pipeline.shared_log import ONE, SharedLog, one_row

T0 = T0_NS // 1000
PART = Partition(OTLP, "0", "id")
EPOCH = bytes(16)


class Harness:
    """A store that reads a log with the topic otlp_metrics; `restart` drops everything that is not on disk."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.path, self.log, self.limits, self.now = folder / "store.duckdb", SharedLog(), limits, T0
        self.log.held[PART] = []
        self.database: Database | None = None
        self.restart()

    def restart(self) -> None:
        self.close()
        self.database = Database(self.path)
        devices = Devices(self.database.connection)
        self.ingest = Ingest(self.database, self.log, devices, lambda: self.now, admission=Admission(self.limits))

    def send(self, *messages: bytes) -> None:
        self.log.add(PART, messages, key=None)

    def drain(self) -> None:
        while self.ingest.step() is not None:
            pass

    def rows(self, query: str) -> list[tuple[object, ...]]:
        self.drain()
        assert self.database is not None
        return self.database.connection.execute(query).fetchall()

    def close(self) -> None:
        if self.database is not None:
            self.database.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def test_rows_of_mapped_and_custom_signals_are_stored_in_their_classes(store: Harness) -> None:
    store.send(gpu_request(), gpu_request(time=T0_NS + 10**9, first=50.0), gpu_request("n2"))
    assert store.rows("SELECT entity, temperature, energy FROM gpu ORDER BY ALL") == [
        ("gpu:n1.0", 40.0, 1_000_000),
        ("gpu:n1.0", 50.0, 1_000_000),
        ("gpu:n1.1", 41.0, 1_001_000),
        ("gpu:n1.1", 51.0, 1_001_000),
        ("gpu:n2.0", 40.0, 1_000_000),
        ("gpu:n2.1", 41.0, 1_001_000),
    ]
    assert store.rows("SELECT entity, value FROM custom WHERE entity LIKE 'custom:n2%' ORDER BY ALL") == [
        ("custom:n2.vendor.thing{slot=0}", 0.5),
        ("custom:n2.vendor.thing{slot=1}", 1.5),
    ]


@pytest.mark.slow
def test_a_message_is_stored_once_across_restarts_and_only_its_offset_counts(store: Harness) -> None:
    same = gpu_request()
    store.send(same, same)
    assert store.rows("SELECT count(*) FROM gpu") == [(4,)]
    store.restart()
    store.send(gpu_request(time=T0_NS + 10**9))
    assert store.rows("SELECT count(*) FROM gpu") == [(6,)]
    assert store.rows("SELECT max(next_offset) FROM ingest_commit WHERE topic = 'otlp_metrics'") == [(3,)]


def test_a_malformed_message_is_a_dead_letter_and_those_beside_it_are_stored(store: Harness) -> None:
    store.send(gpu_request(), gpu_request("n2")[:-7], b"", b"\xff" * 40, gpu_request("n3"))
    assert store.rows("SELECT DISTINCT split_part(entity, '.', 1) FROM gpu ORDER BY ALL") == [("gpu:n1",), ("gpu:n3",)]
    letters = store.rows('SELECT "offset", rule, payload FROM dead_letter ORDER BY ALL')
    assert letters == [(1, "wire", gpu_request("n2")[:-7]), (3, "wire", b"\xff" * 40)]


def test_values_without_a_node_are_a_dead_letter_of_the_rule_otlp(store: Harness) -> None:
    store.send(Request("").gauge("m", 1.0).node("n1").gauge("m", 2.0).encode())
    assert store.rows("SELECT entity, value FROM custom") == [("custom:n1.m", 2.0)]
    ((rule, reason),) = store.rows("SELECT rule, reason FROM dead_letter")
    assert rule == "otlp"
    assert "without a node" in str(reason)


def test_impossible_times_cost_only_the_node_that_has_them(store: Harness) -> None:
    store.send(Request("n1").gauge("m", 1.0, 0).node("n2").gauge("m", 2.0).node("n3").gauge("m", 3.0, 1 << 63).encode())
    assert store.rows("SELECT value FROM custom ORDER BY ALL") == [(2.0,), (3.0,)]  # n3 is ahead: moved back
    assert store.rows("SELECT rule, count(*) FROM dead_letter GROUP BY ALL") == [("otlp", 1)]


def test_a_time_ahead_of_ours_is_moved_back_to_the_arrival_and_an_old_one_is_kept(store: Harness) -> None:
    hour = 3600 * 10**9
    store.send(gpu_request("n1", T0_NS + hour), gpu_request("n2", T0_NS - hour))
    assert store.rows("SELECT DISTINCT node, epoch_us(time) FROM gpu JOIN device USING (entity) ORDER BY ALL") == [
        ("n1", T0),
        ("n2", T0 - 3600 * SECOND),
    ]


def test_nobody_reports_another_nodes_device(store: Harness) -> None:
    store.send(gpu_request("n1"))
    store.send(Request("n2").gauge("hw.temperature", 99.0, T0_NS + 10**9, "Cel", hw__id="gpu:n1.0").encode())
    assert store.rows("SELECT entity FROM gpu WHERE temperature = 99") == []
    assert store.rows("SELECT rule FROM dead_letter") == [("owner",)]


@pytest.mark.slow
def test_of_a_node_with_an_agent_only_custom_signals_are_stored(store: Harness) -> None:
    store.log.add(ONE, [one_row("n1", EPOCH, 0, T0)])
    store.drain()
    before = store.rows("SELECT count(*) FROM gpu")
    store.send(gpu_request("n1"))
    assert store.rows("SELECT count(*) FROM gpu") == before
    assert store.rows("SELECT count(*) FROM custom") == [(2,)]
    store.restart()
    store.send(gpu_request("n1"))
    assert store.rows("SELECT count(*) FROM gpu") == before
    store.now += TAKEOVER + SECOND
    store.send(gpu_request("n1"))
    assert store.rows("SELECT count(*) FROM gpu") != before


def test_the_inventory_has_parents_and_what_a_custom_signal_is(store: Harness) -> None:
    store.send(gpu_request("n1"))
    found = {e: (p, json.loads(str(a))) for e, p, a in store.rows("SELECT entity, parents, attributes FROM entity")}
    assert found["gpu:n1.0"] == (["node:n1"], {})
    assert found["custom:n1.vendor.thing{slot=0}"] == (
        ["node:n1"],
        {"labels": {"slot": "0"}, "metric": "vendor.thing", "type": "gauge", "unit": "1"},
    )


def test_a_sender_that_adds_series_all_the_time_writes_one_inventory_a_minute(store: Harness) -> None:
    for i in range(5):
        store.send(Request("n1").gauge(f"m{i}", 1.0).encode())
        store.drain()
    assert store.rows("SELECT count(*) FROM events WHERE kind = 'inventory'") == [(1,)]
    store.now += INVENTORY_EVERY
    store.send(Request("n1").gauge("m5", 1.0).encode())
    assert store.rows("SELECT count(*) FROM events WHERE kind = 'inventory'") == [(2,)]
    assert store.rows("SELECT count(*) FROM entity WHERE kind = 'custom'") == [(6,)]


def test_series_beyond_the_limit_of_a_sender_are_refused_and_the_others_stay(tmp_path: Path) -> None:
    store = Harness(tmp_path, Limits(entities_per_sender=3))
    request = Request("n1")
    for i in range(5):
        request.gauge(f"m{i}", float(i))
    store.send(request.encode(), request.encode())
    assert store.rows("SELECT count(DISTINCT entity) FROM custom") == [(3,)]
    assert store.rows("SELECT DISTINCT rule FROM dead_letter") == [("entities",)]
    store.close()


def test_nodes_of_other_senders_are_seen_and_their_times_move_the_watermark(store: Harness) -> None:
    store.send(gpu_request("n1"))
    store.drain()
    assert store.ingest.progress.nodes == {"n1": T0}
    assert store.ingest.counters["foreign_messages"] == 1


def test_a_gateways_message_of_the_first_version_is_read(store: Harness) -> None:
    """Golden bytes: kind 3, version 1, an OTLP request that the gateway gw received."""
    message = (Path(__file__).parent / "golden" / "wire-v1-request.bin").read_bytes()
    request = wire.open_request(message)
    assert (request.node, request.format, bytes(request.data)) == ("gw", "otlp", gpu_request())
    store.log.add(PART, [message, message], key=b"gw")
    assert store.rows("SELECT count(*) FROM gpu") == [(2,)]
    assert store.ingest.counters["duplicates"] == 1


def test_a_gateways_message_under_another_key_or_damaged_is_a_dead_letter(store: Harness) -> None:
    message = (Path(__file__).parent / "golden" / "wire-v1-request.bin").read_bytes()
    store.log.add(PART, [message, message[:-1], message[:60] + b"\xff" + message[61:]], key=b"n1")
    assert store.rows("SELECT rule FROM dead_letter ORDER BY ALL") == [("sender",), ("wire",), ("wire",)]
    assert store.rows("SELECT count(*) FROM gpu") == [(0,)]


@pytest.mark.slow
def test_what_is_kept_as_custom_signals_shadowed_or_dropped_is_counted(store: Harness) -> None:
    request = Request("n1").gauge("hw.temperature", 40.0, hw__id="gpu:n1.0", unit="Cel").gauge("m", None)
    point = request.message.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points[0]
    point.exemplars.add().as_double = 1.0
    store.send(request.encode(), gpu_request("n2"), Request("").gauge("m", 1.0).encode(), b"\xff" * 40)
    store.drain()
    counted = {name: store.ingest.counters[name] for name in FOREIGN_COUNTERS}
    assert counted == {
        "foreign_messages": 3,
        "foreign_values": 2 + 6,
        "foreign_custom": 1 + 2,
        "foreign_shadowed": 0,
        "foreign_own": 0,
        "foreign_stale": 1,
        "foreign_exemplars": 1,
        "foreign_buckets": 0,
    }
    assert store.ingest.foreign_rejected == {"otlp": 1, "wire": 1}
    store.log.add(ONE, [one_row("n1", EPOCH, 0, T0)])
    store.drain()
    store.send(gpu_request("n1", T0_NS + 10**9))
    store.drain()
    assert store.ingest.counters["foreign_shadowed"] == 4
    assert store.ingest.counters["foreign_values"] == 8 + 2


@pytest.mark.parametrize("name", ["n1 ", "n\u200b1", "n" * 300])
def test_a_sender_with_an_invalid_node_name_costs_only_its_own_values(store: Harness, name: str) -> None:
    store.send(gpu_request(name), gpu_request("n2"))
    assert store.rows("SELECT DISTINCT split_part(entity, '.', 1) FROM gpu") == [("gpu:n2",)]
    assert store.rows("SELECT DISTINCT rule FROM dead_letter") == [("name",)]
    store.now += 2 * INVENTORY_EVERY
    store.send(gpu_request("n3", time=T0_NS + 10**9))
    assert store.rows("SELECT DISTINCT node FROM events WHERE kind = 'inventory' ORDER BY ALL") == [("n2",), ("n3",)]
    assert store.ingest.rejected == {"name": 1}


def test_an_inventory_that_is_refused_is_a_dead_letter_with_what_it_says(store: Harness) -> None:
    store.send(Request("n1").gauge("m", 1.0, datname="d" * 240, query="SELECT 1\nFROM t").encode(), gpu_request("n2"))
    assert store.rows("SELECT DISTINCT node FROM events WHERE kind = 'inventory'") == [("n2",)]
    ((rule, reason, key, payload),) = store.rows('SELECT rule, reason, "key", payload FROM dead_letter')
    assert (rule, key) == ("name", b"n1")
    assert str(reason).endswith("; in the inventory of n1")
    assert b"SELECT 1" in bytes(payload)  # type: ignore[call-overload]
    assert store.ingest.rejected == {"name": 1}
