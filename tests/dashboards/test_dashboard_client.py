"""The client against a real HTTP server, also one that misbehaves."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dashboards.client import ApiError, Client, token_of
from pipeline.model.errors import UsageError


def test_all_answers_become_types(api: Any) -> None:
    client = Client(api.url)
    fleet = client.fleet()
    assert [node.state for node in fleet.nodes] == ["critical", "no_data", "ok"]
    assert fleet.nodes[2].rack == ""
    assert {i.id for i in client.incidents()} == {"A1", "B2"}
    assert client.incident("A1").findings[0].signals == ("rank.compute_time",)
    assert client.series("rank:81.17", "rank.compute_time", 0, 10).peers == 7
    assert client.timeline("rank:81.17", 0, 10)[0].entity == "job:81"


def test_a_state_asked_for_reaches_the_api(api: Any) -> None:
    Client(api.url).incidents("open")
    assert api.asked == [("incidents", {"state": ["open"]})]


def test_a_note_is_posted_and_answered_with_the_incident(api: Any) -> None:
    assert Client(api.url).act("A1", "acknowledge", "mine").state == "acknowledged"
    assert api.posted == [("incidents/A1/acknowledge", {"comment": "mine"})]


def test_a_token_travels_as_a_bearer(api: Any) -> None:
    Client(api.url, token="s3cret").fleet()
    assert api.headers[-1]["Authorization"] == "Bearer s3cret"


def test_an_unknown_state_of_a_node_is_no_data_never_ok(api: Any) -> None:
    api.fleet["nodes"][2]["state"] = "splendid"
    assert Client(api.url).fleet().nodes[2].state == "no_data"


def test_a_problem_document_is_told_with_its_status(api: Any) -> None:
    with pytest.raises(ApiError, match=r"No incidents/Z9 here \(HTTP 404\)") as caught:
        Client(api.url).incident("Z9")
    assert caught.value.status == 404


def test_a_name_cannot_climb_out_of_its_place_in_the_address(api: Any) -> None:
    with pytest.raises(ApiError):
        Client(api.url).incident("../fleet")
    assert api.asked == [("incidents/../fleet", {})]


def test_nobody_listening_names_the_address_and_the_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ApiError, match=f"{url} does not answer .*fleetpulse pipeline") as caught:
            Client(url).fleet()
    assert caught.value.status is None
    assert caught.value.exit_code == 3


def test_an_api_that_hangs_is_given_up(api: Any) -> None:
    api.released.clear()
    with pytest.raises(ApiError, match="does not answer"):
        Client(api.url, timeout=0.2).fleet()


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"null", b"{}", b'{"as_of": 3, "nodes": []}', b'{"as_of": "yesterday", "nodes": []}'],
)
def test_an_answer_that_is_not_understood_says_so(api: Any, body: bytes) -> None:
    api.broken["fleet"] = (200, body)
    with pytest.raises(ApiError, match=r"does not understand .* check \[dashboard\] api_url"):
        Client(api.url).fleet()


def test_an_incident_of_an_unknown_severity_is_not_understood(api: Any) -> None:
    api.incidents["A1"]["severity"] = "apocalypse"
    with pytest.raises(ApiError, match="severity 'apocalypse' is none of watch, ticket, page"):
        Client(api.url).incident("A1")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_names_the_token_file(api: Any, status: int) -> None:
    api.broken["fleet"] = (status, b'{"detail": "no token"}')
    with pytest.raises(ApiError, match=r"No token.*token_file"):
        Client(api.url).fleet()


def test_an_error_without_a_problem_document_is_told_by_its_reason(api: Any) -> None:
    api.broken["fleet"] = (502, b"bad gateway of somebody")
    with pytest.raises(ApiError, match=r"Bad Gateway \(HTTP 502\)"):
        Client(api.url).fleet()


def test_a_redirect_is_not_followed_with_the_token(api: Any) -> None:
    api.broken["fleet"] = (302, f"{api.url}/api/v1/elsewhere".encode())
    with pytest.raises(ApiError, match="HTTP 302"):
        Client(api.url, token="s3cret").fleet()
    assert [path for path, _ in api.asked] == ["fleet"]


def test_a_token_file_holds_a_token_or_a_name_and_a_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for text in ("s3cret\n", "# who\n\noncall:s3cret\n"):
        file.write_text(text)
        assert token_of(file) == "s3cret"
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        token_of(file)
    with pytest.raises(UsageError, match="cannot be read"):
        token_of(tmp_path / "absent")
