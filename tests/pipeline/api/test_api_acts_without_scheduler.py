"""A site without a scheduler: dry runs over the nodes of the pipeline, and nothing that takes nodes out of service."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.acts.adapters.noop import Noop
from pipeline.commands.executor import make_executor
from pipeline.commands.known_nodes import KnownNodes, find_scheduler, needs_scheduler
from pipeline.config.acts import Acts
from pipeline.http import client
from pipeline.model.errors import Unreachable
from pipeline.model.records import SECOND
from tests.pipeline.api.test_api_acts import Served

FLEET = {"nodes": [{"entity": "node:n03"}, {"entity": "node:n04"}]}
JOBS = {"jobs": [{"job": "job:81", "nodes": ["node:n03", "node:n04"], "gpus": 16, "account": "team"}]}
ASK = client.get


@pytest.fixture
def served(tmp_path, monkeypatch):
    made = Served(tmp_path, monkeypatch)
    monkeypatch.setattr(client, "get", lambda config, path: (200, JOBS if "/jobs" in path else FLEET))
    yield made
    made.close()


def test_a_fresh_install_shows_a_whole_plan_and_the_dry_run_ends_executed(served):
    served.board.config = Acts()
    config = replace(served.config, acts=Acts())
    executor = make_executor(config)
    executor.clock = lambda: served.site.now
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "fault"}
    made = served.call("POST", "/acts", body, token="dashboard", person="alice")[1]
    executor.run_once()
    act = served.board.find(made["id"])
    assert (act.state, act.mode) == ("awaiting_approval", "dry-run")
    assert {guard.name: guard.now for guard in act.plan.guards}[
        "nodes_out_in_fleet"
    ] == "1 of 2 nodes out from all causes"
    assert [(hit.job, hit.nodes, hit.gpus, hit.account) for hit in act.plan.jobs] == [("81", 2, 16, "team")]
    served.approve(served.call("GET", f"/acts/{act.id}")[1], token="dashboard", person="bob")
    executor.run_once()
    assert served.board.find(act.id).state == "executed"
    unknown = served.call("POST", "/acts", {**body, "targets": ["node:n99"]}, token="dashboard", person="alice")[1]
    executor.run_once()
    assert "known node: not known" in served.board.find(unknown["id"]).result["reason"]


def test_the_last_node_of_a_job_of_1100_nodes_has_the_job_and_is_one_of_1100(served, monkeypatch):
    names = [f"n{number:04d}" for number in range(1100)]
    served.site.database.connection.execute(
        """INSERT INTO jobs VALUES ('job:81', make_timestamptz($1::BIGINT), NULL, '', 'team', '', 'slurm', 8800, 8800,
           $2, NULL, false, NULL, NULL, NULL, false)""",
        [served.site.now - 60 * SECOND, [f"node:{name}" for name in names]],
    )
    fleet = {"nodes": [{"entity": f"node:{name}"} for name in names]}
    answer = lambda config, path: ASK(config, path) if "/jobs" in path else (200, fleet)  # noqa: E731
    monkeypatch.setattr(client, "get", answer)
    api = replace(served.config.api, token_file=served.config.executor.token_file)
    state = KnownNodes(replace(served.config, api=api)).read_state(served.site.now)
    assert [(job.id, len(job.nodes), job.gpus) for job in state.jobs_on(frozenset({"n1099"}))] == [("81", 1100, 8800)]
    jobs = [{"job": f"job:{number}", "nodes": [], "gpus": 0, "account": ""} for number in range(10_000)]
    monkeypatch.setattr(client, "get", lambda config, path: (200, {"jobs": jobs} if "/jobs" in path else fleet))
    with pytest.raises(Unreachable, match="10,000 running jobs or more"):
        KnownNodes(served.config).read_state(0)


@pytest.mark.parametrize("verb", ["hold", "release", "evict", "reset", "reboot"])
def test_what_takes_nodes_out_is_never_judged_without_a_scheduler(verb, served):
    acts = Acts(**{verb: "on"}, adapter="webhook")
    assert needs_scheduler(acts)
    plain = Noop(acts)
    assert find_scheduler(plain, replace(served.config, acts=acts)).read_state(0).nodes == {}


def test_an_api_that_does_not_answer_is_no_empty_fleet(served, monkeypatch):
    monkeypatch.setattr(client, "get", lambda config, path: (503, {}))
    with pytest.raises(Unreachable, match="HTTP 503"):
        KnownNodes(served.config).read_state(0)


def test_a_pipeline_without_nodes_yet_refuses_no_node_as_unknown(served, monkeypatch):
    monkeypatch.setattr(client, "get", lambda config, path: (200, {"nodes": [], "jobs": []}))
    served.board.config = Acts()
    executor = make_executor(replace(served.config, acts=Acts()))
    body = {"verb": "hold", "targets": ["node:n03"], "reason": "fault"}
    made = served.call("POST", "/acts", body, token="dashboard", person="alice")[1]
    for _ in range(2):
        executor.run_once()
    shown = served.call("GET", f"/acts/{made['id']}")[1]
    assert (shown["state"], shown["waits_for"].partition(";")[0]) == ("proposed", "the pipeline knows no node yet")
