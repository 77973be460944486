"""Rejected telemetry is reported: for a fleet as a reason of readiness, for one sender with its silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipeline.commands.pipeline import PipelineBackend
from pipeline.model.records import Batch, Block, Origin
from pipeline.transport import wire
from tests.pipeline.test_silence import NODES, SilencePipeline


@pytest.fixture
def line(site: Any) -> Iterator[SilencePipeline]:
    made = SilencePipeline(site)
    yield made
    made.service.close()


def send_rejected(line: SilencePipeline, node: str) -> None:
    """Sends a signal of another type than in the catalogue: the store refuses the whole message."""
    block = Block("node", (f"node:{node}",), {"node.load1": np.ones((1, 1), "f8")})
    body = wire.encode(Batch(Origin("local", node, b"b" * 16), np.array([line.wall()]), (block,)))
    line.site.send_raw(node, body)


def run(line: SilencePipeline, seconds: int, rejected: tuple[str, ...], *speaking: str) -> None:
    for _ in range(seconds // 5):
        for node in rejected:
            send_rejected(line, node)
        line.run(5, *speaking)


def test_a_new_site_whose_telemetry_is_all_rejected_is_not_ready_with_the_reason(line: SilencePipeline) -> None:
    run(line, 30, NODES)
    [reason] = line.service.list_unready_reasons()
    assert reason.startswith("all of 30 messages since ")
    assert reason.endswith("Z were rejected: rule wire (30); see dead letters")
    assert PipelineBackend(line.service).read_health()["stalled"] is True


@pytest.mark.slow
def test_a_known_fleet_without_an_admitted_message_for_a_minute_is_not_ready_with_the_reason(
    line: SilencePipeline,
) -> None:
    run(line, 60, (), *NODES)
    run(line, 80, NODES)
    assert any(
        "messages since" in reason and "were rejected: rule wire" in reason
        for reason in line.service.list_unready_reasons()
    )
    assert line.evidence()["shares"] == "all their messages are rejected (wire)"


def test_readiness_returns_with_the_first_admitted_message(line: SilencePipeline) -> None:
    run(line, 30, NODES)
    run(line, 5, (), "n1")
    assert line.service.list_unready_reasons() == []


@pytest.mark.slow
def test_a_single_rejected_sender_does_not_change_readiness_and_its_silence_names_the_rule(
    line: SilencePipeline,
) -> None:
    run(line, 60, (), *NODES)
    run(line, 120, ("n5",), *NODES[:4])
    assert line.service.list_unready_reasons() == []
    rows = line.rows("SELECT entity, kind, data ->> '$.rules' FROM events")
    assert [row[:2] for row in rows] == [("node:n5", "messages_rejected")]
    [(summary,)] = line.rows("SELECT DISTINCT summary FROM findings WHERE entity = 'node:n5' AND level = 'ticket'")
    assert "its messages are rejected (wire)" in summary


def test_messages_that_were_rejected_once_do_not_change_readiness(line: SilencePipeline) -> None:
    run(line, 5, ("n1",))
    line.run(200)
    assert line.service.list_unready_reasons() == []


@pytest.mark.slow
def test_one_rejected_sender_among_agents_that_send_once_a_minute_does_not_change_readiness(
    line: SilencePipeline,
) -> None:
    for _ in range(10):
        run(line, 55, ("n5",))
        run(line, 5, ("n5",), "n1", "n2")
        assert line.service.list_unready_reasons() == []


@pytest.mark.slow
def test_a_rejected_message_without_a_known_sender_makes_no_event(line: SilencePipeline) -> None:
    run(line, 60, ("ghost",), "n1")
    assert line.rows("SELECT count(*) FROM events") == [(0,)]
