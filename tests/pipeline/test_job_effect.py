"""The effect of an incident on a job in words: when it has recovered, and when its results are in doubt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.impact_rows import ImpactWriter, list_job_incidents, load_books
from pipeline.model.job_effect import describe_effect
from pipeline.model.records import Finding, iso
from pipeline.store.database import Database
from tests.pipeline.test_impact import MINUTE, T0, World


def find_wrong(world: World, entity: str, detector: str = "sdc", **evidence: Any) -> None:
    """Passes a finding of wrong results, as its detector repeats it."""
    found = Finding(world.time, T0 + 20 * MINUTE, entity, detector, "page", 1.0, "wrong results", evidence)
    world.book.publish([], [found], world.time)


def doubt(*jobs: str, since: int = T0 + 20 * MINUTE) -> dict[str, Any]:
    return {"jobs_in_doubt": list(jobs), "last_clean_before": iso(since) if since else "unknown"}


def effect(world: World, name: str = "job:81") -> str:
    job = world.job(name)
    return describe_effect(job["state"], job["slowdown"], job["basis"])


def wrong_world(**more: Any) -> World:
    """A GPU of job 81 gave wrong results since minute 20, which an incident reports at minute 30."""
    world = World()
    world.run(30)
    opened = world.open("gpu:n0.3")
    opened.detector = "sdc"
    find_wrong(world, "gpu:n0.3", **{**doubt("job:81"), **more})
    world.run(1)
    return world


SINCE = f"results in doubt since {iso(T0 + 20 * MINUTE)[:19]}Z"


def test_the_effect_of_wrong_results_is_since_when_they_are_in_doubt() -> None:
    world = wrong_world()
    assert effect(world) == SINCE
    assert world.job()["state"] == "unaffected"
    assert world.impact()["text"] == f"job 81: {SINCE}"


def test_a_job_that_is_slow_too_says_both() -> None:
    world = wrong_world()
    world.run(10, j81=1.25)
    assert effect(world) == f"{SINCE}; 25 % slower than before the onset: step time 1.25 s, was 1.00 s"
    assert f"48 GPUs, {SINCE}; " in world.impact()["text"]


def test_results_stay_in_doubt_after_right_ones_and_after_an_exchange_but_not_if_the_device_was_right() -> None:
    world = wrong_world()
    find_wrong(world, "gpu:n0.3", cleared=True, state="cleared", retest="clean")
    world.run(20)
    assert effect(world) == SINCE
    find_wrong(world, "gpu:n0.3", cleared=True, state="exchanged", retest="superseded")
    world.run(1)
    assert effect(world) == SINCE
    find_wrong(world, "gpu:n0.3", cleared=True, state="cleared", retest="superseded")
    assert effect(world).startswith("not slower than before the onset")


def test_a_job_that_left_the_gpu_before_is_in_doubt_and_no_more_is_said_of_its_pace() -> None:
    world = wrong_world(**doubt("job:81", "job:82", "job:70"))
    world.run(20, j82=2.0)
    assert (effect(world, "job:82"), effect(world, "job:70")) == (SINCE, SINCE)
    assert (world.job("job:82")["state"], world.impact()["lost_gpu_hours"]) == ("unknown", 0.0)
    world.open("node:n7", id_="inc-2")
    world.run(5, j82=2.0)
    assert "counted in" not in world.job("job:82", "inc-2")["basis"]


def test_without_a_right_result_before_it_is_not_known_since_when() -> None:
    assert effect(wrong_world(**doubt("job:81", since=0))) == "results in doubt since an unknown time"


@pytest.mark.parametrize(("main", "doubtful"), [("sdc_gradient", True), ("straggler", False)])
def test_wrong_gradients_put_the_reached_jobs_in_doubt_in_an_incident_about_them(main: str, doubtful: bool) -> None:
    world = World()
    world.run(30)
    opened = world.open("gpu:n0.3")
    opened.detector = main
    find_wrong(world, "gpu:n0.3", "sdc_gradient")
    world.run(1)
    assert (effect(world) == SINCE) == doubtful


def test_a_restart_and_the_incidents_of_the_job_keep_the_doubt(tmp_path: Path) -> None:
    world = wrong_world(**doubt("job:81", "job:70"))
    opened = world.book.tracked["inc-1"].incident
    database = Database(tmp_path / "store.duckdb")
    try:
        with database.transaction() as connection:
            ledger.write_changes(connection, [], [Change("updated", opened, world.time, "fleetpulse")], [], world.time)
            ImpactWriter(world.book).write(connection, world.time)
        (harm,) = list_job_incidents(database.connection, "job:81")
        assert describe_effect(harm["state"], harm["slowdown"], harm["basis"]) == SINCE
        again = World()
        load_books(database.connection, again.book, [opened], world.time)
        stored = again.book.tracked["inc-1"].jobs
        assert stored == world.book.tracked["inc-1"].jobs
        assert (stored["job:81"].reached, stored["job:70"].reached) == (True, False)
        ((kept,),) = database.connection.execute("SELECT state FROM impact").fetchall()
        assert {"doubt", "reached"}.isdisjoint(json.loads(kept)[0]), "the version before knows no such fields"
    finally:
        database.close()


@pytest.mark.parametrize(("slow", "state"), [(2, "unaffected"), (12, "recovered")])
def test_only_a_job_that_lost_a_minute_of_all_its_gpus_has_recovered(slow: int, state: str) -> None:
    world = World()
    world.run(30)
    world.open("gpu:n0.3")
    world.run(slow, j81=1.25)
    assert world.job()["state"] == "slow"
    world.run(10, j81=1.01)
    job = world.job()
    assert job["state"] == state
    assert job["lost_gpu_hours"] > 0
    measured = {"unaffected": "not slower than before the onset: step time 1.01 s, was 1.00 s"}
    assert effect(world) == measured.get(state, f"recovered: {job['basis']}")
    assert world.impact()["text"].startswith(f"reaches 1 rank of job 81, {effect(world)}")
