"""An incident on nodes without ranks says `no job` only if their inventories say so, else that jobs are not known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.incidents.impact_rows import ImpactWriter, load_books, read_impact, read_short_impacts
from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Instant, Origin
from pipeline.store.database import Database
from pipeline.store.events import write_events
from tests.pipeline.test_impact import MINUTE, T0, World


def without_jobs(topology: Any) -> None:
    topology.remove_entities([e for e in topology.parents if e.startswith("rank:")])


def inventory(node: str, time: int, ranks: Iterable[str] = (), collector: str = "jobs") -> Event:
    """Returns an inventory of an agent; ranks run in job 90, one on each GPU."""
    entities: dict[str, Any] = {f"gpu:{node}.{i}": {"parents": [f"node:{node}"]} for i in range(8)}
    if collector:
        entities[f"collector:{node}.{collector}"] = {"parents": [f"node:{node}"]}
    for i, rank in enumerate(ranks):
        entities[rank] = {"parents": ["job:90", f"gpu:{node}.{i}"], "attributes": {"node": node}}
    return Event(time, f"node:{node}", "inventory", {"entities": entities})


class Fresh(World):
    """The same fleet before any inventory: the site's files name its devices, and nothing names its ranks."""

    def __init__(self) -> None:
        super().__init__()
        without_jobs(self.topology)
        self.membership = Membership(self.topology)
        self.tick()

    def tick(self, seconds: float = 10) -> None:
        self.time += round(seconds * SECOND)
        self.book.jobs.observe(Instant(self.time, self.time, {}))
        self.book.advance(self.time)

    def read(self, *inventories: Event) -> None:
        self.membership.apply_inventories(inventories)
        self.book.jobs.listings.note(inventories)

    def shown(self) -> tuple[str, int]:
        found = self.impact()
        return found["text"], found["nodes_without_job_list"]


def test_before_any_inventory_the_jobs_of_a_rack_are_not_known() -> None:
    world = Fresh()
    world.open("cdu:c0")
    assert world.shown() == ("32 GPUs on 4 nodes, jobs not known", 4)
    assert world.impact()["title"] == "jobs not known"


def test_no_job_is_said_once_the_inventories_of_all_nodes_have_none() -> None:
    world = Fresh()
    world.open("cdu:c0")
    world.read(*(inventory(f"n{n}", world.time) for n in (0, 1, 2)))
    world.tick()
    assert world.shown() == ("32 GPUs on 4 nodes, jobs of 1 node not known", 1)
    assert world.impact()["title"] == "jobs of 1 node not known"
    world.read(inventory("n3", world.time))
    world.book.dirty.clear()
    world.tick()
    assert world.shown() == ("32 GPUs on 4 nodes, no job", 0)
    assert world.impact()["title"] == ""
    assert "inc-1" in world.book.dirty, "the row in the store is renewed"


def test_between_an_inventory_and_the_reading_of_its_ranks_the_jobs_are_not_known() -> None:
    world = Fresh()
    world.read(inventory("n7", world.time))
    world.tick()
    world.read(inventory("n0", world.time, [f"rank:90.{i}" for i in range(8)]))
    world.open("gpu:n0.3")  # ranks are read from the topology at most every 10 s
    assert world.shown() == ("1 GPU on 1 node, jobs not known", 1)
    world.tick()
    assert world.shown() == ("reaches 1 rank of job 90, slowdown not measured", 0)


def test_jobs_of_some_nodes_are_named_beside_the_jobs_that_are_known() -> None:
    world = Fresh()
    world.read(inventory("n0", world.time, [f"rank:90.{i}" for i in range(8)]))
    world.tick()
    world.open("rack:r0")
    assert world.shown() == ("reaches 8 ranks of job 90, slowdown not measured; jobs of 3 nodes not known", 3)


def test_an_inventory_that_is_much_later_says_nothing_about_the_onset() -> None:
    """A backlog of hours: the first inventory that it has of a node is of an hour later."""
    world = Fresh()
    world.read(inventory("n0", world.time + 60 * MINUTE))
    world.tick()
    world.open("gpu:n0.3")
    assert world.shown() == ("1 GPU on 1 node, jobs not known", 1)
    world.tick(60 * 60)
    assert world.shown() == ("1 GPU on 1 node, no job", 0)


def test_an_inventory_made_for_metrics_of_other_programs_lists_no_jobs() -> None:
    world = Fresh()
    world.read(inventory("n0", world.time, collector=""), inventory("n1", world.time, collector="nvml"))
    world.tick()
    world.open("rack:r0")
    assert world.shown() == ("32 GPUs on 4 nodes, jobs not known", 4)


def test_the_jobs_of_a_node_without_gpus_are_not_missed() -> None:
    world = Fresh()
    world.topology.merge({"node:storage1": ("rack:r0",)})
    world.read(*(inventory(f"n{n}", world.time) for n in range(4)))
    world.tick()
    world.open("rack:r0")
    assert world.shown() == ("32 GPUs on 5 nodes, no job", 0)


def test_a_node_whose_job_ended_has_no_job() -> None:
    world = World()
    world.run(1)
    without_jobs(world.topology)
    world.run(1)
    world.open("gpu:n0.3")
    assert world.impact()["text"] == "1 GPU on 1 node, no job"


def test_a_restart_knows_the_inventories_of_before(tmp_path: Path) -> None:
    database = Database(tmp_path / "fleet.duckdb")
    try:
        events = [inventory("n0", T0), inventory("n1", T0, collector="nvml")]
        with database.lock:
            batches = [EventBatch(Origin("s", e.entity[5:], b"", False), (e,)) for e in events]
            write_events(database.connection, batches, 0)
        world = Fresh()
        load_books(database.connection, world.book, [], world.time)
        world.open("gpu:n0.3", id_="inc-0")
        world.open("gpu:n1.3", id_="inc-1")
        texts = [world.impact(id_)["text"] for id_ in ("inc-0", "inc-1")]
        assert texts == ["1 GPU on 1 node, no job", "1 GPU on 1 node, jobs not known"]
        with database.lock:
            ImpactWriter(world.book).write(database.connection, T0)
        short = read_short_impacts(database.connection)
        assert {id_: row["nodes_without_job_list"] for id_, row in short.items()} == {"inc-0": 0, "inc-1": 1}
        found = read_impact(database.connection, "inc-1")
        assert found is not None
        assert found["nodes_without_job_list"] == 1
    finally:
        database.close()
