"""A restart of the pipeline forgets no step number, and so neither the steps made again nor those made in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.impact_rows import ImpactWriter, load_books
from pipeline.model.records import SECOND
from pipeline.store.database import Database
from tests.pipeline.test_impact import World
from tests.pipeline.test_loss_counted_once import lost


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Database]:
    database = Database(tmp_path / "store.duckdb")
    yield database
    database.close()


class Site:
    """A world whose pipeline commits each minute, and begins again from the store."""

    def __init__(self, store: Database) -> None:
        self.store = store
        self._take(World())

    def _take(self, world: World) -> None:
        self.world, self.writer = world, ImpactWriter(world.book)

    def run(self, minutes: float, **step_times: float) -> None:
        for reading in range(round(minutes * 6)):
            self.world.run(1 / 6, **step_times)
            if reading % 6 == 5:
                self.save()

    def save(self) -> None:
        world = self.world
        with self.store.transaction() as connection:
            changes = [Change("updated", t.incident, world.time, "x") for t in world.book.tracked.values()]
            ledger.write_changes(connection, [], changes, [], world.time)
            self.writer.write(connection, world.time)
        self.writer.done(world.time)

    def restart(self, away: float = 0.0, **step_times: float) -> None:
        """away: minutes in which the jobs go on and nothing is read."""
        old, again = self.world, World()
        open_ = [tracked.incident for tracked in old.book.tracked.values()]
        load_books(self.store.connection, again.book, open_, old.time)
        again.time, again.steps = old.time + int(away * 60 * SECOND), old.steps
        for job, seconds in {"j81": 1.0, "j82": 1.0, **step_times}.items():
            again.steps[f"job:{job[1:]}"] += away * 60 / seconds if seconds else 0
        self._take(again)


def test_a_restart_of_the_pipeline_in_a_hang_forgets_no_steps_made_again(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(10, j81=0)
    site.restart()
    site.run(10, j81=0)
    site.world.steps["job:81"] -= 600
    site.run(15)
    assert lost(site.world) == pytest.approx(24.0, rel=0.02)


def test_a_restart_of_the_pipeline_before_a_hang_forgets_no_steps_made_again(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(2)
    site.restart()
    site.run(10, j81=0)
    site.world.steps["job:81"] -= 600
    site.run(15)
    assert lost(site.world) == pytest.approx(16.0, rel=0.05)


def test_steps_made_again_cost_no_more_than_they_take_if_the_job_was_slow_before_the_onset() -> None:
    world = World()
    world.run(20)
    world.run(50, j81=3.0)
    world.open("gpu:n0.3")
    world.run(9, j81=0)
    world.steps["job:81"] -= 300
    world.run(10)
    assert lost(world) == pytest.approx(48 * (9 + 5) / 60, rel=0.05)


@pytest.mark.parametrize("step_time", [1.0, 2.0])
def test_the_first_step_after_a_restart_says_what_the_job_did_meanwhile(store: Database, step_time: float) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(10, j81=step_time)
    site.restart(20, j81=step_time)
    site.run(0.5, j81=step_time)
    assert site.world.job()["state"] == ("unaffected" if step_time == 1.0 else "slow")
    site.run(9.5, j81=step_time)
    assert lost(site.world) == pytest.approx(48 * 40 / 60 * (1 - 1 / step_time), rel=0.03, abs=0.1)


def test_a_job_that_loaded_a_checkpoint_while_the_pipeline_was_away_makes_steps_again(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(5, j81=0)
    site.world.steps["job:81"] -= 300
    site.restart(10, j81=0)
    site.run(10)
    assert lost(site.world) == pytest.approx(48 * (15 + 5) / 60, rel=0.03)


def test_ranks_a_step_apart_are_no_step_after_a_restart(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(5, j81=0)
    site.world.steps["job:81"] += 1
    site.restart(0, j81=0)
    site.run(1, j81=0)
    assert (site.world.job()["state"], lost(site.world)) == ("hanging", pytest.approx(4.8, rel=0.02))


def test_a_hang_whose_ranks_agents_have_dropped_goes_on_after_a_restart(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    site.world.open("gpu:n0.3")
    site.run(10, j81=0)
    site.world.hooked = {"job:82"}
    site.run(5, j81=0)
    site.restart()
    site.world.hooked = {"job:82"}
    site.run(15, j81=0)
    assert (site.world.job()["state"], lost(site.world)) == ("hanging", pytest.approx(24.0, rel=0.02))


def test_a_store_of_an_older_version_and_one_that_it_wrote_since_have_no_step_numbers(store: Database) -> None:
    site = Site(store)
    site.world.run(64)
    site.run(1)
    moved = site.world.book.jobs.paces.jobs["job:81"].moved_at
    store.connection.execute("UPDATE jobs SET moved = moved + INTERVAL 1 HOUR")
    site.restart()
    pace = site.world.book.jobs.paces.jobs["job:81"]
    assert (pace.moved_at > moved, pace.step >= 0) == (True, False)
    store.connection.execute("DELETE FROM meta WHERE key = 'job_steps'")
    site.restart()
    assert not site.world.book.jobs.paces.jobs["job:81"].step >= 0
    site.world.open("gpu:n0.3")
    site.run(5)
    assert lost(site.world) == 0.0
