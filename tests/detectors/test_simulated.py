"""Detectors and Desk on the simulator's fleet: right on the demo scenario, silent on a quiet day."""

from __future__ import annotations

import pytest

from agents.sim.scenario import Fleet, Scenario, demo
from benchmarks.detection.judge import judge
from detectors.scoring.score import ANSWER_RULES
from pipeline.model.records import SECOND


@pytest.fixture
def judged():
    """Returns (findings, incidents, the simulator) of a simulated fleet."""

    def run(scenario, seed):
        result = judge(scenario, seed)
        return result.findings, result.incidents, result.simulator

    return run


@pytest.mark.slow
def test_every_fault_of_the_demo_becomes_one_incident_with_the_right_cause(judged):
    _, incidents, simulator = judged(demo(), 1)
    paged = [i for i in incidents if i.severity == "page"]
    assert sorted(i.cause for i in paged) == sorted(fault.entity for fault in simulator.faults)
    for fault in simulator.faults:
        incident = next(i for i in paged if i.cause == fault.entity)
        assert incident.detector in ANSWER_RULES[fault.kind.name].detectors
        assert 0 <= incident.opened - simulator.time_at(fault.onset) <= 900 * SECOND


@pytest.mark.slow
def test_a_quiet_day_of_128_gpus_is_silent(judged):
    found, incidents, _ = judged(Scenario(86_400.0, 10.0, None, Fleet(16, 8)), 1)
    assert found == []
    assert incidents == []


@pytest.mark.slow
def test_a_quiet_morning_with_lost_rows_is_silent(judged):
    found, _, _ = judged(Scenario(6 * 3600.0, 10.0, None, Fleet(4, 8, missing=0.05)), 2)
    assert [f for f in found if f.level != "suspect"] == []
