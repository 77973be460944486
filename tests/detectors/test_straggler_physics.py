"""Slow GPUs and hosts without step times, in synchronous training of many kinds: found ones and missed ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from detectors.straggler.straggler_inferred import StragglerInferred
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology
from tests.detectors.cases.case import START, at_known_site

WIDTH = 8


@dataclass
class Training:
    """A job as GPUs and ports show it: power and SM activity follow the share of the step in which each computes.

    waits: activity and power of a GPU that spins in a collective, of those of one that computes.   gaps: the same of
    one that waits for its host.   noise, phi: of activity and power from sample to sample.   profiled: SM activity is
    measured.   step, collective: s, and share of it.
    """

    seed: int = 0
    nodes: int = 8
    stages: int = 1
    interval: int = 10
    waits: tuple[float, float] = (0.3, 0.5)
    gaps: tuple[float, float] = (0.05, 0.3)
    noise: float = 0.02
    phi: float = 0.3
    profiled: bool = True
    traffic: bool = True
    step: float = 5.0
    collective: float = 0.2
    imbalance: float = 0.0

    def __post_init__(self) -> None:
        self.rng, self.size = np.random.default_rng(self.seed), self.nodes * WIDTH
        self.gpus = tuple(f"gpu:n{i // WIDTH}.{i % WIDTH}" for i in range(self.size))
        self.ports = tuple(f"port:n{i // WIDTH}.p{i % WIDTH}" for i in range(self.size))
        self.hosts = tuple(f"node:n{i}" for i in range(self.nodes))
        self.stage = np.arange(self.size) * self.stages // self.size
        parents = {gpu: [f"node:n{i // WIDTH}"] for i, gpu in enumerate(self.gpus)}
        parents |= {port: [f"node:n{i // WIDTH}", f"leaf:l{i % 4}"] for i, port in enumerate(self.ports)}
        parents |= {f"rank:7.{i}": [f"stage:7.{self.stage[i]}", "job:7", gpu] for i, gpu in enumerate(self.gpus)}
        self.topology = Topology(parents)
        self.own = (1 + self.imbalance * self.rng.standard_normal(self.size)) * (1 + 0.1 * self.stage / self.stages)
        self.lottery = np.exp(0.03 * self.rng.standard_normal((2, self.size)))
        self.drift, self.sent = np.zeros((2, self.size)), np.zeros(self.size)

    def frames(self, tick: int, slow=1.0, starved=0.0, clock=1.0, network=1.0, work=1.0) -> dict[str, Frame]:
        """Frames of an instant. slow: factor on compute times; starved: share by which hosts delay; clock: factor."""
        time = START + tick * self.interval * SECOND
        compute = self.own * np.asarray(slow) / np.asarray(clock) * work
        took = compute / (1 - np.asarray(starved))
        usual = self.own.max() * (1 - self.collective) + self.own.max() * self.collective
        step = took.max() * (1 - self.collective) + self.own.max() * self.collective * network
        busy, gap = compute * (1 - self.collective) / step, (took - compute) * (1 - self.collective) / step
        grow = np.sqrt(1 - self.phi**2) * self.rng.standard_t(4, self.drift.shape) / np.sqrt(2)
        self.drift = self.phi * self.drift + grow
        shown = [busy + (1 - busy - gap) * w + gap * g for w, g in zip(self.waits, self.gaps, strict=True)]
        active, watts = np.array(shown) * self.lottery * (1 + self.noise * self.drift)
        power = 90 + 550 * watts * np.asarray(clock) ** 1.7
        values = {"gpu.sm_clock": np.rint(1755 * np.asarray(clock) * np.ones(self.size) / 15) * 15}
        values |= {"gpu.power": np.rint(power), "gpu.utilization": np.ones(self.size)}
        values |= {"gpu.throttle_reasons": np.zeros(self.size)}
        if self.profiled:
            values["gpu.sm_active"] = np.clip(0.8 * active, 0, 1)
        found = {"gpu": Frame(time, "gpu", self.gpus, values, self.topology)}
        if self.traffic:
            rate = 5e9 * usual / step * (1 + 0.01 * self.rng.standard_normal(self.size))
            self.sent = self.sent + rate * self.interval
            found["nic"] = Frame(time, "nic", self.ports, {"nic.tx_bytes": self.sent.copy()}, self.topology)
        return found


def judge(job, ticks, since, known=True, **fault):
    """Findings while `fault` holds from tick `since` on."""
    detector = at_known_site(StragglerInferred()) if known else StragglerInferred()
    return [f for t in range(ticks) for f in detector.observe(job.frames(t, **(fault if t >= since else {})))]


def draw(seed, **more):
    """A job drawn from published ranges, and wider."""
    rng = np.random.default_rng([seed, 5])
    return Training(
        seed,
        nodes=int(rng.choice([4, 8, 16])),
        stages=int(rng.choice([1, 1, 2])),
        interval=int(rng.choice([1, 10, 30, 60])),
        waits=(float(rng.uniform(0.1, 0.7)), float(rng.uniform(0.35, 0.75))),
        noise=float(rng.uniform(0.005, 0.04)),
        phi=float(rng.uniform(0.0, 0.7)),
        profiled=bool(rng.random() < 0.7),
        traffic=bool(rng.random() < 0.8),
        collective=float(rng.uniform(0.05, 0.3)),
        **more,
    )


def ones(job, where, value, usual=1.0):
    """An array by GPU."""
    out = np.full(job.size, usual)
    out[where] = value
    return out


def loud(found, since=0):
    """Entity -> highest level of tickets and pages."""
    seen: dict[str, str] = {}
    for f in found:
        if f.level != "suspect" and f.time >= since and seen.get(f.entity) != "page":
            seen[f.entity] = f.level
    return seen


@pytest.mark.parametrize("waits", [(0.1, 0.4), (0.6, 0.7)])
@pytest.mark.parametrize("profiled", [True, False])
def test_a_gpu_that_is_slow_at_full_clock_pages_once_its_job_has_lost_a_fifth(waits, profiled):
    job = Training(3, nodes=4, interval=30, waits=waits, profiled=profiled, noise=0.01)
    found = judge(job, 140, 80, slow=ones(job, 9, 1.3))
    assert loud(found) == {"gpu:n1.1": "page"}


def test_a_job_that_does_more_in_each_step_gives_no_finding():
    job = Training(4, nodes=4, interval=30)
    assert judge(job, 160, 80, work=1.3) == []


def test_jobs_that_start_between_two_looks_are_followed_while_a_gpu_is_slow():
    job, detector = Training(5, nodes=4), at_known_site(StragglerInferred())
    for tick in range(90):
        if tick > 60:
            new = {f"rank:{tick}.{i}": [f"job:{tick}", gpu] for i, gpu in enumerate(job.gpus[24:])}
            job.topology.merge(new)
        detector.observe(job.frames(tick, slow=ones(job, 3, 1.3 if tick > 50 else 1.0)))
