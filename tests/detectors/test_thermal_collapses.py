"""GPUs of a loop that hardly flows: their plates are not judged or learned; and the false alarm budget of heat."""

from __future__ import annotations

import numpy as np
import pytest

from detectors import configured
from detectors.corroboration import LATE, Corroboration
from detectors.heat.exclusions import CoolantCollapses
from detectors.heat.thermal import Thermal
from pipeline.model.records import SECOND, Event, Finding
from tests.detectors.cases.case import at_known_site
from tests.detectors.cases.thermal import CASE, GPUS, GUILTY, PLATE, SUPPLY, heat, topology

AT = GPUS.index(GUILTY)
LOTTERY = np.random.default_rng(3).normal(0, 0.1, len(GPUS))


def event_at(tick: int, state: str, entity: str = "cdu:c1", kind: str = "flow_collapse") -> Event:
    data = {"state": state, "since": CASE.time(tick), "signal": "coolant.flow", "value": 30.0, "usual": 300.0}
    return Event(CASE.time(tick), entity, kind, data)


def run_detector(plates, events, ticks, detector=None):
    """Findings; `plates(tick)` is the factor of each plate, `events` those of the agent by tick."""
    detector, graph, found = detector or Thermal(), topology(), []
    for tick in range(ticks):
        values = heat(np.random.default_rng([tick, 1]), PLATE * np.exp(LOTTERY) * plates(tick), SUPPLY)
        mine = [events[tick]] if tick in events else []
        found += detector.observe(CASE.frames_of(tick, values, mine, graph))
    return found


def guilty(factor, since, until=10**9):
    def plates(tick):
        return np.where((np.arange(len(GPUS)) == AT) & (since <= tick < until), factor, 1.0)

    return plates


def test_a_gpu_that_deviates_during_low_flow_of_its_loop_is_not_blamed():
    flat = {60: event_at(60, "active"), 150: event_at(150, "cleared")}
    assert run_detector(guilty(1.4, 60, 150), flat, 260) == []
    assert {f.entity for f in run_detector(guilty(1.4, 60, 150), {}, 260)} == {GUILTY}


def test_a_fault_that_outlasts_the_collapse_is_found_after_it():
    found = run_detector(guilty(1.4, 60), {60: event_at(60, "active"), 90: event_at(90, "cleared")}, 240)
    assert {f.entity for f in found} == {GUILTY}
    assert found[0].time > CASE.time(90) + 300 * SECOND
    assert found[-1].level == "page"


def test_a_resistance_during_a_collapse_is_not_learned():
    """A job that starts on a dry loop: plates lose different flow, which is not the silicon."""
    flat = {1: event_at(1, "active", kind="pressure_collapse"), 60: event_at(60, "cleared", kind="pressure_collapse")}
    assert run_detector(guilty(0.8, 0, 60), flat, 300) == []
    assert {f.entity for f in run_detector(guilty(0.8, 0, 60), {}, 300)} == {GUILTY}


def test_a_collapse_without_an_end_event_excludes_for_an_hour_and_that_of_another_loop_never():
    lost = run_detector(guilty(1.4, 60), {60: event_at(60, "active")}, 560)
    assert lost[0].time > CASE.time(60) + 3600 * SECOND
    other = run_detector(guilty(1.4, 60), {60: event_at(60, "active", "cdu:elsewhere")}, 200)
    assert other[-1].level == "page"


def test_collapses_survive_a_restart_and_invalid_events():
    collapses, graph = CoolantCollapses(), topology()
    invalid = [Event(CASE.time(1), "cdu:c1", "flow_collapse", data) for data in ({}, {"state": 7}, {"state": "gone"})]
    values = heat(np.random.default_rng(1), np.full(len(GPUS), PLATE), SUPPLY)
    frames = CASE.frames_of(1, values, invalid, graph)
    collapses.update(frames)
    assert collapses.cooled_by(frames["gpu"]) is None
    collapses.update(CASE.frames_of(2, values, [event_at(2, "active")], graph))
    again = CoolantCollapses()
    again.restore(collapses.snapshot())
    assert again.cooled_by(frames["gpu"]).all()


@pytest.mark.parametrize(("later", "explains"), [(LATE // SECOND + 10, False), (30, True), (-30, True)])
def test_a_collapse_explains_only_the_heat_that_began_about_when_it_did(later, explains):
    """`later`: s by which the collapse began after the GPU had become warm."""
    time, first = CASE.time(500), CASE.time(300)
    warm = Finding(time, first, GUILTY, "thermal", "suspect", 1.0, "warm", {}, ("gpu.temperature",))
    dry = Finding(time, first + later * SECOND, "cdu:c1", "coolant_edge", "page", 1.0, "dry", {}, ("coolant.flow",))
    found = Corroboration().corroborate([warm, dry], time, topology())
    assert {f.detector: "corroborated_by" in f.evidence for f in found} == {"thermal": explains, "coolant_edge": False}


@pytest.mark.parametrize(
    ("name", "setting", "value", "word"),
    [
        *(("thermal", "worn", 0.1, "wear"), ("coolant", "collapse", 0.5, "collapse"), ("thermal_edge", "least", 5, "")),
        ("coolant", "threshold", 21.0, "flow"),
    ],
)
def test_the_false_alarm_budget_follows_the_settings(name, setting, value, word):
    both = [configured(), configured({name: {setting: value}})]
    lines = [[x for x in next(d for d in mine if d.name == name).budget() if x.startswith(word)] for mine in both]
    assert lines[0]
    assert lines[0] != lines[1]


def test_a_plate_repaired_while_its_gpu_was_idle_is_not_reported_when_work_continues():
    detector, graph, found = at_known_site(Thermal()), topology(), []
    for tick in range(300):
        rng, idle = np.random.default_rng([tick, 1]), 120 <= tick < 200
        values = heat(rng, PLATE * np.exp(LOTTERY) * guilty(2.0, 60, 160)(tick), SUPPLY)
        if idle:
            values["gpu"] |= {"gpu.power": np.full(len(GPUS), 80.0), "gpu.temperature": np.full(len(GPUS), 36.0)}
        new = detector.observe(CASE.frames_of(tick, values, [], graph))
        found += new if tick >= 120 else []
        assert tick != 119 or detector.conditions[GUILTY]["level"] == "page"
    assert found == []
