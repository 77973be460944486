"""Clocks: an error that does not change frames is a suspect, one that does is a ticket, and none pages."""

from __future__ import annotations

import numpy as np
import pytest

from detectors.telemetry.telemetry_clock import TelemetryClock
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
NODES = ("node:a", "node:b")


def run_detector(offsets, events=()):
    """Findings over measurements once a minute of the first node's clock; events by minute."""
    detector, topology, found = TelemetryClock(), Topology({n: ["rack:r"] for n in NODES}), []
    for minute, offset in enumerate(offsets):
        time = START + minute * 60 * SECOND
        mine = tuple(Event(time, "node:a", kind, data) for at, kind, data in events if at == minute)
        values = {"node.clock_offset": np.array([offset, 0.001])}
        found += detector.observe({"node": Frame(time, "node", NODES, values, topology, mine)})
    return found


@pytest.mark.parametrize(("offset", "level"), [(0.2, None), (-3.0, "suspect"), (8.0, "suspect"), (-12.0, "ticket")])
def test_the_level_follows_the_error_of_the_clock(offset, level):
    found = run_detector([0.0] * 5 + [offset] * 10)
    assert {f.level for f in found} == ({level} if level else set())
    assert all(f.entity == "node:a" for f in found)


def test_a_single_wrong_measurement_is_not_reported():
    assert run_detector([0.0] * 5 + [60.0] + [0.0] * 5) == []


def test_a_clock_that_is_set_back_and_forth_is_a_ticket():
    jumps = [(minute, "clock_jump", {"seconds": 30.0 * (-1) ** minute}) for minute in (3, 5, 7)]
    assert {f.level for f in run_detector([0.0] * 12, jumps)} == {"ticket"}
    assert run_detector([0.0] * 12, jumps[:2]) == []


def test_a_clock_that_is_right_again_ends_its_condition():
    found = run_detector([0.0] * 3 + [20.0] * 5 + [0.0] * 10)
    assert max(f.time for f in found) < START + 9 * 60 * SECOND
    assert "behind" in found[0].summary


def test_a_clock_without_measurements_and_malformed_events_are_not_reported():
    assert run_detector([np.nan] * 20, [(2, "clock_jump", {"seconds": None}), (3, "clock_jump", {})]) == []


@pytest.mark.parametrize("seconds", [10**400, float("inf"), [5], "30"])
def test_a_jump_without_a_number_of_seconds_is_ignored(seconds):
    assert run_detector([0.0] * 5, [(k, "clock_jump", {"seconds": seconds}) for k in range(4)]) == []


def test_an_error_that_most_senders_share_is_one_ticket_that_names_the_pipeline_clock():
    detector, topology, found = TelemetryClock(), Topology({n: ["rack:r"] for n in NODES}), []
    for minute, error in ((0, -45.0), (1, None), (2, -300.0), (3, None), (4, 0.0), (5, None)):
        time = START + minute * 60 * SECOND
        event = Event(time, "site:all", "clock_error", {"seconds": error, "senders": 8})
        frames = {"node": Frame(time, "node", NODES, {"node.load1": np.ones(2)}, topology)}
        if error is not None:
            frames["site"] = Frame(time, "site", (), {}, topology, (event,))
        found += detector.observe(frames)
    assert [(f.entity, f.level, f.onset) for f in found] == [
        ("site:all", "ticket", START + at * 60 * SECOND) for at in (0, 0, 2, 2)
    ], "an error that changed by much is a new finding, so that the ticket has its figure"
    assert found[-1].summary == "Whole site: most senders 300 s behind: pipeline clock ahead or messages late"
    assert all(len(f.summary) <= 80 for f in found)
