"""Ranks that are slow from their first sample: a ticket within minutes, a page once the device shows it."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.runner import Runner
from detectors.straggler.straggler import Straggler
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology
from tests.detectors.snapshots import packed

START, STEP = 1_790_000_000 * SECOND, 10 * SECOND
HOUR = 360  # ticks


class Job:
    """A job whose stages fill whole nodes of 8 GPUs in order, with compute times set by the test."""

    def __init__(self, seed: int, nodes: int, stages: int = 1, job: str = "7") -> None:
        self.rng, self.size = np.random.default_rng(seed), nodes * 8
        self.ranks = tuple(f"rank:{job}.{i}" for i in range(self.size))
        self.gpus = tuple(f"gpu:n{i // 8}.{i % 8}" for i in range(self.size))
        self.stage = np.arange(self.size) * stages // self.size
        self.topology = Topology({gpu: [f"node:n{i // 8}"] for i, gpu in enumerate(self.gpus)})
        self.place(job, range(self.size))
        self.times = 3.0 * (1 + 0.3 * self.stage)  # stages differ by design
        self.times *= 1 + 0.01 * self.rng.standard_normal(self.size)  # and so do devices
        self.noise = float(self.rng.uniform(0.005, 0.03))
        self.clock = np.full(self.size, 1950.0)
        self.bits = np.zeros(self.size)

    def place(self, job, where) -> None:
        """Rank i runs on GPU `where[i]`."""
        self.where = np.array(list(where))
        parents = {r: [f"stage:{job}.{s}", f"job:{job}", self.gpus[g]]
                   for r, s, g in zip(self.ranks, self.stage, self.where, strict=True)}  # fmt: skip
        self.topology.merge(parents)

    def frames(self, tick: int, events=()) -> dict[str, Frame]:
        time = START + tick * STEP
        compute = self.times * (1 + self.noise * self.rng.standard_normal(self.size))
        columns = {"gpu.sm_clock": self.clock.copy(), "gpu.throttle_reasons": self.bits.copy()}
        mine = {"rank.compute_time": compute, "rank.step": np.full(self.size, float(tick + 1000))}
        return {
            "gpu": Frame(time, "gpu", self.gpus, columns, self.topology, tuple(events)),
            "rank": Frame(time, "rank", self.ranks, mine, self.topology),
        }


def run(job, ticks, observer=None, first=0, events=None):
    observer = observer or Straggler()
    return [f for t in range(first, first + ticks) for f in observer.observe(job.frames(t, (events or {}).get(t, ())))]


def loudest(found):
    """Entity -> (highest level, minutes until it was reported)."""
    reported = {}
    for level in ("suspect", "ticket", "page"):
        for f in found:
            if f.level == level:
                reported.setdefault((f.entity, level), (f.time - START) / 60 / SECOND)
    return {e: (lv, reported[e, lv]) for e, lv in reported}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [101, 102])
@pytest.mark.parametrize(("nodes", "stages", "slowdown"), [(4, 1, 1.4), (6, 2, 2.0), (16, 4, 1.3), (9, 3, 3.0)])
def test_a_rank_that_is_far_slower_from_its_first_sample_pages(seed, nodes, stages, slowdown):
    job = Job(seed, nodes, stages)
    guilty = int(job.rng.integers(job.size))
    job.times[guilty] *= slowdown
    found = run(job, HOUR)
    (only,) = loudest(found).items()
    assert only == (f"rank:7.{guilty}", ("page", pytest.approx(7.0, abs=0.7)))
    ticket = next(f for f in found if f.level == "ticket")
    assert (ticket.time - START) / 60 / SECOND == pytest.approx(3.5, abs=0.5)
    assert ticket.onset == START
    assert "slow since it started: more work or a slow device" in ticket.evidence["cause"]
    assert ticket.evidence["slowdown"] == pytest.approx(slowdown, rel=0.1)
    assert ticket.signals == ("rank.compute_time",)


def test_a_rank_with_more_work_since_its_start_hides_no_rank_that_becomes_slow():
    """A rank with a busy expert, for example."""
    job = Job(5, 16)
    job.times[17] *= 1.27
    observer = Straggler()
    run(job, 100, observer)
    job.times[40] *= 1.35
    found = loudest([f for f in run(job, 100, observer, first=100) if f.entity == "rank:7.40"])
    assert found["rank:7.40"][0] == "page"


@pytest.mark.parametrize(("slower", "level"), [(1.2, "ticket"), (1.8, "page")])
def test_a_node_that_is_slow_from_its_first_sample_is_one_finding(slower, level):
    """Identical GPUs differ by 22 % at most: up to there it may be the spread of manufacture, or more work."""
    job = Job(5, 6)
    job.times[16:24] *= slower
    assert {e: level for e, (level, _) in loudest(run(job, HOUR)).items()} == {"node:n2": level}


def test_a_node_slow_since_its_start_does_not_page_because_it_was_slower_for_minutes():
    """19 % may be the spread of manufacture: what it paused for says nothing of the rest."""
    job = Job(5, 6)
    job.times[16:24] *= 1.19
    detector = Straggler()
    run(job, 100, detector)
    job.times[16:24] *= 1.2
    found = run(job, 15, detector, 100)
    job.times[16:24] /= 1.2
    found += run(job, 100, detector, 115)
    assert "page" not in {f.level for f in found}, "a ticket at most"


@pytest.mark.parametrize("clock", [0.5, 0.75])
def test_a_clock_far_below_that_of_its_stage_from_the_start_is_a_page(clock):
    job = Job(6, 4, 2)
    job.times[9] /= clock
    job.clock[9] *= clock
    found = run(job, HOUR)
    assert loudest(found)["rank:7.9"] == ("page", pytest.approx(3.5, abs=0.5))
    page = next(f for f in found if f.level == "page")
    assert page.evidence["sm_clock_below_stage"] == pytest.approx(1 - clock, abs=0.03)
    assert "gpu.sm_clock" in page.signals


@pytest.mark.slow
def test_two_slow_clocks_on_two_nodes_are_two_pages():
    job = Job(6, 4, 2)
    for slow in (1, 9):
        job.times[slow] *= 2
        job.clock[slow] /= 2
    assert {e: level for e, (level, _) in loudest(run(job, HOUR)).items()} == {"rank:7.1": "page", "rank:7.9": "page"}


def test_a_power_cap_explains_a_low_clock_so_that_it_is_a_suspect():
    job = Job(6, 4, 2)
    job.times[9] /= 0.75
    job.clock[9] *= 0.75
    job.bits[9] = 4
    assert {level for level, _ in loudest(run(job, HOUR)).values()} == {"suspect"}


@pytest.mark.slow
@pytest.mark.parametrize("share", ["stage", "expert", "first and last"])
def test_work_divided_unevenly_by_design_is_not_a_ticket(share):
    """A stage with more work; the same busy expert in every replica; a job that does not report its stages."""
    job = Job(10, 8, 4 if share != "first and last" else 1)
    if share == "stage":
        job.times[job.stage == 3] *= 1.8
    elif share == "expert":
        job.times[np.arange(job.size) % 8 == 5] *= 1.6
    else:
        job.times[:8] *= 1.5
        job.times[-8:] *= 1.4
    assert {f.level for f in run(job, HOUR)} <= {"suspect"}


@pytest.mark.parametrize("seed", range(200, 204))
def test_healthy_jobs_have_no_finding(seed):
    assert run(Job(seed, 4 + seed % 5, 1 + seed % 3), HOUR) == []


@pytest.mark.slow
def test_a_gap_in_which_the_job_made_steps_does_not_restart_the_wait_for_a_page():
    job, detector = Job(11, 4), Straggler()
    job.times[3] *= 2
    run(job, 120, detector)
    found = run(job, HOUR, detector, 200)
    assert loudest(found)["rank:7.3"] == ("page", pytest.approx(200 / 6, abs=1))


@pytest.mark.slow
def test_a_slow_rank_accepted_as_normal_gives_no_finding_also_after_a_restart():
    job, runner = Job(12, 4), Runner([Straggler()])
    job.times[3] *= 2
    assert "ticket" in {f.level for f in run(job, HOUR, runner)}
    feedback = Event(START + HOUR * STEP, "rank:7.3", "feedback", {"detector": "straggler", "verdict": "not_a_fault"})
    assert run(job, 60, runner, HOUR, {HOUR: (feedback,)}) == []
    state, runner = packed(runner), Runner([Straggler()])
    runner.restore(state)
    assert run(job, 2 * HOUR, runner, HOUR + 60) == []
    job.times[3] *= 1.5
    assert "page" in {f.level for f in run(job, HOUR, runner, 3 * HOUR + 60)}, "a rank slower than accepted is found"


@pytest.mark.slow
def test_a_restart_during_the_wait_gives_the_same_findings():
    whole, parts = Job(13, 4), Job(13, 4)
    for job in (whole, parts):
        job.times[3] *= 2
    expected = run(whole, HOUR, Runner([Straggler()]))
    first, second = Runner([Straggler()]), Runner([Straggler()])
    found = run(parts, 100, first)
    second.restore(packed(first))
    assert [*found, *run(parts, HOUR - 100, second, 100)] == expected
