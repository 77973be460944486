"""The newest step of a job as pages show it: as of the newest instant, and not of the last minute that was stored."""

from __future__ import annotations

from pathlib import Path

from pipeline.incidents.impact_rows import ImpactWriter, list_jobs, load_books
from pipeline.incidents.jobs import Pulse
from pipeline.model.records import iso
from pipeline.store.database import Database
from tests.pipeline.test_impact import MINUTE, World


def pulse(world: World) -> Pulse:
    return world.book.jobs.pulses["job:81"]


def test_the_newest_step_is_as_old_as_the_newest_instant_in_which_one_was_made() -> None:
    world = World()
    world.run(5, j81=7.0)
    ages = []
    for _ in range(18):
        world.run(1 / 6, j81=7.0)
        ages.append(world.time - pulse(world).moved)
    assert set(ages) == {0}, "a step of 7 s ends in each instant of 10 s"
    world.run(1, j81=0)
    assert (world.time - pulse(world).moved, world.time - pulse(world).reported) == (MINUTE, 0)
    assert not pulse(world).hangs
    world.run(2, j81=0)
    assert pulse(world).hangs


def test_ranks_that_report_nothing_are_told_from_ranks_that_make_no_step() -> None:
    world = World()
    world.run(5)
    world.hooked = {"job:82"}
    world.run(1)
    assert world.time - pulse(world).reported == MINUTE
    assert world.book.jobs.pulses["job:82"].reported == world.time


def test_an_ended_job_has_no_pulse() -> None:
    world = World()
    world.run(5)
    for rank in [rank for rank in world.topology.parents if rank.startswith("rank:82.")]:
        del world.topology.parents[rank]
    world.topology.version += 1
    world.run(1)
    assert set(world.book.jobs.pulses) == {"job:81"}


def test_a_hang_and_its_end_are_stored_though_no_minute_ends_and_a_restart_keeps_the_newest_step(
    tmp_path: Path,
) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    writer = ImpactWriter(world.book)

    def write() -> str:
        with database.transaction() as connection:
            writer.write(connection, world.time)
        writer.done(world.time)
        return str(next(job["state"] for job in list_jobs(database.connection) if job["job"] == "job:81"))

    try:
        world.run(10.5)
        assert write() == "running"
        moved = pulse(world).moved
        world.run(2, j81=0)
        assert write() == "running"
        world.run(1, j81=0)
        assert write() == "hanging"
        again = World()
        load_books(database.connection, again.book, [], world.time)
        assert again.book.jobs.paces.jobs["job:81"].moved_at == moved
        assert again.book.jobs.pulses == {}
        world.run(0.5)
        assert write() == "running"
        assert list_jobs(database.connection)[0]["last_step"] == iso(pulse(world).moved)
    finally:
        database.close()
