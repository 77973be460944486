"""Which detectors have nothing to judge by while the pipeline runs: told for want of what, and over when it comes."""

from __future__ import annotations

import json

import numpy as np

from detectors import configured
from detectors.runner import Runner
from pipeline.records import SECOND, Event, Frame
from pipeline.topology import Topology

START = 1_790_000_000 * SECOND


def show(runner, seconds, values, events=()):
    """An instant of one node and one GPU; values: signal -> what both tell."""
    frames = {}
    for device_class, entity in (("node", "node:n0"), ("gpu", "gpu:n0.0")):
        mine = {name: np.array([v]) for name, v in values.items() if name.startswith(device_class)}
        told = tuple(e for e in events if e.entity == entity)
        frames[device_class] = Frame(START + seconds * SECOND, device_class, (entity,), mine, Topology(), told)
    runner.observe(frames)


def off(runner):
    return {row["name"]: row["off"] for row in runner.listing()}


def test_before_the_first_instant_nothing_is_known_to_lack():
    assert set(map(len, off(Runner(configured())).values())) == {0}


def test_what_nobody_has_measured_yet_is_told_and_what_is_measured_is_not():
    runner = Runner(configured())
    show(runner, 0, {"node.load1": 3.0, "gpu.temperature": 50.0, "gpu.power": np.nan})
    lacking = off(runner)
    assert lacking["telemetry"] == []
    assert lacking["telemetry_sensor"] == ["gpu.power"]  # a column without a value is none
    assert lacking["link_stall"] == ["nic.state", "nic.rx_bytes", "nic.tx_bytes"]
    show(runner, 10, {"gpu.power": 600.0})
    assert off(runner)["telemetry_sensor"] == []


def test_a_signal_that_stays_away_for_an_hour_is_lacking_and_back_at_once():
    runner = Runner(configured())
    show(runner, 0, {"node.load1": 3.0})
    show(runner, 3600, {"gpu.power": 600.0})
    assert off(runner)["telemetry"] == []
    show(runner, 3610, {"gpu.power": 600.0})
    assert off(runner)["telemetry"] == ["node.load1"]
    show(runner, 3620, {"node.load1": 3.0})
    assert off(runner)["telemetry"] == []


def test_faults_that_nobody_logged_lack_nothing_and_digests_that_nobody_told_do():
    runner = Runner(configured())
    show(runner, 0, {"node.load1": 3.0})
    assert (off(runner)["xid"], off(runner)["sdc"]) == ([], ["event:digest"])
    show(runner, 10, {}, [Event(START, "gpu:n0.0", "digest", {})])
    assert off(runner)["sdc"] == []


def test_a_restart_remembers_what_was_measured_and_an_older_snapshot_begins_anew():
    runner, other, old = (Runner(configured()) for _ in range(3))
    show(runner, 0, {"node.load1": 3.0})
    state = runner.snapshot()
    other.restore(state)
    show(other, 60, {"gpu.power": 600.0})
    assert off(other)["telemetry"] == []
    kept = json.loads(state)
    del kept["measured"]
    old.restore(json.dumps(kept))
    show(old, 60, {"gpu.power": 600.0})
    assert off(old)["telemetry"] == ["node.load1"]


def test_time_that_steps_back_takes_nothing_away():
    runner = Runner(configured())
    show(runner, 7200, {"node.load1": 3.0})
    show(runner, 0, {"node.load1": 3.0})
    assert off(runner)["telemetry"] == []
