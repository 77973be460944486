"""Nodes themselves: load, processor time, memory, pressure and disk of a training server."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.jobs import Tempo
from agents.sim.layout import Layout
from agents.sim.noise import Counter, Drift, Floats, generator

CPUS, MEMORY, DISK = 192, 2.0 * 2**40, 3.5e12  # of a node with 8 GPUs; chosen
_BUSY_SHARE, _IDLE_SHARE = 0.22, 0.01  # of the processors: data loading and launches
_CHECKPOINT_BYTES = 2e9  # bytes a node writes per second of a checkpoint


class Hosts:
    """State of all nodes; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int) -> None:
        rng, n = generator(seed, 50), layout.nodes
        self.layout, self.interval, self.seed = layout, interval, seed
        self._drifts = {name: Drift(rng, n, 0.8) for name in ("load", "memory", "io")}
        self._uptime = rng.uniform(1e5, 4e6, n)
        self._disk = rng.uniform(0.2, 0.5, n) * DISK
        self._load5 = np.full(n, np.nan)
        names = ("cpu_busy_time", "cpu_idle_time", "cpu_pressure", "memory_pressure", "io_pressure")
        self._counters = {name: Counter(rng.integers(10**9, 10**10, n)) for name in names}
        self._counters |= {name: Counter(rng.integers(10**12, 10**13, n)) for name in ("disk_read", "disk_written")}

    def advance(self, block: int, tempo: Tempo, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class node."""
        rng, ticks = generator(self.seed, 51, block), len(effects.time)
        load = tempo.load[:, :: self.layout.gpus_per_node]
        saving = (load > 0) & (load < 0.5)
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items()}
        share = np.where(load > 0, _BUSY_SHARE * (1 + 0.05 * noise["load"]), _IDLE_SHARE * (1 + 0.2 * noise["load"]))
        share = np.clip(share, 0, 1)
        free = np.where(load > 0, 0.55, 0.95) * MEMORY * (1 + 0.002 * noise["memory"])
        wide = share.shape
        columns: dict[str, NDArray[Any]] = {
            "node.load1": share * CPUS,
            "node.load5": self._smooth(share * CPUS),
            "node.cpu_count": np.full(wide, CPUS),
            "node.memory_total": np.full(wide, MEMORY),
            "node.memory_available": np.rint(free / 4096) * 4096,
            "node.swap_used": np.zeros(wide),
            "node.uptime": np.round(self._uptime + effects.time[:, None], 2),
            "node.disk_used": np.broadcast_to(self._disk, wide),
            "node.disk_total": np.full(wide, DISK),
        }
        growth = self._growth(share, saving, noise["io"])
        return columns | {f"node.{name}": counter.add(growth[name]) for name, counter in self._counters.items()}

    def _growth(self, share: NDArray[Any], saving: NDArray[np.bool_], io: Floats) -> dict[str, NDArray[np.int64]]:
        """What each counter gains within a tick."""
        busy = share * CPUS * 1000 * self.interval
        read = 3e6 * (share / _BUSY_SHARE) * np.exp(0.3 * io) * self.interval
        gains = {
            "cpu_busy_time": busy,
            "cpu_idle_time": CPUS * 1000 * self.interval - busy,
            "cpu_pressure": share * 2e3 * self.interval,
            "memory_pressure": np.zeros(share.shape),
            "io_pressure": np.where(saving, 5e4, 1e2) * self.interval,
            "disk_read": read,
            "disk_written": np.where(saving, _CHECKPOINT_BYTES, 2e5) * self.interval,
        }
        return {name: np.asarray(np.maximum(gain, 0), np.int64) for name, gain in gains.items()}

    def _smooth(self, load: NDArray[Any]) -> NDArray[np.float64]:
        """(ticks, nodes) exponential mean over 5 minutes, as the kernel keeps it."""
        share, now = 1 - np.exp(-self.interval / 300), np.where(np.isnan(self._load5), load[0], self._load5)
        out = np.empty(load.shape)
        for k, value in enumerate(load):
            out[k] = now = now + share * (value - now)
        self._load5 = now
        return out
