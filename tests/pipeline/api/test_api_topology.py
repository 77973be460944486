"""Where an entity is and what runs on it, over HTTP."""

from __future__ import annotations

import httpx
import pytest

from pipeline.api.topology_routes import JobsAt
from pipeline.model.records import SECOND, Event, EventBatch, Origin, iso
from pipeline.store.database import Database
from pipeline.store.events import write_events

HOUR = 3600 * SECOND


@pytest.fixture
def jobs(database: Database, now: int) -> int:
    """Job 81 on n1 for the last hour, job 80 on n1 and n3 the hour before. Returns the time of the change."""
    change = now - HOUR
    with database.transaction() as connection:
        for node in ("n1", "n3"):
            places = {f"rank:80.{node[1]}{i}": {"gpu": f"gpu:{node}.{i}"} for i in range(2)}
            started = Event(change - HOUR, "job:80", "job_start", {"ranks": places})
            ended = Event(change, "job:80", "job_end", {"ranks": list(places)})
            write_events(connection, [EventBatch(Origin("local", node, b"e" * 16), (started, ended))])
        current = Event(change, "job:81", "job_start", {"ranks": {"rank:81.0": {"gpu": "gpu:n1.0"}}})
        write_events(connection, [EventBatch(Origin("local", "n1", b"e" * 16), (current,))])
    return change


def ask(client: httpx.Client, entity: str, time: int | None = None) -> JobsAt:
    at = {} if time is None else {"time": iso(time)}
    answer = client.get("/api/v1/jobs/at", params={"entity": entity, **at})
    assert answer.status_code == 200, answer.text
    return JobsAt.model_validate(answer.json())


def test_a_gpu_has_the_job_of_the_asked_time(client: httpx.Client, jobs: int) -> None:
    assert ask(client, "gpu:n1.0").jobs == ["job:81"]
    assert ask(client, "gpu:n1.0", jobs - SECOND).jobs == ["job:80"]
    assert ask(client, "gpu:n1.0", jobs - 2 * HOUR).jobs == []


def test_a_group_has_the_ranks_of_all_below_it_and_a_part_those_of_its_node(client: httpx.Client, jobs: int) -> None:
    before = jobs - SECOND
    assert [r.rank for r in ask(client, "cdu:c2", before).ranks] == ["rank:80.30", "rank:80.31"]
    assert len(ask(client, "leaf:l1", before).ranks) == 4  # it has ports of both nodes below it
    assert [r.node for r in ask(client, "port:n3.mlx5_0", before).ranks] == ["node:n3"] * 2
    assert ask(client, "rack:r9").ranks == []


def test_a_rank_says_where_and_how_long_it_ran(client: httpx.Client, jobs: int) -> None:
    [rank] = ask(client, "rank:80.10", jobs - SECOND).ranks
    assert (rank.entity, rank.node, rank.exact, rank.source) == ("gpu:n1.0", "node:n1", True, "n1")
    assert (rank.since, rank.until) == (iso(jobs - HOUR), iso(jobs))


def test_a_bad_time_or_entity_is_refused(client: httpx.Client) -> None:
    assert client.get("/api/v1/jobs/at", params={"entity": "gpu:n1.0", "time": "soon"}).status_code == 400
    assert client.get("/api/v1/jobs/at", params={"entity": "n1"}).status_code == 400
