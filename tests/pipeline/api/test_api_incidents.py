"""Incidents over HTTP: reading them, and notes with the name of their author."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from pipeline.api import models
from pipeline.store.database import Database
from tests.pipeline.api.conftest import NOW

INCIDENTS = "/api/v1/incidents"


def test_incidents_are_listed_all_or_by_state(client: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n1.0")
    open_incident("inc-2", "gpu:n2.0", state="resolved")
    everything = models.Incidents.model_validate(client.get(INCIDENTS).json())
    assert {i.id for i in everything.incidents} == {"inc-1", "inc-2"}
    resolved = client.get(INCIDENTS, params={"state": "resolved"}).json()["incidents"]
    assert [i["id"] for i in resolved] == ["inc-2"]
    answer = client.get(INCIDENTS, params={"state": "closed"})
    assert answer.status_code == 400
    assert "state" in answer.json()["detail"]


@pytest.mark.parametrize("route", ["acknowledge", "comment", "resolve"])
def test_a_note_is_written_as_local_when_there_are_no_tokens(
    client: httpx.Client, open_incident: Any, route: str
) -> None:
    open_incident("inc-1", "gpu:n1.0")
    answer = client.post(f"{INCIDENTS}/inc-1/{route}", json={"comment": "seen; looking"})
    assert answer.status_code == 200
    assert models.Incident.model_validate(answer.json()).id == "inc-1"
    after = models.IncidentDetail.model_validate(client.get(f"{INCIDENTS}/inc-1").json())
    assert after.state == {"acknowledge": "acknowledged", "comment": "open", "resolve": "resolved"}[route]
    assert [(h["actor"], h["comment"]) for h in after.history] == [("local", "seen; looking")]


def test_a_note_has_the_user_name_of_the_token(with_tokens: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n1.0")
    headers = {"Authorization": "Bearer bob-has-a-long-token"}
    with_tokens.post(f"{INCIDENTS}/inc-1/comment", json={"comment": "mine"}, headers=headers)
    history = with_tokens.get(f"{INCIDENTS}/inc-1", headers=headers).json()["history"]
    assert history[0]["actor"] == "bob"
    assert with_tokens.post(f"{INCIDENTS}/inc-1/comment", json={"comment": "not mine"}).status_code == 401
    assert len(with_tokens.get(f"{INCIDENTS}/inc-1", headers=headers).json()["history"]) == 1


def test_an_unknown_incident_is_a_404(client: httpx.Client) -> None:
    answers = [client.get(f"{INCIDENTS}/nope")]
    answers += [client.post(f"{INCIDENTS}/nope/{r}", json={"comment": "x"}) for r in ("acknowledge", "comment")]
    for answer in answers:
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert "nope" in answer.json()["detail"]


def test_a_comment_has_a_maximum_length_and_must_not_be_empty(client: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n1.0")
    for comment in ("x" * 4001, "", "  "):
        answer = client.post(f"{INCIDENTS}/inc-1/comment", json={"comment": comment})
        assert answer.status_code == 400
        assert "comment" in answer.json()["detail"]
    assert client.post(f"{INCIDENTS}/inc-1/comment", json={"comment": "x" * 4000}).status_code == 200
    assert client.post(f"{INCIDENTS}/inc-1/acknowledge", json={}).status_code == 200


def test_incidents_that_began_together_near_each_other_are_linked_both_ways(
    client: httpx.Client, open_incident: Any, database: Any
) -> None:
    for number, cause in (("inc-1", "gpu:n1.0"), ("inc-2", "gpu:n1.1"), ("late", "gpu:n1.0"), ("merged", "gpu:n1.1")):
        open_incident(number, cause)
    open_incident("far", "gpu:elsewhere.0")
    with database.transaction() as connection:
        connection.execute("UPDATE incidents SET onset = onset + INTERVAL 121 SECOND WHERE id = 'late'")
        connection.execute("UPDATE incidents SET resolved = onset, state = 'resolved' WHERE id = 'merged'")
        connection.execute(
            "INSERT INTO history SELECT id, 1, onset, 'resolved', 'fleetpulse', 'merged into inc-1', '{}' "
            "FROM incidents WHERE id = 'merged'"
        )
    for one, other in (("inc-1", "inc-2"), ("inc-2", "inc-1")):
        detail = models.IncidentDetail.model_validate(client.get(f"{INCIDENTS}/{one}").json())
        assert [(c.id, c.shared) for c in detail.co_occurring] == [(other, "node:n1")]


def test_the_detail_explains_the_cause(client: httpx.Client, database: Database, open_incident: Any) -> None:
    open_incident("inc-1", "cdu:c1", members=("gpu:n1.0",))
    stored = {"evidence": "2 of 2 nodes", "alternatives": [{"cause": None, "probability": 0.1}]}
    with database.transaction() as connection:
        connection.execute("UPDATE incidents SET explanation = $1 WHERE id = 'inc-1'", [json.dumps(stored)])
        connection.execute(
            """INSERT INTO findings SELECT t, t, 'rank:81.0', 'straggler', 'page', 1, 'slow', '{}', [], 'inc-1'
               FROM (SELECT make_timestamptz($1) AS t)""",
            [NOW],
        )
    found = client.get("/api/v1/incidents/inc-1").json()["explanation"]
    assert (found["root"], found["probability"], found["evidence"]) == ("cdu:c1", 0.9, "2 of 2 nodes")
    assert found["alternatives"] == [{"cause": None, "probability": 0.1}]
    assert found["explained"][0]["path"] == ["cdu:c1", "rack:r1", "node:n1", "gpu:n1.0", "rank:81.0"]
