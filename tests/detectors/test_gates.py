"""Announced work, new software and young jobs count for as long as they matter, and no longer."""

from __future__ import annotations

import json

from detectors.base.gates import LONGEST, SETTLES, Gates
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

T0 = 1_790_000_000 * SECOND
TOPOLOGY = Topology({"gpu:n0.0": ["node:n0"], "gpu:n1.0": ["node:n1"], "node:n0": ["rack:r1"], "node:n1": ["rack:r1"]})
GPUS = ("gpu:n0.0", "gpu:n1.0")


def update_gates(gates, seconds, *events):
    time = T0 + seconds * SECOND
    mine = tuple(Event(time, entity, kind, data) for entity, kind, data in events)
    gates.update({"node": Frame(time, "node", (), {}, TOPOLOGY, mine)})
    return time


def working(gates, time):
    return gates.maintenance_mask(Frame(time, "gpu", GPUS, {}, TOPOLOGY)).tolist()


def test_work_on_a_node_covers_its_gpus_and_no_others():
    gates = Gates()
    time = update_gates(gates, 0, ("node:n0", "maintenance_start", {"reason": "x"}))
    assert working(gates, time) == [True, False]
    assert gates.in_maintenance("gpu:n0.0", TOPOLOGY, time)
    assert not gates.in_maintenance("gpu:n1.0", TOPOLOGY, time)


def test_work_on_a_rack_covers_all_devices_in_it():
    gates = Gates()
    assert working(gates, update_gates(gates, 0, ("rack:r1", "maintenance_start", {}))) == [True, True]


def test_a_device_settles_for_a_while_after_work():
    gates = Gates()
    update_gates(gates, 0, ("node:n0", "maintenance_start", {}))
    end = update_gates(gates, 100, ("node:n0", "maintenance_end", {}))
    assert working(gates, end + SETTLES) == [True, False]
    assert working(gates, end + SETTLES + SECOND) == [False, False]


def test_work_without_an_end_is_over_after_half_as_long_again():
    gates = Gates()
    update_gates(gates, 0, ("node:n0", "maintenance_start", {"seconds": 1000}))
    assert working(gates, update_gates(gates, 1499)) == [True, False]
    late = update_gates(gates, 1501 + SETTLES // SECOND + 1)
    assert working(gates, late + SETTLES) == [False, False]


def test_an_announcement_is_bounded_in_time():
    for seconds in (None, -1, float("nan"), float("inf"), "long", 1e12):
        gates = Gates()
        update_gates(gates, 0, ("node:n0", "maintenance_start", {"seconds": seconds}))
        late = update_gates(gates, LONGEST // SECOND + 1)
        assert working(gates, late + SETTLES + SECOND) == [False, False], seconds


def test_a_change_of_versions_applies_to_all_parts_of_a_node():
    gates = Gates()
    time = update_gates(gates, 5, ("node:n0", "version", {"versions": {"driver": "570"}}))
    assert gates.last_change("gpu:n0.0", TOPOLOGY) == time
    assert gates.last_change("gpu:n1.0", TOPOLOGY) is None


def test_a_job_that_started_again_has_not_ended():
    gates = Gates()
    begun = update_gates(gates, 0, ("job:7", "job_start", {"ranks": {}}))
    assert gates.job_started_at("job:7") == begun
    assert gates.job_ended_at("job:7") is None
    over = update_gates(gates, 10, ("job:7", "job_end", {"ranks": []}))
    assert gates.job_ended_at("job:7") == over
    update_gates(gates, 20, ("job:7", "job_start", {"ranks": {}}))
    assert gates.job_ended_at("job:7") is None


def test_old_entries_are_dropped():
    gates = Gates()
    for n in range(100):
        update_gates(gates, n, (f"job:{n}", "job_start", {}), (f"node:{n}", "version", {}), (f"job:{n}", "job_end", {}))
    update_gates(gates, 3 * 86_400)
    assert all(not known for known in gates.snapshot().values())


def test_state_survives_a_restart_as_json():
    gates, other = Gates(), Gates()
    time = update_gates(gates, 0, ("node:n0", "maintenance_start", {}), ("job:7", "job_start", {}))
    other.restore(json.loads(json.dumps(gates.snapshot())))
    assert working(other, time) == [True, False]
    assert other.job_started_at("job:7") == time
