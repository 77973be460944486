"""Search by name, serial number and incident."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pipeline.api import search

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
