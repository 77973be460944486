"""Nodes out of service for good: nothing is expected of them, until a person returns them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import fleetpulse
from pipeline.api.server import create_app, start_server
from pipeline.commands.pipeline import PipelineBackend
from pipeline.config import sections
from pipeline.engine.decommission import ANNOUNCE_EVERY, Decommission, Decommissioned
from pipeline.http import client
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, Event, Finding
from pipeline.store.database import Database
from tests.pipeline.test_silence import NODES, SilencePipeline

REASON = "sold, ticket 4711"


@pytest.fixture
def fleet(site: Any) -> Iterator[SilencePipeline]:
    made = SilencePipeline(site)
    made.run(60, *NODES)
    yield made
    made.service.close()


def backend(fleet: SilencePipeline) -> PipelineBackend:
    return PipelineBackend(fleet.service)


def open_incidents(fleet: SilencePipeline) -> list[str]:
    return [cause for cause, _, state in fleet.incidents() if state != "resolved"]


def test_a_decommissioned_node_that_stops_sending_opens_no_incident(fleet):
    backend(fleet).decommission_node("n5", "ada", REASON)
    fleet.run(150, *NODES[:4])
    assert fleet.incidents() == []
    fleet.run(120, *NODES[:3])
    assert open_incidents(fleet) == ["node:n4"]  # others still count


@pytest.mark.slow
def test_a_decommissioned_node_is_not_looked_for_after_days_either(fleet):
    backend(fleet).decommission_node("n5", "ada", REASON)
    for _ in range(8):  # four days: longer than detectors look for a silent node
        fleet.now += 12 * 3600
        fleet.run(60, *NODES[:4])
    assert [cause for cause in open_incidents(fleet) if "n5" in cause] == []


@pytest.mark.slow
def test_most_nodes_decommissioned_and_switched_off_together_are_no_outage_of_the_site(fleet):
    for node in NODES[1:]:
        backend(fleet).decommission_node(node, "ada", REASON)
    fleet.run(300, NODES[0])
    assert fleet.incidents() == []


@pytest.mark.slow
def test_its_open_incidents_resolve_with_the_reason(fleet):
    fleet.run(120, *NODES[:4])
    assert open_incidents(fleet) == ["node:n5"]
    row = backend(fleet).decommission_node("n5", "ada", REASON)
    assert row["incidents"] == 1
    assert open_incidents(fleet) == []
    [(actor, comment)] = fleet.rows("SELECT actor, comment FROM history WHERE kind = 'resolved'")
    assert (actor, comment) == ("ada", f"node n5 decommissioned: {REASON}")
    fleet.run(300, *NODES[:4])
    assert open_incidents(fleet) == []


@pytest.mark.slow
def test_it_leaves_the_counts_and_its_history_stays(fleet):
    assert backend(fleet).read_health()["sources"]["agents"] == 5
    rows = fleet.rows("SELECT count(*) FROM node WHERE entity = 'node:n5'")
    backend(fleet).decommission_node("n5", "ada", REASON)
    fleet.run(120, *NODES[:4])
    sources = backend(fleet).read_health()["sources"]
    assert (sources["agents"], sources["silent"]) == (4, 0)
    assert fleet.rows("SELECT count(*) FROM node WHERE entity = 'node:n5'") == rows
    assert backend(fleet).read_counters()["fleetpulse_nodes_decommissioned"] == 1


@pytest.mark.slow
def test_what_it_still_sends_is_stored_and_counted_and_not_evaluated(fleet):
    backend(fleet).decommission_node("n5", "ada", REASON)
    before = fleet.rows("SELECT count(*) FROM node WHERE entity = 'node:n5'")[0][0]
    fleet.run(60, *NODES)
    assert fleet.rows("SELECT count(*) FROM node WHERE entity = 'node:n5'")[0][0] == before + 12
    assert backend(fleet).read_counters()["fleetpulse_decommissioned_rows_total"] == 12
    fleet.run(150, *NODES[:4])  # it falls silent again
    assert fleet.incidents() == []


@pytest.mark.slow
def test_it_is_kept_over_restarts_and_returned_only_by_a_person(fleet):
    backend(fleet).decommission_node("n5", "ada", REASON)
    fleet.restart()
    fleet.run(100, *NODES[:4])
    fleet.restart(after=60)
    fleet.run(120, *NODES)
    assert fleet.incidents() == []
    assert [row["node"] for row in backend(fleet).list_decommissioned()] == ["n5"]
    assert backend(fleet).read_health()["sources"]["agents"] == 4
    row = backend(fleet).return_node("n5", "bob")
    assert (row["user"], row["returned_by"]) == ("ada", "bob")
    fleet.run(700, *NODES)
    assert fleet.incidents() == []
    fleet.run(120, *NODES[:4])
    assert open_incidents(fleet) == ["node:n5"]
    fleet.restart()
    assert backend(fleet).list_decommissioned()[0]["returned_by"] == "bob"
    with pytest.raises(KeyError):
        backend(fleet).return_node("n5", "bob")


@pytest.mark.slow
def test_it_can_be_repeated_and_asks_for_nothing_twice(fleet):
    first = backend(fleet).decommission_node("n5", "ada", REASON)
    again = backend(fleet).decommission_node("n5", "bob", "another reason")
    assert again == first
    assert len(backend(fleet).list_decommissioned()) == 1


@pytest.mark.slow
def test_an_unknown_node_and_an_empty_reason_are_refused(fleet):
    with pytest.raises(UsageError, match="'n9': is not known"):
        backend(fleet).decommission_node("n9", "ada", REASON)
    with pytest.raises(UsageError, match="reason: is empty"):
        backend(fleet).decommission_node("n5", "ada", " ")


@pytest.mark.slow
def test_a_site_whose_last_nodes_are_decommissioned_is_not_silent(fleet):
    for node in NODES:
        backend(fleet).decommission_node(node, "ada", REASON)
    fleet.run(300)
    assert fleet.incidents() == []
    assert backend(fleet).list_unready_reasons() == []


@pytest.mark.parametrize("senders", [(), ("n1",)], ids=["silent", "still sending"])
def test_a_start_expects_nothing_of_a_site_whose_last_node_is_decommissioned(fleet, senders):
    for node in NODES:
        backend(fleet).decommission_node(node, "ada", REASON)
    fleet.restart()
    fleet.run(120, *senders)
    assert fleet.incidents() == []
    assert backend(fleet).list_unready_reasons() == []
    backend(fleet).return_node("n1", "bob")
    fleet.run(60, "n1")
    fleet.run(60)
    assert open_incidents(fleet) == ["site:local"]  # from then on its silence counts


def test_the_page_of_a_silent_site_resolves_when_its_last_node_is_decommissioned(fleet):
    """It stayed open for good: no sender was left whose message could end it."""
    fleet.run(60)
    assert open_incidents(fleet) == ["site:local"]
    for node in NODES[:4]:
        backend(fleet).decommission_node(node, "ada", REASON)
    fleet.run(700)
    assert open_incidents(fleet) == ["site:local"]  # n5 still counts
    fleet.restart()
    assert backend(fleet).decommission_node("n5", "ada", REASON)["incidents"] == 1
    assert open_incidents(fleet) == []
    fleet.run(700)
    assert open_incidents(fleet) == []
    assert backend(fleet).list_unready_reasons() == []
    assert backend(fleet).read_counters()["fleetpulse_sites_silent"] == 0
    events = fleet.rows("SELECT data ->> '$.out_of_service' FROM events WHERE kind = 'site_heard'")
    assert events == [("true",)]


@pytest.mark.slow
def test_while_the_service_starts_a_decommissioned_node_is_not_counted_either(fleet):
    backend(fleet).decommission_node("n5", "ada", REASON)
    fleet.restart()
    fleet.service.engine = None  # as until the detectors are compiled
    assert backend(fleet).read_health()["sources"]["agents"] == 4
    assert sorted(backend(fleet).read_senders().arrivals) == list(NODES[:4])


@pytest.mark.slow
def test_the_command_decommissions_lists_and_returns_over_the_api(fleet, tmp_path, capsys):
    stop = threading.Event()
    config = replace(fleet.service.config, api=sections.Api(port=0))
    api = start_server(create_app(backend(fleet), config), config, stop)
    file = tmp_path / "fleetpulse.toml"
    file.write_text(f"[api]\nport = {api.port}\n")

    def node(*words: str) -> tuple[int, str]:
        code = fleetpulse.main(["node", *words, "--config", str(file)])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    try:
        assert node("decommission", "n5", "--reason", REASON)[0] == 0
        code, shown = node("--output", "jsonl")
        assert (code, json.loads(shown)["node"], json.loads(shown)["user"]) == (0, "n5", "local")
        nodes = client.get(replace(config, api=sections.Api(port=api.port)), "/api/v1/fleet")[1]["nodes"]
        assert [n["entity"] for n in nodes] == [f"node:{name}" for name in NODES[:4]]
        assert node("return", "n5")[0] == 0
        assert node("--output", "jsonl") == (0, "")
        assert "n5" in node("--all")[1]
        code, shown = node("return", "n5")
        assert code == 2
        assert "'n5' is not decommissioned" in shown
        code, shown = node("decommission", "n9", "--reason", REASON)
        assert code == 2
        assert "'n9': is not known" in shown
    finally:
        stop.set()
        api.join()


class TestNames:
    @pytest.fixture
    def out(self, tmp_path: Any) -> Iterator[Decommissioned]:
        database = Database(tmp_path / "store.duckdb")
        made = Decommissioned(database.connection, 0)
        made.set(Decommission("n1", 0, "ada", REASON))
        made.set(Decommission("n2.hall", 0, "ada", REASON))
        yield made
        database.close()

    @pytest.mark.parametrize(
        ("entity", "belongs"),
        [
            ("node:n1", True),
            ("gpu:n1.3", True),
            ("port:n1.mlx5_0", True),
            ("nvlink:n1.3.17", True),
            ("node:n10", False),
            ("gpu:n10.1", False),
            ("node:n2", False),
            ("gpu:n2.hall.0", True),
            ("rack:r1", False),
        ],
    )
    def test_what_is_named_after_a_node_belongs_to_it(self, out, entity, belongs):
        assert out.has(entity) == belongs

    def test_findings_and_events_about_it_are_dropped_but_not_its_maintenance(self, out):
        found = [Finding(1, 1, e, "xid", "page", 1.0, "") for e in ("gpu:n1.0", "gpu:n3.0")]
        assert [f.entity for f in out.keep_findings(found)] == ["gpu:n3.0"]
        events = [Event(1, "node:n1", kind, {}) for kind in ("xid", "maintenance_start")]
        assert [e.kind for e in out.keep_events(events)] == ["maintenance_start"]
        assert out.events == 1

    def test_announcements_are_repeated_for_four_days(self, out):
        times = range(0, 200 * 3600 * SECOND, 3600 * SECOND)
        due = [now for now in times if any(e.entity == "node:n1" for e in out.due_announcements(now))]
        assert due == list(range(ANNOUNCE_EVERY, 96 * 3600 * SECOND, ANNOUNCE_EVERY))
