"""The life of a job: it appears in topology, store and API, and leaves them when its node no longer reports it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from agents.collector import Collector, Device
from agents.collectors.jobs.jobs import Jobs
from agents.collectors.training.training import Training
from agents.node.batches import build_inventory_event, merge_inventories
from agents.training import Steps
from pipeline.api.fleet import compute_blast_radius
from pipeline.ingest.entities import load_entities, load_topology
from pipeline.model.membership import EndedRanks
from pipeline.model.records import SECOND, Event
from pipeline.model.topology import Topology
from tests.agents.proc_tree import ProcTree
from tests.pipeline.conftest import Site

NOW = 1_800_000_000 * SECOND
ROOT = Path(__file__).parents[2]
Lines = Mapping[str, tuple[str, ...]]


def build_inventory(node: str, lines: Lines) -> Event:
    """Returns an inventory whose ranks have the node as attribute."""
    entities = {
        e: {"parents": list(p), "attributes": {"node": node} if e.startswith("rank:") else {"name": "x"}}
        for e, p in {f"node:{node}": (), **lines}.items()
    }
    return Event(NOW, f"node:{node}", "inventory", {"entities": entities})


def rank(job: str, number: int, node: str, stage: str = "") -> Lines:
    over = (f"stage:{job}.{stage}",) if stage else ()
    found = {f"job:{job}": (), f"rank:{job}.{number}": (*over, f"job:{job}", f"gpu:{node}.{number}")}
    return {**found, **({over[0]: (f"job:{job}",)} if over else {}), f"gpu:{node}.{number}": (f"node:{node}",)}


def wait_until(true: Callable[[], bool]) -> None:
    """Waits until `true` returns true, 20 s at most."""
    end = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class TopologyLearner:
    """Applies inventories to a topology as the engine does."""

    def __init__(self) -> None:
        self.topology = Topology()
        self.ended = EndedRanks(self.topology)

    def learn(self, *events: Event) -> tuple[str, ...]:
        for event in events:
            lines = event.data["entities"].items()
            self.topology.merge({e: d["parents"] for e, d in lines}, {e: d["attributes"] for e, d in lines})
        return self.ended.remove_ended(events)[0]


def test_a_gpu_belongs_to_the_job_that_runs_on_it_now() -> None:
    learner = TopologyLearner()
    learner.learn(build_inventory("n1", rank("81", 0, "n1", "0")))
    assert compute_blast_radius("gpu:n1.0", (), learner.topology).jobs == ("job:81",)
    assert set(learner.learn(build_inventory("n1", rank("82", 0, "n1")))) == {"rank:81.0", "stage:81.0", "job:81"}
    assert compute_blast_radius("gpu:n1.0", (), learner.topology).jobs == ("job:82",)
    assert not [entity for entity in learner.topology.parents if "81" in entity]
    assert "rank:81.0" not in learner.topology.attributes


def test_a_job_stays_while_another_node_has_ranks_of_it() -> None:
    learner = TopologyLearner()
    learner.learn(build_inventory("n1", rank("81", 0, "n1", "0")), build_inventory("n2", rank("81", 1, "n2", "1")))
    assert set(learner.learn(build_inventory("n1", {}))) == {"rank:81.0", "stage:81.0"}
    assert learner.topology.ancestors("rank:81.1") == ("stage:81.1", "job:81", "gpu:n2.1", "node:n2")
    assert set(learner.learn(build_inventory("n2", {}))) == {"rank:81.1", "stage:81.1", "job:81"}


def test_a_stage_is_removed_when_its_last_rank_moves_to_another_stage() -> None:
    learner = TopologyLearner()
    learner.learn(build_inventory("n1", rank("81", 0, "n1", "0")))
    assert learner.learn(build_inventory("n1", rank("81", 0, "n1", "3"))) == ("stage:81.0",)
    assert learner.topology.ancestors("rank:81.0")[:2] == ("stage:81.3", "job:81")


def test_a_rank_that_moved_to_another_node_stays_in_any_order_of_reports() -> None:
    learner = TopologyLearner()
    learner.learn(build_inventory("n1", rank("81", 0, "n1")))
    moved = build_inventory("n2", {"job:81": (), "rank:81.0": ("job:81", "gpu:n2.0")})
    assert learner.learn(moved) == ()
    assert learner.learn(build_inventory("n1", {})) == ()
    assert learner.topology.parents["rank:81.0"] == ("job:81", "gpu:n2.0")


def test_ranks_without_a_node_attribute_stay_and_a_restart_continues() -> None:
    topology = Topology({"rank:sim-81.0": ("job:sim-81", "gpu:n1.0")}, {"rank:81.0": {"node": "n1"}})
    ended = EndedRanks(topology)
    assert ended.remove_ended([Event(NOW, "node:n1", "inventory", {"entities": 3})]) == ((), ())
    assert ended.remove_ended([build_inventory("n1", {})]) == (("rank:81.0",), ())
    assert "rank:sim-81.0" in topology.parents


def ended_after(learner: TopologyLearner, *collectors: Collector) -> tuple[str, ...]:
    """Returns the entities that end with the inventory of these collectors."""
    return learner.learn(
        build_inventory_event(NOW, "n1", merge_inventories(collector.inventory() for collector in collectors))
    )


def test_a_rank_known_by_the_training_hook_alone_is_removed_with_its_job(tmp_path: Path) -> None:
    script = "from agents.training import Steps; import sys; Steps('j', 0, stage=2, gpu=3).report(); sys.stdin.read()"
    training, learner = Training(socket=str(tmp_path / "t.sock")), TopologyLearner()
    training.open("n1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLEETPULSE_TRAINING_SOCKET": str(tmp_path / "t.sock")}
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, env=environment):
        wait_until(lambda: training.read()[0].entities == ("rank:j.0",))
        assert ended_after(learner, training) == ()
        assert compute_blast_radius("gpu:n1.3", (), learner.topology).jobs == ("job:j",)
    wait_until(lambda: training.read()[0].entities == ())
    assert set(ended_after(learner, training)) == {"rank:j.0", "stage:j.2", "job:j"}
    training.close()
    assert compute_blast_radius("gpu:n1.3", (), learner.topology).jobs == ()


def test_names_invented_by_a_user_do_not_accumulate(tmp_path: Path) -> None:
    training, learner = Training(socket=str(tmp_path / "t.sock")), TopologyLearner()
    training.open("n1")
    for life in range(5):
        for number in range(300):
            Steps(f"made-up-{life}-{number}", 0, stage=number, socket=str(tmp_path / "t.sock")).report()
        wait_until(lambda: training.read()[0].entities != ())
        ended_after(learner, training)
        assert len(learner.topology.parents) <= 3 * 128 + 1
        training.open("n1")
    training.close()


def test_jobs_that_start_and_end_leave_nothing_in_the_topology() -> None:
    learner = TopologyLearner()
    for number in range(200):
        learner.learn(build_inventory("n1", rank(f"j{number}", 0, "n1", "0")))
    assert len(learner.topology.parents) == 5
    assert len(learner.topology._tuples) <= 10


def test_an_empty_stage_is_removed_immediately() -> None:
    learner = TopologyLearner()
    lines = {**rank("81", 0, "n1"), "stage:81.7": ("job:81",)}
    assert learner.learn(build_inventory("n1", lines)) == ("stage:81.7",)
    assert "rank:81.0" in learner.topology.parents


def test_a_job_that_ends_while_its_agent_is_down_is_removed_from_its_gpu(tmp_path: Path) -> None:
    tree, learner = ProcTree(tmp_path / "proc"), TopologyLearner()
    nowhere = tmp_path / "nowhere"

    def start_collector() -> Jobs:
        places = (tree.root, nowhere, nowhere, nowhere, nowhere, nowhere)
        jobs = Jobs(10.0, 5.0, *places, gpus=None, memory=tmp_path / "jobs.json")
        jobs.open("n1")
        return jobs

    tree.start(20, {"SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "CUDA_VISIBLE_DEVICES": "3"})
    before = start_collector()
    for _ in range(3):
        before.read()
    ended_after(learner, before)
    tree.end(20)
    after = start_collector()
    assert after.inventory() == {e: Device(d.parents, d.attributes) for e, d in before.inventory().items()}
    assert ended_after(learner, after) == ()
    for _ in range(3):
        after.read()
    assert set(ended_after(learner, after)) == {"rank:81.5", "job:81"}
    assert compute_blast_radius("gpu:n1.3", (), learner.topology).jobs == ()


@pytest.mark.slow
def test_a_job_of_the_collector_is_in_the_store_and_in_the_api_until_it_ends(site: Site, tmp_path: Path) -> None:
    tree = ProcTree(tmp_path / "proc")
    environment = {"SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0", "PIPELINE_STAGE": "1", "CUDA_VISIBLE_DEVICES": "3"}
    tree.start(20, {**environment, "SLURM_PROCID": "5"})
    nowhere = tmp_path / "nowhere"
    jobs = Jobs(10.0, 5.0, tree.root, nowhere, nowhere, nowhere, nowhere, nowhere)
    jobs.open("n1")
    events = [event for _ in range(3) for event in jobs.read()[0].events]
    for event in (*events, build_inventory_event(NOW, "n1", jobs.inventory())):
        site.send_events("n1", event)
    site.drain()
    known = site.rows("SELECT entity, parents FROM entities WHERE kind IN ('job', 'rank', 'stage') ORDER BY kind")
    assert known == [
        ("job:81", []),
        ("rank:81.5", ["stage:81.1", "job:81", "gpu:n1.3"]),
        ("stage:81.1", ["job:81"]),
    ]
    assert site.database is not None
    known = load_topology(load_entities(site.database.connection, 0))
    assert known.ancestor_of_kind("rank:81.5", "job") == "job:81"
    tree.end(20)
    tree.start(21, {**environment, "SLURM_JOB_ID": "82", "SLURM_PROCID": "0"})
    ended = [event for _ in range(4) for event in jobs.read()[0].events]
    assert {(event.kind, event.entity) for event in ended} == {("job_end", "job:81"), ("job_start", "job:82")}
    site.send_events("n1", build_inventory_event(NOW + 1, "n1", jobs.inventory()))
    site.drain()
    assert site.rows("SELECT entity FROM entities WHERE kind IN ('job', 'rank') ORDER BY 1") == [
        ("job:82",),
        ("rank:82.0",),
    ]
    for stage in ("3", "4"):
        site.send_events("n1", build_inventory("n1", {**rank("82", 0, "n1", stage), "stage:82.made-up": ("job:82",)}))
        site.drain()
    assert site.rows("SELECT entity FROM entities WHERE kind = 'stage'") == [("stage:82.4",)]
    site.send_events("n1", build_inventory("n1", {}), build_inventory("n1", rank("82", 0, "n1")))
    site.drain()
    assert ("job:82",) in site.rows("SELECT entity FROM entities WHERE kind = 'job'")
    assert site.rows("SELECT DISTINCT kind FROM events WHERE kind LIKE 'job%'") == [("job_start",)]
