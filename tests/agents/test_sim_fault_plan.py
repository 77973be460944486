"""Faults of jobs: on running jobs, one at a time, and included in the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from agents.sim.confounders.cluster import JobRestart, Maintenance
from agents.sim.faults.cluster import HostFault, JobHang
from agents.sim.faults.gpu import GpuEngineFault
from agents.sim.faults.kind import Kind
from agents.sim.faults.link import LinkDown, LinkFlap
from agents.sim.faults.slow import PcieDowngrade, Straggler
from agents.sim.fleet import FleetSimulator
from agents.sim.scenario import Fleet, Jobs, Line, Rates, Scenario
from agents.sim.schedule import Allocation, Schedule
from detectors.scoring.matching import answer_rule
from pipeline.model.errors import UsageError

DAY = 86_400.0


def simulated(*lines: Line, nodes: int = 16) -> FleetSimulator:
    return FleetSimulator(Scenario(5400.0, 10.0, None, Fleet(nodes, 8), lines), 3)


def of_job(schedule: Schedule, name: str) -> list[Allocation]:
    return [stay for stay in schedule.allocations if stay.job.name == name]


def test_a_fault_that_ends_a_job_changes_the_schedule_and_all_later_faults() -> None:
    lines = (Line(JobHang(), 1000.0, 1900.0, "job:sim-81"), Line(JobRestart(), 3500.0, 5000.0, "job:sim-81"))
    simulator = simulated(*lines)
    stays = of_job(simulator.schedule, "sim-81")
    assert [s.end for s in stays] == [1900.0, 3500.0, np.inf]


def test_a_fault_of_a_job_ends_with_its_stay() -> None:
    lines = (Line(JobHang(), 1000.0, 2800.0, "job:sim-81"), Line(Maintenance(), 1500.0, 3000.0, "node:sim-n001"))
    simulator = simulated(*lines)
    hang = simulator.faults[0]
    assert hang.kind.name == "job_hang"
    assert hang.end == 1500.0
    assert [s.end for s in of_job(simulator.schedule, "sim-81")] == [1500.0, np.inf]  # its watchdog ends no later stay


def test_random_job_faults_affect_running_jobs_and_are_half_an_hour_apart() -> None:
    rates = Rates(kinds={"job_hang": 4e4, "data_stall": 4e4, "loss_spike": 4e4, "job_restart": 2e4}, faults=1.0)
    scenario = Scenario(DAY, 10.0, None, Fleet(16, 8), jobs=Jobs(6.0), rates=rates)
    simulator = FleetSimulator(scenario, 2)
    mine = [f for f in simulator.faults if f.kind.target == "job"]
    assert len(mine) > 20
    for fault in mine:
        stay = next(s for s in of_job(simulator.schedule, fault.entity.removeprefix("job:")) if s.end >= fault.end)
        assert stay.begin <= fault.onset or fault.kind.name == "job_restart"
    for one in mine:
        later = [f for f in mine if f.entity == one.entity and f.onset > one.onset]
        assert all(f.onset >= one.end + 1800 for f in later)


def test_a_fault_on_an_unknown_job_is_refused_and_one_on_an_idle_job_has_no_effect() -> None:
    with pytest.raises(UsageError, match=r"'job:sim-99'.*expected one of job:sim-81 to job:sim-82"):
        simulated(Line(JobHang(), 1000.0, 1900.0, "job:sim-99"))
    out = Line(Maintenance(), 500.0, 3000.0, "node:sim-n001")
    simulator = simulated(out, Line(JobHang(), 1000.0, 1900.0, "job:sim-81"), nodes=1)
    assert [f.entity for f in simulator.faults] == ["node:sim-n001", "job:sim-81"]
    assert [s.begin for s in simulator.schedule.allocations] == [0.0, 3000.0]


def test_job_faults_do_not_depend_on_the_order_of_the_lines() -> None:
    lines = [Line(JobRestart(), 3500.0, 5000.0, "job:sim-81"), Line(JobHang(), 1000.0, 1900.0, "job:sim-82")]
    one, other = simulated(*lines), simulated(*reversed(lines))
    assert [(s.job.name, s.end) for s in one.schedule.allocations] == [
        (s.job.name, s.end) for s in other.schedule.allocations
    ]


def test_a_slow_unused_gpu_is_invisible_and_a_logged_fact_never_is() -> None:
    spare = "sim-n016"  # the last eighth of the nodes trains nothing
    slow = Line(Straggler(), 600.0, 1800.0, f"gpu:{spare}.0")
    logged = Line(GpuEngineFault(origin="hardware", engine="compute"), 600.0, 1800.0, f"gpu:{spare}.1")
    simulator = FleetSimulator(Scenario(3600.0, 10.0, None, Fleet(16, 8), (slow, logged)), 1)
    lines = {line["kind"]: line for line in simulator.truth()}
    assert lines["straggler"]["class"] == "invisible"
    assert lines["straggler"]["parameters"]["idle"] is True
    assert lines["gpu_engine_fault"]["class"] == "hard"
    assert "idle" not in lines["gpu_engine_fault"]["parameters"]
    assert any(e.kind == "xid" and spare in e.entity for c in simulator.chunks() for _, e in c.events)


@pytest.mark.parametrize(
    ("kind", "device"),
    [(LinkDown(), "port:{}.mlx5_0"), (LinkFlap(flaps=3), "port:{}.mlx5_0"), (PcieDowngrade(), "gpu:{}.0")],
)
def test_a_link_without_a_job_waits_for_office_hours_and_a_busy_one_does_not(kind: Kind, device: str) -> None:
    for node, cls, level in (("sim-n003", "hard", "page"), ("sim-n016", "soft", "ticket")):
        # the last eighth of the nodes trains nothing
        (line,) = simulated(Line(kind, 600.0, 3000.0, device.format(node))).truth()
        assert (line["class"], line["parameters"].get("idle", False)) == (cls, level == "ticket")
        assert answer_rule(kind.name, line["class"]).level == level


def test_one_more_configured_fault_does_not_change_the_random_faults() -> None:
    rates = Rates(faults=200.0)
    bare, more = (
        FleetSimulator(Scenario(DAY, 10.0, None, Fleet(16, 8), lines, rates=rates), 2).faults
        for lines in ((), (Line(Straggler(), 100.0, 200.0), Line(Straggler(), 300.0, 400.0)))
    )
    hardware = [f for f in bare if f.kind.target != "job"]
    assert len(hardware) > 20
    assert hardware == [f for f in more if f.kind.target != "job"][:-2]
    assert len({f.number for f in more}) == len(more)
    alone = FleetSimulator(Scenario(DAY, 10.0, None, Fleet(16, 8), (Line(Straggler(), 100.0, 200.0),)), 2).faults[0]
    given = next(f for f in more if f.onset == 100.0)
    assert (given.kind, given.entity, given.rng_key) == (alone.kind, alone.entity, alone.rng_key)


def test_job_faults_without_a_running_job_are_counted() -> None:
    lines = tuple(Line(JobHang(), 1000.0 + n, 4000.0) for n in range(5))
    simulator = simulated(*lines)  # two jobs run, and each has one thing at a time
    assert (simulator.planned, simulator.dropped, len(simulator.faults)) == (5, 3, 2)


@pytest.mark.parametrize("part", ["cpu", "dimm", "chassis", "io_board", "ssd"])
def test_a_host_that_fails_under_a_job_is_a_logged_fact_and_without_one_a_soft_fault(part: str) -> None:
    lines = (Line(HostFault(part), 1000.0, 5000.0, f"node:sim-n{number:03}") for number in (1, 16))
    simulator = simulated(*lines, nodes=16)  # two of 16 nodes are spare
    classes = [line["class"] for line in simulator.truth()]
    assert classes == ["hard", "soft"]
    assert answer_rule("host_fault", "soft").level == "ticket"
