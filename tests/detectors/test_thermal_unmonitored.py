"""Loops and racks that throttle as a whole: one finding on each, whether their coolant is read or not."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.faults.facility import FacilityWater
from agents.sim.scenario import Fleet, Line, Scenario
from benchmarks.detection.judge import Trial
from detectors.heat.thermal import Thermal
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import class_of_entity
from pipeline.model.topology import Topology
from tests.detectors.cases.thermal import CASE, GPUS, PLATE, SUPPLY, WIDTH, heat, topology

LOOP, SINCE, HEAT = "cdu:c1", 80, 0x40
SOME = [node * WIDTH + i for node in range(3) for i in range(4)]  # half the GPUs of three nodes of four
COOLANT = ("coolant", "leak")
LOTTERY = np.random.default_rng(3).normal(0, 0.1, len(GPUS))


def run_detector(change, ticks=180, detector=None, since=0, graph=None):
    """Findings on a loop without coolant telemetry; `change(tick, values)` may break, measure or report something."""
    detector, graph, found = detector or Thermal(), graph or topology(), []
    for tick in range(since, since + ticks):
        values = heat(np.random.default_rng([tick, 1]), PLATE * np.exp(LOTTERY), SUPPLY)
        del values["coolant"]
        events = change(tick, values)
        found += detector.observe(CASE.frames_of(tick, values, events or [], graph))
    return found


def hot(gpus=SOME, since=SINCE, until=10**9, bits=HEAT):
    def change(tick, values):
        if since <= tick < until:
            values["gpu"]["gpu.throttle_reasons"][list(gpus)] = bits

    return change


def first(found, level):
    return next(f for f in found if f.level == level)


def test_an_unmonitored_loop_is_a_ticket_in_the_first_frames_a_page_after_ten_minutes_and_ends():
    found = run_detector(hot(until=SINCE + 90), 220)
    assert {f.entity for f in found} == {LOOP}
    assert (found[0].time, found[0].onset, found[0].level) == (CASE.time(SINCE + 1), CASE.time(SINCE), "ticket")
    assert first(found, "page").time == CASE.time(SINCE + 61)
    assert len({f.onset for f in found}) == 1
    assert found[-1].time < CASE.time(SINCE + 90)
    assert "12 of 32 GPUs" in found[0].summary
    assert "on 3 nodes" in found[0].summary
    assert found[0].evidence["gpus"] == [GPUS[i] for i in SOME]


def test_gpus_of_a_loop_in_hardware_slowdown_without_a_bit_of_heat_are_not_said_to_be_hot():
    found = run_detector(hot(bits=0x8))
    assert found
    assert all("12 of 32 GPUs in HW slowdown on 3 nodes" in f.summary for f in found)


def test_most_nodes_with_one_such_gpu_each_are_a_ticket_and_no_page():
    found = run_detector(hot([0, WIDTH, 2 * WIDTH]))
    assert {f.entity for f in found} == {LOOP}
    assert {f.level for f in found} == {"suspect", "ticket"}


def test_the_first_gpu_to_throttle_is_not_a_ticket_after_its_loop():
    """A GPU with normal resistance is a ticket for a day, unless its whole loop was warm."""

    def change(tick, values):
        hot([0], SINCE - 5, SINCE + 60)(tick, values)
        hot(SOME, SINCE, SINCE + 60)(tick, values)

    alone, both = run_detector(hot([0], SINCE - 5, SINCE + 60)), run_detector(change)
    assert alone[-1].time > CASE.time(SINCE + 80)
    assert {f.entity for f in both if f.time < CASE.time(SINCE)} == {GPUS[0]}
    assert {f.entity for f in both if f.time > CASE.time(SINCE)} == {LOOP}
    assert both[-1].time < CASE.time(SINCE + 60)


@pytest.mark.slow
def test_two_nodes_are_reported_as_nodes_and_a_power_cap_or_a_brake_is_not_throttling_by_heat():
    assert {f.entity for f in run_detector(hot(range(2 * WIDTH)))} == {"node:n0", "node:n1"}
    assert run_detector(hot(bits=0x4)) == []
    assert run_detector(hot(bits=0x88)) == []


@pytest.mark.slow
def test_gpus_without_a_node_are_not_loop():
    assert {f.entity for f in run_detector(hot(), graph=Topology(dict.fromkeys(GPUS, (LOOP,))))} <= set(GPUS)
    assert {f.entity for f in run_detector(hot(), graph=Topology())} <= set(GPUS)


def test_a_loop_is_reported_whether_its_coolant_is_read_or_not():
    def reads(tick, values):
        hot()(tick, values)
        values["coolant"] = {"coolant.supply_temperature": np.array([SUPPLY]), "coolant.flow": np.array([300.0])}

    assert {f.entity for f in run_detector(reads)} == {LOOP}


def test_an_air_cooled_rack_is_reported_as_the_rack():
    graph = Topology({**topology().parents, **{f"node:n{n}": ("rack:r0",) for n in range(4)}, "rack:r0": ()})
    found = run_detector(hot(range(len(GPUS))), graph=graph)
    assert {f.entity for f in found} == {"rack:r0"}
    assert found[-1].level == "page"


def test_a_unit_that_throttles_as_the_detector_starts_is_reported():
    found = run_detector(hot(since=0), 100)
    assert {f.entity for f in found} == {LOOP}
    assert found[0].time == CASE.time(1)


@pytest.mark.slow
def test_idle_and_spare_gpus_are_not_part_of_it():
    def spare(tick, values):
        """One of the three nodes never worked."""
        hot()(tick, values)
        values["gpu"]["gpu.power"][:WIDTH] = 90.0

    def rest(tick, values):
        hot()(tick, values)
        if tick >= SINCE - 10:
            values["gpu"]["gpu.power"][:], values["gpu"]["gpu.temperature"][:] = 90.0, SUPPLY + 4

    assert LOOP not in {f.entity for f in run_detector(spare)}
    assert LOOP not in {f.entity for f in run_detector(rest)}


def test_gpus_that_report_no_power_count_as_working():
    def change(tick, values):
        hot()(tick, values)
        values["gpu"]["gpu.power"][:] = np.nan

    assert first(run_detector(change), "page").entity == LOOP


def test_readings_that_are_lost_neither_begin_nor_end_it():
    def nothing(tick, values):
        hot()(tick, values)
        values["gpu"]["gpu.throttle_reasons"][:] = np.nan

    def holes(tick, values):
        hot()(tick, values)
        if tick % 3:
            for column in values["gpu"].values():
                column[:] = np.nan

    assert run_detector(nothing) == []
    found = run_detector(holes, 200)
    assert {f.entity for f in found} == {LOOP}
    assert len({f.onset for f in found}) == 1
    assert found[-1].level == "page"


def test_maintenance_of_the_loop_gives_no_finding():
    def change(tick, values):
        hot()(tick, values)
        return [Event(CASE.time(tick), LOOP, "maintenance_start", {"reason": "filter"})] if tick == SINCE - 1 else None

    assert run_detector(change) == []


@pytest.mark.parametrize("named", [LOOP, "site:all"])
def test_a_loop_accepted_as_normal_gives_no_finding_until_it_is_over(named):
    def blinks(tick, values):
        if tick % 6:
            hot(until=200)(tick, values)
        hot(since=300)(tick, values)

    detector = Thermal()
    assert run_detector(blinks, 120, detector)[-1].entity == LOOP
    detector.accept_as_normal(named, {})
    assert run_detector(blinks, 180, detector, 120) == []
    assert {f.entity for f in run_detector(blinks, 20, detector, 300)} == {LOOP}


def test_feedback_on_one_node_does_not_change_the_loop():
    detector = Thermal()
    run_detector(hot(), 120, detector)
    detector.accept_as_normal("node:n0", {})
    assert {f.entity for f in run_detector(hot(), 30, detector, 120)} == {LOOP}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [40, SINCE + 1, SINCE + 30, SINCE + 100])
def test_a_restart_changes_nothing(stop):
    first, second = Thermal(), Thermal()
    whole = run_detector(hot(until=SINCE + 90))
    parts = run_detector(hot(until=SINCE + 90), stop, first)
    second.restore(first.snapshot())
    assert parts + run_detector(hot(until=SINCE + 90), 180 - stop, second, stop) == whole


class Unmonitored(Trial):
    """A simulated fleet whose coolant units and leak ropes are not monitored."""

    def __init__(self, *args):
        super().__init__(*args)
        add, tell = self.framer.add_rows, self.framer.add_events
        self.framer.add_rows = lambda rows: None if rows.device_class in COOLANT else add(rows)
        self.framer.add_events = lambda events: tell(e for e in events if class_of_entity(e.entity) not in COOLANT)


def warmed(trial):
    """Findings with 34 K more at the supply of the first of two loops, from 1800 s on, for 40 min."""
    kind = FacilityWater(rise=34.0, days=1.0, course="step")
    line = Line(kind, 1800.0, 4200.0, "cdu:sim-c1")
    mine = trial(Scenario(6000.0, 10.0, None, Fleet(40, 8), (line,)), 1)
    for _ in mine.run():
        pass
    return mine, mine.judged()


@pytest.mark.slow
def test_simulated_warm_water_of_an_unmonitored_unit_is_one_page_on_its_loop_after_a_ticket():
    trial, judged = warmed(Unmonitored)
    seconds = lambda time: (time - trial.simulator.time_at(0.0)) / SECOND  # noqa: E731
    mine = {f.level: seconds(f.time) for f in judged.findings if (f.detector, f.entity) == ("thermal", "cdu:sim-c1")}
    assert mine["ticket"] - 1800 <= 300  # the water warms within 300 s
    assert mine["page"] - mine["ticket"] <= 660
    thermal = [f for f in judged.findings if f.detector == "thermal"]
    assert {f.entity for f in thermal if f.level == "page"} == {"cdu:sim-c1"}
    beside = [f for f in thermal if f.entity != "cdu:sim-c1" and f.level != "suspect"]
    assert all(seconds(f.time) <= mine["ticket"] for f in beside)
    paged = [i for i in judged.incidents if i.severity == "page"]
    assert [i.cause for i in paged] == ["cdu:sim-c1"]
    assert paged[0].resolved is not None
    assert not next(d for d in trial.runner.detectors if d.name == "thermal").throttling.units


@pytest.mark.slow
def test_simulated_warm_water_of_a_monitored_unit_is_one_page_of_coolant_and_thermal():
    _, judged = warmed(Trial)
    assert [(i.cause, i.detector) for i in judged.incidents if i.severity == "page"] == [("cdu:sim-c1", "coolant")]
