"""Which jobs suffer from an incident, how much slower they are, and how many GPU-hours that costs, by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.sections import Impact
from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.impact import ImpactBook
from pipeline.incidents.impact_rows import ImpactWriter, list_jobs, load_books, read_impact
from pipeline.incidents.jobs import JobBook
from pipeline.incidents.reach import find_port_gpus
from pipeline.model.records import SECOND, Event, Finding, Frame, Incident, Instant
from pipeline.model.topology import Topology
from pipeline.store.database import Database

T0 = 1_780_000_020 * SECOND - 1_780_000_020 % 60 * SECOND
MINUTE = 60 * SECOND
NODES, GPUS = 8, 8


def make_topology() -> Topology:
    parents: dict[str, tuple[str, ...]] = {}
    for n in range(NODES):
        parents[f"node:n{n}"] = (f"rack:r{n // 4}",)
        parents[f"psu:n{n}.0"] = (f"node:n{n}",)
        for i in range(GPUS):
            parents[f"gpu:n{n}.{i}"] = (f"node:n{n}",)
            parents[f"port:n{n}.mlx5_{i}"] = (f"node:n{n}", f"leaf:l{i}")
            job = "job:81" if n < 6 else "job:82"
            parents[f"rank:{job[4:]}.{n * GPUS + i}"] = (job, f"gpu:n{n}.{i}")
    parents |= {"rack:r0": ("cdu:c0",), "rack:r1": ("cdu:c1",)}
    return Topology(parents)


class World:
    """Jobs that make steps as a test says, and incidents on their fleet. 48 GPUs in job 81, 16 in job 82."""

    def __init__(self, **prices: Any) -> None:
        self.topology = make_topology()
        self.book = ImpactBook(JobBook(self.topology), Impact(**prices))
        self.time, self.steps = T0, {"job:81": 1000.0, "job:82": 500.0}
        self.ranks = tuple(sorted(e for e in self.topology.parents if e.startswith("rank:")))
        self.hooked = {"job:81", "job:82"}

    def run(self, minutes: float, **step_times: float) -> None:
        """Lets jobs make steps of some seconds, one reading each 10 s; 0: none."""
        pace = {"job:81": 1.0, "job:82": 1.0, **{f"job:{name[1:]}": v for name, v in step_times.items()}}
        for _ in range(round(minutes * 6)):
            self.time += 10 * SECOND
            for job, seconds in pace.items():
                self.steps[job] += 10 / seconds if seconds else 0
            self.observe(pace)

    def observe(self, pace: dict[str, float], *events: Event) -> None:
        jobs = [f"job:{rank[5:].split('.')[0]}" for rank in self.ranks]
        known = [
            job in self.hooked and rank in self.topology.parents for job, rank in zip(jobs, self.ranks, strict=True)
        ]
        steps = np.array([np.floor(self.steps[job]) if k else np.nan for job, k in zip(jobs, known, strict=True)])
        times = np.array([pace[job] or np.nan if k else np.nan for job, k in zip(jobs, known, strict=True)])
        frame = Frame(
            self.time, "rank", self.ranks, {"rank.step": steps, "rank.step_time": times}, self.topology, events
        )
        self.book.jobs.observe(Instant(self.time, self.time, {"rank": frame}))
        self.book.advance(self.time)

    def open(self, cause: str, onset: int | None = None, members: tuple[str, ...] = (), id_: str = "inc-1") -> Incident:
        opened = Incident(
            *(id_, cause, self.time, onset or self.time, "page", "title", "link", cause, members or (cause,))
        )
        self.book.publish([Change("opened", opened, self.time, "fleetpulse")], [], self.time)
        return opened

    def resolve(self, incident: Incident) -> None:
        incident.resolved = self.time
        self.book.publish([Change("resolved", incident, self.time, "fleetpulse")], [], self.time)

    def find(self, finding: str, entity: str, cause: str) -> None:
        found = Finding(self.time, self.time, entity, finding, "page", 1.0, f"{entity} is gone", {"cause": cause})
        self.book.publish([], [found], self.time)

    def impact(self, id_: str = "inc-1") -> dict[str, Any]:
        return self.book.describe(self.book.tracked.get(id_) or self.book.dirty[id_])

    def job(self, name: str = "job:81", id_: str = "inc-1") -> dict[str, Any]:
        return next(job for job in self.impact(id_)["jobs"] if job["job"] == name)


def test_a_job_at_a_quarter_longer_steps_loses_a_fifth_of_its_gpu_hours() -> None:
    world = World()
    world.run(30)
    world.open("gpu:n0.3")
    world.run(60, j81=1.25)
    job = world.job()
    assert (job["state"], job["slowdown"], job["gpus"], job["rank_names"]) == ("slow", 0.25, 48, ["rank:81.3"])
    assert job["lost_gpu_hours_per_hour"] == pytest.approx(48 * 0.2)
    assert job["lost_gpu_hours"] == pytest.approx(48 * 0.2, rel=0.01)
    assert job["basis"] == "step time 1.25 s, was 1.00 s before the onset"
    impact = world.impact()
    assert (impact["gpus"], impact["nodes"], impact["ranks"]) == (48, 6, 48)
    assert impact["text"] == "job 81 25 % slower, rank 3, 48 GPUs; 9.6 GPU-h lost, 9.6 GPU-h per hour"
    assert impact["title"] == "job 81 25 % slower (48 GPUs)"


def test_a_link_incident_names_the_job_that_hangs_and_the_rank_on_its_gpu() -> None:
    world = World()
    world.run(90)
    world.open("port:n2.mlx5_5")
    world.run(30, j81=0)
    job = world.job()
    assert (job["state"], job["slowdown"], job["rank_names"], job["ranks"]) == ("hanging", None, ["rank:81.21"], 1)
    assert job["basis"] == "no step for 30 min; reaches rank 21 of job 81"
    assert job["lost_gpu_hours"] == pytest.approx(48 * 0.5, rel=0.01)
    assert world.impact()["text"].startswith("job 81 hangs, rank 21, 48 GPUs; 24.")
    assert world.impact()["title"] == "job 81 hangs (48 GPUs)"


def test_a_hang_that_ends_is_counted_until_the_first_step_after_it() -> None:
    world = World()
    world.run(90)
    world.open("port:n2.mlx5_5")
    world.run(20, j81=0)
    world.run(30)
    job = world.job()
    assert job["state"] == "recovered"
    assert job["lost_gpu_hours"] == pytest.approx(48 / 3, rel=0.01)


def test_a_pause_for_a_checkpoint_is_no_loss() -> None:
    world = World()
    for _ in range(3):
        world.run(20)
        world.run(0.75, j81=0)
    world.run(20)
    world.open("gpu:n0.0")
    world.run(20)
    world.run(0.75, j81=0)
    world.run(20)
    assert (world.job()["state"], world.job()["lost_gpu_hours"]) == ("unaffected", 0.0)
    said = r"reaches 1 rank of job 81, not slower than before the onset: step time 1\.\d+ s, was 1\.\d+ s"
    assert re.fullmatch(said, world.impact()["text"]), world.impact()["text"]


def test_a_job_without_steps_has_no_slowdown_and_says_which_ranks_are_reached() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("port:n2.mlx5_5")
    world.run(30)
    job = world.job()
    assert (job["state"], job["slowdown"], job["lost_gpu_hours"]) == ("unknown", None, 0.0)
    assert job["basis"] == "slowdown not measured: the job reports no steps; reaches rank 21 of job 81"
    assert world.impact()["text"] == "reaches 1 rank of job 81, slowdown not measured"
    assert world.impact()["title"].endswith(" of job 81 on it")


def test_a_job_without_steps_is_lost_with_the_host_that_a_finding_says_is_dead() -> None:
    world = World()
    world.hooked = {"job:82"}
    world.run(30)
    world.open("node:n1")
    for _ in range(30):
        world.find("telemetry", "node:n1", "host")
        world.run(1)
    job = world.job()
    assert (job["state"], job["slowdown"], job["ranks"]) == ("lost", None, 8)
    assert job["basis"] == "node:n1 is gone; the job reports no steps"
    assert job["lost_gpu_hours"] == pytest.approx(24.0, rel=0.02)


def test_a_job_that_began_just_before_the_onset_is_not_measured() -> None:
    world = World()
    world.run(3)
    world.open("gpu:n0.3")
    world.run(10, j81=2.0)
    assert world.job()["basis"] == "slowdown not measured: only 2 min of steps before the onset"
    assert world.job()["lost_gpu_hours"] == 0.0


def test_of_two_incidents_on_a_slow_job_the_nearer_one_counts_it() -> None:
    world = World()
    world.run(30)
    world.open("gpu:n0.3", id_="inc-early")
    world.run(30)
    world.open("gpu:n4.0", id_="inc-near")
    world.run(30, j81=1.5)
    early, near = world.job(id_="inc-early"), world.job(id_="inc-near")
    assert (early["state"], early["lost_gpu_hours"]) == ("slow", 0.0)
    assert early["basis"].endswith("counted in inc-near")
    assert near["lost_gpu_hours"] == pytest.approx(48 * 0.5 / 3, rel=0.02)


def test_a_second_fault_that_slows_a_slow_job_further_counts_what_it_adds_and_the_first_goes_on_after_it() -> None:
    world = World()
    world.run(30)
    world.open("gpu:n0.3", id_="inc-rank")
    world.run(70, j81=1.3)
    before = world.job(id_="inc-rank")["lost_gpu_hours"]
    world.open("gpu:n4.0", id_="inc-flow")
    world.run(10, j81=3.0)
    during = world.job(id_="inc-rank")
    assert during["basis"].endswith("counted in inc-flow")
    flow = world.job(id_="inc-flow")
    assert (flow["state"], flow["slowdown"]) == ("slow", pytest.approx(3.0 / 1.3 - 1, abs=0.01))
    assert flow["lost_gpu_hours"] == pytest.approx(48 * (1 - 1.3 / 3.0) / 6, rel=0.15)
    world.run(20, j81=1.3)
    after = world.job(id_="inc-rank")
    assert (after["state"], "counted in" in after["basis"]) == ("slow", False)
    assert after["lost_gpu_hours"] - before == pytest.approx(48 * (1 - 1 / 1.3) / 3, rel=0.15)


def test_an_onset_that_is_known_late_is_counted_from_the_change_of_pace() -> None:
    world = World()
    world.run(60)
    onset = world.time
    world.run(20, j81=2.0)
    world.open("gpu:n0.3", onset=onset)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * 0.5 / 3, rel=0.05)


def test_a_coolant_fault_reaches_all_nodes_of_its_racks_and_makes_none_of_them_faulty() -> None:
    world = World()
    world.run(30)
    world.open("cdu:c1")
    world.run(10, j81=1.1, j82=1.2)
    impact = world.impact()
    assert [job["job"] for job in impact["jobs"]] == ["job:81", "job:82"]
    assert [job["ranks"] for job in impact["jobs"]] == [16, 16]
    assert (impact["affected"], impact["affected_count"]) == (["node:n4", "node:n5", "node:n6", "node:n7"], 4)
    world.open("gpu:n0.0", id_="inc-2")
    assert world.impact("inc-2")["affected"] == []


def test_a_power_supply_shows_a_job_only_if_it_is_slower() -> None:
    world = World()
    world.run(30)
    world.open("psu:n7.0")
    world.run(10)
    assert world.impact()["jobs"] == []
    world.run(20, j82=1.3)
    assert [(job["job"], job["state"]) for job in world.impact()["jobs"]] == [("job:82", "slow")]


def test_a_restart_from_a_checkpoint_adds_the_steps_that_are_made_again() -> None:
    world = World()
    world.run(90)
    world.open("gpu:n0.3")
    world.run(10, j81=0)
    world.steps["job:81"] -= 600  # steps of 1 s since the checkpoint
    world.run(30)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * (10 + 10) / 60, rel=0.02)


def test_money_follows_the_price_of_the_model() -> None:
    world = World(price_per_gpu_hour=2.0, currency="EUR", model_prices={"B300": 5.0})
    world.topology.merge({}, {f"gpu:n{n}.{i}": {"sku": "B300"} for n in range(6, NODES) for i in range(GPUS)})
    world.run(30)
    world.open("gpu:n0.3")
    world.open("gpu:n7.3", id_="inc-2")
    world.run(60, j81=1.25, j82=1.25)
    assert world.impact()["cost"]["per_hour"] == pytest.approx(48 * 0.2 * 2)
    assert world.impact("inc-2")["cost"] == {
        "amount": pytest.approx(16 * 0.2 * 5, rel=0.01),
        "per_hour": pytest.approx(16 * 0.2 * 5),
        "currency": "EUR",
    }


def test_without_a_price_there_is_no_money() -> None:
    world = World()
    world.open("gpu:n0.3")
    assert world.impact()["cost"] is None


def test_the_impact_is_frozen_at_the_end_and_survives_a_restart(tmp_path: Path) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    world.run(30)
    incidents = [world.open("gpu:n0.3"), world.open("gpu:n7.0", id_="inc-2")]
    writer = ImpactWriter(world.book)

    def write() -> None:
        with database.transaction() as connection:
            changes = [Change("updated", incident, world.time, "fleetpulse") for incident in incidents]
            ledger.write_changes(connection, [], changes, [], world.time)
            writer.write(connection, world.time)
        writer.done(world.time)

    world.run(30, j81=1.25, j82=1.25)
    write()
    other = World()
    load_books(database.connection, other.book, incidents, world.time)
    other.time, other.steps = world.time, world.steps
    other.run(30, j81=1.25, j82=1.25)
    assert other.job()["lost_gpu_hours"] == pytest.approx(48 * 0.2, rel=0.02)
    assert other.job("job:82", "inc-2")["lost_gpu_hours"] == pytest.approx(16 * 0.2, rel=0.02)
    world.resolve(incidents[0])
    write()
    frozen = read_impact(database.connection, "inc-1")
    assert frozen is not None
    assert (frozen["lost_gpu_hours_per_hour"], frozen["jobs"][0]["lost_gpu_hours"]) == (
        0.0,
        pytest.approx(4.8, rel=0.02),
    )
    world.run(30, j81=1.25)
    write()
    assert read_impact(database.connection, "inc-1") == frozen
    (first, second) = list_jobs(database.connection)
    assert (first["job"], first["state"], first["incidents"], first["gpus"]) == ("job:81", "running", [], 48)
    assert (second["incidents"], second["lost_gpu_hours"] > 0) == (["inc-2"], True)
    database.close()


def test_what_is_not_written_is_written_again(tmp_path: Path) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    world.run(10)
    world.open("gpu:n0.3")
    writer = ImpactWriter(world.book)

    def fail() -> None:
        with database.transaction() as connection:
            writer.write(connection, world.time)
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        fail()
    assert read_impact(database.connection, "inc-1") is None
    with database.transaction() as connection:
        writer.write(connection, world.time)
    assert read_impact(database.connection, "inc-1") is not None
    minutes = database.connection.execute("SELECT job, count(*) FROM job_pace GROUP BY job ORDER BY job").fetchall()
    assert minutes == [("job:81", 10), ("job:82", 10)]
    database.close()


def test_names_of_jobs_and_users_come_from_their_start(tmp_path: Path) -> None:
    world = World()
    data = {"ranks": {}, "name": "<b>llama</b>", "user": "ann", "namespace": "nlp", "scheduler": "slurm"}
    world.observe({"job:81": 1.0, "job:82": 1.0}, Event(T0, "job:81", "job_start", data))
    job = world.book.jobs.jobs["job:81"]
    assert (job.name, job.user, job.account, job.started, job.ranks, len(job.nodes)) == (
        "<b>llama</b>",
        "ann",
        "nlp",
        T0,
        48,
        6,
    )
    world.topology.remove_entities([e for e in world.topology.parents if e.startswith("rank:81.")])
    world.run(1)
    assert world.book.jobs.jobs["job:81"].ended is not None


def end_job_81(world: World, minutes: float = 0.5) -> None:
    """Ends it within a fault, `minutes` after the onset and before its steps can be judged."""
    world.run(60)
    world.open("gpu:n0.3")
    world.run(minutes)
    world.topology.remove_entities([e for e in world.topology.parents if e.startswith("rank:81.")])
    world.run(1)


def test_a_job_that_ends_before_it_is_measured_has_ended_and_is_not_called_unaffected() -> None:
    world = World()
    end_job_81(world)
    job = world.job()
    assert (job["state"], job["slowdown"], job["lost_gpu_hours"]) == ("ended", None, 0.0)
    assert job["basis"].startswith("ended 2026-")
    assert job["basis"].endswith("Z, 40 s after the onset; whether because of it is not known")
    assert world.impact()["text"] == f"reaches 1 rank of job 81, {job['basis']}"
    assert world.impact()["title"] == "job 81 ended"


def test_a_job_that_ends_long_after_the_onset_just_ended() -> None:
    world = World()
    end_job_81(world, 30)
    assert (world.job()["state"], world.job()["basis"][-1]) == ("ended", "Z")


def test_a_job_that_ended_before_a_finding_says_that_its_host_is_gone_is_lost_until_it_runs_again() -> None:
    world = World()
    ranks = {e: p for e, p in world.topology.parents.items() if e.startswith("rank:81.")}
    end_job_81(world)
    world.find("xid", "gpu:n0.3", "xid 48")
    world.run(1)
    assert world.job()["state"] == "ended"
    world.find("telemetry", "gpu:n0.3", "host")
    world.run(1)
    job = world.job()
    assert job["state"] == "lost"
    assert job["basis"].endswith("Z: gpu:n0.3 is gone")
    started = Event(world.time + 20 * MINUTE, "job:81", "job_start", {"ranks": {}})
    world.run(20)
    world.topology.merge(ranks, {})
    world.observe({"job:81": 1.0, "job:82": 1.0}, started)
    world.run(10)
    assert world.job()["lost_gpu_hours"] == pytest.approx(48 * 22 / 60, rel=0.05)


def test_a_port_reaches_the_gpu_in_the_same_place_or_all_of_the_node() -> None:
    topology = Topology(
        {
            **{f"gpu:a.{i}": ("node:a",) for i in range(12)},
            **{f"port:a.mlx5_{i}": ("node:a",) for i in range(12)},
            **{f"gpu:b.{i}": ("node:b",) for i in range(8)},
            "port:b.eth0": ("node:b",),
            "port:leaf1.7": ("leaf:leaf1",),
        }
    )
    assert find_port_gpus("port:a.mlx5_10", topology) == ("gpu:a.10",)
    assert len(find_port_gpus("port:b.eth0", topology)) == 8
    assert find_port_gpus("port:leaf1.7", topology) == ()


def test_the_store_keeps_the_impact_as_json(tmp_path: Path) -> None:
    world, database = World(), Database(tmp_path / "store.duckdb")
    world.open("gpu:n0.3")
    with database.transaction() as connection:
        ImpactWriter(world.book).write(connection, world.time)
    (text,) = database.connection.execute("SELECT detail FROM impact").fetchall()[0]
    assert json.loads(text)["gpus"] == 1
    database.close()
