"""Evaluation of simulated fleets: bounded, exact over a restart, with the right location of each rank."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from agents.sim.faults.facility import CoolantLoss
from agents.sim.faults.slow import Straggler
from agents.sim.scenario import Fleet, Jobs, Line, Rates, Scenario
from benchmarks.detection.judge import PARTS, STEP, Trial, judge
from benchmarks.detection.results import result_of
from pipeline.model.records import LEVELS, iso

BROKEN = Scenario(
    duration=2.5 * 3600,
    interval=10.0,
    fleet=Fleet(8, 8, missing=0.01, jitter=5.0),
    faults=(
        Line(Straggler(slowdown=0.25), 2000.0, 5000.0),
        Line(CoolantLoss(flow=0.4), 5800.0, 7800.0),
    ),
    jobs=Jobs(0.5),
)


def report_text(result):
    """All findings and truth of a result, as text."""
    lines = [f.as_json() for f in result.findings] + [i.as_json() for i in result.incidents] + result.truth
    return "\n".join(json.dumps(line) for line in lines)


@pytest.fixture(scope="module")
def complete_run():
    return judge(BROKEN, 3)


@pytest.mark.slow
def test_faults_are_found_in_a_fleet_with_changing_jobs(complete_run):
    paged = {i.cause for i in complete_run.incidents if i.severity == "page"}
    assert {line["entity"] for line in complete_run.truth if line["class"] != "benign"} <= paged


@pytest.mark.slow
@pytest.mark.parametrize("segments", [1, 3])
def test_a_killed_run_continues_from_its_checkpoint_with_the_same_bytes(complete_run, tmp_path, segments):
    place, seen = tmp_path / "checkpoint", []
    stopped = judge(BROKEN, 3, place, 0.5, lambda trial: not seen.append(trial.ticks) and len(seen) < segments)
    assert stopped is None
    assert place.exists()
    resumed = judge(BROKEN, 3, place, 0.5)
    assert report_text(resumed) == report_text(complete_run)
    assert (resumed.samples, resumed.node_days) == (complete_run.samples, complete_run.node_days)
    assert not place.exists(), "a run that is over leaves no checkpoint"


@pytest.mark.slow
def test_a_result_has_the_locations_of_all_ranks_in_findings(complete_run):
    named = {f.entity for f in complete_run.findings if f.entity.startswith("rank:")}
    lines = result_of(complete_run, "")["placed"]
    assert named
    assert named <= {rank for line in lines for rank in line["data"]["ranks"]}
    starts = {
        iso(complete_run.simulator.time_at(allocation.begin))
        for allocation in complete_run.simulator.schedule.allocations
    }
    assert {line["time"] for line in lines} <= starts


def test_every_tick_is_evaluated_including_the_last():
    trial, seen = Trial(replace(BROKEN, duration=600.0, faults=()), 3), []
    applied = trial.membership.apply_instant
    trial.membership.apply_instant = lambda instant: seen.append(instant.time) or applied(instant)
    assert max(trial.run()) == trial.ticks == 60
    first, last = trial.simulator.start, trial.simulator.time_at(590.0)
    assert [cell for t in seen if first <= (cell := t // STEP * STEP) <= last] == list(range(first, last + 1, STEP))


def test_a_checkpoint_is_complete_or_absent(tmp_path, monkeypatch):
    place = tmp_path / "checkpoint"
    assert judge(BROKEN, 3, place, 0.5, lambda _: False) is None
    before = place.read_bytes()
    trial = Trial.load(place, BROKEN, 3)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        trial.save(place)
    assert place.read_bytes() == before


@pytest.mark.slow
def test_only_changes_of_a_condition_are_kept(complete_run):
    levels = Counter((f.key, f.level) for f in complete_run.findings)
    assert set(levels.values()) == {1}
    rising = {}
    for finding in complete_run.findings:
        level = LEVELS.index(finding.level)
        assert level > rising.get(finding.key, -1)
        rising[finding.key] = level


@pytest.mark.slow
def test_a_rank_is_in_the_topology_only_while_its_job_runs():
    """At every moment the topology has exactly the ranks that run in the simulator's schedule."""
    trial = Trial(replace(BROKEN, faults=()), 5)
    gpus, looks = trial.simulator.layout.entities["gpu"], 0
    for ticks in trial.run(every=60):
        now = (ticks - 2) * BROKEN.interval  # the cell of the last tick is not evaluated yet
        running = {
            rank: gpus[gpu]
            for allocation in trial.simulator.schedule.allocations
            if allocation.begin <= now < allocation.end
            for rank, gpu in zip(allocation.job.names, allocation.gpus.tolist(), strict=True)
        }
        known = {e: p[-1] for e, p in trial.topology.parents.items() if e.startswith("rank:")}
        if ticks < BROKEN.ticks:
            assert known == running
            looks += 1
    assert looks > 10
    assert len({allocation.job.name for allocation in trial.simulator.schedule.allocations}) > 1


@pytest.mark.slow
def test_cpu_time_samples_and_node_days_are_reported(complete_run):
    assert set(complete_run.seconds) == set(PARTS)
    assert all(spent > 0 for spent in complete_run.seconds.values())
    assert complete_run.node_days == pytest.approx(8 * 2.5 / 24)
    assert complete_run.samples > 8 * 8 * BROKEN.ticks * 10


def test_a_detector_that_fails_fails_the_run(monkeypatch):
    monkeypatch.setattr("detectors.link.link.Link.observe", lambda self, frames: 1 / 0)
    with pytest.raises(RuntimeError, match=r"detectors failed: {'link': \d+}"):
        judge(replace(BROKEN, duration=600.0, faults=(), rates=Rates()), 1)
