"""Mutes over HTTP: made with a reason and an end, listed, ended; and the verdict that something is no fault."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipeline.api import models

MUTES = "/api/v1/mutes"
WANTED = {"detector": "straggler", "scope": "rack:r1", "seconds": 600, "reason": "new paste"}


def test_a_mute_is_made_listed_and_ended(client: httpx.Client) -> None:
    made = models.Mute.model_validate(client.post(MUTES, json=WANTED).json())
    assert (made.detector, made.scope, made.reason, made.user, made.ended) == (
        *("straggler", "rack:r1", "new paste", "local"),
        None,
    )
    listed = models.Mutes.model_validate(client.get(MUTES).json()).mutes
    assert [m.id for m in listed] == [made.id]
    over = client.post(f"{MUTES}/{made.id}/end", json={})
    assert over.status_code == 200
    assert models.Mute.model_validate(over.json()).ended is not None
    (listed,) = models.Mutes.model_validate(client.get(MUTES).json()).mutes
    assert (listed.ended_by, made.ended_by) == ("local", None), "who lets it speak again is kept too"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"detector": "stragler"}, "no such detector"),
        ({"scope": "rack"}, "expected an entity"),
        ({"reason": " "}, "reason"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1e9}, "30 days"),
        ({"detector": "*", "scope": "*"}, "mutes everything"),
        ({"forever": True}, "forever"),
    ],
)
def test_a_mute_that_nobody_could_want_is_a_clear_400(client: httpx.Client, change: Any, named: str) -> None:
    answer = client.post(MUTES, json={**WANTED, **change})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert named in answer.json()["detail"]


def test_a_mute_that_is_not_there_is_404(client: httpx.Client) -> None:
    assert client.post(f"{MUTES}/nothing/end", json={}).status_code == 404


def test_a_mute_needs_a_token_where_tokens_are(with_tokens: httpx.Client) -> None:
    assert with_tokens.post(MUTES, json=WANTED, headers={"Authorization": ""}).status_code == 401


def test_an_incident_can_be_resolved_as_not_a_fault(client: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n1.0")
    said = {"comment": "always so", "not_a_fault": True}
    assert client.post("/api/v1/incidents/inc-1/resolve", json=said).status_code == 200
    (line,) = client.get("/api/v1/incidents/inc-1").json()["history"]
    assert line["comment"] == "not a fault: always so"
    assert client.post("/api/v1/incidents/inc-1/acknowledge", json=said).status_code == 400


def test_the_detectors_are_listed_with_what_a_reader_needs_to_trust_them(client: httpx.Client) -> None:
    listed = models.Detectors.model_validate(client.get("/api/v1/detectors").json())
    assert [(m.detector, m.scope, m.mode) for m in listed.modes] == [("*", "rack:r1", "record")]
    straggler = next(d for d in listed.detectors if d.name == "straggler")
    assert (straggler.family, straggler.device_class, straggler.off) == ("straggler", "rank", [])
    assert "rank.compute_time" in straggler.needs
    assert "suspects per 1,000 node-days" in straggler.budget[0]
    assert all(d.blind and d.about for d in listed.detectors)
