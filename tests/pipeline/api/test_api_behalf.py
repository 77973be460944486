"""On behalf of: a program with the right names the person who writes; the audit has both."""

from __future__ import annotations

import pytest

from pipeline.api import tokens
from pipeline.config.sections import Api, Config, Store
from pipeline.http.roles import encode_name, is_note
from tests.pipeline.api import test_api_people
from tests.pipeline.api.test_api_people import Calls

site = test_api_people.site

AS_ALICE = {"Fleetpulse-User": "alice@example.org", "Fleetpulse-Role": "operator", "Fleetpulse-Client": "10.1.2.3"}


@pytest.fixture
def board(site, tmp_path):
    """The API with tokens of two dashboards, which may act for others, and of one admin, who may not."""
    config = Config(api=Api(host="0.0.0.0"), store=Store(path=tmp_path / "store.duckdb"))
    path, made = tokens.find_role_file(config.store.path), {}
    for owner, role, behalf in (("dashboard", "admin", True), ("wall", "viewer", True), ("root", "admin", False)):
        made[owner] = tokens.create_role_token(path, owner, role, 1, "root", site.now, behalf)[1]
    return Calls(site, config), made


def test_a_write_is_recorded_for_the_person_with_the_programs_name_in_the_origin(site, board):
    call, token = board
    page = site.report("gpu:n0.0")
    answer = call("POST", f"/incidents/{page}/acknowledge", {"comment": "x"}, bearer=token["dashboard"], **AS_ALICE)
    assert answer.status_code == 200
    assert answer.json()["acknowledged_by"] == "alice@example.org"
    row = call("GET", "/audit", bearer=token["root"]).json()["audit"][0]
    assert (row["actor"], row["role"]) == ("alice@example.org", "operator")
    assert row["origin"].startswith("10.1.2.3 via dashboard (")
    named = {**AS_ALICE, "Fleetpulse-Subject": "auth0%7C24400320"}
    call("POST", f"/incidents/{page}/comment", {"comment": "x"}, bearer=token["dashboard"], **named)
    row = call("GET", "/audit", bearer=token["root"]).json()["audit"][0]
    assert row["origin"].endswith("), subject auth0|24400320")


def test_a_person_has_the_lower_of_both_roles(site, board):
    call, token = board
    page = site.report("gpu:n0.0")
    note = (f"/incidents/{page}/comment", {"comment": "x"})
    viewer = {**AS_ALICE, "Fleetpulse-Role": "viewer"}
    admin = {**AS_ALICE, "Fleetpulse-Role": "admin"}
    assert call("POST", *note, bearer=token["dashboard"], **viewer).status_code == 403
    assert call("POST", *note, bearer=token["wall"], **admin).status_code == 403
    assert call("POST", "/budget/hot/reset", {}, bearer=token["dashboard"], **AS_ALICE).status_code == 403
    assert call("POST", "/budget/hot/reset", {}, bearer=token["dashboard"], **admin).status_code == 200
    rows = call("GET", "/audit", bearer=token["root"]).json()["audit"]
    assert [(r["actor"], r["role"], r["outcome"]) for r in rows[1:]] == [
        ("alice@example.org", "operator", "refused"),
        ("alice@example.org", "viewer", "refused"),
        ("alice@example.org", "viewer", "refused"),
    ]


def test_a_token_without_the_right_may_name_nobody(site, board):
    call, token = board
    page = site.report("gpu:n0.0")
    for headers in (
        AS_ALICE,
        {"Fleetpulse-User": "alice"},
        {"Fleetpulse-Role": "viewer"},
        {"Fleetpulse-Client": "::1"},
        {"Fleetpulse-Subject": "s-1"},
    ):
        answer = call("POST", f"/incidents/{page}/comment", {"comment": "x"}, bearer=token["root"], **headers)
        assert answer.status_code == 403
        assert "may not act on behalf of others" in answer.json()["detail"]
    assert call("GET", "/incidents", bearer=token["root"], **AS_ALICE).status_code == 403
    rows = call("GET", "/audit", bearer=token["root"]).json()["audit"]
    assert {(r["actor"], r["outcome"]) for r in rows} == {("root", "refused")}
    assert len(rows) == 6


def test_without_tokens_nobody_can_be_named(site, tmp_path):
    call = Calls(site, Config(store=Store(path=tmp_path / "store.duckdb")))
    page = site.report("gpu:n0.0")
    assert call("POST", f"/incidents/{page}/comment", {"comment": "x"}, **AS_ALICE).status_code == 403


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    "changed",
    [
        {"Fleetpulse-Role": "root"},
        {"Fleetpulse-Role": ""},
        {"Fleetpulse-User": ""},
        {"Fleetpulse-User": "%20alice"},
        {"Fleetpulse-User": "a%0Ab"},
        {"Fleetpulse-User": "%E2%80%AEecila"},
        {"Fleetpulse-User": "%FF"},
        {"Fleetpulse-User": "a" * 129},
        {"Fleetpulse-Client": "1" * 65},
        {"Fleetpulse-Subject": ""},
        {"Fleetpulse-Subject": "a" * 256},
    ],
)
def test_headers_that_are_not_understood_are_an_error(site, board, changed):
    call, token = board
    page = site.report("gpu:n0.0")
    note = (f"/incidents/{page}/comment", {"comment": "x"})
    answer = call("POST", *note, bearer=token["dashboard"], **{**AS_ALICE, **changed})
    assert answer.status_code == 400
    assert "expected" in answer.json()["detail"]


def test_any_name_of_a_person_can_be_sent(site, board):
    call, token = board
    page = site.report("gpu:n0.0")
    for name in ("Ærøskøbing <b>", "名前", "ann,bob;c%20d", "x" * 128):
        headers = {**AS_ALICE, "Fleetpulse-User": encode_name(name)}
        note = (f"/incidents/{page}/comment", {"comment": "x"})
        answer = call("POST", *note, bearer=token["dashboard"], **headers)
        assert answer.status_code == 200
        assert call("GET", "/audit", bearer=token["root"]).json()["audit"][0]["actor"] == name


def test_whoami_returns_name_role_and_right(site, board):
    call, token = board
    assert call("GET", "/whoami", bearer=token["wall"]).json() == {
        "name": "wall",
        "role": "viewer",
        "on_behalf_of": True,
    }
    found = call("GET", "/whoami", bearer=token["dashboard"], **AS_ALICE).json()
    assert found == {"name": "alice@example.org", "role": "operator", "on_behalf_of": False}
    assert call("GET", "/whoami", bearer="fp_wrong-wrong-wrong").status_code == 401


def test_notes_are_what_changes_neither_alerts_nor_settings():
    of = "/api/v1/incidents/A%2F1"
    notes = ("acknowledge", "assign", "comment", "feedback", "reopen", "resolve")
    assert all(is_note(f"{of}/{verb}") for verb in notes)
    others = (f"{of}/merge", f"{of}/split", "/api/v1/silences", "/api/v1/mutes", "/api/v1/incidents/a/b/comment")
    assert not any(is_note(path) for path in others)
