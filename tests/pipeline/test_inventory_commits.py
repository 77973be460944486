"""What inventories say does not depend on how many of them are committed, or judged, together: a backlog has many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.model.membership import Membership
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.model.topology import Topology
from pipeline.store.append import forget_sources
from pipeline.store.database import Database
from pipeline.store.events import write_events
from tests.examples import examples
from tests.pipeline.test_job_end import NOW

READ = (
    "SELECT entity, kind, parents, attributes, node, epoch_us(named), CASE WHEN kind NOT IN ('rank', 'stage', 'job') "
    "THEN epoch_us(since) END FROM entity ORDER BY entity",
    'SELECT rank, job, stage, device, node, epoch_us(since), epoch_us("until") FROM job_rank ORDER BY ALL',
    'SELECT entity, parents, epoch_us(since), epoch_us("until") FROM inventory_past ORDER BY ALL',
)


def list_inventory(node: str, time: int, ranks: Sequence[tuple[int, int, int]], rack: str = "rack:r1") -> Event:
    """ranks: (job, number, GPU)."""
    lines: dict[str, Any] = {f"node:{node}": {"parents": [rack], "attributes": {"agent": str(time % 3)}}}
    lines |= {f"gpu:{node}.{gpu}": {"parents": [f"node:{node}"], "attributes": {}} for gpu in range(2)}
    for job, number, gpu in ranks:
        stage = f"stage:{job}.{number % 2}"
        lines[f"job:{job}"] = {"parents": [], "attributes": {"name": "llama"}}
        lines[stage] = {"parents": [f"job:{job}"], "attributes": {}}
        over = [stage, f"job:{job}", f"gpu:{node}.{gpu}"]
        lines[f"rank:{job}.{number}"] = {"parents": over, "attributes": {"node": node}}
    return Event(NOW + time * SECOND, f"node:{node}", "inventory", {"entities": lines})


RANKS = st.lists(st.tuples(st.sampled_from([81, 82]), st.integers(0, 1), st.integers(0, 1)), max_size=3)
SAID = st.tuples(st.sampled_from(["n1", "n2"]), RANKS, st.sampled_from(["rack:r1", "rack:r1", "rack:r2"]))
SEQUENCE = st.lists(st.tuples(SAID, st.booleans()), min_size=1, max_size=8)
"""Inventories, and whether each begins another commit."""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    made = Database(Path(tmp_path_factory.mktemp("store")) / "store.duckdb")
    yield made
    made.close()


def write(database: Database, commits: Sequence[Sequence[Event]]) -> list[list[tuple[Any, ...]]]:
    """Returns what the tables have after commits, and takes those back."""
    connection = database.connection
    connection.begin()
    try:
        for events in commits:
            batches = [EventBatch(Origin("local", e.entity[5:], b"e" * 16), (e,)) for e in events]
            write_events(connection, batches)
        return [connection.execute(sql).fetchall() for sql in READ]
    finally:
        connection.rollback()
        forget_sources(connection)


def judge(groups: Sequence[Sequence[Event]]) -> Topology:
    membership = Membership(Topology({}))
    for events in groups:
        membership.apply_events(events)
    return membership.topology


def split(sequence: Sequence[tuple[Any, bool]]) -> tuple[list[Event], list[list[Event]]]:
    events = [list_inventory(node, i, ranks, rack) for i, ((node, ranks, rack), _) in enumerate(sequence)]
    groups: list[list[Event]] = []
    for event, (_, begins) in zip(events, sequence, strict=True):
        if begins or not groups:
            groups.append([])
        groups[-1].append(event)
    return events, groups


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SEQUENCE)
def test_the_tables_are_the_same_for_any_split_of_inventories_into_commits(
    database: Database, sequence: Sequence[tuple[Any, bool]]
) -> None:
    events, groups = split(sequence)
    assert write(database, groups) == write(database, [[event] for event in events])


@settings(max_examples=examples(200), deadline=None)
@given(SEQUENCE)
def test_the_topology_is_the_same_for_any_split_of_inventories_into_instants(
    sequence: Sequence[tuple[Any, bool]],
) -> None:
    events, groups = split(sequence)
    together, alone = judge(groups), judge([[event] for event in events])
    assert dict(together.parents) == dict(alone.parents)
    assert dict(together.attributes) == dict(alone.attributes)


def test_a_rank_that_a_newer_inventory_of_the_same_commit_does_not_list_is_removed(database: Database) -> None:
    entities, _, _ = write(database, [[list_inventory("n1", 0, [(81, 0, 0)]), list_inventory("n1", 1, [(82, 0, 0)])]])
    assert [row[0] for row in entities if row[1] in ("rank", "job")] == ["job:82", "rank:82.0"]


def test_a_rank_that_one_inventory_of_an_instant_does_not_list_and_the_next_does_stays_on_its_node() -> None:
    first, second, third = (list_inventory("n1", i, ranks) for i, ranks in enumerate(([(81, 0, 0)], [], [(81, 0, 0)])))
    topology = judge([[first], [second, third]])
    assert topology.descendants("job:81") == ("stage:81.0", "rank:81.0")


def test_an_end_between_two_inventories_of_a_backlog_counts_when_its_frame_is_judged() -> None:
    """All inventories of a backlog are applied before its first frame; the newest has the next run of the job."""
    membership = Membership(Topology({}))
    membership.apply_inventories(
        [list_inventory("n1", i, ranks) for i, ranks in enumerate(([(81, 0, 0)], [], [(81, 0, 0)]))]
    )
    end = Event(NOW + SECOND, "job:81", "job_end", {"ranks": ["rank:81.0"]})
    assert membership.apply_events([end]) == ("rank:81.0", "job:81", "stage:81.0")
    start = Event(NOW + 2 * SECOND, "job:81", "job_start", {"ranks": {"rank:81.0": {"gpu": "gpu:n1.0"}}})
    membership.apply_events([start])
    assert membership.topology.descendants("job:81") == ("rank:81.0",)


@pytest.mark.parametrize(("entities", "left"), [({}, []), ("none", ["rank:81.0"]), (None, ["rank:81.0"])])
def test_an_empty_inventory_ends_the_ranks_of_its_node_in_any_commit_and_a_malformed_one_none(
    database: Database, entities: Any, left: list[str]
) -> None:
    said = list_inventory("n1", 0, [(81, 0, 0)])
    empty = Event(NOW + SECOND, "node:n1", "inventory", {"entities": entities})
    for commits in ([[said], [empty]], [[said, empty]]):
        found, _, _ = write(database, commits)
        assert [row[0] for row in found if row[1] == "rank"] == left
