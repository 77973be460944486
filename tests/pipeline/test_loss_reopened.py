"""What jobs lost while an incident was resolved is not added when it is open again, unless their steps show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.impact_rows import ImpactWriter, load_books, load_losses
from pipeline.incidents.job_loss import JobLoss
from pipeline.incidents.job_pace import MINUTE, JobPace
from pipeline.model.records import SECOND, Incident
from pipeline.store.database import Database
from tests.pipeline.test_impact import World
from tests.pipeline.test_loss_counted_once import end_job, lost, start_job

Read = Callable[[str], dict[str, JobLoss]]


def reopen(world: World, incident: Incident, read: Read = lambda incident: {}) -> None:
    again = replace(incident, resolved=None)
    world.book.publish([Change("reopened", again, world.time, "ann")], [], world.time, read)


@pytest.mark.parametrize("hours", [2, 10])
def test_an_incident_that_comes_back_counts_only_the_minutes_in_which_the_job_was_slow(hours: int) -> None:
    world = World()
    world.run(65)
    incident = world.open("gpu:n0.3")
    world.run(20, j81=1.3)
    world.resolve(incident)
    world.run(60 * hours)
    world.run(5, j81=1.3)
    reopen(world, incident)
    world.run(5, j81=1.3)
    assert lost(world) == pytest.approx(48 * 0.5 * (1 - 1 / 1.3), rel=0.02)


def test_a_hang_whose_ranks_reported_it_while_the_incident_was_resolved_counts() -> None:
    world = World()
    world.run(65)
    incident = world.open("gpu:n0.3")
    world.run(10, j81=0)
    world.resolve(incident)
    world.run(30, j81=0)
    reopen(world, incident)
    world.run(5, j81=0)
    assert lost(world) == pytest.approx(48 * 45 / 60, rel=0.02)


def test_a_hang_that_nobody_reported_while_the_incident_was_resolved_does_not_count() -> None:
    world = World()
    world.run(65)
    incident = world.open("gpu:n0.3")
    world.run(10, j81=0)
    world.resolve(incident)
    world.hooked = {"job:82"}
    world.run(600, j81=0)
    reopen(world, incident)
    assert lost(world) == pytest.approx(8.0, rel=0.02)


def test_a_job_without_steps_loses_nothing_while_the_incident_is_resolved() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    incident = world.open("node:n1")
    for _ in range(10):
        world.find("telemetry", "node:n1", "host")
        world.run(1)
    world.resolve(incident)
    world.run(600)
    world.find("telemetry", "node:n1", "host")
    reopen(world, incident)
    world.run(5)
    assert lost(world) == pytest.approx(48 * 15 / 60, rel=0.03)


@pytest.mark.parametrize("waits", [20, 600])
def test_a_job_that_ran_again_or_ended_while_the_incident_was_resolved_loses_no_time_by_that(waits: int) -> None:
    world = World()
    world.run(65)
    incident = world.open("gpu:n0.3")
    world.run(10, j81=0)
    ranks = end_job(world, 81)
    world.run(1, j81=0)
    world.resolve(incident)
    before = world.job()["lost_gpu_hours"]
    world.run(waits, j81=0)
    start_job(world, ranks)
    world.run(30)
    reopen(world, incident)
    world.run(5)
    assert lost(world) == pytest.approx(before, rel=0.02)


def test_an_incident_that_comes_back_after_a_restart_knows_no_pace_of_before(tmp_path: Path) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    world.run(65)
    incident = world.open("gpu:n0.3")
    world.run(20, j81=1.3)
    world.resolve(incident)
    try:
        with database.transaction() as connection:
            ledger.write_changes(connection, [], [Change("updated", incident, world.time, "x")], [], world.time)
            ImpactWriter(world.book).write(connection, world.time)
        before = world.job()["lost_gpu_hours"]
        again = World()
        again.time = world.time + 600 * MINUTE
        load_books(database.connection, again.book, [], again.time)
        again.run(0.5, j81=1.3)
        reopen(again, incident, lambda id_: load_losses(database.connection, id_))
        again.run(10, j81=1.3)
        assert lost(again) == pytest.approx(before + 48 * 10.5 / 60 * (1 - 1 / 1.3), rel=0.05)
    finally:
        database.close()


def test_time_before_the_kept_minutes_is_not_counted() -> None:
    pace, now = JobPace(), 1_790_000_040 * SECOND
    for tick in range(60):
        pace.add(now + tick * 10 * SECOND, 2.0, 5.0 * tick)
    end = now + 10 * MINUTE
    assert pace.measure_loss(1.0, now - 600 * MINUTE, end, end) == pytest.approx(10 * MINUTE / 2, rel=0.03)
