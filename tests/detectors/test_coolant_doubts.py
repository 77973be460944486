"""Suspects of coolant that may be the instrument, and the false alarm budget of its thresholds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.corroboration import Corroboration
from detectors.heat.coolant import Coolant
from detectors.heat.coolant_edge import CoolantEdge
from detectors.heat.thermal import Thermal
from pipeline.judging.frames import Frame
from pipeline.model.records import SECOND, Event, Finding
from pipeline.model.topology import Topology
from tests.detectors.cases.thermal_inlet import CASE as INLETS

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
FLOW, SUPPLY = "coolant.flow", "coolant.supply_temperature"


def less(share, every=False):
    def change(tick, values):
        values["coolant"][FLOW][: None if every else 1] *= share if tick >= 60 else 1.0

    return change


def warmer(kelvin, ticks, loop=0):
    def change(tick, values):
        values["coolant"][SUPPLY][loop] += min(max(tick - 60, 0) / ticks, 1) * kelvin

    return change


def all_of(*changes):
    def change(tick, values):
        for one in changes:
            one(tick, values)

    return change


def no_witness(tick, values):
    for signal in ("coolant.pressure", "pump.speed"):
        values["coolant"].pop(signal)


def idle(tick, values):
    values["gpu"]["gpu.power"] = np.full(16, 300.0 if tick >= 58 else 700.0)


def doubted(found):
    """Whether the newest of some suspects is doubted."""
    assert {f.level for f in found} == {"suspect"}
    return found[-1].evidence["doubted"]


@pytest.mark.slow
def test_a_suspect_that_may_be_the_instrument_is_marked_as_doubted(site, watch):
    for change in (less(0.8), warmer(8.0, 1e-3, 3), less(0.8, every=True), all_of(less(0.8, True), idle)):
        assert doubted(watch(Coolant(), site, 300, change))


def test_a_finding_with_one_undoubted_sensor_is_not_doubted(site, watch):
    small, jumps = all_of(less(0.94), no_witness), warmer(8.0, 1e-3)
    assert not watch(Coolant(), site, 220, small)[-1].evidence["doubted"]
    found = watch(Coolant(), site, 220, all_of(small, jumps))
    assert not [f for f in found if {FLOW, SUPPLY} <= set(f.signals)][-1].evidence["doubted"]


def test_a_page_is_not_doubted_though_another_meter_is(site, watch):
    found = watch(Coolant(), site, 200, all_of(less(0.8), warmer(6.0, 30)))
    assert found[-1].level == "page"
    assert not found[-1].evidence["doubted"]


def test_a_flow_collapse_at_normal_pressure_is_doubted_and_explains_no_warm_gpu(site, watch):
    data = {"state": "active", "signal": FLOW, "value": 120.0, "usual": 300.0, "share": 0.7}

    def change(tick, values):
        return [Event(START + tick * STEP, "cdu:c0", "flow_collapse", data)] if tick == 60 else []

    found = watch(CoolantEdge(), site, 62, change)
    assert doubted(found)
    time = found[-1].time
    warm = Finding(time, time, "gpu:n0.0", "thermal", "suspect", 1.0, "warm", {}, ("gpu.temperature",))
    explained = Corroboration().corroborate([warm, found[-1]], time, site.topology)
    assert not any("corroborated_by" in f.evidence for f in explained)


def test_the_budget_of_loops_is_at_the_threshold_without_peers():
    lines = [line for line in Coolant(threshold=17.0).budget() if "ticks" in line]
    assert {line.split(":")[0] for line in lines} == {"flow", "warmth"}
    assert "threshold 21 " in lines[0]
    assert all("node" not in line and "loop-days" in line for line in lines)


def test_a_group_accepted_as_normal_is_learned_again_member_by_member():
    gpus = tuple(f"gpu:n{n}.0" for n in range(4))
    parents = {f"rank:7.{n}": ("stage:7.0", "job:7", gpu) for n, gpu in enumerate(gpus[:2])}
    graph = Topology(parents | {gpu: (f"node:n{n}", "pdu:p0") for n, gpu in enumerate(gpus)})
    frame = Frame(START, "gpu", gpus, {"gpu.temperature": np.full(4, 50.0), "gpu.power": np.full(4, 500.0)}, graph)
    for entity, count in (("fleet:gpu", 4), ("site:all", 4), ("stage:7.0", 2), ("job:7", 2), ("pdu:p0", 4)):
        detector = Thermal()
        detector.grow(4)
        detector.wearing[:] = True
        detector.accept_as_normal(entity, {})
        detector.observe({"gpu": frame})
        assert detector.accepted == []
        assert np.count_nonzero(~detector.wearing) in (count, 4), entity


def test_all_inlets_are_accepted_by_the_name_of_the_fleet():
    detector, graph = INLETS.detector(), INLETS.topology()
    for tick in range(25):
        detector.observe(INLETS.frames(tick, False, graph))
    learned = detector.warmth.cells.copy()
    detector.accept_as_normal("fleet:sensor", {})
    frame = INLETS.frames(25, False, graph)["sensor"]
    detector.observe({"sensor": replace(frame, values={})})
    assert learned.any()
    assert not detector.warmth.cells.any()
