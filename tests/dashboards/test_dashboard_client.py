"""The client with a real HTTP server, also a failing one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from dashboards.client import ApiError, Client, read_token
from pipeline.http.client import NO_RIGHT, REFUSED
from pipeline.model.errors import UsageError


def test_all_responses_are_parsed(api: Any) -> None:
    client = Client(api.url)
    fleet = client.fetch_fleet()
    assert [node.state for node in fleet.nodes] == ["critical", "no_data", "ok"]
    assert fleet.nodes[2].rack == ""
    assert {i.id for i in client.fetch_incidents()} == {"A1", "B2"}
    assert client.fetch_incident("A1").findings[0].signals == ("rank.compute_time",)
    assert client.fetch_series("rank:81.17", "rank.compute_time", 0, 10).peers == 7
    assert client.fetch_timeline("rank:81.17", 0, 10)[0].entity == "job:81"


def test_the_state_filter_is_sent_to_the_api(api: Any) -> None:
    Client(api.url).fetch_incidents("open")
    assert api.asked == [("incidents", {"state": ["open"]})]


def test_a_note_is_posted_and_returns_the_incident(api: Any) -> None:
    assert Client(api.url).write_note("A1", "acknowledge", "mine").state == "acknowledged"
    assert api.posted == [("incidents/A1/acknowledge", {"comment": "mine"})]


def test_the_token_is_sent_as_a_bearer_token(api: Any) -> None:
    Client(api.url, token="s3cret").fetch_fleet()
    assert api.headers[-1]["Authorization"] == "Bearer s3cret"


def test_an_unknown_node_state_becomes_no_data(api: Any) -> None:
    api.fleet["nodes"][2]["state"] = "splendid"
    assert Client(api.url).fetch_fleet().nodes[2].state == "no_data"


def test_the_detail_and_status_of_a_problem_document_are_reported(api: Any) -> None:
    with pytest.raises(ApiError, match=r"No incidents/Z9 here \(HTTP 404\)") as caught:
        Client(api.url).fetch_incident("Z9")
    assert caught.value.status == 404


def test_any_path_is_fetched_with_a_query_and_parsed(api: Any) -> None:
    assert Client(api.url).fetch(lambda table: len(table["nodes"]), "fleet", [("kind", "node")]) == 3
    assert api.asked == [("fleet", {"kind": ["node"]})]


def test_any_change_is_sent_to_a_path(api: Any) -> None:
    Client(api.url).send(dict, "incidents/A1/comment", {"comment": "seen"})
    assert api.posted == [("incidents/A1/comment", {"comment": "seen"})]


def test_names_are_quoted_in_the_path(api: Any) -> None:
    with pytest.raises(ApiError):
        Client(api.url).fetch_incident("../fleet")
    assert api.asked == [("incidents/../fleet", {})]


def test_a_refused_connection_names_the_address_and_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ApiError, match=f"{url} does not answer .*fleetpulse doctor") as caught:
            Client(url).fetch_fleet()
    assert caught.value.status is None
    assert caught.value.exit_code == 3


def test_a_hanging_api_times_out(api: Any) -> None:
    api.released.clear()
    with pytest.raises(ApiError, match="does not answer"):
        Client(api.url, timeout=0.2).fetch_fleet()


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b"{}", b'{"as_of": 3, "nodes": []}', b'{"as_of": "yesterday", "nodes": []}'],
)
def test_an_unexpected_response_is_an_error(api: Any, body: bytes) -> None:
    api.broken["fleet"] = (200, body)
    with pytest.raises(ApiError, match=r"unexpected response .* check \[dashboard\] api_url"):
        Client(api.url).fetch_fleet()


def test_an_unknown_severity_is_an_error(api: Any) -> None:
    api.incidents["A1"]["severity"] = "apocalypse"
    with pytest.raises(ApiError, match="severity 'apocalypse': expected one of watch, ticket, page"):
        Client(api.url).fetch_incident("A1")


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_without_the_right_names_the_token_file(api: Any, status: int) -> None:
    api.broken["fleet"] = (status, json.dumps({"detail": "no token", "type": NO_RIGHT}).encode())
    with pytest.raises(ApiError, match=r"No token.*token_file"):
        Client(api.url).fetch_fleet()


@pytest.mark.parametrize("kind", [REFUSED, "about:blank"])
def test_a_refusal_that_no_token_would_change_says_nothing_of_tokens(api: Any, kind: str) -> None:
    why = "approve ACT-1: the requester cannot approve what needs two people"
    api.broken["acts/ACT-1/approve"] = (403, json.dumps({"detail": why, "type": kind}).encode())
    with pytest.raises(ApiError) as refused:
        Client(api.url).send(dict, "acts/ACT-1/approve", {})
    assert str(refused.value) == f"A{why[1:]} (HTTP 403)"


def test_an_error_without_a_problem_document_is_reported_by_its_reason(api: Any) -> None:
    api.broken["fleet"] = (502, b"bad gateway of a proxy")
    with pytest.raises(ApiError, match=r"Bad Gateway \(HTTP 502\)\. .* run: fleetpulse doctor"):
        Client(api.url).fetch_fleet()


def test_only_a_response_that_is_missing_leaves_a_write_in_doubt(api: Any) -> None:
    api.broken["fleet"] = (409, b'{"detail": "changed"}')
    with pytest.raises(ApiError) as refused:
        Client(api.url).fetch_fleet()
    with pytest.raises(ApiError) as away:
        Client("http://127.0.0.1:9").fetch_fleet()
    api.released.clear()
    with pytest.raises(ApiError, match=r"does not answer within 0\.2 s: the pipeline is busy or hangs") as late:
        Client(api.url, timeout=0.2).fetch_fleet()
    assert (refused.value.unsure, away.value.unsure, late.value.unsure) == (False, False, True)
    assert refused.value.describe("Not silenced.") == "Not silenced. Changed (HTTP 409)"


def test_a_redirect_is_not_followed_with_the_token(api: Any) -> None:
    api.broken["fleet"] = (302, f"{api.url}/api/v1/elsewhere".encode())
    with pytest.raises(ApiError, match="HTTP 302"):
        Client(api.url, token="s3cret").fetch_fleet()
    assert [path for path, _ in api.asked] == ["fleet"]


def test_a_token_file_contains_a_token_or_name_and_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for text in ("s3cret\n", "# who\n\noncall:s3cret\n"):
        file.write_text(text)
        assert read_token(file) == "s3cret"
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_token(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "absent")
