"""Silence of a whole site is one page within a minute, for every cause."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from detectors.runner import Runner
from detectors.telemetry.telemetry import Telemetry
from detectors.telemetry.telemetry_site import TelemetrySite
from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.settings import build_section
from pipeline.engine.people import People
from pipeline.judging.site_silence import SiteSilenceWatch
from pipeline.model.records import SECOND, Batch, Block, Event, Frame, Origin
from pipeline.model.topology import Topology
from pipeline.transport import wire

T0 = 1_780_000_000 * SECOND
NODES = ("n1", "n2", "n3", "n4", "n5")


class SilencePipeline:
    """A pipeline over real spools whose clocks the test moves."""

    def __init__(self, site: Any, /, **tables: Any) -> None:
        self.site, self.now, self.jump, self.tables = site, 0.0, 0.0, tables
        self.start()

    def wall(self) -> int:
        return T0 + round((self.now + self.jump) * SECOND)

    def start(self) -> None:
        folder = self.site.folder
        table = {"store": {"path": str(folder / "store.duckdb")}, "spool": {"directory": str(folder / "spool")}}
        config = build_section(configuration.Config, {**table, **self.tables}, "test")
        self.service = PipelineService(config, Runner([Telemetry(), TelemetrySite()]), self.wall, lambda: self.now)
        self.service.start_engine()

    def restart(self, after: float = 0.0) -> None:
        self.service.close()
        self.now += after
        self.start()

    def send(self, node: str, site: str = "local") -> None:
        block = Block("node", (f"node:{node}",), {"node.load1": np.ones((1, 1), "f4")})
        self.site.send_raw(node, wire.encode(Batch(Origin(site, node, b"b" * 16), np.array([self.wall()]), (block,))))

    def inventory(self, node: str, parents: tuple[str, ...] = (), **attributes: str) -> None:
        entities = {f"node:{node}": {"parents": parents, "attributes": attributes}}
        self.site.send_events(node, Event(self.wall(), f"node:{node}", "inventory", {"entities": entities}))

    def run(self, seconds: float, *senders: str, site: str = "local") -> None:
        """Advances time in steps of 5 s, in which some nodes send."""
        for _ in range(round(seconds / 5)):
            self.now += 5
            for node in senders:
                self.send(node, site)
            while self.run_step():
                pass
            self.service.report_silence()

    def run_step(self) -> bool:
        """Runs one step, and restarts if the service requests it, as its loop does."""
        if self.service.engine is None:
            self.service.start_engine()
        return self.service.run_step()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.service.database.cursor().execute(query).fetchall()

    def incidents(self) -> list[tuple[str, str, str]]:
        return self.rows("SELECT cause, severity, state FROM incidents ORDER BY opened, cause")

    def evidence(self) -> dict[str, Any]:
        query = "SELECT evidence FROM findings WHERE detector = 'telemetry_site'"
        return dict(json.loads(self.rows(query)[0][0]))


@pytest.fixture
def line(site: Any) -> Iterator[SilencePipeline]:
    made = SilencePipeline(site)
    yield made
    made.service.close()


def test_a_site_whose_agents_are_all_silent_is_one_page_within_a_minute(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.run(30)
    assert line.incidents() == []
    line.run(10)
    assert line.incidents() == [("site:local", "page", "open")]
    assert line.rows("SELECT summary FROM incidents") == [("Site local: all 5 agents silent",)]
    line.run(600)
    assert len(line.incidents()) == 1


@pytest.mark.slow
def test_a_site_that_reports_again_resolves_after_ten_quiet_minutes(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.run(60)
    line.run(30, "n3")
    assert line.incidents()[0][2] == "open"
    line.run(720, *NODES)
    assert line.incidents() == [("site:local", "page", "resolved")]


def test_a_new_site_without_agents_is_ready_and_quiet(line: SilencePipeline) -> None:
    line.run(600)
    assert line.incidents() == []
    assert line.service.list_unready_reasons() == []


@pytest.mark.slow
def test_while_the_whole_fleet_is_silent_the_pipeline_is_not_ready_and_the_watchdog_stops(
    line: SilencePipeline,
) -> None:
    line.run(60, *NODES)
    assert line.service.list_unready_reasons() == []
    line.run(50)
    assert line.service.list_unready_reasons() == ["no data from any agent of 1 site since 2026-05-28T20:27:40Z"]
    line.run(10, "n1")
    assert line.service.list_unready_reasons() == []


@pytest.mark.slow
def test_a_restart_is_not_silence_and_a_silence_across_it_pages(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.restart(3600)
    line.run(30)
    assert line.incidents() == []
    line.run(10)
    assert line.incidents() == [("site:local", "page", "open")]


@pytest.mark.slow
def test_a_restart_during_silence_does_not_page_twice_and_detects_its_end(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.run(60)
    line.restart()
    line.run(120)
    assert line.incidents() == [("site:local", "page", "open")]
    assert line.rows("SELECT count(*) FROM events WHERE kind = 'site_silent'") == [(1,)]
    line.run(720, *NODES)
    assert line.incidents() == [("site:local", "page", "resolved")]


@pytest.mark.slow
def test_a_restart_does_not_page_twice_if_the_agents_were_stored_one_after_another(line: SilencePipeline) -> None:
    for _ in range(12):
        for node in NODES:
            line.now += 1
            line.send(node)
            line.service.run_step()
    line.run(60)
    line.restart()
    line.run(120)
    assert line.rows("SELECT kind, count(*) FROM events GROUP BY kind") == [("site_silent", 1)]


@pytest.mark.slow
def test_a_site_whose_clocks_are_set_back_is_not_silent(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    for step in range(24):
        line.now += 5
        line.jump = -5 * (step + 1)  # messages keep the same date for two minutes
        for node in NODES:
            line.send(node)
        line.jump = 0
        while line.service.run_step():
            pass
        line.service.report_silence()
    assert line.incidents() == []


@pytest.mark.slow
def test_a_wall_clock_that_jumps_makes_no_sender_silent(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.jump = 7200
    line.run(30, *NODES)
    line.jump = 0
    line.run(30, *NODES)
    assert line.incidents() == []


@pytest.mark.slow
def test_agents_that_send_once_a_minute_are_not_silent_in_between(line: SilencePipeline) -> None:
    line.run(5, "n1")
    line.run(25)
    for _ in range(5):
        line.run(5, "n1")
        line.run(55)
    assert line.incidents() == []
    line.run(180)
    assert line.incidents()[-1] == ("site:local", "page", "open")


@pytest.mark.slow
def test_a_node_that_stays_silent_when_its_site_returns_is_a_separate_incident(line: SilencePipeline) -> None:
    """It was once a member of the page of the whole site, although the site was no longer silent."""
    line.run(60, *NODES)
    line.run(60)
    line.run(120, *NODES[1:])
    assert [cause for cause, *_ in line.incidents()] == ["site:local"], "not while the others come back"
    line.run(180, *NODES[1:])
    assert sorted(line.incidents()) == [("node:n1", "watch", "open"), ("site:local", "page", "open")]
    assert line.rows("SELECT summary FROM incidents WHERE cause = 'site:local'") == [
        ("Site local: all 5 agents silent",)
    ]
    line.run(900, *NODES[1:])  # a node without a job may reboot for a quarter of an hour
    assert sorted(line.incidents()) == [("node:n1", "ticket", "open"), ("site:local", "page", "resolved")]


@pytest.mark.slow
def test_a_node_lost_soon_after_its_site_returned_is_an_incident(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.run(60)
    line.run(40, *NODES)
    line.run(240, *NODES[1:])
    assert sorted(line.incidents()) == [("node:n1", "watch", "open"), ("site:local", "page", "open")]


def run_minutes(line: SilencePipeline, count: int) -> None:
    """Advances minutes in which an agent sends once, with an event in between."""
    for _ in range(count):
        line.run(5, "n1")
        line.run(10)
        line.inventory("n1")
        line.run(45)


@pytest.mark.slow
def test_a_new_site_of_agents_that_send_once_a_minute_is_not_silent_in_between(line: SilencePipeline) -> None:
    run_minutes(line, 4)
    assert line.incidents() == []


@pytest.mark.slow
def test_agents_that_send_once_a_minute_are_not_silent_after_a_restart(line: SilencePipeline) -> None:
    run_minutes(line, 4)
    line.restart()
    line.run(40)
    run_minutes(line, 3)
    line.restart(50)
    run_minutes(line, 3)
    assert line.incidents() == []
    line.run(190)
    assert line.incidents()[-1] == ("site:local", "page", "open")


@pytest.mark.slow
def test_during_a_minute_of_evaluation_no_sender_becomes_silent(
    line: SilencePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages sent during that minute are not read yet: this once caused a false page for the whole site."""
    line.run(60, *NODES)
    judged = line.service._evaluate

    def slow(*words: Any) -> int:
        line.now += 60
        return judged(*words)

    with monkeypatch.context() as busy:
        busy.setattr(line.service, "_evaluate", slow)
        line.service.run_step()
    line.service.report_silence()
    line.run(10, *NODES)
    assert line.incidents() == []
    line.run(30)
    assert line.incidents() == []
    line.run(10)
    assert line.incidents() == [("site:local", "page", "open")]


@pytest.mark.slow
def test_a_wall_clock_set_back_by_half_an_hour_is_not_a_reason_to_be_ready(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.jump = -1800
    line.run(30, *NODES)
    [reason, *_] = line.service.list_unready_reasons()
    assert "clock was set back" in reason


@pytest.mark.slow
def test_after_a_wall_clock_set_back_by_hours_evaluation_continues(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.jump = -7200
    line.run(60, *NODES)
    assert line.service.list_unready_reasons() == []
    assert line.incidents() == []


@pytest.mark.slow
def test_sites_are_evaluated_separately(line: SilencePipeline) -> None:
    for _ in range(12):
        line.run(5, "a1", "a2", site="north")
        line.send("b1", "south")
    for _ in range(10):
        line.run(5, "a1", "a2", site="north")
    assert line.incidents() == [("site:south", "page", "open")]
    assert line.service.list_unready_reasons() == [], "the others are still monitored"
    for _ in range(20):
        line.run(5, "a1", "a2", site="north")
    assert line.rows("SELECT count(*) FROM findings WHERE entity = 'node:b1'") == [(1,)]
    assert line.incidents() == [("site:south", "page", "open")], "a silent node of a silent site belongs to its page"


@pytest.mark.slow
def test_messages_read_late_do_not_make_the_unread_senders_silent(
    line: SilencePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.run(30, *NODES)
    line.now += 600
    for node in NODES:
        line.send(node)
    line.service.run_step()
    line.service.report_silence()
    assert line.incidents() == []


@pytest.mark.slow
def test_the_page_names_what_the_silent_agents_share(line: SilencePipeline) -> None:
    for node in NODES:
        line.inventory(node, ("leaf:l1", f"rack:r{node}"))
    line.run(60, *NODES)
    line.run(60)
    assert line.evidence()["shares"] == "leaf:l1"
    assert line.rows("SELECT summary FROM incidents") == [("Site local: all 5 agents silent, shared: leaf switch l1",)]


@pytest.mark.slow
def test_the_page_reports_an_upgrade_of_the_agents(line: SilencePipeline) -> None:
    for node in NODES:
        line.inventory(node, agent="1.0")
    line.run(60, *NODES)
    for node in NODES:
        line.inventory(node, agent="1.1")
    line.run(10, *NODES)
    line.run(60)
    assert line.evidence()["shares"] == "agents upgraded to 1.1"


@pytest.mark.slow
def test_the_page_names_an_unreadable_transport(line: SilencePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    line.run(60, *NODES)
    monkeypatch.setattr(line.service.transport, "find_problem", lambda: "kafka k1:9092: no answer")
    line.run(60)
    assert line.evidence()["reading"] == "kafka k1:9092: no answer"
    assert line.rows("SELECT summary FROM incidents") == [
        ("Site local: all 5 agents not read, the pipeline reads nothing",)
    ]


@pytest.mark.slow
def test_a_mute_of_the_detector_suppresses_the_page(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    assert line.service.engine is not None
    People(line.service.engine).mute("telemetry_site", "site:local", 3600, "moving", "ann")
    line.run(60)
    assert line.incidents() == []
    assert line.evidence()["muted"]["reason"] == "moving"


@pytest.mark.slow
def test_a_page_whose_write_failed_is_written_later(line: SilencePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    line.run(60, *NODES)
    line.run(30)
    line.now += 10
    with monkeypatch.context() as broken:
        broken.setattr("pipeline.engine.engine.write_events", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            line.service.report_silence()
    assert line.incidents() == []
    line.now += 1
    line.service.report_silence()
    assert line.incidents() == [("site:local", "page", "open")]


@pytest.mark.slow
def test_a_replay_of_the_stored_events_gives_the_same_findings(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    line.run(60)
    line.run(20, *NODES)
    stored = line.rows("SELECT epoch_us(time), entity, kind, data FROM events WHERE kind LIKE 'site_%' ORDER BY time")
    events = tuple(Event(time, entity, kind, json.loads(data)) for time, entity, kind, data in stored)
    frame = Frame(events[-1].time, "site", ("site:local",), {}, Topology({}), events)
    found = Runner([TelemetrySite()]).observe({"site": frame})
    live = line.rows("SELECT epoch_us(onset), entity, level FROM findings WHERE detector = 'telemetry_site'")
    assert [(f.onset, f.entity, f.level) for f in found] == [*live, *live]
    assert [f.evidence.get("cleared") for f in found] == [None, True]


@pytest.mark.parametrize("data", [{}, {"agents": "x", "since": "y"}, {"agents": -1}, {"agents": 3, "since": None}])
def test_an_event_without_its_data_is_not_a_finding(data: dict[str, Any]) -> None:
    assert TelemetrySite().judge_event(Event(T0, "site:local", "site_silent", data), Topology()) is None


def test_a_title_has_at_most_80_characters(line: SilencePipeline) -> None:
    data = {"agents": 123_456, "since": "2026-05-28T20:27:40Z", "shares": "leaf:" + "x" * 70}
    event = Event(T0, "site:" + "long-name" * 8, "site_silent", data)
    found = TelemetrySite().judge_event(event, Topology())
    assert found is not None
    assert len(found.summary) <= 80


@pytest.mark.parametrize("restarts", [False, True])
def test_nodes_that_send_under_another_name_of_their_site_are_not_silent(line: SilencePipeline, restarts: bool) -> None:
    """Each node was called dead under the old name, and the silence of all was that of the old site, for good."""
    line.run(120, *NODES)
    for name in ("east", "local", "east"):
        if restarts:
            line.restart(after=5)
        line.run(180, *NODES, site=name)
    assert line.incidents() == []
    line.run(60)
    assert line.incidents() == [("site:east", "page", "open")]
    line.run(900, *NODES, site="west")
    assert line.incidents() == [("site:east", "page", "resolved")]
    line.run(120, *NODES[1:], site="west")
    assert [cause for cause, _, state in line.incidents() if state == "open"] == [f"node:{NODES[0]}"]


@pytest.mark.slow
def test_threads_may_check_for_silence_while_nodes_are_added() -> None:
    watch = SiteSilenceWatch({}, lambda node: "s", {})
    wrong: list[Exception] = []
    done = threading.Event()

    def check_silence() -> None:
        while not done.is_set():
            try:
                watch.describe_total_silence(T0)
            except RuntimeError as error:
                wrong.append(error)

    asking = threading.Thread(target=check_silence)
    asking.start()
    nodes: dict[str, int] = {}
    for i in range(3000):
        nodes[f"n{i}"] = T0
        watch.record_arrivals(nodes, False)
    done.set()
    asking.join()
    assert wrong == []


@pytest.mark.slow
def test_a_wall_clock_set_forward_by_a_month_deletes_no_telemetry(line: SilencePipeline) -> None:
    line.run(60, *NODES)
    [(before,)] = line.rows("SELECT count(*) FROM node")
    line.jump = 30 * 86400
    line.run(10)
    line.jump = 0
    line.run(10)
    assert line.rows("SELECT count(*) FROM node") == [(before,)]


@pytest.mark.parametrize("restart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_evaluation_continues_after_a_clock_that_was_a_month_ahead_returns(
    line: SilencePipeline, restart: bool
) -> None:
    line.run(60, *NODES)
    line.jump = 30 * 86_400
    line.run(75, *NODES)
    line.jump = 0.0
    if restart:
        line.restart()
    line.run(120, *NODES)
    judged = PipelineBackend(line.service).read_health()["watermark"]
    assert judged is not None
    assert line.wall() - 60 * SECOND <= judged <= line.wall(), (
        "evaluation waited until the clock reached its future time again"
    )
    assert line.service.list_unready_reasons() == []
    assert line.service.engine is not None
    assert PipelineBackend(line.service).read_counters()["fleetpulse_rows_unjudged"] > 0, (
        "data dated in the future is counted"
    )
    line.run(120, *NODES[:4])
    assert ("node:n5", "watch") in [row[:2] for row in line.incidents()]
    if restart:
        return  # the rest takes long, and is the same
    line.run(1500, *NODES)
    assert {state for *_, state in line.incidents()} == {"resolved"}
