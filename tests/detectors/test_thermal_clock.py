"""Thermal detectors with wrong time: events and frames dated far ahead, a clock that is set back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.heat.coolant import Coolant
from detectors.heat.coolant_leak import CoolantLeak, Reservoirs
from detectors.heat.drift import SlowTrends
from detectors.heat.exclusions import CohortShift, CoolantCollapses
from detectors.heat.resistance import ThermalResistance
from detectors.heat.thermal_edge import ThermalEdge
from pipeline.judging.frames import Frame
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.detectors.cases.thermal import CASE, GPUS, PLATE, SUPPLY, heat, topology

HOUR = 3600 * SECOND
DAY = 24 * HOUR


def gpus(tick, events=(), ahead=0):
    values = heat(np.random.default_rng([tick, 1]), np.full(len(GPUS), PLATE), SUPPLY)
    values["gpu"]["gpu.energy"] = np.full(len(GPUS), 640.0 * 10_000 * tick)
    frames = CASE.frames_of(tick, values, events, topology())
    return {name: replace(frame, time=frame.time + ahead) for name, frame in frames.items()}


@pytest.mark.parametrize("ahead", [DAY, 10**16])
def test_a_collapse_dated_far_ahead_excludes_no_longer_than_any_other(ahead):
    collapses = CoolantCollapses()
    collapses.update(gpus(1, [Event(CASE.time(1) + ahead, "cdu:c1", "flow_collapse", {"state": "active"})]))
    assert collapses.cooled_by(gpus(2)["gpu"]).all()
    collapses.update({"gpu": replace(gpus(2)["gpu"], time=CASE.time(1) + HOUR + 1)})
    assert collapses.cooled_by(gpus(2)["gpu"]) is None


def test_a_collapse_in_a_frame_that_is_a_day_ahead_excludes_for_an_hour():
    collapses = CoolantCollapses()
    collapses.update(gpus(1, [Event(CASE.time(1) + DAY, "cdu:c1", "flow_collapse", {"state": "active"})], DAY))
    for tick in (2, 300):
        collapses.update(gpus(tick))
        assert collapses.cooled_by(gpus(tick)["gpu"]).all()
    collapses.update(gpus(365))
    assert collapses.cooled_by(gpus(365)["gpu"]) is None


@pytest.mark.parametrize("wrong", [lambda tick: DAY * (tick == 40), lambda tick: 2 * HOUR * (tick < 40)])
def test_resistances_are_measured_again_after_the_clock_is_right(wrong):
    resistance, usable = ThermalResistance(), []
    for tick in range(140):
        frames = gpus(tick, ahead=wrong(tick))
        supply = np.full(len(GPUS), SUPPLY)
        sample = resistance.measure(frames["gpu"], supply)
        usable.append(bool(sample.usable.all()) and bool((np.abs(sample.power_error) < 0.04).all()))
    assert all(usable[60:])


def test_a_frame_out_of_order_does_not_change_the_resistance():
    resistance = ThermalResistance()
    for tick in range(30):
        resistance.measure(gpus(tick)["gpu"], np.full(len(GPUS), SUPPLY))
    assert not resistance.measure(gpus(20)["gpu"], np.full(len(GPUS), SUPPLY)).usable.any()
    assert resistance.last == CASE.time(29)


def test_hours_and_levels_continue_after_a_frame_that_is_a_day_ahead():
    drifts, levels = SlowTrends(), Reservoirs()
    closed, judged = 0, 0
    for minute in range(6 * 60):
        time = CASE.time(0) + minute * 60 * SECOND + (DAY if minute == 30 else 0)
        closed += drifts.add(np.array([0.1]), time)
        judged += levels.add(np.array([0.8]), time) is not None
    assert closed >= 5
    assert judged >= 170


def test_a_burst_hose_is_reported_after_a_frame_that_is_a_day_ahead():
    detector, graph, found = CoolantLeak(), Topology(), []
    rng = np.random.default_rng(4)
    for tick in range(360):
        time = CASE.time(0) + tick * 30 * SECOND + (DAY if tick == 100 else 0)
        level = 0.8 - 0.6 * max(tick - 240, 0) / 120 + 0.002 * rng.standard_normal()
        column = {"reservoir.level": np.array([level])}
        found += detector.observe({"coolant": Frame(time, "coolant", ("cdu:c0",), column, graph)})
    assert found[-1].level == "page"


def test_a_cohort_that_moved_in_a_frame_ahead_is_not_settling_for_a_day():
    shift, size = CohortShift(), 8
    sample = ThermalResistance().measure(gpus(1)["gpu"], np.full(len(GPUS), SUPPLY))
    sample = replace(sample, **{name: getattr(sample, name)[:size] for name in ("ln_r", "usable", "rise", "power")})
    assert not shift.is_settling(size).any()
    shift.usual[:], shift.until[:] = sample.ln_r, float(CASE.time(0) + DAY)
    groups = np.zeros(size, np.int32)
    for tick in (1, 32):
        shift.update(sample, None, np.zeros(size), groups, CASE.time(tick), 10.0)
    assert not shift.is_settling(size).any()


def test_a_part_that_rose_in_a_frame_ahead_is_not_rising_for_a_day():
    detector = ThermalEdge()
    data = {"state": "active", "slope": 1.0, "rise": 30.0, "seconds": 30.0, "value": 80.0}
    detector.observe(gpus(1, [Event(CASE.time(1) + DAY, GPUS[0], "temperature_rise", data)], DAY))
    assert detector.rising
    assert detector.observe(gpus(2)) == []
    assert not detector.rising


def test_a_loss_that_began_in_a_frame_ahead_is_held_from_now_on(site, watch):
    """One loop without second sensors: a page after the hold, though the clock was wrong when its loss began."""
    detector = Coolant()

    def change(tick, values):
        for signal in ("coolant.pressure", "pump.speed"):
            values["coolant"].pop(signal)
        values["coolant"]["coolant.flow"][0] *= 0.83 if tick >= 60 else 1.0

    watch(detector, site, 100, change)
    assert detector.flows.large_since[0] > 0
    detector.flows.large_since[0] += DAY
    detector.conditions.clear()
    found = watch(detector, site, 120, change, first=100)
    assert found[-1].level == "page"
