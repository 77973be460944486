"""Retention of the store: devices and entities without reports for a long time are dropped."""

import numpy as np
import pytest

from pipeline.engine.engine import Engine
from pipeline.incidents import ledger
from pipeline.model.records import SECOND, Batch, Block, Event, Origin
from pipeline.model.topology import Topology
from pipeline.store import latest, retention
from pipeline.store.devices import Devices
from pipeline.store.retention import DAY
from pipeline.transport import wire

T0 = 1_780_000_000 * SECOND


class FrameRecorder:
    """A judge that keeps the GPU frames it receives."""

    signals = None
    names = ()

    def __init__(self):
        self.seen, self.restored = [], []

    def listing(self):
        return []

    def calibration(self):
        return {}

    def calibration_rows(self, other=None):
        return []

    def observe(self, frames):
        self.seen += [frames["gpu"]] if "gpu" in frames else []
        return []

    def judge_events(self, events, topology, again=False):
        return []

    def snapshot(self):
        return ()

    def restore(self, state):
        self.restored.append(state)


WEEK = 7 * DAY


def send_devices(site, time, *entities):
    block = Block("gpu", entities, {"gpu.temperature": np.full((1, len(entities)), 40.0, "f4")})
    site.send_raw("n1", wire.encode(Batch(Origin("local", "n1", b"b" * 16), np.array([time]), (block,))))


@pytest.mark.slow
def test_many_silent_devices_are_dropped_and_the_others_keep_ids_and_rows(site, monkeypatch):
    monkeypatch.setattr(retention, "MIN_SILENT_DEVICES", 2)
    send_devices(site, T0, "gpu:n1.0", "gpu:n1.1", "gpu:n1.2", "gpu:n1.3")
    send_devices(site, T0 + 8 * DAY, "gpu:n1.1", "gpu:n1.9")
    site.drain()
    assert (
        retention.drop_silent_devices(site.database, WEEK, share=1.0, now=T0 + 9 * DAY) == 0
    )  # 3 are no more than 2 + 2
    assert retention.drop_silent_devices(site.database, WEEK, share=0.25, now=T0 + 9 * DAY) == 3
    assert site.rows("SELECT id, entity FROM device ORDER BY ALL") == [(1, "gpu:n1.1"), (4, "gpu:n1.9")]
    site.shut()
    send_devices(site, T0 + 8 * DAY + SECOND, "gpu:n1.0", "gpu:n1.1", "gpu:n1.9")
    ingest = site.drain()
    assert list(ingest.devices.names("gpu")) == ["gpu:n1.1", "gpu:n1.9", "gpu:n1.0"]
    assert site.rows("SELECT entity, count(*) FROM gpu GROUP BY ALL ORDER BY ALL") == [
        ("gpu:n1.0", 1),
        ("gpu:n1.1", 2),
        ("gpu:n1.9", 2),
    ]
    ids = np.array([0, 1, 2, 4, 5], np.int32)
    assert ingest.devices.find_slots("gpu", ids).tolist() == [-1, 0, -1, 1, 2]
    assert Devices(site.database.connection).find_slots("gpu", ids).tolist() == [-1, 0, -1, 1, 2]


def test_a_fleet_that_is_silent_as_a_whole_is_not_dropped(site, monkeypatch):
    monkeypatch.setattr(retention, "MIN_SILENT_DEVICES", 0)
    send_devices(site, T0, "gpu:n1.0", "gpu:n1.1")
    site.drain()
    assert retention.drop_silent_devices(site.database, WEEK, share=0.25, now=T0 + 100 * DAY) == 0


def test_one_clock_in_the_future_drops_no_device(site, monkeypatch):
    monkeypatch.setattr(retention, "MIN_SILENT_DEVICES", 0)
    send_devices(site, T0, "gpu:n1.0", "gpu:n1.1")
    send_devices(site, T0, "gpu:n1.2")
    site.drain()
    site.database.connection.execute(
        f"UPDATE latest_gpu SET time = make_timestamptz({T0 + 5000 * DAY}) WHERE device = 2"
    )
    assert retention.drop_silent_devices(site.database, WEEK, share=0.25, now=T0 + SECOND) == 0


def test_entities_without_an_inventory_are_dropped(site):
    for time, gpu in ((T0, "gpu:n1.0"), (T0 + 8 * DAY, "gpu:n1.1")):
        lines = {"entities": {gpu: {"parents": ["node:n1"], "attributes": {}}}}
        site.send_events("n1", Event(time, "node:n1", "inventory", lines))
    send_devices(site, T0 + 8 * DAY, "gpu:n1.1")
    site.drain()
    site.database.connection.execute(
        "INSERT INTO entity BY NAME SELECT 'gpu:old' AS entity, 'gpu' AS kind, "
        "'local' AS site, false AS simulated, [] AS parents, '{}' AS attributes"
    )
    assert retention.drop_unnamed_entities(site.database, WEEK, now=T0 + 9 * DAY) == 1
    assert site.rows("SELECT entity FROM entity ORDER BY ALL") == [("gpu:n1.1",), ("gpu:old",)]


def test_the_newest_row_of_each_device_is_found_in_any_order_of_time():
    time, device = np.array([5, 1, 6, 2, 0, 6]), np.array([3, 1, 3, 2, 1, 3], np.int32)
    for more in (0, 100_000):
        assert sorted(latest.find_newest_rows(time, device + np.int32(more)).tolist()) == [1, 3, 5]


def test_rows_of_a_renumbered_device_reach_its_slot_in_frames_and_learned_state_is_reset(site, monkeypatch):
    monkeypatch.setattr(retention, "MIN_SILENT_DEVICES", 0)
    send_devices(site, T0, "gpu:n1.0", "gpu:n1.1")
    send_devices(site, T0 + 8 * DAY, "gpu:n1.1")
    site.drain()
    with site.database.transaction() as connection:
        ledger.save_snapshot(connection, "judge", T0 + 8 * DAY - SECOND, "{}")
    retention.drop_silent_devices(site.database, WEEK, share=0.25, now=T0 + 9 * DAY)
    judge = FrameRecorder()
    devices = Devices(site.database.connection)
    engine = Engine(site.database, devices, Topology(), judge, lambda *_: (), lambda: T0 + 9 * DAY, 10 * SECOND)
    engine.advance(T0 + 8 * DAY + 60 * SECOND)
    assert [(list(f.entities), f["gpu.temperature"].tolist()) for f in judge.seen] == [(["gpu:n1.1"], [40.0])]
    assert judge.restored == []
