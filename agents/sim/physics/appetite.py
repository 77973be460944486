"""What jobs want of their GPUs: models differ in the power that they draw and in the memory that they fill."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.physics.noise import Floats, generator
from agents.sim.schedule import Job, Stay

_LIGHT = 0.25  # share by which the lightest job draws less than the most; most sit at the limit [AcmeTrace]
_FILLED = (0.65, 0.96)  # share of the memory that a job fills; quartiles in [AcmeTrace] 0.67, 0.77 and 0.78
_STAGE, _RANK_SD, _MOST = 0.04, 0.005, 0.985  # pipeline stages hold different layers, ranks nearly the same; chosen


class Appetite:
    """Of all jobs; drawn from the seed and a job's number, so that a job keeps it wherever it moves."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._filled = cache(self._of_ranks)

    def level(self, number: int) -> float:
        """Share of the power above idle that a job draws."""
        return float(1 - _LIGHT * generator(self.seed, 22, number).random() ** 2)

    def of(self, stays: list[Stay], effects: Effects) -> tuple[Floats, NDArray[np.float64]]:
        """(ticks, GPUs) level of power and share of memory; 1 where no job runs."""
        level = np.ones(effects.job_of_gpu.shape, np.float32)
        filled = np.ones(effects.job_of_gpu.shape)
        for stay in stays:
            on = np.flatnonzero(effects.within(stay.begin, stay.end))
            where = np.s_[:, stay.gpus] if len(on) == len(level) else np.ix_(on, stay.gpus)
            level[where], filled[where] = self.level(stay.job.number), self._filled(stay.job)
        return level, filled

    def _of_ranks(self, job: Job) -> NDArray[np.float64]:
        """(ranks,) share of the memory that each fills."""
        rng = generator(self.seed, 23, job.number)
        level = rng.uniform(*_FILLED)
        stages = rng.uniform(-_STAGE, _STAGE, job.stages)[job.stage_of_rank]
        return np.minimum(level + stages + _RANK_SD * rng.standard_normal(job.ranks).clip(-3, 3), _MOST)
