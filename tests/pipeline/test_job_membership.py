"""Which rank ran where and when: intervals written by events, in any order of arrival within a commit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from pipeline.config.sections import Store
from pipeline.model.records import SECOND, Event, EventBatch, Origin
from pipeline.store.database import Database
from pipeline.store.events import write_events
from pipeline.store.job_membership import Membership, find_memberships
from pipeline.store.retention import DAY, apply_bounds, drop_unnamed_entities

T0 = 1_800_000_000 * SECOND
Fact = tuple[str, str, int, int | None]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(tmp_path / "store.duckdb")
    yield made
    made.close()


def write(database: Database, *events: Event, node: str = "n1") -> None:
    with database.transaction() as connection:
        write_events(connection, [EventBatch(Origin("local", node, b"e" * 16), events)])


def start(time: int, *gpus: int, job: str = "job:7", node: str = "n1") -> Event:
    ranks = {f"rank:{job[4:]}.{g}": {"stage": f"stage:{job[4:]}.0", "gpu": f"gpu:{node}.{g}"} for g in gpus}
    return Event(T0 + time * SECOND, job, "job_start", {"ranks": ranks})


def end(time: int, *ranks: str, job: str = "job:7") -> Event:
    return Event(T0 + time * SECOND, job, "job_end", {"ranks": list(ranks)})


def inventory(time: int, ranks: Mapping[str, Sequence[str]], node: str = "n1") -> Event:
    lines = {rank: {"parents": list(p), "attributes": {"node": node}} for rank, p in ranks.items()}
    return Event(T0 + time * SECOND, f"node:{node}", "inventory", {"entities": lines})


def facts(database: Database, *entities: str, at: int | None = None) -> list[Fact]:
    """(rank, entity, since, until) in seconds after T0; at: only those at that second."""
    first, last = (0, 10**6) if at is None else (at, at)
    found = find_memberships(database.connection, entities, T0 + first * SECOND, T0 + last * SECOND)
    seconds = [(m.since - T0) // SECOND for m in found]
    until = [None if m.until is None else (m.until - T0) // SECOND for m in found]
    return [(m.rank, m.entity, s, u) for m, s, u in zip(found, seconds, until, strict=True)]


def test_a_rank_is_on_its_gpu_from_the_start_of_its_job_to_its_end(database):
    write(database, start(10, 0, 1))
    write(database, end(50, "rank:7.0"))
    assert facts(database, "node:n1") == [("rank:7.0", "gpu:n1.0", 10, 50), ("rank:7.1", "gpu:n1.1", 10, None)]
    assert facts(database, "gpu:n1.0", at=49) == [("rank:7.0", "gpu:n1.0", 10, 50)]
    assert facts(database, "gpu:n1.0", at=50) == []
    assert facts(database, "gpu:n1.0", at=9) == []
    for name in ("rank:7.1", "stage:7.0", "job:7"):
        assert ("rank:7.1", "gpu:n1.1", 10, None) in facts(database, name, at=60)


def test_an_end_without_ranks_ends_the_whole_job(database):
    write(database, start(10, 0, 1), start(10, 2, job="job:8"))
    write(database, Event(T0 + 20 * SECOND, "job:7", "job_end", {}))
    assert [f[0] for f in facts(database, "node:n1", at=30)] == ["rank:8.2"]


def test_an_inventory_places_ranks_with_all_their_gpus_and_ends_those_it_no_longer_lists(database):
    both = ("job:7", "gpu:n1.0", "gpu:n1.1")
    write(database, start(10, 0))
    write(database, inventory(15, {"rank:7.0": both}))
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 10, None), ("rank:7.0", "gpu:n1.1", 15, None)]
    write(database, inventory(40, {}))
    assert [f[3] for f in facts(database, "rank:7.0")] == [40, 40]


def test_an_inventory_of_another_node_ends_nothing(database):
    write(database, inventory(15, {"rank:7.0": ("job:7", "gpu:n1.0")}))
    write(database, inventory(20, {}, node="n2"), node="n2")
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 15, None)]


def test_a_rank_without_a_known_gpu_is_on_its_node_and_found_for_each_of_its_gpus(database):
    write(database, Event(T0, "job:7", "job_start", {"ranks": {"rank:7.n1": {}}}))
    assert facts(database, "gpu:n1.3", at=5) == [("rank:7.n1", "node:n1", 0, None)]
    [found] = find_memberships(database.connection, ["gpu:n1.3"], T0, T0)
    assert not found.exact
    assert facts(database, "gpu:n11.3", at=5) == []


def test_gpus_that_become_known_later_count_from_the_beginning(database):
    write(database, Event(T0, "job:7", "job_start", {"ranks": {"rank:7.0": {}}}))
    write(database, inventory(15, {"rank:7.0": ("job:7", "gpu:n1.0")}))
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 0, None)]


def test_a_rank_that_moves_ends_on_its_old_gpu(database):
    write(database, start(10, 0), inventory(11, {"rank:7.0": ("job:7", "gpu:n1.0")}))
    write(database, inventory(30, {"rank:7.0": ("job:7", "gpu:n2.5")}, node="n2"), node="n2")
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 10, 30), ("rank:7.0", "gpu:n2.5", 30, None)]


def test_a_message_older_than_the_end_opens_nothing(database):
    write(database, start(10, 0))
    write(database, end(50, "rank:7.0"))
    write(database, start(12, 0))
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 10, 50)]


def test_an_older_start_moves_the_beginning_back(database):
    write(database, inventory(15, {"rank:7.0": ("job:7", "gpu:n1.0")}))
    write(database, start(10, 0))
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 10, None)]


def test_the_order_of_events_in_a_commit_does_not_matter(database):
    events = [start(10, 0), end(20, "rank:7.0"), start(30, 0), end(40, "rank:7.0"), start(50, 0)]
    random.Random(1).shuffle(events)
    write(database, *events)
    expected = [("rank:7.0", "gpu:n1.0", 10, 20), ("rank:7.0", "gpu:n1.0", 30, 40), ("rank:7.0", "gpu:n1.0", 50, None)]
    assert facts(database, "gpu:n1.0") == expected


def test_hostile_events_change_nothing(database):
    wrong = [{"ranks": 5}, {"ranks": {"rank:7.0": 3, "gpu:x": {}}}, {}, {"ranks": []}]
    write(database, *(Event(T0, "job:7", "job_start", data) for data in wrong))
    write(database, Event(T0, "node:n1", "inventory", {"entities": {"rank:7.0": {"parents": 1}, "rank:7.1": None}}))
    write(database, end(3), Event(T0, "job:<b>", "job_end", {"ranks": [5, None]}))
    assert database.connection.execute("SELECT count(*) FROM job_rank").fetchall() == [(0,)]


def test_the_view_has_the_number_of_the_rank(database):
    write(database, start(10, 0, 5))
    rows = database.connection.execute("SELECT rank, number, entity, node FROM job_membership ORDER BY number")
    assert rows.fetchall() == [("rank:7.0", 0, "gpu:n1.0", "node:n1"), ("rank:7.5", 5, "gpu:n1.5", "node:n1")]


def test_ranks_of_a_node_that_is_gone_end_when_it_was_last_heard(database):
    for time in (15, 3600):
        write(database, inventory(time, {"rank:7.0": ("job:7", "gpu:n1.0")}))
    drop_unnamed_entities(database, keep=DAY, now=T0 + 3 * DAY)
    assert facts(database, "rank:7.0") == [("rank:7.0", "gpu:n1.0", 15, 3600)]


def test_ended_ranks_are_removed_after_the_history(database):
    write(database, start(10, 0, 1))
    write(database, end(50, "rank:7.0"))
    apply_bounds(database, Store(), T0 + 91 * DAY)
    assert facts(database, "node:n1") == [("rank:7.1", "gpu:n1.1", 10, None)]


def test_a_row_of_the_answer_names_what_reported_it(database):
    write(database, start(10, 0))
    [found] = find_memberships(database.connection, ["gpu:n1.0"], T0 + 10 * SECOND, T0 + 10 * SECOND)
    assert found == Membership(
        *("job:7", "rank:7.0", "stage:7.0", "gpu:n1.0", "node:n1", T0 + 10 * SECOND, None, "n1", False)
    )
