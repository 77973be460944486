"""Too much input: what one sender costs others, and how much waits in memory when everything arrives together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from agents.node.spool.spool import Spool
from pipeline.commands.service import PipelineService
from pipeline.config import sections
from pipeline.ingest import ingest
from pipeline.model.records import SECOND, TELEMETRY, Batch, Block, Origin
from pipeline.transport import wire
from tests.pipeline.test_service import EmptyJudge

T0 = 1_780_000_000 * SECOND
GPUS = 8


class Fleet:
    """Spools of many nodes, and a pipeline that reads them; the test moves the clock."""

    def __init__(self, folder: Path) -> None:
        self.now, self._spools = T0, dict[str, Spool]()
        self._folder = folder / "spool"
        config = sections.Config(
            spool=sections.Spool(self._folder),
            store=sections.Store(folder / "store.duckdb", free_bytes=0),
            pipeline=sections.Pipeline(commit_wait=0.0),
        )
        self.service = PipelineService(config, EmptyJudge(), clock=lambda: self.now)  # type: ignore[arg-type]
        self.service.start_engine()

    def send(self, node: str, times: np.ndarray) -> None:
        if node not in self._spools:
            self._spools[node] = Spool(self._folder, node, TELEMETRY, free_bytes=0)
        values = np.full((len(times), GPUS), 50, "f4")
        block = Block("gpu", tuple(f"gpu:{node}.{i}" for i in range(GPUS)), {"gpu.temperature": values})
        body = wire.encode(Batch(Origin("local", node, b"b" * 16), times.astype(np.int64), (block,)))
        self._spools[node].append(body, wire.TELEMETRY_KIND, self.now)
        self._spools[node].sync()

    def run(self, look: Callable[[], None] = lambda: None) -> int:
        """Runs steps until nothing is left; returns how many."""
        steps = 1
        while self.service.run_step():
            look()
            steps += 1
        return steps

    def count(self, query: str) -> int:
        return int(self.service.database.connection.execute(query).fetchall()[0][0])

    def close(self) -> None:
        self.service.close()
        for spool in self._spools.values():
            spool.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_twelve_million_old_rows_of_one_sender_delay_others_by_a_few_commits(fleet: Fleet) -> None:
    for _ in range(12):
        fleet.now += 10 * SECOND
        for node in ("n1", "n2"):
            fleet.send(node, np.array([fleet.now]))
        fleet.run()
    ticks = 150_000
    for number in range(10):
        fleet.send("bad", fleet.now - (60 + number) * SECOND + np.arange(ticks))
    fleet.now += 60 * SECOND  # frames wait 30 s for a sender that is behind
    for node in ("n1", "n2"):
        fleet.send(node, np.array([fleet.now]))
    began = time.process_time()
    steps = fleet.run()
    assert steps <= 15  # a message each, of 1.2 million rows
    assert time.process_time() - began < 30  # 1.6 s alone
    assert fleet.service.engine.framer.closed == fleet.now - 30 * SECOND  # type: ignore[union-attr]
    assert fleet.service.engine.framer.late["gpu"] == 10 * ticks * GPUS  # type: ignore[union-attr]
    assert fleet.count("SELECT count(*) FROM gpu") == 10 * ticks * GPUS + 26 * GPUS


def test_everything_at_once_after_an_outage_is_stored_and_evaluated_with_bounded_queues(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, messages, ticks = 100, 12, 5
    for number in range(messages):
        for node in range(nodes):
            fleet.send(f"n{node}", T0 + (number * ticks + np.arange(ticks)) * SECOND)
    fleet.now += 120 * SECOND
    monkeypatch.setattr(ingest, "COMMIT_MESSAGES", 50)
    monkeypatch.setattr(ingest, "_FETCH_MESSAGES", 2)
    waiting: list[int] = []
    held: list[int] = []

    def look() -> None:
        waiting.append(sum(map(len, fleet.service.ingest._queues.values())))
        held.append(sum(len(rows.time) for chunks in fleet.service.engine.framer._rows.values() for rows in chunks))  # type: ignore[union-attr]

    fleet.run(look)
    assert fleet.count("SELECT count(*) FROM gpu") == nodes * messages * ticks * GPUS
    assert fleet.service.engine.framer.late == {}  # type: ignore[union-attr]
    assert max(waiting) <= 2 * nodes
    # frames close while the backlog is read: the rows of about one frame and one commit wait, never those of all
    assert max(held) <= (3 * ticks * nodes + 50 * ticks) * GPUS
