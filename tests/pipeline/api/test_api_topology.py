"""Where an entity is and what runs on it, over HTTP."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from pipeline.api.topology_routes import JobsAt, LinksAt, TopologyAt
from pipeline.model.records import SECOND, Event, EventBatch, Origin, iso
from pipeline.store.database import Database
from pipeline.store.events import write_events
from pipeline.store.topology_lines import write_site

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


@pytest.fixture
def moved(database: Database, now: int) -> int:
    """Node n1 is in rack r9 of a file for an hour, and was in r8 before; its port is cabled to l1. Returns when."""
    with database.transaction() as connection:
        cable = ("port:n1.mlx5_0", "port:l1.4", "netbox", {"label": "C7"})
        write_site(connection, {("node:n1", "rack:r8"): "netbox", ("port:l1.4", "leaf:l1"): "netbox"}, [cable], 1)
        lines = {("node:n1", "rack:r9"): "netbox", ("port:l1.4", "leaf:l1"): "netbox"}
        write_site(connection, lines, [cable], now - HOUR)
        connection.execute(
            """UPDATE entity SET attributes = '{"module_part": "MMA4Z00", "module_serial": "MT1"}'
               WHERE entity = 'port:n1.mlx5_0'"""
        )
        connection.execute("INSERT INTO device VALUES ('nic', 0, 'local', 'port:n1.mlx5_0', 'n1', true)")
        connection.execute(
            "INSERT INTO latest_nic (time, device, state, speed) VALUES (make_timestamptz(?), 0, 1, 400000)", [now]
        )
    return now - HOUR


def where(client: httpx.Client, entity: str, time: int | None = None) -> TopologyAt:
    at = {} if time is None else {"time": iso(time)}
    return TopologyAt.model_validate(client.get("/api/v1/topology", params={"entity": entity, **at}).json())


def test_an_entity_has_the_parents_of_the_asked_time_with_source_and_interval(client: httpx.Client, moved: int) -> None:
    [rack] = where(client, "node:n1").parents
    assert (rack.entity, rack.source, rack.since, rack.until) == ("rack:r9", "netbox", iso(moved), None)
    before = where(client, "node:n1", moved - SECOND)
    assert [(p.entity, p.until) for p in before.parents] == [("rack:r8", iso(moved))]
    assert where(client, "gpu:n1.0", moved - SECOND).above == ["node:n1", "rack:r8"]
    assert where(client, "gpu:n2.0").above == ["node:n2", "rack:r1", "cdu:c1"]


def test_children_are_counted_by_kind_and_peers_by_parent(client: httpx.Client, moved: int) -> None:
    node = where(client, "node:n1")
    assert [(c.kind, c.count) for c in node.children] == [("gpu", 2), ("port", 1)]
    assert [c.entities for c in where(client, "rack:r1").children] == [["node:n2"]]
    assert [(p.parent, p.count) for p in where(client, "gpu:n1.0").peers] == [("node:n1", 1)]
    assert not where(client, "rack:none").known


def test_a_past_group_has_the_jobs_of_the_nodes_that_were_in_it(client: httpx.Client, moved: int, jobs: int) -> None:
    assert ask(client, "rack:r8", moved - SECOND).jobs == ["job:80"]
    assert ask(client, "rack:r8").jobs == []


def test_a_link_has_both_ends_with_state_and_optics(client: httpx.Client, moved: int) -> None:
    answer = LinksAt.model_validate(client.get("/api/v1/links", params={"entity": "node:n1"}).json())
    [link] = answer.links
    assert (link.near.port, link.near.device, link.near.state, link.near.speed) == (
        *("port:n1.mlx5_0", "node:n1"),
        *("up", 400000),
    )
    assert link.near.module == {"module_part": "MMA4Z00", "module_serial": "MT1"}
    assert link.far is not None
    assert (link.far.port, link.far.device, link.far.state) == ("port:l1.4", "leaf:l1", None)
    assert (link.source, link.facts) == ("netbox", {"label": "C7"})
    switch = LinksAt.model_validate(client.get("/api/v1/links", params={"entity": "leaf:l1"}).json())
    assert [(x.near.port, x.far and x.far.port) for x in switch.links] == [("port:l1.4", "port:n1.mlx5_0")]
    port = LinksAt.model_validate(client.get("/api/v1/links", params={"entity": "port:n3.mlx5_0"}).json())
    assert [(x.near.port, x.far) for x in port.links] == [("port:n3.mlx5_0", None)]


def test_an_incident_is_explained_by_the_topology_of_its_time(
    client: httpx.Client, moved: int, open_incident: Callable[..., None], database: Database
) -> None:
    open_incident("i1", "node:n1")
    database.connection.execute("UPDATE incidents SET onset = make_timestamptz(?)", [moved - SECOND])
    found = client.get("/api/v1/incidents/i1").json()
    assert found["above"] == ["rack:r8"]


def test_the_blast_radius_of_an_incident_is_that_of_its_onset(
    client: httpx.Client, moved: int, open_incident: Callable[..., None], database: Database
) -> None:
    open_incident("i1", "rack:r8")
    open_incident("i2", "rack:r9")

    def count(id_: str, kind: str) -> int:
        return int(client.get(f"/api/v1/incidents/{id_}").json()["blast_radius"]["entities"].get(kind, 0))

    assert count("i1", "node") == 0
    database.connection.execute("UPDATE incidents SET onset = make_timestamptz(?)", [moved - SECOND])
    assert (count("i1", "node"), count("i2", "node")) == (1, 0)
    assert count("i1", "gpu") >= 1
