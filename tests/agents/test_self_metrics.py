"""The agent's own telemetry."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.collector import Reading, SamplingSchedule
from agents.collectors.host.host import Host
from agents.collectors.nic.network import Network
from agents.node.self_metrics import SelfMetrics
from agents.node.workers.pool import WorkerPool
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE

START = 1_767_225_600 * SECOND


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool([Host(), Network()], "n1")
    made.tick(START, 10.0)
    yield made
    made.close(5.0)


def self_metrics_of(pool: WorkerPool, proc: Path = Path("/proc")) -> SelfMetrics:
    return SelfMetrics("n1", pool, SamplingSchedule("n1", lambda: START), proc)


def values_of(metrics: SelfMetrics, pool: WorkerPool, changed: bool = False) -> dict[str, Any]:
    found: list[Reading] = metrics.build_readings(changed, {"agent.spool_bytes": 7.0})
    return {name: values for reading in found for name, values in reading.columns.items()}


def test_each_collector_has_a_state_a_latency_and_a_silence(pool: WorkerPool) -> None:
    found = values_of(self_metrics_of(pool), pool)
    states = [CATALOGUE["collector.state"].states[int(s)] for s in found["collector.state"]]
    assert states[0] == "ok"
    assert np.all(found["collector.latency"] > 0)
    assert np.all(found["collector.silence"] < 60)
    assert found["collector.restarts"].tolist() == [0, 0]


def test_its_cost_covers_all_its_processes(pool: WorkerPool) -> None:
    found = values_of(self_metrics_of(pool), pool)
    spent = sum(os.times()[:2]) * 1000
    assert found["agent.cpu_time"][0] >= spent - 200
    own = int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    assert 10e6 < found["agent.memory"][0] < 2 * own + 1e9  # whatever this process has loaded for other tests
    assert found["agent.spool_bytes"] == [7.0]


def test_a_worker_in_a_call_is_not_measured(pool: WorkerPool, tmp_path: Path) -> None:
    """Reading the memory map of a process that hangs in the kernel may hang as well."""
    asked: list[str] = []

    class Watched(type(tmp_path)):  # type: ignore[misc] # the platform's own kind of path
        def __truediv__(self, name: object) -> Path:
            asked.append(str(name))
            return Path("/proc") / str(name)

    (worker,) = [w for w in pool.workers if w.collector.name == "network"]
    assert worker.client is not None
    assert worker.is_due(START + SECOND, False)
    assert worker.start_read(False)
    metrics = self_metrics_of(pool, Watched("/proc"))
    pids = metrics._pids()
    assert worker.client.pid in pids
    metrics._total_memory()
    assert str(worker.client.pid) not in asked
    assert str(os.getpid()) in asked


def test_a_lane_whose_collectors_are_all_paused_gets_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = WorkerPool([Network()], "n1")
    (worker,) = made.workers
    worker.release()
    worker._backoff.pause(0.0, math.inf)
    monkeypatch.setattr(
        "agents.node.workers.pool.start_process", lambda *_: pytest.fail("a process without collectors")
    )
    made._start_lane(worker.collector.lane)
    assert worker.client is None
    made.close(5.0)


def test_cpu_time_never_decreases_when_a_worker_ends(pool: WorkerPool) -> None:
    metrics = self_metrics_of(pool)
    before = metrics._total_cpu_ms()
    for worker in pool.workers:
        worker.release()
    assert metrics._total_cpu_ms() >= before


def test_self_metrics_are_sent_every_ten_seconds_and_on_each_change_of_state(pool: WorkerPool) -> None:
    metrics = self_metrics_of(pool)
    assert values_of(metrics, pool)
    assert values_of(metrics, pool) == {}
    assert set(values_of(metrics, pool, changed=True)) == {
        "collector.state",
        "collector.latency",
        "collector.silence",
        "collector.restarts",
    }


def test_agent_and_collectors_are_in_the_inventory(pool: WorkerPool) -> None:
    found = self_metrics_of(pool).inventory()
    assert set(found) == {"agent:n1", "collector:n1.host", "collector:n1.network"}
    assert found["collector:n1.network"].attributes["place"] == "process"
