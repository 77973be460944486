"""Thermal detectors with wrong time: events and frames dated far ahead, a clock that is set back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.heat.coolant import Coolant
from detectors.heat.coolant_leak import CoolantLeak, Reservoirs
from detectors.heat.drift import SlowTrends
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


LEARNS, GROUPS = np.ones((3, len(GPUS)), bool), np.zeros(len(GPUS), np.int32)


def measure(resistance, frame):
    return resistance.measure(frame, np.full(len(GPUS), SUPPLY), np.full(len(GPUS), np.nan), LEARNS, GROUPS)


@pytest.mark.parametrize("wrong", [lambda tick: DAY * (tick == 40), lambda tick: 2 * HOUR * (tick < 40)])
def test_resistances_are_measured_again_after_the_clock_is_right(wrong):
    resistance, usable = ThermalResistance(), []
    for tick in range(140):
        sample = measure(resistance, gpus(tick, ahead=wrong(tick))["gpu"])
        usable.append(bool(sample.usable.mean() > 0.9) and bool((np.abs(sample.power_error) < 0.04).all()))
    assert all(usable[80:])


def test_a_frame_out_of_order_does_not_change_the_resistance():
    resistance = ThermalResistance()
    for tick in range(30):
        measure(resistance, gpus(tick)["gpu"])
    assert not measure(resistance, gpus(20)["gpu"]).usable.any()
    assert resistance.last == CASE.time(29)


def test_hours_and_levels_continue_after_a_frame_that_is_a_day_ahead():
    drifts, levels = SlowTrends(), Reservoirs()
    closed, judged = 0, 0
    for minute in range(6 * 60):
        time = CASE.time(0) + minute * 60 * SECOND + (DAY if minute == 30 else 0)
        closed += drifts.add(np.array([0.1]), time)
        judged += levels.add(np.array([0.8]), time, ()) is not None
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


def test_a_part_that_rose_in_a_frame_ahead_is_not_rising_for_a_day():
    detector = ThermalEdge()
    data = {"state": "active", "slope": 1.0, "rise": 30.0, "seconds": 30.0, "value": 80.0}
    detector.observe(gpus(1, [Event(CASE.time(1) + DAY, GPUS[0], "temperature_rise", data)], DAY))
    assert detector.rising
    assert detector.observe(gpus(2)) == []
    assert not detector.rising


def test_a_loss_that_began_in_a_frame_ahead_is_held_from_now_on(site, watch):
    """One loop without second sensors: a ticket after the hold, though the clock was wrong when its loss began."""
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
    assert found[-1].level == "ticket"
