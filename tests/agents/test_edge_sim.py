"""Edge rules over the simulator's fleet: silent on a quiet day, and quick when a pump fails."""

from __future__ import annotations

import numpy as np
import pytest

from agents.collector import Reading
from agents.node.edge.rules import EdgeRules
from agents.sim.faults.facility import CoolantLoss
from agents.sim.faults.slow import Straggler
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Line, Scenario
from pipeline.config.sections import Edge as Settings
from pipeline.model.records import SECOND, Event

CLASSES = ("gpu", "coolant")


def simulate_events(scenario: Scenario, seed: int) -> tuple[list[Event], FleetSimulator]:
    """The events of the rules for a simulated fleet, evaluated at each tick."""
    simulator, found = FleetSimulator(scenario, seed), []
    edge = EdgeRules(Settings())
    names = {c: tuple(simulator.entities(c)) for c in CLASSES}
    for chunk in simulator.chunks():
        for k, time in enumerate(chunk.times.tolist()):
            columns = {c: {n: v[k] for n, v in chunk.columns[c].items()} for c in CLASSES}
            for c in CLASSES:
                if "gpu.temperature" in columns[c]:
                    columns[c]["gpu.temperature"] = np.rint(columns[c]["gpu.temperature"])
                found += edge.evaluate(time, [Reading(c, names[c], columns[c])])
    return found, simulator


@pytest.mark.slow
def test_a_quiet_hour_at_one_second_is_silent() -> None:
    found, _ = simulate_events(Scenario(3600.0, 1.0, None, Fleet(2, 8)), 1)
    assert found == []


def test_a_quiet_hour_with_lost_readings_is_silent() -> None:
    found, _ = simulate_events(Scenario(3600.0, 1.0, None, Fleet(1, 8, missing=0.05)), 2)
    assert found == []


def test_a_failing_pump_is_reported_within_seconds_and_a_slow_gpu_is_not() -> None:
    names = FleetSimulator(Scenario(10.0, 1.0, None, Fleet(2, 8)), 3).entities("coolant")
    pump = Line(CoolantLoss(flow=0.4, ramp=2.0), 900.0, 1200.0, names[0])
    slow = Line(Straggler(slowdown=0.2, reason=0.0), 300.0, 600.0)
    found, simulator = simulate_events(Scenario(1500.0, 1.0, None, Fleet(2, 8), (pump, slow)), 3)
    begun = [e for e in found if e.data["state"] == "active" and e.kind != "temperature_rise"]
    assert {(e.entity, e.kind) for e in begun} == {(names[0], "flow_collapse"), (names[0], "pressure_collapse")}
    onset = simulator.time_at(900.0)
    assert all(0 < e.time - onset <= 4 * SECOND for e in begun)  # the pump needs 1 to 2 s to run down so far
    over = {e.kind for e in found if e.data["state"] == "cleared"}
    assert {"flow_collapse", "pressure_collapse"} <= over
