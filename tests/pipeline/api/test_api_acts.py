"""Acts over HTTP and by the command: who may do what, and the executor's part with its own token."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

import fleetpulse
from pipeline.acts.executor import Executor
from pipeline.acts.remote import RemoteBoard, encode_facts, parse_facts
from pipeline.api import tokens
from pipeline.api.server import create_app, start_server
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config.acts import Acts
from pipeline.config.acts import Executor as Settings
from pipeline.config.sections import Api, Config, Store
from pipeline.http import client
from pipeline.incidents.audit import list_audit
from pipeline.model.errors import Refused, WireError
from tests.pipeline.acts_world import Scheduler
from tests.pipeline.api.test_api_people import Service
from tests.pipeline.living import LivingSite

ON = Acts(hold="on", release="on", evict="on", adapter="slurm")


class Served:
    """A served API of a living site, tokens of all kinds, and an executor that speaks HTTP."""

    def __init__(self, folder, monkeypatch):
        self.site = LivingSite(folder / "store.duckdb")
        service = Service(self.site)
        service.config, service.devices = Config(acts=ON), self.site.engine.devices
        backend = PipelineBackend(service)
        backend.list_unready_reasons, backend.list_evaluation_faults, backend.read_revision = list, list, object
        backend.read_health = lambda: {"watermark": None, "stalled": False}
        monkeypatch.setattr("pipeline.commands.act_board.count_nodes", lambda _: 40)
        monkeypatch.setattr("pipeline.commands.act_board.read_recovery", lambda *_: {})
        self.board, self.backend = backend.acts, backend
        rights = {"viewer": {}, "operator": {}, "admin": {}}
        self.tokens = {role: self.token(folder, role, role) for role in rights}
        self.tokens["dashboard"] = self.token(folder, "dashboard", "admin", on_behalf_of=True)
        self.tokens["executor"] = self.token(folder, "executor", "operator", executor=True)
        self.stop = threading.Event()
        config = Config(api=Api(port=0), store=Store(path=folder / "store.duckdb"))
        self.server = start_server(create_app(backend, config, lambda: self.site.now), config, self.stop)
        file = folder / "executor.token"
        file.write_text(f"executor:{self.tokens['executor']}\n")
        self.file = folder / "fleetpulse.toml"
        self.file.write_text(f"[api]\nport = {self.server.port}\n")
        self.config = Config(api=Api(port=self.server.port), executor=Settings(token_file=file))
        self.scheduler = Scheduler()
        clock = lambda: self.site.now  # noqa: E731
        self.executor = Executor(RemoteBoard(self.config), ON, self.scheduler, lambda verb: self.scheduler, clock)

    def token(self, folder, owner, role, **rights):
        file = tokens.find_role_file(folder / "store.duckdb")
        return tokens.create_role_token(file, owner, role, 0, "test", self.site.now, **rights)[1]

    def call(self, method, path, body=None, token="operator", person=None, headers=None):
        """(status, answer) of a call with one of the tokens, for a person if one is named."""
        import urllib.error
        import urllib.request

        given = {"Authorization": f"Bearer {self.tokens[token]}", "Content-Type": "application/json"}
        headers = {**given, **(headers or {})}
        if person:
            headers |= {"Fleetpulse-User": person, "Fleetpulse-Role": "operator"}
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.server.port}/api/v1{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def propose(self, verb="hold", node="n03", **how):
        body = {"verb": verb, "targets": [f"node:{node}"], "reason": "fault"}
        status, act = self.call("POST", "/acts", body, **how)
        assert status == 200, act
        self.executor.run_once()
        return self.call("GET", f"/acts/{act['id']}")[1]

    def approve(self, act, **how):
        return self.call("POST", f"/acts/{act['id']}/approve", {"plan": act["plan"]["hash"], "comment": "yes"}, **how)

    def close(self):
        self.stop.set()
        self.server.join(5)
        self.site.database.close()


@pytest.fixture
def served(tmp_path, monkeypatch):
    made = Served(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.mark.slow
def test_a_person_proposes_another_approves_and_the_executor_holds_over_http(served):
    act = served.propose(token="dashboard", person="alice")
    assert (act["state"], act["requested_by"], act["by_person"]) == ("awaiting_approval", "alice", True)
    status, approved = served.approve(act, token="dashboard", person="bob")
    assert (status, approved["state"]) == (200, "approved")
    for _ in range(3):
        served.executor.run_once()
    found = served.call("GET", f"/acts/{act['id']}")[1]
    assert (found["state"], found["in_force"]) == ("verified", True)
    assert served.scheduler.nodes["n03"].mark == act["mark"]
    assert [row["id"] for row in served.call("GET", "/acts?open=true")[1]["acts"]] == [act["id"]]


def test_rows_of_the_executor_have_its_role_its_address_and_whose_token_it_has(served):
    act = served.propose(token="dashboard", person="alice")
    served.approve(act, token="dashboard", person="bob")
    for _ in range(3):
        served.executor.run_once()
    rows = list_audit(served.site.database.connection, target=act["id"])
    assert {(r["actor"], r["role"], r["origin"]) for r in rows if r["actor"] == "executor"} == {
        ("executor", "operator", "127.0.0.1")
    }
    body = {"executor": "alice", "target": "node:n03", "seen": "IDLE"}
    assert served.call("POST", f"/executor/acts/{act['id']}/undone", body, token="executor")[0] == 200
    newest = list_audit(served.site.database.connection)[0]
    assert (newest["actor"], newest["origin"]) == ("alice", "127.0.0.1, token of executor")


def test_a_caller_does_not_choose_the_address_in_the_audit(served):
    forged = {"X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "https", "Forwarded": "for=6.6.6.6"}
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "fault"}
    assert served.call("POST", "/acts", body, headers=forged)[0] == 200
    assert served.call("POST", "/acts", body, token="viewer", headers=forged)[0] == 403
    rows = list_audit(served.site.database.connection)
    assert {(row["actor"], row["origin"]) for row in rows if row["actor"] in ("operator", "viewer")} == {
        ("operator", "127.0.0.1"),
        ("viewer", "127.0.0.1"),
    }


def test_what_an_act_waits_for_is_told_over_http(served):
    served.scheduler.run("81", ("n03",))
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "x", "when": "when_idle"}
    act = served.call("POST", "/acts", body, token="dashboard", person="alice")[1]
    assert act["waits_for"] == "no executor has asked for work since the pipeline started"
    served.executor.run_once()
    served.approve(served.call("GET", f"/acts/{act['id']}")[1], token="dashboard", person="bob")
    for _ in range(2):
        served.executor.run_once()
    assert [row["waits_for"] for row in served.call("GET", "/acts")[1]["acts"]] == [
        "until no job is on the nodes: n03 has 81"
    ]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("token", ["viewer", "operator", "admin", "executor"])
def test_no_token_approves(served, token):
    act = served.propose()
    status, said = served.approve(act, token=token)
    assert (status, served.call("GET", f"/acts/{act['id']}")[1]["state"]) == (403, "awaiting_approval")
    newest = list_audit(served.site.database.connection)[0]
    assert (newest["outcome"], newest["actor"]) == ("refused", token)
    assert "approve" in said["detail"] or "viewer" in said["detail"]


def test_a_viewer_proposes_nothing_and_a_token_without_the_right_names_nobody(served):
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "x"}
    assert served.call("POST", "/acts", body, token="viewer")[0] == 403
    assert served.call("POST", "/acts", body, token="operator", person="alice")[0] == 403
    assert served.call("GET", "/acts", token="viewer")[1]["acts"] == []


@pytest.mark.slow
def test_only_the_executors_token_reaches_the_executors_part(served):
    for token in ("viewer", "operator", "admin", "dashboard"):
        assert served.call("POST", "/executor/claim", {"executor": "x"}, token=token)[0] == 403
    assert served.call("POST", "/executor/claim", {"executor": "x"}, token="executor") == (200, {"work": []})


def test_a_plan_or_a_report_that_is_none_is_refused(served):
    act = served.propose()
    for path, body in (
        ("plan", {"plan": {"made": "now"}}),
        ("report", {"executor": "x", "state": "verified", "result": {}}),
        ("begin", {"executor": "x", "failing": []}),
    ):
        assert served.call("POST", f"/executor/acts/{act['id']}/{path}", body, token="executor")[0] == 400
    assert served.call("GET", f"/acts/{act['id']}")[1]["state"] == "awaiting_approval"
    assert served.call("GET", "/acts/ACT-none")[0] == 404


@pytest.mark.slow
def test_the_command_shows_the_plan_and_is_refused_with_exit_code_4(served, monkeypatch, capsys):
    act = served.propose()
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["operator"])
    run = lambda *words: fleetpulse.main([*words, "--config", str(served.file)])  # noqa: E731
    assert run("act", "show", act["id"]) == 0
    out = capsys.readouterr()
    assert "nodes_out_per_rack" in out.out
    assert f"{act['id']}: hold n03, awaiting approval, on" in out.err
    assert max(map(len, out.out.splitlines())) <= 120
    assert run("act", "approve", act["id"]) == 4
    assert "tokens never approve" in capsys.readouterr().err
    assert run("act", "run", act["id"]) == 4
    assert run("act", "plan", "hold", "n0 3", "--reason", "x") == 2
    assert run("act", "cancel", act["id"], "--comment", "wrong node") == 0
    assert run("act") == 0
    assert run("audit", "verify") == 0
    capsys.readouterr()
    served.site.database.connection.execute("UPDATE audit SET reason = 'nothing' WHERE number = 1")
    assert run("audit", "verify") == 1


def test_the_command_follows_an_act_to_its_end_and_one_that_goes_on_is_no_success(served, monkeypatch, capsys):
    act = served.propose(token="dashboard", person="alice")
    served.approve(act, token="dashboard", person="bob")
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["operator"])
    follow = ["act", "run", act["id"], "--wait", "1", "--config", str(served.file)]
    assert fleetpulse.main(follow) == 1
    assert f"act {act['id']}: is approved after 1 s" in capsys.readouterr().err
    monkeypatch.delenv("FLEETPULSE_TOKEN")  # the executor has its own token
    for _ in range(3):
        served.executor.run_once()
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["operator"])
    assert fleetpulse.main(follow) == 0
    assert "verified" in capsys.readouterr().out


def test_without_the_pipeline_the_executor_does_nothing(served):
    served.stop.set()
    served.server.join(5)
    with pytest.raises(client.FleetpulseError):
        served.executor.run_once()
    assert served.scheduler.log == []


def test_the_facts_of_the_guards_survive_the_way_to_the_executor(served):
    facts = served.board.collect_facts(served.propose()["id"])
    full = replace(facts, silent=frozenset({"n1"}), excluded=("n9*",), cause_nodes=frozenset({"n2"}), racks={"n1": "r"})
    assert parse_facts(json.loads(json.dumps(encode_facts(full)))) == full


def test_an_executor_does_nothing_while_the_pipeline_sends_what_it_does_not_know(served, monkeypatch):
    """A guard may depend on it. Both have one version again once the executor is upgraded too."""
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "fault"}
    made = served.call("POST", "/acts", body)[1]
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.api.act_routes.encode_facts", lambda facts: {**encode_facts(facts), "of_later": []})
        with pytest.raises(WireError, match=r"'of_later'.*install the executor of the pipeline's version"):
            served.executor.run_once()
        with pytest.raises(WireError):
            RemoteBoard(served.config).collect_facts(made["id"])
    assert served.call("GET", f"/acts/{made['id']}")[1]["state"] == "proposed"
    served.executor.run_once()
    assert served.call("GET", f"/acts/{made['id']}")[1]["state"] == "awaiting_approval"


def test_a_second_executor_is_refused_while_one_is_at_work(served):
    served.executor.run_once()
    other = replace(served.config, executor=replace(served.config.executor, name="other"))
    with pytest.raises(Refused, match="is at work"):
        RemoteBoard(other).claim("other")


@pytest.mark.slow
def test_objectives_and_the_rma_packet_over_http_and_by_command(served, monkeypatch, capsys, tmp_path):
    incident = served.site.report("gpu:n1.2")
    monkeypatch.setenv("FLEETPULSE_TOKEN", served.tokens["viewer"])
    run = lambda *words: fleetpulse.main([*words, "--config", str(served.file)])  # noqa: E731
    status, found = served.call("GET", "/objectives?days=30", token="viewer")
    assert (status, [row["name"] for row in found["objectives"]]) == (200, ["fleet goodput", "fleet availability"])
    assert found["evaluated"]["complete"] is False
    assert "of this time" in found["evaluated"]["note"] or "history begins" in found["evaluated"]["note"]
    assert served.call("GET", "/objectives?to=2999-01-01T00:00:00Z", token="viewer")[0] == 400
    for verb in ((), ("losses",), ("energy",), ("failures",), ("nodes",), ("spares",)):
        assert run("objectives", *verb) == 0
        assert max(map(len, capsys.readouterr().out.splitlines()), default=0) <= 120
    zipped = tmp_path / "packet.zip"
    assert run("rma", incident, "--zip", str(zipped)) == 0
    assert zipped.read_bytes()[:2] == b"PK"
    assert run("rma", "n1", "--zip", str(zipped)) == 2  # an existing file stays
    assert "exists" in capsys.readouterr().err
    assert run("rma", "n404") == 2
    assert "no incident, device or node" in capsys.readouterr().err
