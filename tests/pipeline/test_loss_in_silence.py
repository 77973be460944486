"""Missing telemetry of a job is no hang, and its steps after it say what it lost until then."""

from __future__ import annotations

import pytest

from tests.pipeline.test_impact import MINUTE, World
from tests.pipeline.test_loss_counted_once import end_job, lost, merge

ALL = {"job:81", "job:82"}


def fall_silent(world: World, minutes: float, step_time: float) -> None:
    """Job 81 makes steps of some seconds (0: none), and no rank of it reports them."""
    world.hooked = {"job:82"}
    world.run(minutes, j81=step_time)
    world.hooked = ALL


def test_a_job_without_telemetry_is_not_said_to_hang_and_its_steps_show_that_it_did_not() -> None:
    world = World()
    world.run(90)
    last = world.time
    fall_silent(world, 1, 1.0)
    world.open("rack:r0", onset=last, members=("node:n0", "node:n1", "node:n2", "node:n3"))
    fall_silent(world, 3, 1.0)
    job = world.job()
    assert (job["state"], job["lost_gpu_hours"], job["lost_gpu_hours_per_hour"]) == ("unknown", 0.0, 0.0)
    assert job["basis"] == "slowdown not measured: no report of its ranks for 4 min"
    assert not world.book.jobs.pulses["job:81"].hangs
    world.run(5)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("unaffected", 0.0)


@pytest.mark.parametrize("silent", [3.5, 30, 60])
@pytest.mark.parametrize("step_time", [1.0, 1.3, 2.0])
def test_silence_costs_what_the_steps_made_in_it_leave_over(step_time: float, silent: float) -> None:
    world = World()
    world.run(65)
    world.open("gpu:n0.3")
    world.run(20, j81=step_time)
    before = world.job()["lost_gpu_hours"]
    fall_silent(world, silent, step_time)
    assert world.job()["lost_gpu_hours"] == pytest.approx(before, abs=0.2)
    world.run(10, j81=step_time)
    assert lost(world) == pytest.approx(48 * (30 + silent) / 60 * (1 - 1 / step_time), rel=0.02, abs=0.05)


def test_a_silence_in_which_the_job_stood_still_for_a_part_costs_that_part() -> None:
    world = World()
    world.run(65)
    world.open("gpu:n0.3")
    world.run(5)
    fall_silent(world, 30, 1.0)
    fall_silent(world, 10, 0)
    world.run(10)
    assert lost(world) == pytest.approx(48 * 10 / 60, rel=0.02)


def test_a_hang_is_counted_up_to_the_last_report_and_wholly_once_the_old_step_comes_again() -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    world.run(4, j81=0)
    fall_silent(world, 20, 0)
    job = world.job()
    assert (job["state"], job["lost_gpu_hours_per_hour"]) == ("hanging", 0.0)
    assert job["lost_gpu_hours"] == pytest.approx(48 * 4 / 60, rel=0.01)
    assert job["basis"].startswith("no step for 4 min, then no report for 20 min")
    world.run(1, j81=0)
    assert lost(world) == pytest.approx(48 * 25 / 60, rel=0.01)
    world.run(10)
    assert lost(world) == pytest.approx(48 * 25 / 60, rel=0.01)


def test_a_hang_whose_ranks_agents_have_dropped_goes_on() -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    world.run(10, j81=0)  # STALE_S of an agent
    fall_silent(world, 20, 0)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("hanging", pytest.approx(24.0, rel=0.01))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("step_time", "left"), [(1.0, 0.0), (2.0, 2.4)])
def test_a_loss_that_a_finding_said_is_taken_back_by_the_steps_after_it(
    merged: bool, step_time: float, left: float
) -> None:
    world = World()
    world.run(90)
    opened = world.open("node:n1")
    for _ in range(6):
        world.find("telemetry", "node:n1", "host")
        fall_silent(world, 1, step_time)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("lost", pytest.approx(4.8, rel=0.02))
    if merged:
        world.open("leaf:l1", id_="inc-kept")
        merge(world, opened, "inc-kept")
    world.run(5)
    assert lost(world) == pytest.approx(left, abs=0.1)


def test_an_end_that_is_known_after_reports_and_findings_have_stopped_takes_back_what_came_after_it() -> None:
    world = World()
    world.run(90)
    world.open("node:n1")
    begun = world.time
    world.find("telemetry", "node:n1", "host")
    fall_silent(world, 15, 0)  # the finding counts for 10 min
    assert world.job()["lost_gpu_hours"] == pytest.approx(8.0, rel=0.03)
    end_job(world, 81, at=begun + 2 * MINUTE)
    world.run(1, j81=0)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * 2 / 60, rel=0.05)


def test_a_restart_from_a_checkpoint_in_a_silence_costs_it_and_the_steps_made_again() -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    fall_silent(world, 10, 0)
    world.steps["job:81"] -= 600
    world.run(20)
    assert lost(world) == pytest.approx(16.0, rel=0.02)
