"""What the agent tells of itself."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import Reading, Rhythm
from agents.collectors.host.host import Host
from agents.collectors.nic.network import Network
from agents.node.self_metrics import Vitals
from agents.node.workers.pool import Looking
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE

START = 1_767_225_600 * SECOND


@pytest.fixture
def looking() -> Iterator[Looking]:
    made = Looking([Host(), Network()], "n1")
    made.tick(START, 10.0)
    yield made
    made.close(5.0)


def vitals_of(looking: Looking, proc: Path = Path("/proc")) -> Vitals:
    return Vitals("n1", looking, Rhythm("n1", lambda: START), proc)


def told(vitals: Vitals, looking: Looking, changed: bool = False) -> dict[str, Any]:
    found: list[Reading] = vitals.readings(changed, {"agent.spool_bytes": 7.0})
    return {name: values for reading in found for name, values in reading.columns.items()}


def test_each_collector_has_a_state_a_latency_and_a_silence(looking: Looking) -> None:
    found = told(vitals_of(looking), looking)
    states = [CATALOGUE["collector.state"].states[int(s)] for s in found["collector.state"]]
    assert states[0] == "ok"
    assert np.all(found["collector.latency"] > 0)
    assert np.all(found["collector.silence"] < 60)
    assert found["collector.restarts"].tolist() == [0, 0]


def test_its_cost_is_that_of_all_its_processes(looking: Looking) -> None:
    found = told(vitals_of(looking), looking)
    spent = sum(os.times()[:2]) * 1000
    assert found["agent.cpu_time"][0] >= spent - 200
    assert 10e6 < found["agent.memory"][0] < 2e9
    assert found["agent.spool_bytes"] == [7.0]


def test_a_worker_that_is_in_a_call_is_not_measured(looking: Looking, tmp_path: Path) -> None:
    """Reading the memory map of a process that hangs in the kernel may hang as well."""
    asked: list[str] = []

    class Watched(type(tmp_path)):  # type: ignore[misc] # the platform's own kind of path
        def __truediv__(self, name: object) -> Path:
            asked.append(str(name))
            return Path("/proc") / str(name)

    (worker,) = [w for w in looking.workers if w.collector.name == "network"]
    assert worker.place is not None
    assert worker.due(START + SECOND, False)
    assert worker.ask(False)
    vitals = vitals_of(looking, Watched("/proc"))
    pids = vitals._pids()
    assert worker.place.pid in pids
    vitals._memory()
    assert str(worker.place.pid) not in asked
    assert str(os.getpid()) in asked


def test_a_lane_whose_collectors_must_all_wait_gets_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Looking([Network()], "n1")
    (worker,) = made.workers
    worker.vacate()
    worker._until = math.inf
    monkeypatch.setattr("agents.node.workers.pool.in_process", lambda *_: pytest.fail("a process for nobody"))
    made._open_lane(worker.collector.lane)
    assert worker.place is None
    made.close(5.0)


def test_processor_time_never_falls_when_a_worker_ends(looking: Looking) -> None:
    vitals = vitals_of(looking)
    before = vitals._processor_ms()
    for worker in looking.workers:
        worker.vacate()
    assert vitals._processor_ms() >= before


def test_it_is_told_every_ten_seconds_and_at_once_when_a_state_changes(looking: Looking) -> None:
    vitals = vitals_of(looking)
    assert told(vitals, looking)
    assert told(vitals, looking) == {}
    assert set(told(vitals, looking, changed=True)) == {
        "collector.state",
        "collector.latency",
        "collector.silence",
        "collector.restarts",
    }


def test_agent_and_collectors_are_in_the_inventory(looking: Looking) -> None:
    found = vitals_of(looking).inventory()
    assert set(found) == {"agent:n1", "collector:n1.host", "collector:n1.network"}
    assert found["collector:n1.network"].attributes["place"] == "process"
