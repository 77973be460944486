"""Scenario files: accepted values, and errors that name file, key and fix."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from agents.sim.fault_plan import FaultPlan
from agents.sim.faults.facility import CoolantLoss
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import demo
from agents.sim.scenario_file import load
from pipeline.model.errors import UsageError
from pipeline.model.records import iso

BASE = "version = 1\nduration = 600\ninterval = 10\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return path


def test_a_scenario_file_is_read_completely(tmp_path: Path) -> None:
    text = BASE + (
        "start = 2026-03-01T00:00:00Z\n[fleet]\nnodes = 3\ngpus_per_node = 4\n"
        '[[fault]]\nkind = "coolant"\nonset = 100\nend = 200\nflow = 0.5\n'
        '[[fault]]\nkind = "sdc"\nentity = "gpu:sim-n002.1"\nonset = 50\n'
    )
    scenario = load(written(tmp_path, text))
    simulator = FleetSimulator(scenario, 1)
    assert iso(simulator.start) == "2026-03-01T00:00:00.000000Z"
    assert (simulator.layout.nodes, simulator.layout.gpus_per_node, scenario.ticks) == (3, 4, 60)
    assert [(f.kind.name, f.entity, f.onset, f.end) for f in simulator.faults] == [
        ("coolant", "cdu:sim-c1", 100.0, 200.0),
        ("sdc", "gpu:sim-n002.1", 50.0, 600.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[[", "is not TOML"),
        ("duration = 1\ninterval = 1\n", "version = None; expected version = 1"),
        ("version = 2\nduration = 1\ninterval = 1\n", "version = 2"),
        ("version = 1\ninterval = 1\n", "duration: missing"),
        ("version = 1\nduration = 'x'\ninterval = 1\n", "duration"),
        ("version = 1\nduration = -1\ninterval = 1\n", "duration = -1.0: out of range"),
        (
            "version = 1\nduration = inf\ninterval = 1\n",
            "duration = inf: out of range; expected seconds above 0, at most 10 years",
        ),
        ("version = 1\nduration = nan\ninterval = 1\n", "duration = nan"),
        ("version = 1\nduration = 1e18\ninterval = 1\n", "duration = 1e+18"),
        ("version = 1\nduration = 600\ninterval = nan\n", "interval = nan"),
        (
            BASE + "start = 9999-12-31T23:59:00Z\n",
            "start = 9999-12-31T23:59:00.000000Z: out of range; expected a time from 1970",
        ),
        (BASE + "start = 0001-01-01T00:00:00+05:00\n", "start = "),
        (BASE + "[live]\nevery = nan\n", "[live] every = nan"),
        (BASE + "[live]\nevery = 60\nhours = inf\n", "[live] hours = inf"),
        (BASE + "[live]\nevery = 1e-9\n", "expected an interval that gives at most 1,000,000 faults in 168 h"),
        (
            BASE + "[[fault]]\nkind = 'sdc'\nonset = nan\n",
            "[[fault]] 1: onset = nan; expected seconds after the start, a finite number",
        ),
        (BASE + "[[fault]]\nkind = 'sdc'\nonset = 10\nend = inf\n", "[[fault]] 1: end = inf; expected seconds"),
        (BASE + "intervall = 3\n", "did you mean 'interval'?"),
        (BASE + "start = 'noon'\n", "start = 'noon'"),
        (BASE + "[fleet]\nnode = 3\n", "did you mean 'nodes'?"),
        (BASE + "[fleet]\nnodes = 0\n", "[fleet] nodes"),
        (BASE + "[[fault]]\nonset = 3\n", "[[fault]] 1: kind: missing"),
        (BASE + "[[fault]]\nkind = 'stragler'\nonset = 3\n", "did you mean 'straggler'?"),
        (BASE + "[[fault]]\nkind = 'sdc'\n", "onset = None"),
        (BASE + "[[fault]]\nkind = 'sdc'\nonset = 10\nend = 5\n", "expected end after onset"),
        (BASE + "[[fault]]\nkind = 'sdc'\nonset = 10\nprobabilty = 0.5\n", "did you mean 'probability'?"),
        (BASE + "[[fault]]\nkind = 'sdc'\nonset = 10\nprobability = 1.5\n", "expected 0 to 1"),
        (BASE + "[fault]\nkind = 'sdc'\n", "expected [[fault]]"),
        (
            BASE + "[[fault]]\nkind = 'hbm_ce_burst'\nonset = 1\nend = 1e9\ndecades = 8\n",
            "decades = 8.0; expected 0 to 5",
        ),
        (BASE + "[[faults]]\nkind = 'sdc'\n", "did you mean '[[fault]]'?"),
    ],
)
def test_an_invalid_scenario_is_refused_with_a_suggested_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        load(written(tmp_path, text))
    assert "scenario.toml" in str(error.value)
    assert message in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("kind", ["optic_degradation", "nvlink_error", "link_degradation", "sdc", "link_flap"])
def test_a_fault_that_ends_long_after_the_scenario_is_still_simulated(tmp_path: Path, kind: str) -> None:
    fault = f"[[fault]]\nkind = '{kind}'\nonset = 10\nend = 1e300\n"
    simulator = FleetSimulator(load(written(tmp_path, BASE + "[fleet]\nnodes = 1\n" + fault)), 1)
    assert simulator.faults[0].end == 600 + 30 * 86_400
    assert sum(len(chunk.times) for chunk in simulator.chunks()) == 60
    assert simulator.truth()[0]["end"] == "2026-01-01T00:10:00.000000Z"


def test_faults_of_the_demo_can_end_after_its_duration() -> None:
    scenario = demo()
    layout = FleetSimulator(scenario, 1).layout
    for live in (True, False):
        ends = [f.end for f in FaultPlan.plan(scenario, layout, 1, live).faults[:5]]
        assert ends == [line.end for line in scenario.faults]


def test_a_missing_scenario_is_named() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: cannot be read"):
        load("nowhere.toml")


def test_an_entity_outside_the_fleet_is_refused(tmp_path: Path) -> None:
    scenario = load(written(tmp_path, BASE + "[[fault]]\nkind = 'sdc'\nentity = 'gpu:n1.1'\nonset = 3\n"))
    with pytest.raises(UsageError, match=r"not in this fleet; expected one of gpu:sim-n001\.0"):
        FleetSimulator(scenario, 1)


def test_the_demo_has_each_required_fault_late_and_one_that_ended_long_before() -> None:
    scenario = demo()
    last = scenario.duration - 90 * 60
    assert {line.kind.name for line in scenario.faults} >= {"sdc", "link_degradation", "straggler", "coolant"}
    assert all(line.onset >= last for line in scenario.faults)
    assert any(line.end < scenario.duration - 15 * 60 for line in scenario.faults)
    assert any(line.end > scenario.duration for line in scenario.faults)
    assert scenario.fleet.nodes >= 64
    assert FleetSimulator(scenario, 1).world.instruments.margins, "the time to throttling is predicted from them"


@pytest.mark.slow
def test_live_faults_begin_every_couple_of_minutes_and_only_if_requested() -> None:
    scenario = demo()
    layout = FleetSimulator(scenario, 1).layout
    live = [f for f in FaultPlan.plan(scenario, layout, 1, True).faults if f.onset > scenario.duration]
    gaps = [b.onset - a.onset for a, b in itertools.pairwise(live)]
    assert live[0].onset - scenario.duration < 60
    assert all(100 < gap < 200 for gap in gaps)
    assert {f.kind.name for f in live} == {"sdc", "link_degradation", "straggler", "coolant"}
    assert all(f.kind.ramp >= 300 for f in live if isinstance(f.kind, CoolantLoss)), "to be seen while GPUs warm"
    assert FaultPlan.plan(scenario, layout, 1, True).faults == FaultPlan.plan(scenario, layout, 1, True).faults
    assert len(FaultPlan.plan(scenario, layout, 1, False).faults) == len(scenario.faults)


def test_a_fault_after_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "late.toml"
    path.write_text(
        "version = 1\nduration = 600\ninterval = 1\n[fleet]\nnodes = 1\ngpus_per_node = 8\n"
        "[[fault]]\nkind = 'sdc'\nonset = 900\nend = 1000\n"
    )
    with pytest.raises(UsageError, match="expected it before the end of the scenario at 600 s"):
        load(str(path))
