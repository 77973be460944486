"""Detectors and Desk on the simulator's fleet: right on the demo scenario, silent on a quiet day."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Scenario, demo
from detectors import configured
from detectors.replay import Cases
from detectors.runner import Runner
from detectors.score import COUNTS
from pipeline.frames import Framer
from pipeline.incidents import Desk
from pipeline.records import SECOND, Rows
from pipeline.topology import Topology


@pytest.fixture
def judged():
    """Everything that is said of a simulated fleet: (findings, incidents, the simulator)."""

    def run(scenario, seed):
        simulator = FleetSimulator(scenario, seed)
        topology = Topology(simulator.layout.parents)
        framer = Framer(10 * SECOND, topology, lambda c: simulator.layout.entities.get(c, ()))
        runner, cases, found = Runner(configured()), Cases(Desk(topology)), []
        for chunk in simulator.chunks():
            for device_class, columns in chunk.columns.items():
                devices = np.arange(len(simulator.entities(device_class)), dtype=np.int32)
                flat = {name: values.reshape(-1) for name, values in columns.items()}
                time = np.repeat(chunk.times, len(devices))
                framer.add(Rows(device_class, time, np.tile(devices, len(chunk.times)), flat))
            framer.add_events(event for _, event in chunk.events if event.kind != "inventory")
            for instant in framer.advance(int(chunk.times[-1]) + 1):
                findings = runner.observe(instant.frames)
                cases.observe(instant, findings)
                found += findings
        assert runner.errors == {}
        return found, cases.all(), simulator

    return run


def test_every_fault_of_the_demo_becomes_one_incident_with_the_right_cause(judged):
    _, incidents, simulator = judged(demo(), 1)
    paged = [i for i in incidents if i.severity == "page"]
    assert sorted(i.cause for i in paged) == sorted(fault.entity for fault in simulator.faults)
    for fault in simulator.faults:
        incident = next(i for i in paged if i.cause == fault.entity)
        assert incident.detector in COUNTS[fault.kind.name].detectors
        assert 0 <= incident.opened - simulator.at(fault.onset) <= 900 * SECOND


@pytest.mark.slow
def test_a_quiet_day_of_512_gpus_is_silent(judged):
    found, incidents, _ = judged(Scenario(86_400.0, 10.0, None, Fleet(64, 8)), 1)
    assert found == []
    assert incidents == []


def test_a_quiet_morning_with_lost_rows_is_silent(judged):
    found, _, _ = judged(Scenario(6 * 3600.0, 10.0, None, Fleet(4, 8, missing=0.05)), 2)
    assert [f for f in found if f.level != "suspect"] == []
