"""What the API refuses of people, on a real engine: versions, hostile times and text, and who tried."""

from __future__ import annotations

import pytest

from pipeline.api import tokens
from pipeline.commands.output import render_rows
from pipeline.config.sections import Api, Config, Store
from pipeline.incidents.audit import list_audit
from pipeline.incidents.handover import format_handover, read_handover
from pipeline.model.plain_text import strip_codes
from pipeline.model.records import LAST_TIME, SECOND, from_iso, iso
from tests.pipeline.api.test_api_people import Calls
from tests.pipeline.living import HOUR, LivingSite

FAR, FIRST = "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"
SILENCE = {"matchers": ["rack=r0"], "reason": "x"}
WINDOW = {"scopes": ["node:n0"], "reason": "x"}


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


@pytest.fixture
def call(site):
    return Calls(site, Config())


@pytest.mark.parametrize(("path", "body"), [("/silences", SILENCE), ("/maintenance", WINDOW)])
@pytest.mark.parametrize(
    "span",
    [
        {"seconds": 1e12},
        {"seconds": 1e300},
        {"seconds": 1e-9},
        {"starts": FAR, "seconds": 3600},
        {"starts": "9999-12-31T23:00:00Z", "seconds": 3599},
        {"starts": "9999-12-30T00:00:00Z", "ends": FAR},
        {"starts": "9999-12-01T00:00:00Z", "ends": "9999-12-30T00:00:00Z"},
        {"starts": "9999-12-31T23:59:59-14:00", "seconds": 1},
        {"starts": FIRST, "seconds": 3600},
        {"starts": FIRST, "ends": FAR},
        {"ends": "0001-01-01T00:00:00+14:00"},
    ],
)
def test_times_that_are_no_dates_are_400_with_a_text_and_nothing_is_added(call, path, body, span):
    answer = call("POST", path, {**body, **span})
    assert (answer.status_code, answer.json()["detail"][:6] != "") == (400, True)
    assert call("GET", "/silences").json() == {"silences": []}


def test_other_durations_and_times_of_people_are_answered_too(site, call):
    page = site.report("gpu:n0.0")
    mute = {"detector": "hot", "scope": "*", "reason": "x"}
    assert call("POST", "/mutes", {**mute, "seconds": 1e300}).status_code == 400
    assert call("POST", f"/incidents/{page}/acknowledge", {"hours": 1e300}).status_code == 400
    made = call("POST", "/silences", {**SILENCE, "seconds": 60}).json()
    for change in ({"ends": FAR}, {"starts": FAR}, {"starts": FAR, "ends": FAR}, {"starts": FIRST, "ends": FIRST}):
        assert call("PUT", f"/silences/{made['id']}", change).status_code == 400
    for time in (FIRST, FAR):
        assert call("GET", f"/handover?since={time}").status_code == 200
        assert call("GET", f"/handover?since={time}", Accept="text/plain").status_code == 200
        assert call("GET", f"/audit?since={time}").status_code == 200
    begun = call("POST", "/silences", {**SILENCE, "starts": FIRST, "ends": iso(site.now + HOUR)})
    assert (begun.status_code, begun.json()["starts"]) == (200, "0001-01-01T00:00:00.000000Z")
    assert "0001-01-01T00:00:00.000000Z" in {s["starts"] for s in call("GET", "/silences").json()["silences"]}


@pytest.mark.parametrize("path", ["objectives?to=", "topology?time=", "topology?entity=node:n0&time="])
@pytest.mark.parametrize("time", [FIRST, "0001-01-01T00:00:00%2B14:00", "1969-12-31T23:00:00Z", "x"])
def test_times_before_there_are_any_are_400_wherever_they_are_asked_for(call, path, time):
    assert call("GET", f"/{path}{time}").status_code == 400


def test_a_token_lasts_for_days_that_are_a_date(tmp_path):
    for days in (1e300, float("nan"), -1.0):
        with pytest.raises(tokens.UsageError, match="days = "):
            tokens.create_role_token(tmp_path / "s.tokens", "ann", "viewer", days, "root", 1)


@pytest.mark.parametrize("time", [0, 1, from_iso("0987-06-05T04:03:02.000001Z"), from_iso(FIRST), LAST_TIME])
def test_times_have_27_characters_and_are_read_again_also_of_years_before_1000(time):
    assert len(iso(time)) == 27
    assert from_iso(iso(time)) == time


def test_a_silence_that_had_not_begun_is_expired_when_a_person_ends_it(site, call):
    starts = iso(site.now + 6 * HOUR)
    for path, body in (("/silences", SILENCE), ("/maintenance", WINDOW)):
        made = call("POST", path, {**body, "starts": starts, "seconds": 3600}).json()
        assert made["state"] == "pending"
        ended = call("POST", f"/silences/{made['id']}/expire", {}).json()
        assert (ended["state"], ended["until"]) == ("expired", iso(site.now))
        assert call("POST", f"/silences/{made['id']}/expire", {}).status_code == 400
    assert call("GET", "/silences?active=true").json()["silences"] == []
    site.step()
    assert [s for s in site.engine.life.silences if s.state(site.now) != "expired"] == []
    site.now += 6 * HOUR + 60 * SECOND
    assert site.state(site.report("gpu:n0.0")) == "open"


def test_a_write_with_another_version_is_refused_wherever_there_are_versions(site, call):
    mute = call("POST", "/mutes", {"detector": "hot", "scope": "*", "seconds": 60, "reason": "x"})
    assert mute.headers["etag"] == '"1"'
    path = f"/mutes/{mute.json()['id']}/end"
    assert call("POST", path, {}, If_Match='"777"').status_code == 412
    ended = call("POST", path, {}, If_Match='"1"')
    assert (ended.status_code, ended.json()["version"], ended.headers["etag"]) == (200, 2, '"2"')
    assert {s["version"] for s in call("GET", "/silences").json()["silences"]} == {2}
    assert call("POST", "/calibration", {"action": "unpin"}, If_Match='"777"').status_code == 412
    pinned = call("POST", "/calibration", {"action": "unpin"}, If_Match='"0"')
    assert (pinned.status_code, pinned.headers["etag"]) == (200, '"1"')
    assert call("POST", "/calibration", {"action": "unpin"}, If_Match='"0"').status_code == 412
    assert call("POST", "/calibration", {"action": "unpin"}).headers["etag"] == '"2"'


@pytest.mark.parametrize(
    "version", ["soon", '"-1"', '"1", "2"', "", '"' + "9" * 19 + '"', '"' + "9" * 5000 + '"', "9" * 100_000]
)
def test_a_version_that_is_none_is_400_with_a_short_text_and_nothing_is_written(site, call, version):
    page = site.report("gpu:n0.0")
    answer = call("POST", f"/incidents/{page}/comment", {"comment": "x"}, If_Match=version)
    assert answer.status_code == 400
    assert answer.json()["detail"] == f"If-Match: {version[:64]!r}: expected the version of an earlier answer"
    assert call("GET", f"/incidents/{page}").json()["version"] == 1


def test_a_version_of_64_bits_is_only_another_one(site, call):
    page = site.report("gpu:n0.0")
    answer = call("POST", f"/incidents/{page}/comment", {"comment": "x"}, If_Match='"' + "9" * 18 + '"')
    assert answer.status_code == 412


@pytest.mark.parametrize("path", ["/budget/hot/reset", "/nodes/n0/decommission", "/notifications/replay", "/silences"])
def test_a_version_of_what_has_none_is_refused_and_not_ignored(call, path):
    answer = call("POST", path, {"reason": "x"}, If_Match='"777"')
    assert (answer.status_code, "has no version" in answer.json()["detail"]) == (412, True)


def test_any_version_is_no_condition(site, call):
    assert call("POST", "/budget/hot/reset", {}, If_Match="*").status_code != 412


def test_a_window_of_an_entity_that_is_not_known_is_added_with_a_warning(call):
    for scopes, warning in (
        (["node:n0"], ""),
        (["node:n0", "x:quite-new"], "scope = 'x:quite-new': unknown entity; no effect until it appears"),
    ):
        made = call("POST", "/maintenance", {"scopes": scopes, "seconds": 60, "reason": "x"}).json()
        assert made["warning"] == warning
    scopes = [f"x:{i}" for i in range(10)]
    made = call("POST", "/maintenance", {"scopes": scopes, "seconds": 60, "reason": "x"}).json()
    assert made["warning"].endswith("; and 7 more")


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31mann", "ann\u202e", " ", " ann", "\u200fann", "x" * 201])
def test_an_assignee_is_a_name_that_looks_like_what_it_is(site, call, name):
    page = site.report("gpu:n0.0")
    assert call("POST", f"/incidents/{page}/assign", {"to": name}).status_code == 400
    assert call("POST", f"/incidents/{page}/assign", {"to": "Zoë van 東京"}).json()["assignee"] == "Zoë van 東京"
    assert call("POST", f"/incidents/{page}/assign", {"to": ""}).json()["assignee"] is None


def test_codes_are_removed_from_what_people_write_and_lines_stay(site, call):
    page = site.report("gpu:n0.0")
    written, kept = "first\r\n\tsecond\x00 \x1b[2Jdone \u202egnihton\u2066", "first\n\tsecond [2Jdone gnihton"
    history = call("POST", f"/incidents/{page}/comment", {"comment": written})
    assert history.status_code == 200
    assert call("GET", f"/incidents/{page}").json()["history"][-1]["comment"] == kept
    assert call("POST", "/silences", {**SILENCE, "reason": written, "seconds": 60}).json()["reason"] == kept
    assert call("POST", f"/incidents/{page}/reopen", {"comment": "\x00\u202e"}).status_code == 400


def test_a_handover_and_csv_have_no_codes_of_what_was_stored_before(site):
    page = site.report("gpu:n0.0")
    site.people.assign(page, "ann", "eve\u202e\x1b[2J\nx", "")
    site.people.add_silence("silence", (), None, site.now + HOUR, "why\u202e\x1b\nmore", "ann")
    found = read_handover(site.database.connection, site.now - HOUR, site.now)
    assert not set(format_handover(found)) & set("\u202e\x1b")
    assert "x" in format_handover(found)
    assert render_rows([{"a": "b\u202e\x1b\x00\nc"}], ("a",), "csv") == 'a\n"b\nc"\n'
    assert strip_codes("a\tb\nc é 東京 👍🏽") == "a\tb\nc é 東京 👍🏽"


def test_the_audit_names_the_owner_of_an_expired_or_revoked_token(site, tmp_path):
    config = Config(api=Api(host="0.0.0.0"), store=Store(path=tmp_path / "store.duckdb"))
    path = tokens.find_role_file(config.store.path)
    gone, old = (tokens.create_role_token(path, owner, "operator", 1, "root", site.now) for owner in ("ann", "bob"))
    tokens.revoke_role_token(path, gone[0].id, "root", site.now)
    call = Calls(site, config)
    assert call("POST", "/silences", {}, bearer=gone[1]).status_code == 401
    site.now += 25 * HOUR
    rows = list_audit(site.database.connection)
    assert [(r["actor"], r["reason"]) for r in rows] == [("ann", f"revoked token {gone[0].id}")]
    known = tokens.Tokens({}, path, lambda: site.now)
    assert known.explain(f"Bearer {old[1]}") == ("bob", f"expired token {old[0].id}")
    assert known.explain("Bearer nonsense") == ("unknown", "no token, or an unknown one")
    assert call("GET", "/incidents", bearer=gone[1]).status_code == 401
    assert len(list_audit(site.database.connection)) == 1
