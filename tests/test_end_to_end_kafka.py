"""The same scenario over spool and over Kafka gives identical findings and incidents, and the same rows."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import detectors
from agents.sim.command import SimulateOptions, simulate
from detectors.runner import Runner
from pipeline.commands.service import PipelineService
from pipeline.config import sections
from pipeline.model.errors import Retryable
from pipeline.model.records import SECOND, from_iso
from tests.kafka_broker import Address
from tests.kafka_clients import make_topics

SCENARIO = """version = 1
duration = 3600
interval = 10
start = "2026-01-01T00:00:00Z"
[fleet]
nodes = 8
gpus_per_node = 8
[[fault]]
kind = "sdc"
probability = 0.7
onset = 1200
[[fault]]
kind = "straggler"
onset = 1500
[[fault]]
kind = "link_degradation"
onset = 1800
"""
END = from_iso("2026-01-01T01:00:00Z")
PATIENCE = 60 * SECOND
"""Advance of the clock when all is read: no sender is waited for any more."""
SECONDS = 120.0
"""Longest reading and evaluation; chosen: it takes 10 s on an idle machine."""
FINDINGS = (
    "SELECT time::VARCHAR, onset::VARCHAR, entity, detector, level, score, summary, evidence FROM findings ORDER BY ALL"
)
INCIDENTS = (
    "SELECT id, cause, opened::VARCHAR, onset::VARCHAR, resolved::VARCHAR, severity, members, confidence, state, "
    "summary FROM incidents ORDER BY ALL"
)
ROWS = "SELECT count(*), sum(hash(t)) FROM {} t"


class Run:
    """One whole path: simulate, transport, ingest, detectors, Desk. The clock is just after the scenario's end."""

    def __init__(self, folder: Path, transport: str, base: sections.Config) -> None:
        self.config = dataclasses.replace(
            base,
            spool=sections.Spool(folder / "spool", free_bytes=0),
            store=sections.Store(folder / "store.duckdb"),
            pipeline=sections.Pipeline(transport=transport),  # type: ignore[arg-type] # one of the two
        )
        (folder / "scenario.toml").write_text(SCENARIO)
        order = SimulateOptions(str(folder / "scenario.toml"), 3, transport, 0.0)
        assert simulate(order, self.config, None, self._wait, lambda: END) == 0
        self.now = END + SECOND
        self.service = PipelineService(self.config, Runner(detectors.configured({}, "")), clock=lambda: self.now)

    @staticmethod
    def _wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def read_and_evaluate(self, messages: int = 0) -> None:
        """Reads all messages (at least `messages`) and evaluates them up to END.

        The last lateness would be evaluated over the spool alone: the broker dates messages by the real clock, months
        after the scenario, so that over Kafka no sender counts as alive and the watermark stays at the newest event
        time minus the lateness. Live, newer telemetry closes those frames.
        """
        self.service.start_engine()
        self._run_until(lambda: self.messages >= messages)
        self.now += PATIENCE
        self._run_until(lambda: self.service.ingest.progress.backlog is None)
        assert self.service.engine is not None
        self.service.engine.advance(END)
        assert self.service.engine.framer.closed == END

    def _run_until(self, done: Any) -> None:
        end = time.monotonic() + SECONDS
        busy = True
        while busy or not done():
            assert time.monotonic() < end, f"not within {SECONDS:g} s: {self.service.list_unready_reasons()}"
            with suppress(Retryable):
                busy = self.service.run_step()

    @property
    def messages(self) -> int:
        """Number of stored messages of all senders."""
        return int(self.rows("SELECT coalesce(sum(sequence + 1), 0) FROM producer_mark")[0][0])

    def rows(self, query: str) -> Sequence[tuple[Any, ...]]:
        with contextlib.closing(self.service.database.cursor()) as cursor:
            return cursor.execute(query).fetchall()


@pytest.mark.slow
def test_the_same_scenario_over_spool_and_over_kafka_gives_identical_findings(kafka: Address, tmp_path: Path) -> None:
    runs = []
    for transport in ("spool", "kafka"):
        (tmp_path / transport).mkdir()
        run = Run(tmp_path / transport, transport, sections.Config(kafka=make_topics(kafka)))
        try:
            run.read_and_evaluate(runs[0][0] if runs else 0)
            queries = [FINDINGS, INCIDENTS, *(ROWS.format(c) for c in ("gpu", "nic", "node", "rank", "events"))]
            runs.append((run.messages, [run.rows(query) for query in queries]))
            assert run.rows("FROM gaps") == run.rows("FROM dead_letter") == []
            assert run.service.engine is not None
            assert not run.service.engine.framer.late
        finally:
            run.service.close()
    (count, over_spool), (count_kafka, over_kafka) = runs
    assert count == count_kafka > 0
    findings, incidents = over_spool[:2]
    assert {detector for _, _, _, detector, *_ in findings} >= {"sdc", "straggler", "link"}
    assert len(incidents) >= 3
    assert over_kafka == over_spool
