"""BMCs and exporters that are not read: a ticket after five minutes, with the reason, and over with an answer; BMCs of
nodes, which work in that time, after half an hour."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.telemetry.telemetry import Telemetry
from detectors.telemetry.telemetry_blind import TelemetryBlind
from pipeline.model.records import SECOND, Event, Finding, Frame
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
NAN = float("nan")


class Watch:
    """Shows a BMC's or an exporter's state every ten seconds."""

    def __init__(self, entity: str = "bmc:row1", signal: str = "bmc.reachable") -> None:
        self.detector, self.time = TelemetryBlind(), START
        self.entity, self.signal = entity, signal

    def see(self, value: float, seconds: int, *events: tuple[str, dict[str, str]]) -> list[Finding]:
        found = []
        for _ in range(0, seconds, 10):
            self.time += 10 * SECOND
            mine = tuple(Event(self.time, self.entity, kind, data) for kind, data in events)
            columns = {self.signal: np.array([value])}
            kind = self.entity.partition(":")[0]
            frame = Frame(self.time, kind, (self.entity,), columns, Topology({}), mine)
            found += self.detector.observe({kind: frame})
            events = ()
        return found


def test_a_bmc_that_does_not_answer_for_five_minutes_is_a_ticket_with_the_reason() -> None:
    watch = Watch()
    assert watch.see(1, 60) == []
    soon = watch.see(0, 20, ("bmc_lost", {"reason": "Connection refused"}))
    assert [(f.level, f.time - f.onset) for f in soon] == [("suspect", 0)], "its agent has waited long enough"
    assert {f.level for f in watch.see(0, 280)} <= {"suspect"}
    first = next(f for f in watch.see(0, 60) if f.level == "ticket")
    assert (first.entity, first.level, first.onset) == ("bmc:row1", "ticket", START + 70 * SECOND)
    assert "leak detectors" in first.summary
    assert first.summary.endswith("Connection refused")


def test_it_is_over_with_the_first_answer_and_a_restart_of_the_bmc_is_not_a_ticket() -> None:
    watch = Watch()
    assert watch.see(0, 400) != []
    assert watch.see(1, 10) == []
    for _ in range(20):
        assert {f.level for f in watch.see(0, 180)} == {"suspect"}
        assert watch.see(1, 10) == []


def test_a_bmc_that_its_agent_reports_as_lost_is_a_suspect_from_that_frame_until_it_is_back() -> None:
    watch = Watch()
    assert watch.see(1, 60) == []
    (first,) = watch.see(NAN, 10, ("bmc_lost", {"reason": "/redfish/v1: no answer for 20 s"}))
    assert (first.level, first.onset, first.summary.endswith("no answer for 20 s")) == ("suspect", watch.time, True)
    assert watch.see(NAN, 10, ("bmc_back", {})) == []
    assert watch.see(NAN, 50) == []


def test_a_bmc_that_was_removed_or_whose_agent_stopped_is_not_a_ticket() -> None:
    watch = Watch()
    watch.see(1, 60)
    assert watch.see(NAN, 86_400) == []
    assert watch.see(0, 400) != []
    assert watch.see(NAN, 7200)[6:] == []


def test_an_hour_without_any_frame_blames_no_bmc() -> None:
    watch = Watch()
    watch.see(1, 60)
    watch.time += 3600 * SECOND
    assert watch.see(NAN, 60) == []
    assert watch.see(1, 60) == []


def test_a_reason_that_comes_before_its_state_is_kept_until_the_next_answer() -> None:
    watch = Watch()
    watch.see(1, 10, ("bmc_lost", {"reason": "HTTP 401"}))
    assert watch.see(0, 400)[0].summary.endswith(": HTTP 401")
    watch.see(1, 60, ("bmc_back", {}))
    assert watch.see(0, 400)[0].summary.endswith(": no reason reported")


def test_an_exporter_that_is_down_is_a_ticket_and_one_that_is_scraped_seldom_is_not() -> None:
    watch = Watch("exporter:facility", "exporter.up")
    watch.see(1, 10)
    assert watch.see(NAN, 3600) == []
    found = watch.see(0, 400, ("exporter", {"state": "down", "reason": "HTTP 503"}))
    assert found[0].summary == "Exporter facility: not read: HTTP 503"


def test_one_failed_scrape_of_an_exporter_that_is_scraped_seldom_is_not_a_ticket() -> None:
    watch = Watch("exporter:facility", "exporter.up")
    watch.see(0, 10)
    assert watch.see(NAN, 590) == []
    assert watch.see(1, 10) == []
    watch.see(0, 10)
    assert watch.see(NAN, 590) == []
    assert watch.see(0, 10) != []


def test_a_bmc_that_was_never_read_is_not_a_ticket_before_it_is_known() -> None:
    assert Watch().see(NAN, 3600) == []


def test_a_bmc_whose_state_comes_each_minute_is_judged_like_any_other() -> None:
    detector, found = TelemetryBlind(), []
    for minute in range(40):
        column = {"bmc.reachable": np.array([1.0 if minute < 20 else 0.0])}
        frame = Frame(START + minute * 60 * SECOND, "bmc", ("bmc:n1",), column, Topology({}))
        found += detector.observe({"bmc": frame})
        for second in range(10, 60, 10):  # frames without it in between
            other = Frame(START + (minute * 60 + second) * SECOND, "node", (), {}, Topology({}))
            found += detector.observe({"node": other})
    ticket = next(f for f in found if f.level == "ticket")
    assert ticket.time - START <= (20 * 60 + 370) * SECOND
    assert found[-1].time >= START + 39 * 60 * SECOND, "it does not end while the BMC is silent"


def run_supplies(every: int, bmc: bool) -> list[tuple[str, str, float]]:
    """Findings of both detectors when the BMC of node 1 falls silent at 1,200 s: (detector, entity, s after it)."""
    names = tuple(f"psu:n{i}.{j}" for i in range(4) for j in range(2))
    parents = {name: [f"node:{name[4:6]}"] for name in names} | {f"bmc:n{i}": [f"node:n{i}"] for i in range(4)}
    topology, found = Topology(parents), []
    for detector in (Telemetry(), TelemetryBlind()):
        for second in range(0, 3600, 10):
            time, silent = START + second * SECOND, second >= 1200
            nodes = tuple(f"node:n{i}" for i in range(4))
            frames = {"node": Frame(time, "node", nodes, {"node.load1": np.full(4, 1.0)}, topology)}
            if second % every < 10:
                output = np.where([silent and name[4:6] == "n1" for name in names], np.nan, 900.0)
                frames["psu"] = Frame(time, "psu", names, {"psu.output_power": output}, topology)
            if bmc:
                state = np.array([1.0, 0.0 if silent else 1.0, 1.0, 1.0])
                bmcs = tuple(f"bmc:n{i}" for i in range(4))
                frames["bmc"] = Frame(time, "bmc", bmcs, {"bmc.reachable": state}, topology)
            found += detector.observe(frames)
    return [(f.detector, f.entity, (f.time - START) / SECOND - 1200) for f in found if f.level == "ticket"]


@pytest.mark.parametrize("every", [10, 30, 60])
def test_a_silent_bmc_is_one_ticket_by_one_rule_whatever_reads_it(every: int) -> None:
    with_state, without = run_supplies(every, True), run_supplies(every, False)
    assert {f[:2] for f in with_state} == {("telemetry_blind", "bmc:n1")}
    assert {f[:2] for f in without} == {("telemetry", "node:n1")}
    assert all(1800 - every <= found[0][2] <= 1800 + every + 20 for found in (with_state, without))
