"""NVLinks: one link per GPU represents its 18: its speed falls in steps, its errors are those of all.

Traffic follows the pace of the job; checksum errors and replays are rare unless a fault makes them. (Every link on its
own would be the largest class of the fleet, for counters that all but never move.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.jobs import Tempo
from agents.sim.physics.lives import resets
from agents.sim.physics.noise import Counter, Floats, generator, rare
from agents.sim.physics.state import State

SPEED = 18 * 200_000.0  # Mbit/s in one direction: 18 links of 25 GB/s [H100 datasheet]
_LINE = SPEED / 8 * 1e6 / 1024  # KiB/s
_LEVEL = (0.04, 0.20)  # of the line on the mean, for each job: tensor parallelism by how it is split; chosen
_REPLAY_PER_HOUR = 0.002  # per GPU; chosen: healthy links have a few in a year
_SWING = 0.03  # from tick to tick; chosen


class Nvlinks:
    """State of the NVLinks of all GPUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 37), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        past = rng.integers(10**11, 10**12, n)
        starts = {"tx_data": past, "rx_data": past + rng.integers(0, 10**9, n), "replay_errors": rng.poisson(0.1, n)}
        names = ("replay_errors", "recovery_errors", "crc_errors", "tx_data", "rx_data")
        zero = np.zeros(n, np.int64)
        self._counters = {name: Counter(state, f"nvlink.{name}", starts.get(name, zero)) for name in names}
        self._levels: list[float] = []

    def step(self, block: int, tempo: Tempo, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class nvlink."""
        rng, harm = generator(self.seed, 38, block), generator(self.seed, 39, block)
        gpu, shape = effects.gpu, tempo.load.shape
        restarted, none = resets(effects, "nvlink"), np.zeros(shape, np.int64)
        growth = {**self._traffic(rng, tempo, effects)}
        growth["replay_errors"] = rare(rng, _REPLAY_PER_HOUR / 3600 * self.interval, shape)
        if gpu.nvlink_replays:
            growth["replay_errors"] += harm.poisson(gpu.nvlink_replays.array() * self.interval)
        if gpu.nvlink_crc:
            growth["crc_errors"] = harm.poisson(gpu.nvlink_crc.array() * self.interval)
        if gpu.nvlink_recoveries:
            growth["recovery_errors"] = gpu.nvlink_recoveries.array()
        columns: dict[str, NDArray[Any]] = {
            "nvlink.state": np.broadcast_to(~gpu.nvlink_down.values, shape),
            "nvlink.speed": np.broadcast_to(np.float32(SPEED) * gpu.nvlink_speed.values, shape),
        }
        for name, counter in self._counters.items():
            if name in growth or restarted is not None:
                columns[f"nvlink.{name}"] = counter.add(growth.get(name, none), restarted)
            else:
                columns[f"nvlink.{name}"] = counter.still(shape[0])
        return columns

    def _traffic(self, rng: np.random.Generator, tempo: Tempo, effects: Effects) -> dict[str, NDArray[np.int64]]:
        """KiB within each tick; what the GPUs of a node send goes round among them."""
        width, shape = self.layout.gpus_per_node, tempo.pace.shape
        share = self._level(effects) * tempo.pace * (1 + np.float32(_SWING) * rng.standard_normal(shape, np.float32))
        share = np.where(effects.gpu.nvlink_down.values, 0, np.clip(share, 0, effects.gpu.nvlink_speed.values))
        sent = np.asarray(share.astype(np.float64) * (_LINE * self.interval), np.int64)
        received = np.roll(sent.reshape(shape[0], -1, width), 1, axis=2).reshape(shape)
        return {"tx_data": sent, "rx_data": received}

    def _level(self, effects: Effects) -> Floats:
        """(ticks, GPUs) share of the line that the job there uses at full pace; of no job 0."""
        job = effects.job_of_gpu
        for number in range(len(self._levels), int(job.max()) + 1):
            self._levels.append(float(generator(self.seed, 40, 1, number).uniform(*_LEVEL)))
        return np.asarray([*self._levels, 0.0], np.float32)[job]
