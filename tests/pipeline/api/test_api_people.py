"""The API of what people do: versions, roles, audit, silences, maintenance, handover; on a real engine."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

import fleetpulse
from pipeline.api import guard, store_reads, tokens
from pipeline.api.people_routes import Audit, Handover, Silence, Silences
from pipeline.api.server import create_app
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config.sections import Api, Config, Store
from pipeline.incidents import audit
from pipeline.incidents.audit import check_chain
from pipeline.incidents.handover import format_handover
from pipeline.incidents.matchers import parse_matchers
from pipeline.model.errors import ConfigError, UsageError
from pipeline.model.records import Caller, iso
from tests.pipeline.api.conftest import InProcess
from tests.pipeline.living import HOUR, MINUTE, LivingSite


class Service:
    """What the backend needs of the service, on a living site."""

    def __init__(self, site):
        self.site, self.config, self.judge = site, Config(), site.engine.judge
        self.topology, self.database, self.clock = site.topology, site.database, lambda: site.now

    @property
    def engine(self):
        return self.site.engine


class Calls:
    """Calls of the API; by a token if `bearer` is given."""

    def __init__(self, site, config):
        backend = PipelineBackend(Service(site))
        backend.list_unready_reasons = backend.list_evaluation_faults = list  # the rest of a service is not here
        backend.read_health = lambda: {"watermark": None, "stalled": False}
        backend.read_revision = object
        self.client = httpx.Client(transport=InProcess(create_app(backend, config, lambda: site.now)))

    def __call__(self, method, path, body=None, bearer="", **headers):
        base = "http://127.0.0.1:8600" if not bearer else "http://fleet.example"
        given = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request(method, f"{base}/api/v1{path}", json=body, headers=given)


@pytest.fixture
def site(tmp_path):
    made = LivingSite(tmp_path / "store.duckdb")
    yield made
    made.database.close()


@pytest.fixture
def call(site):
    return Calls(site, Config())


def test_a_write_with_the_version_of_before_is_refused_with_412_and_the_answer_has_the_new_one(site, call):
    page = site.report("gpu:n0.0")
    detail = call("GET", f"/incidents/{page}")
    assert (detail.headers["etag"], detail.json()["version"]) == ('"1"', 1)
    done = call("POST", f"/incidents/{page}/acknowledge", {"comment": "mine", "hours": 1}, If_Match='"1"')
    assert (done.status_code, done.headers["etag"], done.json()["state"]) == (200, '"2"', "acknowledged")
    assert done.json()["acknowledged_until"] == iso(site.now + HOUR)
    late = call("POST", f"/incidents/{page}/resolve", {"comment": "mine"}, If_Match='"1"')
    assert late.status_code == 412
    assert "version 2 now, not 1" in late.json()["detail"]
    assert call("POST", f"/incidents/{page}/comment", {"comment": "x"}, If_Match="soon").status_code == 400
    assert call("POST", f"/incidents/{page}/comment", {"comment": "x"}, If_Match="*").status_code == 200


def test_each_act_on_an_incident_has_a_route_and_an_unknown_incident_is_404(site, call):
    page, other = site.report("gpu:n0.0"), site.report("gpu:n5.0")
    post = lambda verb, body, id_=page: call("POST", f"/incidents/{id_}/{verb}", body)  # noqa: E731
    assert post("assign", {"to": "bob"}).json()["assignee"] == "bob"
    assert post("feedback", {"verdict": "useful"}).json()["feedback"] == "useful"
    assert set(post("merge", {"incidents": [other], "comment": "one"}).json()["members"]) == {"gpu:n0.0", "gpu:n5.0"}
    apart = post("split", {"entities": ["gpu:n5.0"], "comment": "two"}).json()
    assert apart["members"] == ["gpu:n5.0"]
    assert post("resolve", {"comment": "done"}).json()["state"] == "resolved"
    assert post("reopen", {"comment": "not done"}).json()["state"] == "open"
    assert post("reopen", {"comment": ""}).status_code == 400
    assert post("feedback", {"verdict": "nice"}).status_code == 400
    assert post("assign", {"to": "bob"}, "inc-nope").status_code == 404
    assert post("merge", {"incidents": ["inc-nope"], "comment": "x"}).status_code == 404


def test_silences_and_maintenance_by_the_api(site, call):
    page = site.report("gpu:n0.0")
    wanted = {"matchers": ['rack="r0"', {"name": "severity", "value": "info", "isEqual": False}], "reason": "cable"}
    assert [
        i["id"] for i in call("POST", "/silences/preview", {"matchers": wanted["matchers"]}).json()["incidents"]
    ] == [page]
    made = call("POST", "/silences", {**wanted, "seconds": 600})
    Silence.model_validate(made.json())
    assert (made.json()["text"], made.headers["etag"]) == ('rack="r0" severity!="info"', '"1"')
    assert call("GET", f"/incidents/{page}").json()["silenced_by"] == [made.json()["id"]]
    path = f"/silences/{made.json()['id']}"
    assert call("PUT", path, {"ends": iso(site.now + HOUR)}, If_Match='"1"').json()["version"] == 2
    assert call("PUT", path, {"reason": "x"}, If_Match='"1"').status_code == 412
    assert call("POST", f"{path}/expire", {}).json()["state"] == "expired"
    assert call("POST", f"{path}/expire", {}).status_code == 400
    assert call("PUT", "/silences/none", {"reason": "x"}).status_code == 404
    assert call("POST", "/silences", {**wanted, "matchers": ["a!=b"], "seconds": 60}).status_code == 400
    assert call("POST", "/silences", wanted).status_code == 400
    window = call("POST", "/maintenance", {"scopes": ["node:n0"], "seconds": 3600, "reason": "pump"}).json()
    assert (window["kind"], window["until"]) == ("maintenance", iso(site.now + HOUR + 15 * MINUTE))
    call("POST", "/mutes", {"detector": "hot", "scope": "*", "seconds": 60, "reason": "paste"})
    listed = call("GET", "/silences").json()
    Silences.model_validate(listed)
    assert {s["kind"] for s in listed["silences"]} == {"silence", "maintenance", "mute"}
    assert len(call("GET", "/silences?active=true").json()["silences"]) == 2
    assert [s["id"] for s in call("GET", "/maintenance").json()["silences"]] == [window["id"]]


@pytest.mark.slow
def test_a_handover_has_what_is_open_muted_pending_and_changed(site, call):
    old = site.report("gpu:n5.0")
    site.people.acknowledge(old, "bob", "mine")
    site.wait(60)
    site.people.add_silence("silence", parse_matchers(["gpu=n0.1"]), None, site.now + HOUR, "known", "ann")
    page, quiet = site.report("gpu:n0.0"), site.report("gpu:n0.1")
    found = call("GET", f"/handover?since={iso(site.now - MINUTE)}").json()
    Handover.model_validate(found)
    assert [i["id"] for i in found["open"]] == [page, old]
    assert [i["id"] for i in found["muted"]["incidents"]] == [quiet]
    pending = sorted(row["what"] for row in found["pending"])
    assert pending == ["acknowledgement of bob expires", "page without an owner", "silence of ann ends"]
    site.people.assign(page, "ann", "carol", "network team")
    assigned = [row["what"] for row in call("GET", "/handover").json()["pending"] if row["id"] == page]
    assert assigned == ["page of carol, not acknowledged"]
    assert {row["id"]: row["changes"] for row in found["changed"]} == {page: ["opened"], quiet: ["opened", "silenced"]}
    text = call("GET", "/handover", Accept="text/plain").text
    assert max(map(len, text.splitlines())) <= 120
    assert "Open: 2" in text
    assert "Pending: 3" in text


def test_a_handover_as_text_has_whole_titles_in_lines_of_120_columns():
    title = "Leaf sim-l12: 34 ports with symbol errors, 512 of 1,024 GPUs of job sim-81 wait for 3 of them"
    when = iso(1_790_000_000 * 1_000_000)
    who = {"assignee": "ann@example.org", "acknowledged_by": "", "severity": "page", "state": "acknowledged"}
    found = {
        "since": when,
        "now": when,
        "open": [{"id": "inc-20260101-000001", "summary": title, **who}],
        "muted": {"incidents": [], "silences": []},
        "pending": [],
        "changed": [],
    }
    text = format_handover(found)
    assert max(map(len, text.splitlines())) <= 120
    assert title in " ".join(text.split())
    assert "  inc-20260101-000001  page    acknowledged  ann@example.org  Leaf" in text


@pytest.mark.slow
def test_past_incidents_of_the_same_device_come_first_with_what_people_wrote(site, call):
    first = site.report("gpu:n0.0")
    site.people.resolve(first, "ann", "reseated the card")
    site.clear("gpu:n0.0")
    other = site.report("gpu:n5.0")
    site.people.resolve(other, "ann", "swapped")
    site.clear("gpu:n5.0")
    site.wait(60)
    page = site.report("gpu:n0.0")
    assert page != first
    similar = call("GET", f"/incidents/{page}").json()["similar"]
    assert [(s["id"], s["why"], s["note"]) for s in similar] == [
        (first, "same detector and device", "ann: reseated the card"),
        (other, "same detector", "ann: swapped"),
    ]


@pytest.fixture
def guarded(site, tmp_path):
    """The API beyond loopback with tokens of each role, by role."""
    config = Config(api=Api(host="0.0.0.0"), store=Store(path=tmp_path / "store.duckdb"))
    path, made = tokens.find_role_file(config.store.path), {}
    for role in ("viewer", "operator", "admin"):
        made[role] = tokens.create_role_token(path, f"{role}-one", role, 1, "root", site.now)[1]
    return Calls(site, config), made, path


@pytest.mark.slow
def test_each_role_may_do_its_part_and_what_is_refused_is_in_the_audit(site, guarded):
    call, token, _ = guarded
    page = site.report("gpu:n0.0")
    act = f"/incidents/{page}/acknowledge"
    assert call("GET", "/incidents", bearer=token["viewer"]).status_code == 200
    assert call("POST", act, {"comment": "x"}, bearer=token["viewer"]).status_code == 403
    assert call("POST", act, {"comment": "x"}, bearer=token["operator"]).status_code == 200
    assert call("POST", "/budget/hot/reset", {}, bearer=token["operator"]).status_code == 403
    assert call("POST", "/budget/hot/reset", {}, bearer=token["admin"]).status_code == 200
    assert call("POST", act, {"comment": "x"}, bearer="fp_wrong-wrong-wrong").status_code == 401
    answer = call("GET", "/audit", bearer=token["viewer"]).json()
    Audit.model_validate(answer)
    assert answer["broken"] is None
    assert [(r["actor"], r["role"], r["action"], r["outcome"]) for r in answer["audit"]] == [
        ("unknown", "viewer", f"POST /api/v1{act}", "refused"),
        ("admin-one", "admin", "reset budget", "done"),
        ("operator-one", "operator", "POST /api/v1/budget/hot/reset", "refused"),
        ("operator-one", "operator", "acknowledge", "done"),
        ("viewer-one", "viewer", f"POST /api/v1{act}", "refused"),
    ]
    assert {r["origin"] for r in answer["audit"]} != {""}


@pytest.mark.slow
def test_a_flood_of_attempts_without_a_right_does_not_fill_the_audit(site, guarded):
    call, _, _ = guarded
    for _ in range(80):
        assert call("POST", "/silences", {}, bearer="fp_wrong-wrong-wrong").status_code == 401
    assert site.database.connection.execute("SELECT count(*) FROM audit").fetchone() == (60,)
    assert check_chain(site.database.connection) is None


def test_revoke_of_a_user_of_the_token_file_says_where_that_token_is(tmp_path, capsys):
    file, users = tmp_path / "fleetpulse.toml", tmp_path / "tokens"
    users.write_text("# people\noperator:a-token-of-24-letters\n")
    file.write_text(f"[store]\npath = '{tmp_path / 's.duckdb'}'\n[api]\ntoken_file = '{users}'\n")
    assert fleetpulse.main(["token", "revoke", "operator", "--config", str(file)]) == 2
    assert f"token operator: is a line of [api] token_file = '{users}'" in capsys.readouterr().err
    assert fleetpulse.main(["token", "revoke", "people", "--config", str(file)]) == 2
    assert "token people: no such token" in capsys.readouterr().err


def test_a_revoked_or_expired_token_is_refused_at_once_and_the_file_has_no_token(site, guarded, tmp_path):
    call, token, path = guarded
    kept = tokens.load_role_tokens(path)
    assert not [text for text in token.values() if text in path.read_text()]
    assert path.stat().st_mode & 0o777 == 0o600
    operator = next(t for t in kept if t.role == "operator")
    tokens.revoke_role_token(path, operator.id, "root", site.now)
    assert call("GET", "/incidents", bearer=token["operator"]).status_code == 401
    assert call("GET", "/incidents", bearer=token["viewer"]).status_code == 200
    with pytest.raises(UsageError, match="no such token, or it is revoked"):
        tokens.revoke_role_token(path, operator.id, "root", site.now)
    viewer = next(t for t in kept if t.role == "viewer")
    assert viewer.is_valid(viewer.expires - 1)
    assert not viewer.is_valid(viewer.expires)


def test_tokens_with_roles_are_enough_beyond_loopback_and_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "s.tokens"
    with pytest.raises(ConfigError, match="beyond loopback without tokens"):
        tokens.read_tokens(Api(host="0.0.0.0"), roles=path)
    tokens.create_role_token(path, "ann", "viewer", 0, "root", 1)
    assert tokens.read_tokens(Api(host="0.0.0.0"), roles=path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"s\.tokens: cannot be read"):
        tokens.read_tokens(Api(host="0.0.0.0"), roles=path)


def test_a_reload_of_another_service_is_a_row_of_the_audit(site, call):
    body = {"source": "/etc/fleetpulse/fleetpulse.toml", "reason": "dashboard.port", "outcome": "done"}
    assert call("POST", "/audit/reloads", body).status_code == 200
    (row,) = call("GET", "/audit?target=/etc/fleetpulse/fleetpulse.toml").json()["audit"]
    assert (row["action"], row["reason"], row["outcome"]) == ("reload configuration", "dashboard.port", "done")
    assert call("POST", "/audit/reloads", {**body, "outcome": "perhaps"}).status_code == 400


def test_attempts_without_a_valid_token_have_a_budget_of_a_day_in_the_audit(site, guarded, monkeypatch):
    call, token, _ = guarded
    now = [86_400.0 * 5]
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(guard, "UNKNOWN_A_DAY", 3)
    count = "SELECT count(*), max_by(reason, number) FROM audit"
    for _ in range(6):
        now[0] += 61
        assert call("POST", "/silences", {}, bearer="fp_wrong-wrong-wrong").status_code == 401
    rows, last = site.database.connection.execute(count).fetchone()
    assert (rows, last.partition(";")[2]) == (
        3,
        " the last of 3 without a valid token in a day, more are only in the log",
    )
    assert call("POST", "/budget/hot/reset", {}, bearer=token["viewer"]).status_code == 403
    assert site.database.connection.execute(count).fetchone()[0] == 4, "one with a token is recorded"
    now[0] += 86_400
    assert call("POST", "/silences", {}, bearer="fp_wrong-wrong-wrong").status_code == 401
    assert site.database.connection.execute(count).fetchone()[0] == 5


def test_the_audit_is_read_within_the_limits_and_in_parts(site, guarded, monkeypatch):
    call, token, _ = guarded
    page = site.report("gpu:n0.0")
    for text in "abcdefg":
        site.people.comment(page, Caller("ann"), text)
    monkeypatch.setattr(audit, "PART", 2)
    real, runs = store_reads.StoreReads.run, []
    monkeypatch.setattr(store_reads.StoreReads, "run", lambda *given: runs.append(1) or real(*given))
    assert call("GET", "/audit", bearer=token["viewer"]).json()["broken"] is None
    assert len(runs) == 5, "one for the rows, four for seven rows of the chain"
    site.database.connection.execute("DELETE FROM audit WHERE number IN (3, 4, 5)")
    assert call("GET", "/audit", bearer=token["viewer"]).json()["broken"] == 6
    site.database.connection.execute("DELETE FROM audit WHERE number < 6")
    assert call("GET", "/audit", bearer=token["viewer"]).json()["broken"] is None


def test_the_chain_is_whole_although_retention_removes_rows_while_it_is_checked(site, monkeypatch):
    page = site.report("gpu:n0.0")
    for text in "abcdefg":
        site.people.comment(page, Caller("ann"), text)
    monkeypatch.setattr(audit, "PART", 2)
    check = audit.ChainCheck()
    assert check.check_part(site.database.connection)
    site.database.connection.execute("DELETE FROM audit WHERE number < 5")
    while check.check_part(site.database.connection):
        pass
    assert check.broken is None


def test_an_action_in_the_audit_is_cut(site):
    audit.write_audit(site.database.connection, [audit.AuditEntry("ann", "x" * 5000, "t")], site.now)
    assert [len(row["action"]) for row in audit.list_audit(site.database.connection)] == [audit.MAX_ACTION]
