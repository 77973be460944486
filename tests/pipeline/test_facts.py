"""Which jobs a finding about a device says something about: those with a rank on it, not all of the incident."""

from __future__ import annotations

import pytest

from pipeline.incidents.facts import LASTS, FactBook
from pipeline.incidents.reach import find_carriers
from pipeline.model.records import SECOND, Finding
from pipeline.model.topology import Topology
from tests.pipeline.test_impact import World
from tests.pipeline.test_loss_counted_once import end_job, lost, report_down, start_job


def make_world(hooked: set[str] | None = None) -> World:
    """Both jobs are below one CDU: job 81 on n0 to n5, job 82 on n6 and n7."""
    world = World()
    world.topology.merge({"rack:r0": ("cdu:c9",), "rack:r1": ("cdu:c9",)}, {})
    world.hooked = world.hooked if hooked is None else hooked
    world.run(30)
    return world


def report_off_the_bus(world: World, gpu: str) -> None:
    evidence = {"xids": {"79": {"count": 1}}}
    world.book.publish([], [Finding(world.time, world.time, gpu, "xid", "page", 1.0, "XID 79", evidence)], world.time)


def test_a_gpu_off_the_bus_says_nothing_about_the_end_of_another_job_below_the_same_cdu() -> None:
    world = make_world()
    world.open("cdu:c9", members=("cdu:c9", "gpu:n0.0", "gpu:n7.0"))
    world.run(2)
    report_off_the_bus(world, "gpu:n0.0")
    ranks = end_job(world, 82)
    world.run(5)
    assert (world.job("job:82")["state"], world.job("job:81")["state"]) == ("ended", "unaffected")
    assert "XID" not in world.job("job:82")["basis"]
    start_job(world, ranks)
    world.run(5)
    assert lost(world, "job:82") == 0.0


@pytest.mark.parametrize("device", ["gpu:n7.0", "node:n7"])
def test_the_job_with_a_rank_on_the_lost_device_is_lost_with_it_also_if_it_ended_before(device: str) -> None:
    world = make_world()
    world.open("cdu:c9", members=("cdu:c9", device))
    end_job(world, 82)
    if device.startswith("node:"):
        world.find("telemetry", device, "host")
    else:
        report_off_the_bus(world, device)
    world.run(1, j82=0)
    assert (world.job("job:82")["state"], world.job("job:81")["state"]) == ("lost", "unaffected")


def test_of_jobs_without_steps_only_the_one_on_the_dead_host_loses_hours() -> None:
    world = make_world(hooked=set())
    world.open("cdu:c9", members=("cdu:c9", *(f"node:n{n}" for n in range(8))))
    world.find("telemetry", "node:n0", "host")
    world.run(6)
    assert [world.job(job)["state"] for job in ("job:81", "job:82")] == ["lost", "unknown"]
    assert lost(world, "job:81") == pytest.approx(4.8, rel=0.05)
    assert lost(world, "job:82") == 0.0


def test_a_fact_about_any_of_many_members_counts() -> None:
    world = make_world(hooked=set())
    members = tuple(f"port:n{n}.mlx5_{i}" for n in range(8) for i in range(8)) + tuple(
        f"gpu:n{n}.{i}" for n in range(8) for i in range(8)
    )
    world.open("cdu:c9", members=("cdu:c9", *members))
    report_off_the_bus(world, "gpu:n7.7")
    world.run(1)
    assert [world.job(job)["state"] for job in ("job:81", "job:82")] == ["unknown", "lost"]


def test_a_hang_of_one_job_says_nothing_about_another_job_behind_the_same_leaf() -> None:
    world = make_world(hooked=set())
    world.open("leaf:l1", members=("leaf:l1", "job:81"))
    found = Finding(world.time, world.time, "job:81", "straggler_job", "page", 1.0, "hangs", {"cause": "hang"})
    world.book.publish([], [found], world.time)
    world.run(1)
    assert [world.job(job)["state"] for job in ("job:81", "job:82")] == ["hanging", "unknown"]


def test_a_job_that_went_on_elsewhere_is_not_lost_by_the_device_that_it_left() -> None:
    world = make_world(hooked=set())
    world.open("gpu:n7.0")
    report_off_the_bus(world, "gpu:n7.0")
    world.run(1)
    assert world.job("job:82")["state"] == "lost"
    moved = {f"rank:82.{56 + i}": ("job:82", f"gpu:n6.{i}") for i in range(8)}
    world.topology.merge(moved, {})
    world.run(2)
    assert world.job("job:82")["state"] == "unknown"


@pytest.mark.parametrize("down", ["port:n7.mlx5_2", "leaf:l2", "port:leaf2.9"])
def test_a_link_that_is_down_cuts_off_the_jobs_behind_it(down: str) -> None:
    world = make_world()
    world.topology.merge({}, {"port:leaf2.9": {"peer": "port:n7.mlx5_2"}})
    world.open(down, members=(down, "gpu:n7.2", "gpu:n0.3"))
    report_down(world, down)
    end_job(world, 81, 82)
    world.run(1, j81=0, j82=0)
    expected = "lost" if down == "leaf:l2" else "ended"
    assert [world.job(job)["state"] for job in ("job:81", "job:82")] == [expected, "lost"]


def test_a_dead_host_that_is_reported_on_a_gpu_counts_for_its_other_gpus() -> None:
    world = make_world(hooked=set())
    world.open("gpu:n7.0", members=("gpu:n7.0", "gpu:n7.1"))
    world.topology.remove_entities(["rank:82.56"])
    evidence = {"cause": "host", "node": "node:n7"}
    found = Finding(world.time, world.time, "gpu:n7.0", "telemetry", "page", 1.0, "host dead", evidence)
    world.book.publish([], [found], world.time)
    world.run(1)
    assert world.job("job:82")["state"] == "lost"


def test_carriers_of_work_are_none_and_follow_the_topology() -> None:
    topology = Topology({"gpu:a.0": ("node:a",), "node:a": ("rack:r",), "rank:1.0": ("job:1", "gpu:a.0")})
    assert [find_carriers(e, topology) for e in ("rank:1.0", "job:1")] == [frozenset(), frozenset()]
    assert find_carriers("rack:r", topology) == {"node:a", "gpu:a.0"}
    book, parts = FactBook(), (frozenset({"gpu:a.0"}), frozenset({"node:a"}), frozenset({"rank:1.0"}))
    book.note(Finding(SECOND, SECOND, "rack:s", "telemetry", "page", 1.0, "dark", {"cause": "power"}))
    assert book.find("job:1", book.of, parts, topology) is None
    topology.merge({"node:a": ("rack:s",)}, {})
    assert book.find("job:1", book.of, parts, topology) is book.of["rack:s"]
    book.drop_old(2 * SECOND + LASTS)
    assert not book.of
