"""Ended ranks lose their columns in frames while the pipeline runs, and the detectors keep what they learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import duckdb
import numpy as np
import pytest

from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.settings import build_section
from pipeline.engine import ended_ranks
from pipeline.model.records import SECOND, Batch, Block, Origin
from pipeline.transport import wire
from tests.pipeline.conftest import Site

T0 = 1_780_000_000 * SECOND
HOUR = 3600 * SECOND


class Learner:
    """A judge whose state is the sum of what each column of the frames of ranks had."""

    signals = None
    names = ()
    beat: Any = staticmethod(lambda doing: None)

    def __init__(self) -> None:
        self.sums: dict[int, float] = {}
        self.widths: list[int] = []

    def listing(self) -> list[dict[str, Any]]:
        return []

    def calibration(self) -> dict[str, Any]:
        return {}

    def calibration_rows(self, other: Any = None) -> list[dict[str, Any]]:
        return []

    def judge_events(self, events: Any, topology: Any, again: bool = False) -> list[Any]:
        return []

    def observe(self, frames: Any) -> list[Any]:
        if (frame := frames.get("rank")) is not None:
            self.widths.append(len(frame.entities))
            for i in np.flatnonzero(~np.isnan(frame["rank.step"])).tolist():
                self.sums[i] = self.sums.get(i, 0.0) + float(frame["rank.step"][i])
        return []

    def snapshot(self) -> Iterator[tuple[str, list[bytes]]]:
        yield "learner", [json.dumps(self.sums).encode()]

    def restore(self, pieces: Any) -> None:
        self.sums = {int(i): s for i, s in json.loads(pieces["learner"]).items()}

    def drop_ranks(self, kept: Any) -> None:
        place = {int(column): new for new, column in enumerate(np.flatnonzero(kept))}
        self.sums = {place[i]: s for i, s in self.sums.items() if i in place}


class Running:
    """A pipeline on a real store, and a clock that a test sets."""

    def __init__(self, site: Site) -> None:
        self.site, self.now = site, T0
        store = {"path": str(site.folder / "store.duckdb"), "hot_hours": 1.0}
        table: dict[str, Any] = {"store": store, "spool": {"directory": str(site.folder / "spool")}}
        table["pipeline"] = {"commit_wait": 0.0, "lateness": 0.0}
        table["admission"] = {"speaks_for": [{"node": "n1", "entities": ["*:*"]}]}
        self.judge, self._config = Learner(), build_section(configuration.Config, table, "test")
        self.service = self.start()

    def start(self) -> PipelineService:
        monotonic = lambda: (self.now - T0) / SECOND  # noqa: E731
        return PipelineService(self._config, self.judge, clock=lambda: self.now, monotonic=monotonic)

    def send(self, time: int, step: int, *ranks: str) -> None:
        block = Block("rank", ranks, {"rank.step": np.full((1, len(ranks)), step, "u8")})
        batch = Batch(Origin("local", "n1", b"b" * 16), np.array([time]), (block,))
        self.site.send_raw("n1", wire.encode(batch))

    def run(self, now: int) -> None:
        """Runs the loop at a time until nothing is left to do."""
        self.now = now
        while self.service._run_once():
            pass

    def count_rows(self, rank: str) -> int:
        with self.service.database.lock:
            query = "SELECT count(*) FROM rank WHERE entity = $1"
            return int(self.service.database.connection.execute(query, [rank]).fetchall()[0][0])

    def ranks(self) -> list[str]:
        return list(self.service.devices.names("rank"))


@pytest.fixture
def running(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(ended_ranks, "MIN_SILENT_DEVICES", 0)
    made = Running(site)
    yield made
    made.service.close()


def live_through_two_jobs(running: Running) -> None:
    """A job of three ranks ends, another of two runs; afterwards its hours are sealed."""
    for tick in range(30):
        running.send(T0 + tick * 10 * SECOND, 1, "rank:3.0", "rank:3.1", "rank:3.2")
    running.send(T0 + 300 * SECOND, 5, "rank:4.0", "rank:4.1")
    running.run(T0 + 301 * SECOND)
    for tick in range(20):
        running.send(T0 + 4 * HOUR + tick * 10 * SECOND, 5, "rank:4.0", "rank:4.1")
    running.run(T0 + 4 * HOUR + 201 * SECOND)


def work_on(running: Running, hour: int) -> None:
    """The second job runs for 200 s, some hours after the start."""
    for tick in range(20):
        at = T0 + hour * HOUR + tick * 10 * SECOND
        running.send(at, 5, "rank:4.0", "rank:4.1")
    running.run(T0 + hour * HOUR + 201 * SECOND)
    running.service.sealer.seal(T0 + (hour - 2) * HOUR)


def test_many_ended_ranks_lose_their_columns_and_learned_state_follows_the_others(running: Running) -> None:
    live_through_two_jobs(running)
    assert running.ranks() == ["rank:3.0", "rank:3.1", "rank:3.2", "rank:4.0", "rank:4.1"]
    learned = running.judge.sums[3]
    work_on(running, 6)
    assert len(running.ranks()) == 5, "their hours are not sealed yet"
    work_on(running, 8)
    assert running.ranks() == ["rank:4.0", "rank:4.1"]
    assert running.judge.widths[-1] == 2
    assert running.judge.sums[0] == running.judge.sums[1] == learned + 2 * 20 * 5
    assert running.count_rows("rank:3.0") == 30, "their history stays"


def test_a_rank_that_comes_back_has_a_column_again(running: Running) -> None:
    live_through_two_jobs(running)
    work_on(running, 6)
    work_on(running, 8)
    running.send(T0 + 9 * HOUR, 7, "rank:3.0", "rank:4.0")
    running.send(T0 + 9 * HOUR + 20 * SECOND, 7, "rank:3.0", "rank:4.0")
    running.run(T0 + 9 * HOUR + 21 * SECOND)
    assert running.ranks() == ["rank:4.0", "rank:4.1", "rank:3.0"]
    assert running.judge.sums[2] == 7
    assert running.count_rows("rank:3.0") == 32


def test_a_fault_while_they_are_dropped_loses_neither_ranks_nor_learned_state(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through_two_jobs(running)
    work_on(running, 6)
    learned = running.judge.sums[3]

    def fail(*_: Any) -> str:
        raise duckdb.IOException("IO Error: the disk went away")

    with monkeypatch.context() as broken:
        broken.setattr(ended_ranks, "_delete", fail)
        running.now = T0 + 8 * HOUR
        with pytest.raises(duckdb.IOException):
            running.service._run_once()
        running.judge.sums.clear()  # whatever the judge holds now is not used
    work_on(running, 9)
    assert running.ranks() == ["rank:4.0", "rank:4.1"]
    assert running.judge.sums[0] == learned + 20 * 5


@pytest.mark.slow
def test_a_new_process_drops_them_at_its_start(running: Running) -> None:
    live_through_two_jobs(running)
    work_on(running, 6)
    learned = running.judge.sums[3]
    running.service.close()
    running.judge = Learner()
    running.now = T0 + 7 * HOUR
    running.service = running.start()
    work_on(running, 8)
    assert running.ranks() == ["rank:4.0", "rank:4.1"]
    assert running.judge.sums[1] == learned + 20 * 5


@pytest.mark.slow
def test_a_reload_that_fails_after_the_ranks_is_done_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    live_through_two_jobs(running)

    def fail(*_: Any) -> None:
        raise duckdb.IOException("IO Error: the disk went away")

    with monkeypatch.context() as broken:
        broken.setattr("pipeline.commands.service.open_transport", fail)
        with pytest.raises(duckdb.IOException):
            running.service._reload("a test")
    assert running.service._must_reload
    work_on(running, 6)
    assert len(running.ranks()) == 5
