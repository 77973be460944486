"""Gaps that wait for the next events: adjacent ones are merged, and a flood of them stays small."""

from __future__ import annotations

from agents.node.uplink.sender import MAX_GAPS, GapEvents
from pipeline.transport import Partition

ONE, OTHER = (Partition("telemetry.v1", node, "0a") for node in ("n0", "n1"))


def test_adjacent_gaps_are_merged_per_stream_and_cause() -> None:
    losses = GapEvents()
    for partition, first, behind, cause in [
        (ONE, 3, 4, "x"),
        (OTHER, 3, 4, "x"),
        (ONE, 4, 6, "x"),
        (ONE, 6, 7, "y"),
        (ONE, 9, 10, "x"),
    ]:
        losses.add(partition, first, behind, cause)
    found = [(e.entity, e.data["first"], e.data["next"], e.data["cause"]) for e in losses.take_events()]
    assert sorted(found) == [
        ("node:n0", 3, 6, "x"),
        ("node:n0", 6, 7, "y"),
        ("node:n0", 9, 10, "x"),
        ("node:n1", 3, 4, "x"),
    ]
    assert losses.take_events() == []


def test_reported_gaps_are_not_repeated_when_more_follow() -> None:
    losses = GapEvents()
    losses.add(ONE, 0, 1, "x")
    losses.take_events()
    losses.add(ONE, 1, 2, "x")
    assert [(e.data["first"], e.data["next"]) for e in losses.take_events()] == [(1, 2)]


def test_a_flood_of_gaps_keeps_the_newest() -> None:
    losses = GapEvents()
    for number in range(0, 10_000, 2):
        losses.add(ONE, number, number + 1, "x")
    found = losses.take_events()
    assert len(found) == MAX_GAPS
    assert found[-1].data["first"] == 9998
