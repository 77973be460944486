"""What jobs lose is counted once over all incidents, goes with merged incidents, and is not said of other faults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.facts import read_fact
from pipeline.incidents.impact_rows import ImpactWriter, load_books, read_impact
from pipeline.incidents.loss_claims import LossClaims
from pipeline.model.records import SECOND, Event, Finding, Incident, Level
from pipeline.store.database import Database
from tests.pipeline.test_impact import MINUTE, World


def lost(world: World, job: str = "job:81") -> float:
    """Returns the GPU-hours of a job over all open incidents."""
    jobs = [j for i in world.book.tracked for j in world.impact(i)["jobs"]]
    return float(sum(j["lost_gpu_hours"] for j in jobs if j["job"] == job))


def rate(world: World) -> float:
    return float(sum(world.impact(i)["lost_gpu_hours_per_hour"] for i in world.book.tracked))


def end_job(world: World, *numbers: int, at: int | None = None) -> dict[str, tuple[str, ...]]:
    """Ends jobs, of which each event comes now; returns their ranks."""
    names = tuple(f"rank:{number}." for number in numbers)
    ranks = {e: p for e, p in world.topology.parents.items() if e.startswith(names)}
    world.topology.remove_entities(list(ranks))
    ended = [Event(at or world.time, f"job:{number}", "job_end", {}) for number in numbers]
    world.observe({"job:81": 0 if 81 in numbers else 1.0, "job:82": 0 if 82 in numbers else 1.0}, *ended)
    return ranks


def start_job(world: World, ranks: dict[str, tuple[str, ...]]) -> None:
    world.topology.merge(ranks, {})
    started = [Event(world.time, name, "job_start", {"ranks": {}}) for name in ("job:81", "job:82")]
    world.observe({"job:81": 1.0, "job:82": 1.0}, *started)


def merge(world: World, gone: Incident, kept: str) -> None:
    ended = replace(gone, resolved=world.time)
    world.book.publish([Change("resolved", ended, world.time, "ann", folded_into=kept)], [], world.time)


def report_down(world: World, entity: str, level: Level = "page", **evidence: Any) -> None:
    found = Finding(
        *(world.time, world.time, entity, "link", level, 1.0, f"{entity}: down", {"down_s": 20.0, **evidence})
    )
    world.book.publish([], [found], world.time)


# --- merged incidents ---------------------------------------------------------------------------------


def slow_twice(**prices: Any) -> tuple[World, Incident, Incident]:
    """Job 81 is slowed by one fault, which the first incident counts, and then by another one."""
    world = World(**prices)
    world.run(60)
    first = world.open("gpu:n0.3", id_="inc-a")
    world.run(70, j81=1.3)
    second = world.open("leaf:l1", id_="inc-b")
    world.run(20, j81=3.0)
    return world, first, second


def test_a_merge_keeps_the_sum_of_what_both_incidents_cost_and_says_where_it_is_counted() -> None:
    world, _, second = slow_twice(price_per_gpu_hour=2.0)
    parts = [world.job(id_=i)["lost_gpu_hours"] for i in ("inc-a", "inc-b")]
    assert parts == [pytest.approx(13.34, abs=0.01), pytest.approx(8.69, abs=0.01)]
    merge(world, second, "inc-a")
    kept, gone = world.impact("inc-a"), world.impact("inc-b")
    assert kept["lost_gpu_hours"] == pytest.approx(sum(parts), abs=0.01)
    assert kept["cost"]["amount"] == pytest.approx(2 * sum(parts), abs=0.02)
    assert kept["lost_gpu_hours_per_hour"] == pytest.approx(48 * (1 - 1 / 3.0))
    assert (gone["lost_gpu_hours"], gone["cost"]["amount"]) == (0.0, 0.0)
    assert gone["text"] == "job 81 131 % slower, 48 GPUs; counted in inc-a"
    world.run(10, j81=3.0)
    assert world.impact("inc-a")["lost_gpu_hours"] == pytest.approx(sum(parts) + 48 / 6 * (1 - 1 / 3.0), rel=0.01)


def test_a_merge_counts_a_job_of_the_merged_incident_alone_and_names_it_there() -> None:
    world = World()
    world.run(60)
    world.open("gpu:n0.3", id_="inc-a")
    other = world.open("gpu:n7.0", id_="inc-b")
    world.run(30, j82=2.0)
    merge(world, other, "inc-a")
    assert world.job("job:82", "inc-a")["lost_gpu_hours"] == pytest.approx(4.0, rel=0.02)
    assert world.impact("inc-b")["text"] == "job 82 100 % slower, rank 56, 16 GPUs; counted in inc-a"


def test_a_merge_into_an_incident_that_opens_in_the_same_change_keeps_the_loss() -> None:
    world, _, second = slow_twice()
    parts = lost(world)
    opened = Incident("inc-c", "job:81", world.time, second.onset, "page", "title", "link", "job:81", ("job:81",))
    ended = [
        Change("resolved", replace(t.incident, resolved=world.time), world.time, "fleetpulse", folded_into="inc-c")
        for t in world.book.tracked.values()
    ]
    world.book.publish([*ended, Change("opened", opened, world.time, "fleetpulse")], [], world.time)
    assert list(world.book.tracked) == ["inc-c"]
    assert lost(world) == pytest.approx(parts, abs=0.01)


def test_a_merge_that_could_not_be_written_is_not_added_twice() -> None:
    world, _, second = slow_twice()
    parts, state = lost(world), world.book.copy_state()
    merge(world, second, "inc-a")
    world.book.restore_state(state)
    assert lost(world) == pytest.approx(parts, abs=0.01)
    merge(world, second, "inc-a")
    assert lost(world) == pytest.approx(parts, abs=0.01)


def test_the_kept_incident_is_written_with_the_merge_and_a_reopened_one_starts_without_the_loss(tmp_path: Path) -> None:
    world, first, second = slow_twice()
    database, writer = Database(tmp_path / "store.duckdb"), ImpactWriter(world.book)

    def write() -> None:
        with database.transaction() as connection:
            changes = [Change("updated", incident, world.time, "fleetpulse") for incident in (first, second)]
            ledger.write_changes(connection, [], changes, [], world.time)
            writer.write(connection, world.time)
        writer.done(world.time)

    try:
        write()
        before = lost(world)
        merge(world, second, "inc-a")
        write()
        kept, gone = (read_impact(database.connection, i) for i in ("inc-a", "inc-b"))
        assert kept is not None
        assert gone is not None
        assert kept["lost_gpu_hours"] == pytest.approx(before, abs=0.01)
        assert (gone["lost_gpu_hours"], gone["text"].endswith("counted in inc-a")) == (0.0, True)
        again = World()
        load_books(database.connection, again.book, [first, second], world.time)
        again.time, again.steps = world.time, world.steps
        again.run(1, j81=3.0)
        assert lost(again) == pytest.approx(before + 48 / 60 * (1 - 1 / 3.0), rel=0.02)
    finally:
        database.close()


# --- several incidents on a job -----------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), ("leaf:l1",), ("leaf:l1", "cdu:c0")])
def test_a_restart_is_counted_by_the_incident_that_counts_the_hang_before_it(others: tuple[str, ...]) -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    for number, cause in enumerate(others, 2):
        world.open(cause, id_=f"inc-{number}")
    world.run(10, j81=0)
    world.steps["job:81"] -= 600  # steps of 1 s since the checkpoint
    world.run(30)
    assert lost(world) == pytest.approx(16.0, rel=0.02)
    assert world.job()["lost_gpu_hours"] == pytest.approx(16.0, rel=0.02)


@pytest.mark.parametrize("other", [None, "leaf:l1"])
def test_the_time_from_an_end_to_the_restart_is_counted_by_one_incident(other: str | None) -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    if other is not None:
        world.open(other, id_="inc-2")
    world.run(10, j81=0)
    ranks = end_job(world, 81)
    world.run(20, j81=0)
    start_job(world, ranks)
    world.run(1, j81=0)
    assert rate(world) == 48.0
    world.run(10)
    assert lost(world) == pytest.approx(24.8, rel=0.02)


@pytest.mark.parametrize("other", [None, "leaf:l1"])
def test_a_job_without_steps_is_counted_by_one_incident_with_a_finding_about_it(other: str | None) -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("node:n1")
    if other is not None:
        world.open(other, members=(other, "node:n2"), id_="inc-2")
    for _ in range(30):
        world.find("telemetry", "node:n1", "host")
        world.find("telemetry", "node:n2", "host")
        world.run(1)
    assert lost(world) == pytest.approx(24.0, rel=0.02)
    assert rate(world) == 48.0


def test_a_restart_after_an_end_is_counted_by_the_fault_before_it_and_the_time_between_is_not_slow() -> None:
    world = World()
    world.run(60)
    world.open("gpu:n0.3", id_="inc-rank")
    world.run(20, j81=1.12)
    world.open("leaf:l1", id_="inc-leaf")
    world.run(1 / 3, j81=1.12)
    ranks = end_job(world, 81)
    world.run(6, j81=0)
    world.steps["job:81"] -= 300
    start_job(world, ranks)
    world.run(5, j81=1.12)
    assert world.job(id_="inc-leaf")["lost_gpu_hours"] == pytest.approx(4.0, rel=0.02)
    slow = 48 * 25.3 / 60 * (1 - 1 / 1.12)
    assert world.job(id_="inc-rank")["lost_gpu_hours"] == pytest.approx(slow, rel=0.03)


def test_an_incident_that_opens_later_with_a_nearer_onset_counts_only_what_no_other_has_counted() -> None:
    world = World()
    world.run(60)
    world.open("gpu:n0.3", onset=world.time - 8 * MINUTE, id_="inc-far")
    began = world.time
    world.run(20, j81=2.0)
    world.open("gpu:n4.0", onset=began, id_="inc-near")
    world.run(10, j81=2.0)
    assert lost(world) == pytest.approx(48 * 0.5 * 0.5, rel=0.03)
    assert world.job(id_="inc-near")["lost_gpu_hours"] == pytest.approx(48 * 0.5 / 6, rel=0.05)


def test_what_an_incident_counted_before_it_was_resolved_is_not_counted_again_after_a_restart(tmp_path: Path) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    world.run(60)
    first = world.open("gpu:n0.3", id_="inc-a")
    world.run(20, j81=2.0)
    world.resolve(first)
    try:
        with database.transaction() as connection:
            changes = [Change("updated", first, world.time, "fleetpulse")]
            ledger.write_changes(connection, [], changes, [], world.time)
            ImpactWriter(world.book).write(connection, world.time)
        again = World()
        load_books(database.connection, again.book, [], world.time)
        again.time, again.steps = world.time, world.steps
        again.run(1, j81=2.0)
        again.open("gpu:n4.0", onset=first.onset, id_="inc-b")
        again.run(9, j81=2.0)
        assert lost(again) == pytest.approx(48 * 0.5 / 6, rel=0.05)
    finally:
        database.close()


def test_claims_give_each_time_to_one_incident_and_again_only_to_the_same_one() -> None:
    claims = LossClaims()
    assert claims.take("job:1", 10, 20, "a") == [(10, 20)]
    assert claims.take("job:1", 0, 30, "b") == [(0, 10), (20, 30)]
    assert claims.take("job:1", 5, 40, "a") == [(10, 20), (30, 40)]
    assert claims.take("job:2", 5, 40, "a") == [(5, 40)]
    claims.release("job:1", 35, "a")
    assert claims.take("job:1", 0, 50, "b") == [(0, 10), (20, 30), (35, 50)]
    assert (claims.take_restart("job:1", 7, "a"), claims.take_restart("job:1", 7, "b")) == (True, False)
    claims.hand_over("job:1", "a", "b")
    assert claims.take("job:1", 0, 50, "b") == [(0, 50)]
    assert (claims.take_restart("job:1", 7, "a"), claims.take_restart("job:1", 7, "b")) == (False, True)
    claims.keep({"job:2"})
    assert claims.take("job:1", 0, 50, "c") == [(0, 50)]


# --- a second fault on a slow job ---------------------------------------------------------------------


def test_a_fault_on_a_job_that_another_one_slowed_before_is_not_said_to_slow_it() -> None:
    world = World()
    world.run(40)
    world.open("gpu:n0.3", id_="inc-rank")
    world.run(20, j81=1.3)
    world.open("leaf:l1", id_="inc-leaf")
    world.run(10, j81=1.3)
    leaf = world.job(id_="inc-leaf")
    assert (leaf["state"], leaf["basis"]) == ("unaffected", "step time 1.30 s, was 1.30 s before the onset")
    assert world.impact("inc-leaf")["title"] == "2 jobs on it"
    assert world.job(id_="inc-rank")["lost_gpu_hours"] == pytest.approx(48 * 0.5 * (1 - 1 / 1.3), rel=0.02)


def test_a_fault_that_slows_a_slow_job_further_says_by_how_much_and_leaves_the_loss_to_the_first() -> None:
    world = World()
    world.run(40)
    world.open("gpu:n0.3", id_="inc-rank")
    world.run(20, j81=1.3)
    world.open("leaf:l1", id_="inc-leaf")
    world.run(10, j81=1.5)
    assert world.impact("inc-leaf")["title"] == "job 81 15 % slower (48 GPUs)"
    assert world.impact("inc-leaf")["text"] == "job 81 15 % slower, 48 GPUs; counted in inc-rank"


def test_an_incident_alone_on_a_job_that_was_slow_long_before_it_costs_nothing_until_it_is_slower_still() -> None:
    world = World()
    world.run(40)
    world.run(20, j81=1.3)
    world.open("leaf:l1")
    world.run(10, j81=1.3)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("unaffected", 0.0)
    world.run(60, j81=1.5)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * (1 - 1.3 / 1.5), rel=0.05)


def test_a_fault_on_a_job_that_hung_before_it_is_not_said_to_hang_it() -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3", id_="inc-rank")
    world.run(10, j81=0)
    world.open("leaf:l1", id_="inc-leaf")
    world.run(2, j81=0)
    leaf = world.job(id_="inc-leaf")
    assert (leaf["state"], leaf["basis"]) == ("unknown", "slowdown not measured: no step since 10 min before the onset")
    assert world.job(id_="inc-rank")["lost_gpu_hours"] == pytest.approx(48 / 5, rel=0.02)


# --- links that are down, and ends --------------------------------------------------------------------


def test_a_dead_leaf_costs_its_jobs_the_time_until_they_run_again() -> None:
    world = World()
    world.run(60)
    world.open("leaf:l1")
    world.run(1 / 3)
    ranks = end_job(world, 81, 82)
    report_down(world, "leaf:l1", down=8, ports=8)
    world.run(1, j81=0, j82=0)
    impact = world.impact()
    assert impact["title"] == "2 jobs suffer (64 GPUs)"
    assert impact["text"] == "job 81 is lost, 48 GPUs; job 82 is lost, 16 GPUs"
    assert re.fullmatch(r"ended \S+Z: leaf:l1: down", world.job()["basis"])
    assert (impact["gpus"], impact["nodes"], impact["ranks"]) == (64, 8, 64)
    world.run(14, j81=0, j82=0)
    start_job(world, ranks)
    world.run(5)
    assert world.impact()["lost_gpu_hours"] == pytest.approx(64 * 15 / 60, rel=0.05)


def test_jobs_that_ended_are_not_called_on_it_and_their_ranks_stay_counted() -> None:
    world = World()
    world.run(60)
    world.open("leaf:l1")
    world.run(1 / 3)
    end_job(world, 82)
    world.run(1, j82=0)
    assert world.impact()["title"] == "1 job on it, 1 ended"
    end_job(world, 81)
    world.run(1, j81=0, j82=0)
    assert world.impact()["title"] == "2 jobs ended"
    assert world.impact()["text"] == "reaches 8 ranks of 2 jobs, 2 ended"
    assert world.impact()["ranks"] == 8


def test_a_dead_port_explains_the_end_of_a_job_that_made_no_more_steps() -> None:
    world = World()
    world.run(60)
    world.open("port:n2.mlx5_5")
    report_down(world, "port:n2.mlx5_5")
    world.run(1)
    end_job(world, 81)
    world.run(1, j81=0)
    assert (world.job()["state"], world.impact()["title"]) == ("lost", "job 81 is lost (48 GPUs)")


def test_a_job_that_went_on_over_other_links_is_not_lost_with_a_dead_port() -> None:
    world = World()
    world.run(60)
    world.open("port:n2.mlx5_5")
    for _ in range(8):
        report_down(world, "port:n2.mlx5_5")
        world.run(1)
    end_job(world, 81)
    world.run(1, j81=0)
    assert (world.job()["state"], world.impact()["title"]) == ("ended", "job 81 ended")


def test_a_dead_port_says_nothing_about_a_job_without_steps_that_runs() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("port:n2.mlx5_5")
    report_down(world, "port:n2.mlx5_5")
    world.run(5)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("unknown", 0.0)


@pytest.mark.parametrize(("level", "fact"), [("page", True), ("ticket", False), ("suspect", False)])
def test_only_a_link_whose_loss_pages_is_a_fact(level: Level, fact: bool) -> None:
    found = Finding(0, 0, "port:a.1", "link", level, 1.0, "down", {"down_s": 20.0})
    assert (read_fact(found) is not None) == fact
    assert read_fact(replace(found, evidence={"flaps": 3})) is None


def test_what_was_counted_after_an_end_that_was_known_late_is_taken_back() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("gpu:n0.3")
    world.find("telemetry", "gpu:n0.3", "host")
    world.run(6)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("lost", pytest.approx(4.8, rel=0.05))
    end_job(world, 81, at=world.time - 4 * MINUTE)
    world.run(1)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * 2 / 60, rel=0.1)


@pytest.mark.parametrize("others", [(), ("inc-a",), ("inc-a", "merged")])
def test_an_end_that_is_known_late_costs_the_same_after_a_merge(others: tuple[str, ...]) -> None:
    world = World()
    world.run(90)
    first = world.open("gpu:n0.3", id_="inc-b")
    if others:
        world.open("leaf:l1", id_="inc-a", onset=world.time + MINUTE)
    world.run(10, j81=0)
    if "merged" in others:
        merge(world, first, "inc-a")
    ranks = end_job(world, 81, at=world.time - 8 * MINUTE)
    world.run(10, j81=0)
    start_job(world, ranks)
    world.run(6)
    assert lost(world) == pytest.approx(16.1, abs=0.1)


def test_a_job_that_ended_before_the_onset_loses_nothing_by_it() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("gpu:n0.3")
    world.find("telemetry", "gpu:n0.3", "host")
    world.run(0.5)
    assert world.job()["lost_gpu_hours"] > 0
    ranks = end_job(world, 81, at=world.time - 4 * MINUTE)
    world.run(1)
    job = world.job()
    assert (job["state"], job["lost_gpu_hours"], job["lost_gpu_hours_per_hour"]) == ("ended", 0.0, 0.0)
    assert job["basis"].endswith("before the onset")
    world.run(10)
    start_job(world, ranks)
    world.run(5)
    assert (world.job()["state"], world.impact()["lost_gpu_hours"]) == ("unknown", 0.0)


# --- telemetry that is read late ----------------------------------------------------------------------


def test_a_clock_ahead_of_the_telemetry_makes_no_job_hang() -> None:
    world = World()
    world.run(90)
    opened = world.open("gpu:n0.3")
    world.run(5)
    ahead = world.time + 30 * MINUTE
    world.book.publish([Change("acknowledged", opened, ahead, "ann")], [], ahead)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("unaffected", 0.0)


def test_a_page_whose_onset_the_telemetry_has_not_reached_says_no_state_of_jobs() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.find("telemetry", "gpu:n0.3", "host")
    world.open("gpu:n0.3", onset=world.time + 5 * MINUTE)
    assert (world.job()["state"], world.job()["basis"][:47]) == (
        "unknown",
        "slowdown not measured: telemetry is read up to ",
    )
    world.run(4.5)
    world.find("telemetry", "gpu:n0.3", "host")
    world.run(1.5)
    assert world.job()["state"] == "lost"


def test_a_job_whose_ranks_were_silent_before_the_onset_is_not_lost_by_it() -> None:
    world = World()
    world.run(90)
    world.topology.remove_entities([e for e in world.topology.parents if e.startswith("rank:82.")])
    world.hooked = {"job:81"}
    world.book.jobs.places.version += 1
    for _ in range(18):
        world.time += 10 * SECOND
        world.book.jobs.time = world.time
    world.find("telemetry", "gpu:n7.3", "host")
    world.open("gpu:n7.3")
    assert world.job("job:82")["state"] == "unknown"
    assert world.job("job:82")["basis"] == "slowdown not measured: no step since 3 min before the onset"
    assert world.impact()["lost_gpu_hours_per_hour"] == 0.0
