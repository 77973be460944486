"""The list of incidents: filters, order, groups, pages and counts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipeline.api import models
from pipeline.store.database import Database

INCIDENTS = "/api/v1/incidents"


@pytest.fixture
def listed(client: httpx.Client, open_incident: Any) -> Any:
    """Asks for the list, of four incidents; returns ids."""
    open_incident("A", "gpu:n1.0", "ticket")
    open_incident("B", "gpu:n1.1", "page", state="acknowledged")
    open_incident("C", "gpu:n3.0", "page")
    open_incident("D", "cdu:c2", "watch", members=("gpu:n3.0", "gpu:n3.1"))

    def ask(**query: Any) -> list[str]:
        answer = client.get(INCIDENTS, params=query)
        assert answer.status_code == 200, answer.text
        return [i.id for i in models.Incidents.model_validate(answer.json()).incidents]

    return ask


def test_incidents_are_filtered_by_what_needs_a_person(listed: Any) -> None:
    assert listed(show="pending", sort="severity") == ["C", "A", "D"]
    assert listed(show="acknowledged") == ["B"]
    assert listed(show="silenced") == []
    assert listed(show="unresolved", sort="severity") == ["C", "B", "A", "D"]


def test_silenced_incidents_have_the_word_of_the_pages_and_the_one_of_before_is_accepted(
    listed: Any, open_incident: Any, client: httpx.Client, database: Database
) -> None:
    open_incident("E", "gpu:n5.0", "page", state="silenced")
    with database.transaction() as connection:
        connection.execute("UPDATE incidents SET life = $1 WHERE id = 'E'", ['{"silenced_by": ["s1"]}'])
    assert listed(show="silenced") == listed(show="muted") == ["E"]
    counts = client.get(INCIDENTS, params={"show": "muted"}).json()["counts"]
    assert (counts["silenced"], "muted" in counts) == (1, False)
    assert client.get(INCIDENTS, params={"show": "mute"}).status_code == 400


def test_matchers_are_those_of_silences(listed: Any) -> None:
    assert listed(filter='rack="r1"') == ["A", "B"]
    assert listed(filter=['rack=~"r.*"', 'severity="critical"']) == ["B", "C"]
    assert listed(filter='scope="cdu:c2"') == ["C", "D"]
    assert listed(filter='detector!="straggler"') == []


def test_all_words_must_occur(listed: Any) -> None:
    assert listed(q="WRONG n1.1") == ["B"]
    assert listed(q="wrong <b>") == []


def test_groups_are_counted_and_the_largest_comes_first(listed: Any, client: httpx.Client) -> None:
    assert listed(group="node")[:2] in (["A", "B"], ["C", "D"])
    page = client.get(INCIDENTS, params={"group": "severity", "limit": 1}).json()
    assert page["groups"] == [
        {"value": "critical", "total": 2},
        {"value": "info", "total": 1},
        {"value": "warning", "total": 1},
    ]
    assert [i["id"] for i in page["incidents"]] == ["B"]


def test_a_page_has_the_counts_of_all_tabs(listed: Any, client: httpx.Client) -> None:
    assert listed(limit=2, offset=2, sort="severity") == ["A", "D"]
    page = client.get(INCIDENTS, params={"limit": 1, "q": "n1"}).json()
    assert (page["total"], len(page["incidents"])) == (2, 1)
    assert page["counts"] == {"unresolved": 2, "pending": 1, "acknowledged": 1, "silenced": 0, "resolved": 0, "all": 2}


def test_labels_come_only_on_request(listed: Any, client: httpx.Client) -> None:
    assert "labels" not in client.get(INCIDENTS).json()["incidents"][0]
    found = {i["id"]: i["labels"] for i in client.get(INCIDENTS, params={"labels": "true"}).json()["incidents"]}
    assert (found["A"]["rack"], found["A"]["severity"]) == (["r1"], ["warning"])
    assert client.get(f"{INCIDENTS}/A").json()["labels"] == found["A"]


@pytest.mark.parametrize(
    ("query", "fault"),
    [({"filter": "rack"}, "expected LABEL=VALUE"), ({"show": "some"}, "show"), ({"limit": 0}, "limit")],
)
def test_a_bad_filter_is_refused_with_what_was_expected(client: httpx.Client, query: Any, fault: str) -> None:
    answer = client.get(INCIDENTS, params=query)
    assert answer.status_code == 400
    assert fault in answer.json()["detail"]


def test_a_row_has_the_version_of_its_incident_also_after_a_change(listed: Any, client: httpx.Client) -> None:
    seen = []
    for comment in ("it was loose", "the cable"):
        assert client.post(f"{INCIDENTS}/A/comment", json={"comment": comment}).status_code == 200
        rows = client.get(INCIDENTS).json()["incidents"]
        version = next(row["version"] for row in rows if row["id"] == "A")
        assert version == client.get(f"{INCIDENTS}/A").json()["version"]
        seen.append(version)
    assert seen[1] == seen[0] + 1
