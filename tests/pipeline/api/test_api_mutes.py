"""Mutes over HTTP: created with a reason and an end, listed, ended; and incidents resolved as not a fault."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipeline.api import models

MUTES = "/api/v1/mutes"
MUTE = {"detector": "straggler", "scope": "rack:r1", "seconds": 600, "reason": "new paste"}


def test_a_mute_is_created_listed_and_ended(client: httpx.Client) -> None:
    created = models.Mute.model_validate(client.post(MUTES, json=MUTE).json())
    assert (created.detector, created.scope, created.reason, created.user, created.ended) == (
        *("straggler", "rack:r1", "new paste", "local"),
        None,
    )
    listed = models.Mutes.model_validate(client.get(MUTES).json()).mutes
    assert [m.id for m in listed] == [created.id]
    over = client.post(f"{MUTES}/{created.id}/end", json={})
    assert over.status_code == 200
    assert models.Mute.model_validate(over.json()).ended is not None
    (listed,) = models.Mutes.model_validate(client.get(MUTES).json()).mutes
    assert (listed.ended_by, created.ended_by) == ("local", None), "the user who ended it is stored"


@pytest.mark.sample(every=3)
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
def test_an_invalid_mute_is_a_400_that_names_the_field(client: httpx.Client, change: Any, named: str) -> None:
    answer = client.post(MUTES, json={**MUTE, **change})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert named in answer.json()["detail"]


def test_an_unknown_mute_is_a_404(client: httpx.Client) -> None:
    assert client.post(f"{MUTES}/nothing/end", json={}).status_code == 404


def test_a_mute_needs_a_token_when_tokens_are_configured(with_tokens: httpx.Client) -> None:
    assert with_tokens.post(MUTES, json=MUTE, headers={"Authorization": ""}).status_code == 401


def test_an_incident_can_be_resolved_as_not_a_fault(client: httpx.Client, open_incident: Any) -> None:
    open_incident("inc-1", "gpu:n1.0")
    note = {"comment": "always so", "not_a_fault": True}
    assert client.post("/api/v1/incidents/inc-1/resolve", json=note).status_code == 200
    (line,) = client.get("/api/v1/incidents/inc-1").json()["history"]
    assert line["comment"] == "not a fault: always so"
    assert client.post("/api/v1/incidents/inc-1/acknowledge", json=note).status_code == 400


def test_the_list_of_detectors_has_detection_rates_budgets_and_state(client: httpx.Client) -> None:
    listed = models.Detectors.model_validate(client.get("/api/v1/detectors").json())
    assert [(m.detector, m.scope, m.mode) for m in listed.modes] == [("*", "rack:r1", "record")]
    straggler = next(d for d in listed.detectors if d.name == "straggler")
    assert (straggler.family, straggler.device_class, straggler.off) == ("straggler", "rank", [])
    assert "rank.compute_time" in straggler.needs
    assert "suspects per 1,000 node-days" in straggler.budget[0]
    assert all(d.blind and d.about for d in listed.detectors)
