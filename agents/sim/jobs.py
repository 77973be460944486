"""Training jobs: how loaded their GPUs are, how long a step takes, and what each rank says of it.

In synchronous training a step ends for all ranks when the slowest has computed: step = max(compute) + collectives. So
one slow rank shows in everybody's step time, and only its own compute time tells who it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects, Happening
from agents.sim.layout import STAGES, Job, Layout
from agents.sim.noise import Drift, Floats, generator, heavy

CHECKPOINT_EVERY, CHECKPOINT_TAKES = 1800.0, 45.0  # s; published jobs write one every 20 to 40 min
DIURNAL = 0.015  # throughput swing over a day that large training runs report
_COMPUTE, _COLLECTIVE = 4.2, 0.8  # s per step: a large model on H100; chosen
_STAGE_SD, _RANK_SD, _STEP_SD, _STEP_PHI = 0.10, 0.004, 0.008, 0.3
"""Spread between stages (published), between ranks and from step to step (chosen below the 3 % of unpadded batches)."""
_PAUSE_RATE, _PAUSE = 1e-3, (0.05, 0.20)  # garbage collection stretches one step in a thousand; its size is chosen
_CHECKPOINT_LOAD = 0.25


@dataclass(slots=True)
class Tempo:
    """One block of all jobs: load (ticks, GPUs), saving (ticks, jobs) and, once known, pace = nominal / actual step."""

    load: Floats
    saving: NDArray[np.bool_]
    pace: Floats


class Jobs:
    """State of all jobs of the fleet; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int) -> None:
        rng = generator(seed, 10)
        self.layout, self.interval, self.seed = layout, interval, seed
        stages = 1 + _STAGE_SD * np.clip(rng.standard_normal(STAGES * len(layout.jobs)), -2.5, 2.5)
        lottery = 1 + _RANK_SD * np.clip(rng.standard_normal(layout.ranks), -3, 3)
        self._base = (_COMPUTE * stages[layout.stage_of_rank] * lottery).astype(np.float32)
        self._offset = rng.uniform(300.0, CHECKPOINT_EVERY, len(layout.jobs))  # when a job writes its first checkpoint
        self._nominal = np.array([self._base[j.ranks].max() for j in layout.jobs], np.float32) + _COLLECTIVE
        self._progress = rng.uniform(1e3, 1e5, len(layout.jobs))
        self._drift = Drift(rng, layout.ranks, _STEP_PHI)
        self._held = np.full((3, layout.ranks), np.nan, np.float32)

    def load(self, effects: Effects) -> Tempo:
        """Load of each GPU and who writes a checkpoint; adds the events of jobs."""
        time, jobs = effects.time, self.layout.jobs
        phase = np.mod(time[:, None] - self._offset, CHECKPOINT_EVERY)
        saving = (phase < CHECKPOINT_TAKES) & (time[:, None] >= self._offset)
        swing = 1 - DIURNAL * (0.5 + 0.5 * np.sin(2 * np.pi * time / 86_400))
        load = np.zeros((len(time), self.layout.gpus), np.float32)
        for number, job in enumerate(jobs):
            level = np.where(saving[:, number], _CHECKPOINT_LOAD, 1.0) * swing
            load[:, job.gpus] = level[:, None].astype(np.float32)
            self._tell(job, float(self._offset[number]), effects)
        return Tempo(load, saving, np.ones((len(time), len(jobs)), np.float32))

    def advance(self, block: int, tempo: Tempo, clock: Floats, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class rank from the GPUs' clocks (factor on nominal); sets tempo.pace."""
        rng = generator(self.seed, 11, block)
        ticks, ranks = len(effects.time), self.layout.ranks
        noise = 1 + np.float32(_STEP_SD) * self._drift.draw(rng, ticks)
        pauses = rng.random((ticks, ranks), np.float32) < _PAUSE_RATE
        noise[pauses] += rng.uniform(*_PAUSE, int(pauses.sum())).astype(np.float32)
        compute = self._base * noise / clock[:, :ranks]
        wait = np.float32(_COLLECTIVE) * (1 + np.float32(0.03) * np.abs(heavy(rng, (ticks, len(self.layout.jobs)))))
        values, steps = np.empty((3, ticks, ranks), np.float32), np.empty((ticks, ranks), np.uint64)
        for number, job in enumerate(self.layout.jobs):
            mine = compute[:, job.ranks]
            working = mine.max(axis=1) + wait[:, number] * effects.network[:, number]
            saving = tempo.saving[:, number]
            tempo.pace[:, number] = np.where(saving, 0, self._nominal[number] / working)
            done = self._progress[number] + np.cumsum(np.where(saving, 0, self.interval / working))
            told = np.stack([np.broadcast_to(working[:, None], mine.shape), mine, working[:, None] - mine])
            values[:, :, job.ranks] = self._hold(number, told, done)
            steps[:, job.ranks] = done[:, None].astype(np.uint64)
            self._progress[number] = done[-1]
        names = ("rank.step_time", "rank.compute_time", "rank.communication_time")
        return {"rank.step": steps, **dict(zip(names, values, strict=True))}

    def _hold(self, number: int, told: Floats, done: NDArray[np.float64]) -> Floats:
        """(3, ticks, ranks) what ranks say: the last finished step, unchanged until the next one is finished."""
        job = self.layout.jobs[number]
        before = self._held[:, job.ranks]
        before = np.where(np.isnan(before), told[:, 0], before)
        finished = np.diff(np.floor(done), prepend=np.floor(self._progress[number])) > 0
        newest = np.maximum.accumulate(np.where(finished, np.arange(1, len(done) + 1), 0))
        held = np.concatenate([before[:, None], told], axis=1)[:, newest]
        self._held[:, job.ranks] = held[:, -1]
        return held

    def _tell(self, job: Job, offset: float, effects: Effects) -> None:
        """Start of the job, with its ranks, at 0; each checkpoint when it begins."""
        entity, since, until = f"job:{job.name}", effects.since, effects.until
        if since < 0:
            effects.events.append(Happening(0.0, entity, "job_start", {"ranks": self._membership(job)}))
        first = max(0, int(np.floor((since - offset) / CHECKPOINT_EVERY)) + 1)
        last = int(np.floor((until - offset) / CHECKPOINT_EVERY))
        for n in range(first, last + 1):
            moment = offset + n * CHECKPOINT_EVERY
            effects.events.append(Happening(moment, entity, "checkpoint", {"seconds": CHECKPOINT_TAKES}))

    def _membership(self, job: Job) -> dict[str, dict[str, str]]:
        names, gpus = self.layout.entities["rank"][job.ranks], self.layout.entities["gpu"][job.gpus]
        parents = self.layout.parents
        return {rank: {"stage": parents[rank][0], "gpu": gpu} for rank, gpu in zip(names, gpus, strict=True)}
