"""Search by name, serial number and incident."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from pipeline.api import search
from pipeline.incidents.silences import alert_name
from pipeline.model.entity_names import entity_name
from pipeline.model.topology import Topology

SEARCH = "/api/v1/search"


def found(client: httpx.Client, text: str, **more: Any) -> list[str]:
    answer = client.get(SEARCH, params={"q": text, **more})
    assert answer.status_code == 200, answer.text
    return [row.id for row in search.Results.model_validate(answer.json()).results]


def test_a_node_comes_before_its_devices(client: httpx.Client) -> None:
    ids = found(client, "n1")
    assert ids[0] == "node:n1"
    assert {"gpu:n1.0", "gpu:n1.1", "port:n1.mlx5_0"} <= set(ids)


def test_racks_jobs_and_cooling_units_are_found(client: httpx.Client) -> None:
    assert found(client, "R2")[0] == "rack:r2"
    assert found(client, "81")[0] == "job:81"
    assert found(client, "c1")[0] == "cdu:c1"


def test_a_kind_in_front_restricts_the_search(client: httpx.Client) -> None:
    assert found(client, "gpu:n1") == ["gpu:n1.0", "gpu:n1.1"]
    assert found(client, "port:") == ["port:n1.mlx5_0", "port:n3.mlx5_0"]


def test_a_serial_number_leads_to_its_device(client: httpx.Client, database: Any) -> None:
    with database.transaction() as connection:
        about = json.dumps({"serial": "1654922006536", "uuid": "GPU-5d1e"})
        connection.execute("UPDATE entity SET attributes = ? WHERE entity = 'gpu:n2.1'", [about])
    row = client.get(SEARCH, params={"q": "4922006"}).json()["results"][0]
    assert (row["id"], row["match"], row["text"]) == ("gpu:n2.1", "1654922006536", "node:n2")
    assert found(client, "gpu-5D1E") == ["gpu:n2.1"]


def test_incidents_are_found_by_id_and_by_words_of_their_title(client: httpx.Client, open_incident: Any) -> None:
    open_incident("INC-7", "rack:r1")
    open_incident("INC-8", "rack:r2", state="resolved")
    assert found(client, "inc-7") == ["INC-7"]
    assert found(client, "WRONG something") == ["INC-7", "INC-8"]
    assert client.get(SEARCH, params={"q": "inc-8"}).json()["results"][0]["state"] == "resolved"


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("GPU 1 of n1", "gpu:n1.1"),
        ("gpu 1 OF N1", "gpu:n1.1"),
        ("Node n1", "node:n1"),
        ("rack R2", "rack:r2"),
        ("CDU c1", "cdu:c1"),
        ("Port mlx5_0 of n3", "port:n3.mlx5_0"),
        ("rank 1 of job 81", "rank:81.1"),
        ("GPU 1 of n1: XID 79, GPU has fallen off the bus", "gpu:n1.1"),
        ("[simulated] CDU c1: flow 193 L/min, minimum 225; job 81 hangs", "cdu:c1"),
    ],
)
def test_a_name_or_title_as_pages_show_it_leads_to_its_device(client: httpx.Client, text: str, entity: str) -> None:
    assert found(client, text)[0] == entity


def test_every_name_that_pages_show_is_found_first(client: httpx.Client) -> None:
    rows = client.get("/api/v1/entities").json()["entities"]
    assert len(rows) > 20
    for row in rows:
        assert found(client, entity_name(row["entity"]).upper(), limit=1) == [row["entity"]]


def test_the_beginning_of_a_shown_name_finds_what_it_can_become(client: httpx.Client) -> None:
    assert found(client, "GPU 1 of n") == ["gpu:n1.1", "gpu:n2.1", "gpu:n3.1"]
    assert found(client, "node n")[:2] == ["node:n1", "node:n2"]
    assert found(client, "gpu 1") == ["gpu:n1.1", "gpu:n2.1", "gpu:n3.1"], "not gpu:n1.0: a node with a 1"
    assert found(client, "port mlx5") == ["port:n1.mlx5_0", "port:n3.mlx5_0"]
    assert found(client, "gpu n1") == ["gpu:n1.0", "gpu:n1.1"]


def test_a_whole_title_finds_its_incident_and_its_device(
    client: httpx.Client, database: Any, open_incident: Any
) -> None:
    titles = {
        "INC-1": ("gpu:n1.1", "GPU 1 of n1: 11,200 symbol errors in 28 of 31 checks of a long, long test…"),
        "INC-2": ("gpu:n1.1", "GPU 1 of n1: XID 79, GPU has fallen off the bus"),
        "INC-3": ("gpu:n2.1", "GPU 1 of n2: XID 79, GPU has fallen off the bus"),
    }
    for incident, (cause, summary) in titles.items():
        open_incident(incident, cause)
        with database.transaction() as connection:
            connection.execute("UPDATE incidents SET summary = ? WHERE id = ?", [summary, incident])
    assert found(client, titles["INC-2"][1]) == ["gpu:n1.1", "INC-2"]
    assert found(client, f"[simulated] {titles['INC-1'][1].upper()}") == ["gpu:n1.1", "INC-1"]
    assert found(client, titles["INC-1"][1].replace(",200", "200")) == ["gpu:n1.1", "INC-1"]
    older = "GPU 1 of n1: XID 31, memory page fault"
    assert found(client, older) == ["gpu:n1.1", "INC-1", "INC-2"], "the title of then: the incidents of the device"


def test_the_name_of_an_alert_finds_its_incidents(client: httpx.Client, open_incident: Any) -> None:
    open_incident("INC-7", "gpu:n1.1")
    name = alert_name("straggler")
    assert found(client, name) == ["INC-7"]
    assert found(client, f"{name.upper()} n1") == ["INC-7"]
    assert found(client, alert_name("sdc")) == []


@pytest.mark.parametrize("text", ["gpu" + " of " * 74, ": " * 150, "version" + " a" * 146, "1," * 150, "[" * 300])
def test_a_hostile_name_costs_little_among_many(text: str) -> None:
    """Measured: 2 ms with 400,000 names."""
    index = search.make_index((f"gpu:{i}.of", f"{i}.of") for i in range(200_000))
    start = time.process_time()
    search.find_entities(index, Topology(), text.strip().casefold(), 20)
    search.fold_text(text)
    assert time.process_time() - start < 0.2


def test_a_whole_name_is_found_among_more_than_are_ranked() -> None:
    names = [f"n{i}" for i in range(2 * search.MAX_SCANNED)]
    index = search.make_index((f"node:{name}", name) for name in names)
    for wanted in ("n7", names[-1], f"Node {names[-1]}".casefold()):
        rows, _ = search.find_entities(index, Topology(), wanted, 1)
        assert [row["id"] for row in rows] == [f"node:{wanted.split()[-1]}"]


def test_results_are_limited_and_counted(client: httpx.Client) -> None:
    answer = client.get(SEARCH, params={"q": "n", "limit": 2}).json()
    assert len(answer["results"]) == 2
    assert answer["total"] > 8


@pytest.mark.parametrize("text", ["<b>", "%", "' OR 1=1", "\n", "x" * 300, "ä\u0000"])
def test_hostile_text_finds_nothing_and_breaks_nothing(client: httpx.Client, text: str) -> None:
    assert found(client, text) == []


def test_text_that_is_missing_or_too_long_is_refused(client: httpx.Client) -> None:
    assert client.get(SEARCH).status_code == 400
    assert client.get(SEARCH, params={"q": "x" * 301}).status_code == 400


def test_a_line_with_several_matches_is_found_once() -> None:
    index = search.make_index((f"node:n{i}", f"n{i}") for i in range(1000))
    assert [entity for entity, _ in index.find("n99")] == ["node:n99", *(f"node:n99{i}" for i in range(10))]
    assert [entity for entity, _ in search.make_index([("node:nnn", "nnn")]).find("n")] == ["node:nnn"]
    assert list(index.find("zz")) == []
