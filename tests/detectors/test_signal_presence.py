"""Detectors that are off while the pipeline runs because signals are missing, and on when the signals come."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest

from detectors import configured
from detectors.runner import Runner
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed, read, written

START = 1_790_000_000 * SECOND


def show(runner, seconds, values, events=()):
    """Observes an instant of one node and one GPU; values: signal -> value of both."""
    frames = {}
    for device_class, entity in (("node", "node:n0"), ("gpu", "gpu:n0.0")):
        mine = {name: np.array([v]) for name, v in values.items() if name.startswith(device_class)}
        own = tuple(e for e in events if e.entity == entity)
        frames[device_class] = Frame(START + seconds * SECOND, device_class, (entity,), mine, Topology(), own)
    runner.observe(frames)


def off(runner):
    return {row["name"]: row["off"] for row in runner.listing()}


def test_before_the_first_instant_no_signal_is_missing():
    assert set(map(len, off(Runner(configured())).values())) == {0}


HOUR = 3610
"""s after which a signal that was never measured is missing."""


def test_after_a_start_no_signal_is_missing_before_its_patience_is_over():
    runner = Runner(configured())
    for seconds in (0, 10, 1800, 3600):
        show(runner, seconds, {"node.load1": 3.0})
        assert {name for name, missing in off(runner).items() if missing} == set()


def test_signals_that_were_never_measured_are_missing_and_measured_ones_are_not():
    runner = Runner(configured())
    for seconds in (0, HOUR):
        show(runner, seconds, {"node.load1": 3.0, "gpu.temperature": 50.0, "gpu.power": np.nan})
    missing = off(runner)
    assert missing["telemetry"] == []
    assert missing["thermal"] == ["gpu.power"]  # a column without a value is none
    assert missing["link_stall"] == ["nic.state", "nic.rx_bytes", "nic.tx_bytes"]
    show(runner, HOUR + 10, {"gpu.power": 600.0})
    assert off(runner)["thermal"] == []


def test_a_signal_without_values_for_an_hour_is_missing_until_the_next_value():
    runner = Runner(configured())
    show(runner, 0, {"node.load1": 3.0})
    show(runner, 3600, {"gpu.power": 600.0})
    assert off(runner)["telemetry"] == []
    show(runner, 3610, {"gpu.power": 600.0})
    assert off(runner)["telemetry"] == ["node.load1"]
    show(runner, 3620, {"node.load1": 3.0})
    assert off(runner)["telemetry"] == []


def test_fault_events_are_never_missing_and_digests_are():
    runner = Runner(configured())
    for seconds in (0, 86_410):
        show(runner, seconds, {"node.load1": 3.0})
    assert (off(runner)["xid"], off(runner)["sdc"]) == ([], ["event:digest"])
    show(runner, 86_420, {}, [Event(START, "gpu:n0.0", "digest", {})])
    assert off(runner)["sdc"] == []


def test_a_restart_keeps_which_signals_were_measured_and_an_older_snapshot_starts_afresh():
    runner, other, old = (Runner(configured()) for _ in range(3))
    show(runner, 0, {"node.load1": 3.0})
    state = packed(runner)
    other.restore(state)
    show(other, 3600, {"gpu.power": 600.0})
    assert off(other)["telemetry"] == []
    show(other, 3610, {"gpu.power": 600.0})
    assert off(other)["telemetry"] == ["node.load1"]
    kept = read(state)
    del kept["measured"]
    old.restore(written(kept))
    show(old, HOUR, {"gpu.power": 600.0})
    assert off(old)["telemetry"] == []
    show(old, 2 * HOUR, {"gpu.power": 600.0})
    assert off(old)["telemetry"] == ["node.load1"]


def judging(name, signal, device_class, entity, tables=MappingProxyType({})):
    """Signals that one detector misses after an hour of one signal alone; also in a replay of a recording with it."""
    (live,) = (d for d in configured(tables) if d.name == name)
    (played,) = (d for d in configured(tables) if d.name == name)
    runner = Runner([live])
    for seconds in (0, HOUR):
        column = {signal: np.array([1.0])}
        runner.observe({device_class: Frame(START + seconds * SECOND, device_class, (entity,), column, Topology())})
    return off(runner)[name], Runner([played], {signal}).listing()[0]["off"]


@pytest.mark.parametrize(
    ("name", "signal", "entity", "missing"),
    [
        ("coolant_leak", "reservoir.level", "cdu:c1", []),
        ("coolant_leak", "leak.state", "leak:c1.1", []),
        ("coolant_leak", "coolant.pressure", "cdu:c1", ["leak.state or reservoir.level"]),
        ("telemetry_blind", "exporter.up", "exporter:e1", []),
        ("telemetry_blind", "bmc.reachable", "bmc:n1", []),
        ("telemetry_blind", "node.load1", "node:n1", ["bmc.reachable or exporter.up"]),
        ("host_health", "disk.state", "disk:n1.nvme0", []),
        ("anomaly", "custom.value", "custom:x", []),
    ],
)
def test_one_of_several_signals_is_enough_where_a_detector_works_on_any_of_them(name, signal, entity, missing):
    assert judging(name, signal, CATALOGUE[signal].device_class, entity) == (missing, missing)


def test_the_generic_detector_misses_only_its_configured_signals():
    tables = {"anomaly": {"signals": ["gpu.memory_used", "node.load1"]}}
    assert judging("anomaly", "gpu.memory_used", "gpu", "gpu:n1.0", tables)[0] == []
    assert judging("anomaly", "gpu.power", "gpu", "gpu:n1.0", tables)[0] == ["gpu.memory_used or node.load1"]


def test_a_clock_that_is_set_back_makes_no_signal_missing():
    runner = Runner(configured())
    show(runner, 7200, {"node.load1": 3.0})
    show(runner, 0, {"node.load1": 3.0})
    assert off(runner)["telemetry"] == []
