"""Edge events of agents become findings that page when they must, last while the condition does, and end."""

from __future__ import annotations

import numpy as np
import pytest

from detectors import configured
from detectors.heat.coolant_edge import CoolantEdge
from detectors.heat.coolant_leak import CoolantLeak
from detectors.heat.thermal_edge import ThermalEdge
from detectors.runner import Runner
from pipeline.incidents.desk import QUIET_PERIOD, Desk
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
ROPE, LOOP = "leak_detector:c0.hose", "cdu:c0"
HEAT = {"value": 71.0, "rise": 11.0, "seconds": 5.0, "slope": 1.4}


def edge(tick, entity, kind, state="active", **data):
    time = START + tick * STEP
    return Event(time, entity, kind, {"state": state, "since": time - SECOND, **data})


def with_events(*events):
    """A change that reports each event in its tick."""
    return lambda tick, values: [e for e in events if e.time == START + tick * STEP]


def leak(tick, word):
    return edge(tick, ROPE, "leak", leak=word, value={"warning": 1, "critical": 2}[word])


def flow(tick, state="active", value=120.0):
    return edge(tick, LOOP, "flow_collapse", state, signal="coolant.flow", value=value, usual=300.0, share=0.7)


def rise(tick, entity, signal="gpu.temperature", state="active"):
    return edge(tick, entity, "temperature_rise", state, signal=signal, **HEAT)


# --- leaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "level"), [("warning", "ticket"), ("critical", "page")])
def test_a_leak_is_reported_with_its_event_and_lasts_until_it_is_cleared(site, watch, word, level):
    events = with_events(leak(3, word), edge(40, ROPE, "leak", "cleared", leak="ok", value=0))
    found = watch(CoolantLeak(), site, 60, lambda tick, values: values["leak"].clear() or events(tick, values))
    assert found[0].time == START + 3 * STEP
    assert found[0].onset == START + 3 * STEP - SECOND
    assert {f.level for f in found} == {level}
    assert all(f.evidence["holds"] for f in found[:-1])
    assert (found[-1].evidence["cleared"], found[-1].time) == (True, START + 40 * STEP)


def test_a_warning_that_becomes_critical_rises_and_keeps_its_onset(site, watch):
    events = with_events(leak(3, "warning"), leak(9, "critical"))
    found = watch(CoolantLeak(), site, 20, lambda tick, values: values["leak"].clear() or events(tick, values))
    by_level = {f.level: f for f in found}
    assert list(by_level) == ["ticket", "page"]
    assert len({f.onset for f in found}) == 1


def test_a_leak_and_its_end_are_found_in_the_telemetry_when_the_events_are_lost(site, watch):
    def wet(tick, values):
        values["leak"]["leak.state"][1] = 2.0 if 5 <= tick < 20 else np.nan if tick < 25 else 0.0
        return ()

    found = watch(CoolantLeak(), site, 40, wet)
    assert (found[0].time, found[0].level) == (START + 5 * STEP, "page")
    assert (found[-1].evidence.get("cleared"), found[-1].time) == (True, START + 26 * STEP)


def test_a_broken_or_absent_leak_detector_neither_starts_nor_ends_a_leak(site, watch):
    def broken(tick, values):
        values["leak"]["leak.state"][1] = (3.0, 4.0, 77.0, np.nan)[tick % 4]
        return [leak(8, "critical")] if tick == 8 else ()

    found = watch(CoolantLeak(), site, 100, broken)
    assert found[0].time == START + 8 * STEP
    assert not any(f.evidence.get("cleared") for f in found)


@pytest.mark.parametrize("data", [{}, {"state": 1}, {"state": "active", "since": "x"}, {"state": "active", "leak": []}])
def test_events_of_another_shape_are_ignored(site, watch, data):
    events = [Event(START, e, k, data) for e in (ROPE, LOOP) for k in ("leak", "flow_collapse", "temperature_rise")]
    for detector in (CoolantLeak(), CoolantEdge()):
        assert watch(detector, site, 3, with_events(*events)) == []


# --- flow and pressure -----------------------------------------------------------------------------------------------


def low(events, ticks):
    def change(tick, values):
        if tick in ticks:
            values["coolant"]["coolant.flow"][0] = 120.0
        return with_events(*events)(tick, values)

    return change


def test_a_collapse_pages_with_its_event_and_ends_with_its_event(site, watch):
    found = watch(CoolantEdge(), site, 60, low([flow(5), flow(30, "cleared", 299.0)], range(5, 30)))
    assert found[0].summary == "CDU c0: flow 120 L/min, minimum 210"
    assert {(f.entity, f.level) for f in found} == {(LOOP, "page")}
    assert found[0].time == START + 5 * STEP
    assert START + 23 * STEP <= found[-1].time < START + 30 * STEP


def test_a_collapse_is_reported_with_the_newest_flow_under_its_limit(site, watch):
    def run_down(tick, values):
        values["coolant"]["coolant.flow"][0] = {5: 120.0, 6: 100.0}.get(tick, 85.0) if tick >= 5 else 300.0
        return with_events(flow(5))(tick, values)

    found = watch(CoolantEdge(), site, 40, run_down)
    ends = [f.summary.partition(";")[0] for f in (found[0], found[-1])]
    assert ends == [f"CDU c0: flow {n} L/min, minimum 210" for n in (120, 85)]


def test_a_collapse_that_was_over_within_the_frame_is_a_suspect_once(site, watch):
    time = START + 5 * STEP
    over = Event(time + 6 * SECOND, LOOP, "flow_collapse", {**flow(5).data, "state": "cleared"})
    found = watch(CoolantEdge(), site, 20, lambda tick, values: [flow(5), over] if tick == 5 else ())
    assert [(f.level, f.entity) for f in found] == [("suspect", LOOP)]


def test_a_collapse_whose_end_was_lost_ends_with_two_good_frames(site, watch):
    found = watch(CoolantEdge(), site, 200, low([flow(5)], range(5, 30)))
    assert found[-1].time <= START + 31 * STEP


def test_a_loop_that_is_not_read_is_not_reported_until_it_is_read_again(site, watch):
    def gone(tick, values):
        values["coolant"]["coolant.flow"][0] = 120.0 if tick < 20 or tick > 60 else np.nan
        return with_events(flow(5))(tick, values)

    times = [(f.time - START) // STEP for f in watch(CoolantEdge(), site, 80, gone)]
    assert not [t for t in times if 20 <= t <= 60]
    assert [t for t in times if t > 60]


# --- heat ------------------------------------------------------------------------------------------------------------


def test_one_gpu_that_heats_up_is_a_suspect_and_three_of_a_node_are_a_page_on_the_node(site, watch):
    alone = watch(ThermalEdge(), site, 10, with_events(rise(3, "gpu:n1.0")))
    assert {(f.entity, f.level) for f in alone} == {("gpu:n1.0", "suspect")}
    found = watch(ThermalEdge(), site, 10, with_events(rise(3, "gpu:n1.0"), rise(5, "gpu:n1.1"), rise(6, "gpu:n1.2")))
    assert [(f.entity, f.level) for f in found if f.level == "page"] == [("node:n1", "page")]
    spread = watch(
        ThermalEdge(), site, 60, with_events(rise(3, "gpu:n1.0"), rise(20, "gpu:n1.1"), rise(45, "gpu:n1.2"))
    )
    assert {f.level for f in spread} == {"suspect"}


def test_a_gpu_that_heats_up_below_a_collapsed_loop_is_explained_by_it(site, watch):
    change = low([flow(4), rise(5, "gpu:n1.0")], range(4, 60))
    found = watch(Runner([CoolantEdge(), ThermalEdge()]), site, 12, change)
    (warm,) = [f for f in found if f.detector == "thermal_edge"][-1:]
    assert warm.evidence["corroborated_by"] == {"detector": "coolant_edge", "entity": LOOP}


def test_warm_supply_alone_is_a_suspect_and_with_a_gpu_behind_it_a_page(site, watch):
    supply = rise(3, LOOP, "coolant.supply_temperature")
    assert {f.level for f in watch(ThermalEdge(), site, 10, with_events(supply))} == {"suspect"}
    found = watch(ThermalEdge(), site, 10, with_events(supply, rise(6, "gpu:n1.0")))
    assert {f.entity for f in found if f.level == "page"} == {LOOP}


@pytest.mark.slow
def test_the_same_sensor_twice_does_not_count_as_two(site, watch):
    def warm(tick, values):
        if tick > 200:
            values["coolant"]["coolant.supply_temperature"][0] += 4.0
        return with_events(rise(201, LOOP, "coolant.supply_temperature"))(tick, values)

    found = watch(Runner(configured()), site, 215, warm)
    mine = [f for f in found if f.detector == "thermal_edge"]
    assert {f.level for f in mine} == {"suspect"}
    assert not any("corroborated_by" in f.evidence for f in mine)


# --- incidents -------------------------------------------------------------------------------------------------------


def test_a_leak_opens_one_page_that_ends_only_when_dry(site, watch):
    topology = Topology({ROPE: [LOOP], LOOP: ["rack:r1"], "node:n0": ["rack:r1", LOOP]})
    runner, desk, opened = Runner([CoolantLeak(), CoolantEdge()]), Desk(topology), []
    for tick in range(240):
        values = {"leak": {"leak.state": np.array([0.0, 0.0 if tick < 3 or tick > 120 else 2.0])}}
        events = [leak(3, "critical")] if tick == 3 else []
        events += [edge(122, ROPE, "leak", "cleared", leak="ok", value=0)] if tick == 122 else []
        opened += desk.observe(START + tick * STEP, runner.observe(site.frames(tick, values, events)))
    first, last = opened[0].incident, opened[-1].incident
    assert (first.severity, first.cause, first.members) == ("page", ROPE, (ROPE,))
    assert last.id == first.id
    assert last.resolved is not None
    assert last.resolved >= START + 122 * STEP + QUIET_PERIOD
    assert topology.ancestors(ROPE) == (LOOP, "rack:r1")


def test_a_leak_and_the_resulting_collapse_are_one_incident_on_the_unit(site, watch):
    runner, desk, changes = Runner([CoolantLeak(), CoolantEdge()]), Desk(site.topology), []
    for tick in range(30):
        values = site.values()
        events = []
        if tick >= 3:
            values["coolant"]["coolant.flow"][0] = 90.0
            values["leak"]["leak.state"][1] = 2.0
            events = [flow(3), leak(3, "critical")] if tick == 3 else []
        changes += desk.observe(START + tick * STEP, runner.observe(site.frames(tick, values, events)))
    open_now = {c.incident.id: c.incident for c in changes if c.incident.resolved is None}
    assert [i.cause for i in open_now.values()] == [LOOP]
    assert set(next(iter(open_now.values())).members) == {LOOP, ROPE}


HOSTILE = [float("nan"), float("inf"), -float("inf"), 10**400, "9", None, True]


@pytest.mark.parametrize("bad", HOSTILE, ids=str)
def test_invalid_numbers_of_an_agent_are_in_no_finding(site, watch, bad):
    heat = edge(3, "gpu:n0.0", "temperature_rise", signal=bad, **dict.fromkeys(HEAT, bad))
    lost = edge(3, LOOP, "flow_collapse", signal="coolant.flow", value=bad, usual=bad, share=bad)
    for detector, events in ((ThermalEdge(), heat), (CoolantEdge(), lost)):
        found = watch(detector, site, 20, with_events(events))
        assert found
        assert "nan" not in str([(f.summary, f.evidence, f.signals) for f in found])
        assert "inf" not in str([(f.summary, f.evidence, f.signals) for f in found])


def test_one_infinite_pressure_is_not_a_reading_and_the_frames_after_it_are_judged(site, watch):
    def change(tick, values):
        if tick == 0:
            values["coolant"]["coolant.pressure"][0] = np.inf

    detector = CoolantEdge()
    assert watch(detector, site, 60, change) == []
    assert detector.usual[0] == pytest.approx(2.0, rel=0.02)
