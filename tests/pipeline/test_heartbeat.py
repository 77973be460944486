"""A hanging loop is reported by the others: readiness, Watchdog, metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.commands.pipeline import PipelineBackend
from pipeline.commands.service import PipelineService
from pipeline.config import sections as configuration
from pipeline.config.settings import build_section
from pipeline.model.records import SECOND, Finding
from pipeline.runtime.heartbeat import EvaluationProgress
from tests.until import until

T0 = 1_780_000_000 * SECOND


class HangingJudge:
    """A judge that waits while it is held."""

    signals = frozenset({"gpu.temperature"})
    names = ("stuck",)

    def __init__(self) -> None:
        self.free, self.entered = threading.Event(), threading.Event()
        self.free.set()
        self.beat: Callable[[str], None] = lambda doing: None

    def listing(self) -> list[dict[str, Any]]:
        return []

    def calibration(self) -> dict[str, Any]:
        return {}

    def calibration_rows(self, other: Any = None) -> list[dict[str, Any]]:
        return []

    def observe(self, frames: Any) -> list[Finding]:
        self.beat("detector stuck")
        self.entered.set()
        self.free.wait(30)
        return []

    def judge_events(self, events: Any, topology: Any, again: bool = False) -> list[Finding]:
        return []

    def snapshot(self) -> tuple[()]:
        return ()

    def restore(self, pieces: object) -> None:
        """Does nothing: there is no state."""


class Running:
    """A pipeline whose loop runs in a thread, with a clock that the test moves."""

    def __init__(self, site: Any) -> None:
        folder, self.seconds = site.folder, 0.0
        table = {"store": {"path": str(folder / "store.duckdb")}, "spool": {"directory": str(folder / "spool")}}
        self.judge, self.stop = HangingJudge(), threading.Event()
        config = build_section(configuration.Config, table, "test")
        self.service = PipelineService(config, self.judge, lambda: T0 + 600 * SECOND, lambda: self.seconds)
        self.thread = threading.Thread(target=self.service.run, args=(self.stop,))

    def close(self) -> None:
        self.judge.free.set()
        self.stop.set()
        self.thread.join(10)
        self.service.close()


@pytest.fixture
def running(site: Any) -> Iterator[Running]:
    made = Running(site)
    yield made
    made.close()


def test_a_detector_that_does_not_return_is_named_by_readiness_and_stops_the_watchdog(
    running: Running, site: Any
) -> None:
    running.judge.free.clear()
    site.send("n1", T0)
    site.send("n1", T0 + 500 * SECOND)
    running.thread.start()
    assert running.judge.entered.wait(10)
    assert running.service.list_unready_reasons() == []
    running.seconds += 31
    assert running.service.list_unready_reasons() == ["evaluation stalled for 31 s: no return from detector stuck"]
    assert running.service.notifier._alive() is False
    assert PipelineBackend(running.service).read_counters()["fleetpulse_heartbeat_age_seconds"] == 31
    running.judge.free.set()
    until(lambda: running.service.list_unready_reasons() == [])
    assert running.service.notifier._alive() is True


def test_a_read_that_does_not_return_is_named_by_readiness(
    running: Running, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, held = running.service.transport.read, threading.Event()

    def blocked(*arguments: Any) -> Any:
        held.set()
        running.judge.free.wait(30)
        return read(*arguments)

    running.judge.free.clear()
    monkeypatch.setattr(running.service.transport, "read", blocked)
    site.send("n1", T0)
    running.thread.start()
    assert held.wait(10)
    running.seconds += 31
    assert running.service.list_unready_reasons() == ["evaluation stalled for 31 s: no return from ingest"]


def test_telemetry_that_is_stored_and_not_evaluated_for_three_frames_is_reported() -> None:
    seconds = [0.0]
    progress = EvaluationProgress(10.0, 30.0, lambda: seconds[0])
    for _ in range(10):
        seconds[0] += 10
        progress.heartbeat.beat("judging")
        progress.record(T0, T0 + round(seconds[0] * SECOND))
    assert progress.describe_trouble() == "evaluation stalled for 90 s: the newest 100 s of telemetry are not evaluated"
    progress.record(T0 + 60 * SECOND, T0 + 100 * SECOND)
    assert progress.describe_trouble() is None


def test_a_clock_set_back_behind_the_closed_frames_is_reported_until_it_has_passed_them() -> None:
    progress = EvaluationProgress(10.0, 30.0, lambda: 0.0)
    progress.record(T0, T0 - 7200 * SECOND, T0 - 7200 * SECOND)
    assert progress.describe_trouble() == ("evaluation stalled: clock was set back: data of the next 7200 s is late")
    progress.record(T0, T0, T0)
    assert progress.describe_trouble() is None


def test_an_idle_evaluation_is_not_reported_as_stalled() -> None:
    seconds = [0.0]
    progress = EvaluationProgress(10.0, 30.0, lambda: seconds[0])
    progress.record(T0, T0 + 40 * SECOND)
    seconds[0] += 3600
    progress.heartbeat.beat("ingest")
    assert progress.describe_trouble() is None
