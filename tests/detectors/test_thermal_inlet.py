"""Warm air at the inlets: a rack, a row, one sensor, a warm afternoon, the whole hall."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detectors.heat.thermal_inlet import ThermalInlet
from pipeline.model.records import SECOND, Frame
from tests.detectors.cases.thermal_inlet import CASE, NODES, PER_RACK, SENSORS, air, topology

RACK = np.arange(NODES) // PER_RACK


def run_detector(warmer, faster, ticks=480, graph=None):
    """`warmer` K and `faster` share of the fans by tick, per node."""
    detector, graph, out = ThermalInlet(), graph or topology(), []
    for tick in range(ticks):
        values = air(np.random.default_rng([tick, 2]), warmer(tick), faster(tick))
        out += detector.observe(CASE.frames_of(tick, values, [], graph))
    return out


def grown(tick, mine, size, ramp=90):
    return size * np.where(mine, min(max(tick - 240, 0) / ramp, 1), 0.0)


def test_a_rack_with_warm_intake_air_is_a_ticket_and_never_a_page():
    found = run_detector(lambda t: grown(t, RACK == 2, 5.0), lambda t: grown(t, RACK == 2, 0.8))
    assert {f.entity for f in found} == {"rack:r2"}
    assert {f.level for f in found} == {"suspect", "ticket"}
    assert found[-1].evidence["fans_faster"] == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("of", [1, 2, 6])
def test_the_inlets_of_a_rack_may_be_read_at_different_moments(of):
    """BMCs are read in turn: each instant has a sixth of them."""
    detector, graph, found = ThermalInlet(), topology(), []
    for tick in range(600):
        values = air(np.random.default_rng([tick, 2]), grown(tick, RACK == 2, 8.0), np.zeros(NODES))
        absent = np.repeat(np.arange(NODES) % of != tick % of, 2)
        values["sensor"] = {name: np.where(absent, np.nan, v) for name, v in values["sensor"].items()}
        found += detector.observe(CASE.frames_of(tick, values, [], graph))
    assert {f.entity for f in found} == {"rack:r2"}
    assert len({f.onset for f in found}) == 1
    assert found[-1].level == "ticket"


@pytest.mark.slow
def test_most_racks_of_a_row_are_reported_as_the_row():
    graph = topology(PER_RACK // 2)
    graph.merge({f"rack:r{r}": (f"row:a{r // 2}",) for r in range(8)})
    found = run_detector(lambda t: grown(t, RACK == 1, 6.0), lambda t: grown(t, RACK == 1, 0.9), graph=graph)
    assert {f.entity for f in found if f.level == "ticket"} == {"row:a1"}


@pytest.mark.slow
@pytest.mark.parametrize("kelvin", [1.0, 2.0, 2.7])
def test_a_warm_afternoon_gives_no_ticket(kelvin):
    found = run_detector(
        lambda t: grown(t, RACK == 1, kelvin, 200), lambda t: grown(t, RACK == 1, 0.15 * kelvin, 200), 600
    )
    assert {f.level for f in found} <= {"suspect"}


@pytest.mark.slow
def test_two_warm_afternoons_together_give_no_ticket_while_the_fans_run_as_usual():
    found = run_detector(lambda t: grown(t, RACK == 1, 5.0, 200), lambda t: grown(t, RACK == 1, 0.3, 200), 600)
    assert {f.level for f in found} <= {"suspect"}


@pytest.mark.slow
def test_air_that_is_far_too_warm_is_a_ticket_at_any_fan_speed():
    found = run_detector(lambda t: grown(t, RACK == 1, 8.0, 200), lambda t: grown(t, RACK == 1, 0.0), 600)
    assert {f.level for f in found} == {"suspect", "ticket"}


def test_one_inlet_that_jumps_is_its_sensor():
    alone = np.arange(NODES) == 9
    assert run_detector(lambda t: grown(t, alone, 12.0, 1), lambda t: grown(t, alone, 0.0)) == []


@pytest.mark.slow
def test_a_hall_that_warms_with_the_weather_gives_no_finding():
    every = RACK >= 0
    assert run_detector(lambda t: grown(t, every, 5.0, 600), lambda t: grown(t, every, 0.5, 600), 900) == []


@pytest.mark.parametrize(("unit", "kelvin", "ramp"), [("hall", 8.0, 60), ("", 8.0, 60), ("hall", 5.0, 90)])
def test_a_hall_that_warms_within_minutes_is_one_ticket(unit, kelvin, ramp):
    every, graph = RACK >= 0, topology()
    if unit:
        graph.merge({f"rack:r{r}": (f"{unit}:h",) for r in range(4)})
    found = run_detector(lambda t: grown(t, every, kelvin, ramp), lambda t: grown(t, every, 0.5, ramp), graph=graph)
    assert len({f.entity for f in found}) == 1
    assert found[-1].level == "ticket"
    assert found[-1].entity == f"{unit}:h" if unit else found[-1].entity.startswith("rack:")


@pytest.mark.slow
@pytest.mark.parametrize("afternoon", [0.0, 2.3])
def test_a_hall_that_is_as_warm_as_before_ends_its_finding_and_may_open_another(afternoon):
    def warmer(tick):
        failed = 6.0 * (1000 <= tick < 1250) + 6.0 * (tick >= 1600)
        return np.full(NODES, afternoon * min(max(tick - 240, 0) / 700, 1) + failed)

    found = run_detector(warmer, lambda t: np.zeros(NODES), 1720)
    onsets = {f.onset for f in found if f.level == "ticket"}
    assert len(onsets) == 2


def test_racks_of_a_row_that_the_topology_does_not_name_are_one_finding():
    graph = topology(PER_RACK // 2)
    mine = np.arange(NODES) // (PER_RACK // 2) < 4
    found = run_detector(lambda t: grown(t, mine, 6.0), lambda t: grown(t, mine, 0.9), graph=graph)
    assert len({f.entity for f in found if f.level == "ticket"}) == 1
    assert sorted(found[-1].evidence["racks"]) == [f"rack:r{r}" for r in range(4)]
    assert "4 racks" in found[-1].summary


def test_a_row_that_is_half_of_the_hall_is_reported_as_the_row():
    graph = topology(PER_RACK // 2)
    graph.merge({f"rack:r{r}": (f"row:a{r // 4}",) for r in range(8)})
    mine = np.arange(NODES) // (PER_RACK // 2) < 4
    found = run_detector(lambda t: grown(t, mine, 6.0), lambda t: grown(t, mine, 0.9), graph=graph)
    assert {f.entity for f in found if f.level == "ticket"} == {"row:a0"}


def test_faster_fans_with_cool_air_give_no_finding():
    assert run_detector(lambda t: grown(t, RACK == 0, 0.0), lambda t: grown(t, RACK == 0, 0.9)) == []


def test_nan_and_new_sensors_and_time_that_steps_back_are_accepted():
    detector, graph = ThermalInlet(), topology()
    for tick in range(200):
        values = air(np.random.default_rng([tick, 2]), np.zeros(NODES), np.zeros(NODES))
        for column in values["sensor"].values():
            column[(tick * 7) % (2 * NODES)] = np.nan
        if tick < 40:
            values["sensor"] = {name: column[:NODES] for name, column in values["sensor"].items()}
        at = tick - 20 if tick == 100 else tick
        assert detector.observe(CASE.frames_of(at, values, [], graph)) == []


def test_there_is_no_finding_before_it_has_learned():
    assert run_detector(lambda t: 8.0 * (RACK == 1), lambda t: 0.9 * (RACK == 1), 100) == []
    assert CASE.step * SECOND == 10 * SECOND


@pytest.mark.slow
def test_a_rack_accepted_as_normal_is_learned_again():
    detector, graph = ThermalInlet(), topology()
    for tick in range(700):
        up = grown(tick, RACK == 2, 5.0)
        values = air(np.random.default_rng([tick, 2]), up, up / 6)
        found = detector.observe(CASE.frames_of(tick, values, [], graph))
        if tick == 400:
            assert detector.conditions.keys() == {"rack:r2"}
            detector.accept_as_normal("rack:r2", {})
        assert tick <= 400 or found == []


CHASSIS = tuple(f"chassis:b{n}.1" for n in range(NODES))


def chassis_frames(tick, warmer, sensed, read=True):
    """Frames with the intake air of chassis, by Redfish; `sensed`: nodes that have sensors of it too."""
    graph = topology()
    graph.merge({chassis: (f"node:n{n}",) for n, chassis in enumerate(CHASSIS)})
    values = air(np.random.default_rng([tick, 2]), warmer, np.zeros(NODES))
    inlets, absent = values["sensor"]["sensor.temperature"][0::2].copy(), np.repeat(~sensed, 2)
    frames = CASE.frames_of(tick, values, [], graph) if sensed.any() else {}
    if frames:
        kept = tuple(e for e, gone in zip(SENSORS, absent, strict=True) if not gone)
        columns = {name: column[~absent] for name, column in frames["sensor"].values.items()}
        frames["sensor"] = replace(frames["sensor"], entities=kept, values=columns)
    if read:
        columns = {"power.inlet_temperature": inlets, "power.draw": np.full(NODES, 6e3)}
        frames["power"] = Frame(CASE.time(tick), "power", CHASSIS, columns, graph)
    return frames


@pytest.mark.parametrize("sensed", [np.zeros(NODES, bool), np.arange(NODES) % 4 == 0], ids=["none", "some"])
def test_intake_air_that_chassis_report_by_redfish_is_judged(sensed):
    detector, found = ThermalInlet(), []
    for tick in range(480):
        found += detector.observe(chassis_frames(tick, grown(tick, RACK == 2, 8.0), sensed, tick % 3 == 2))
    assert {f.entity for f in found} == {"rack:r2"}
    assert found[-1].level == "ticket"
    assert any(name.startswith("chassis:") for name in found[-1].evidence["inlets"])


def test_a_second_thermometer_of_the_same_air_does_not_count():
    detector, one = ThermalInlet(), np.arange(NODES) % PER_RACK < 2
    for tick in range(480):
        warmer = grown(tick, RACK == 2, 8.0) * one
        frames = chassis_frames(tick, warmer, one)
        kept = frames["power"].entities
        hidden = np.where(one, frames["power"]["power.inlet_temperature"], np.nan)
        frames["power"] = replace(frames["power"], entities=kept, values={"power.inlet_temperature": hidden})
        assert detector.observe(frames) == []


def test_what_was_learnt_of_sensors_stays_theirs_when_chassis_come_and_after_a_restart():
    detector, sensed = ThermalInlet(), np.arange(NODES) % 2 == 0
    found = []
    for tick in range(480):
        if tick in (200, 300):
            restored = ThermalInlet()
            restored.restore(detector.snapshot())
            detector = restored
        frames = chassis_frames(tick, grown(tick, RACK == 2, 8.0), sensed, tick > 150)
        if tick % 2:
            frames.pop("sensor")
        found += detector.observe(frames) if frames else []
    assert {f.entity for f in found} == {"rack:r2"}
    assert found[-1].level == "ticket"
