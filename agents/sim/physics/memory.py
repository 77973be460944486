"""Memory of the GPUs: errors that ECC corrected and could not correct, in HBM and on the chip, and remapped rows.

A healthy GPU has only corrected errors. Uncorrected ones are faults, at their published rate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Channel, Effects
from agents.sim.layout import Layout
from agents.sim.physics.noise import Counter, generator
from agents.sim.physics.state import State

DRAM_CORRECTED, SRAM_CORRECTED = 0.005, 0.001
"""Corrected errors per GPU and hour, on average; chosen, since no figure is published: a node has one per quiet day."""
_WEAK, _BURST = 0.3, 0.5
"""Shape of the gamma by which GPUs differ, and of the logarithmic size of a burst: counts are negative binomial and a
few GPUs have most of them, as field studies of HBM and DDR find; sizes chosen."""
_ROWS = (0.05, 0.10)
"""Rows that a GPU has had remapped, after corrected and uncorrected errors: a year at 11.3 per 1M GPU-hours [Delta]
gives the second, the first is chosen."""
_VOLATILE = ("dram_corrected", "dram_uncorrected", "sram_corrected", "sram_uncorrected")
"""Counts since the driver was loaded; remapped rows are written into the GPU and outlive a reset."""


class Memory:
    """State of the memory of all GPUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 25), layout.gpus
        self.interval, self.seed, self.state = interval, seed, state
        weight = np.cumsum(rng.gamma(_WEAK, 1 / _WEAK, n))
        self._place = weight / weight[-1]
        past = rng.poisson(0.3, n)  # since the driver was loaded, some weeks ago; chosen
        starts = {"dram_corrected": past, "rows_corrected": rng.poisson(_ROWS[0], n)}
        starts["rows_uncorrected"] = rng.poisson(_ROWS[1], n)
        names = (*_VOLATILE, "rows_corrected", "rows_uncorrected")
        zero = np.zeros(n, np.int64)
        state["counter.gpu.ecc_corrected"], state["counter.gpu.ecc_uncorrected"] = past, zero
        self._counters = {name: Counter(state, f"gpu.{name}", starts.get(name, zero)) for name in names}

    def step(self, block: int, effects: Effects, reset: NDArray[np.bool_] | None) -> dict[str, NDArray[Any]]:
        """Returns the columns of class gpu; `reset` (ticks, GPUs): whether the driver was reloaded or the GPU reset."""
        rng, gpu, shape = generator(self.seed, 26, block), effects.gpu, effects.job_of_gpu.shape
        grown: dict[str, NDArray[np.int64] | None] = {
            "dram_corrected": _with(self._background(rng, DRAM_CORRECTED, shape), gpu.dram_corrected),
            "sram_corrected": _with(self._background(rng, SRAM_CORRECTED, shape), gpu.sram_corrected),
            "dram_uncorrected": _with(None, gpu.dram_uncorrected),
            "sram_uncorrected": _with(None, gpu.sram_uncorrected),
            "rows_corrected": _with(None, gpu.rows_corrected),
            "rows_uncorrected": _with(None, gpu.rows_uncorrected),
        }
        read = {n: self._read(n, growth, reset if n in _VOLATILE else None, shape) for n, growth in grown.items()}
        both = {f"gpu.ecc_{what}": read[f"dram_{what}"] + read[f"sram_{what}"] for what in ("corrected", "uncorrected")}
        for name, values in both.items():
            self.state[f"counter.{name}"] = values[-1].astype(np.int64)  # the readings before the next reset
        return {
            **both,
            **{f"gpu.{name}": values for name, values in read.items()},
            "gpu.rows_pending": np.broadcast_to(gpu.rows_pending.values, shape),
            "gpu.rows_failed": np.broadcast_to(gpu.rows_failed.values, shape),
        }

    def _background(self, rng: np.random.Generator, rate: float, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Returns (ticks, GPUs) corrected errors of healthy memory, at `rate` per hour; None: there are none."""
        size = -_BURST / ((1 - _BURST) * np.log(1 - _BURST))  # mean of the logarithmic distribution
        bursts = rng.poisson(rate / 3600 * self.interval * shape[0] * shape[1] / size)
        if not bursts:
            return None
        out = np.zeros(shape, np.int64)
        where = rng.integers(0, shape[0], bursts), np.searchsorted(self._place, rng.random(bursts))
        np.add.at(out, where, rng.logseries(_BURST, bursts))
        return out

    def _read(
        self, name: str, growth: NDArray[np.int64] | None, reset: NDArray[np.bool_] | None, shape: tuple[int, ...]
    ) -> NDArray[np.uint64]:
        """Returns (ticks, GPUs) readings of a counter."""
        counter = self._counters[name]
        if growth is None and reset is None:
            return np.broadcast_to(counter.last, shape).view(np.uint64)
        return counter.add(np.zeros(shape, np.int64) if growth is None else growth, reset)


def _with(background: NDArray[np.int64] | None, affected: Channel) -> NDArray[np.int64] | None:
    """Returns background plus errors from faults; None if there are none."""
    if not affected:
        return background
    return affected.array() if background is None else background + affected.array()
