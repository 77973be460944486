"""Nodes: load, processor time, memory, pressure and disk of a training server."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.counter_generations import resets
from agents.sim.physics.jobs import GpuActivity
from agents.sim.physics.noise import Bursts, Counter, Floats, SlowDrift, generator, rare
from agents.sim.physics.state import State

CPUS, MEMORY, DISK = 192, 2.0 * 2**40, 3.5e12  # of a node with 8 GPUs; chosen
_BUSY_SHARE, _IDLE_SHARE = 0.15, 0.01  # of the processors: data loading and launches
_USED, _IDLE_USED, _MOST_USED = 0.12, 0.03, 0.6  # of the memory, without the page cache
_JOB_SD, _NODE_SD = (0.5, 0.2), (0.55, 0.1)
"""Spread of the logarithm of these two between jobs, and between the nodes of one job. Levels and spreads are measured
on GPU servers [AcmeTrace]; how much of the spread is due to the job is chosen."""
_CPU_SD, _QUICK_CPU, _USED_SD, _DISK_SD = 0.2, 0.05, 0.1, 0.3
"""Standard deviation over hours, and of the processors from tick to tick: shares; of the disk, of its logarithm.
Chosen."""
_STEADY = 0.95  # share of the variance of slow metrics that moves in hours: minutes correlate by 0.9 [SMD, ASD]
_READ, _WRITTEN = 3e6, 2e5  # bytes a node reads and writes per second besides checkpoints; chosen
_CHECKPOINT_BYTES = 2e9  # bytes a node writes per second of a checkpoint
_CORRECTED_PER_HOUR = 0.004  # background of host memory; chosen: one error in ten days on a healthy node
_READERS = 64  # data loader processes that storage can block; chosen: 8 for each GPU
_CLOCK_SD_S, _CLOCK_S = (
    2e-5,
    1800.0,
)  # s: clock error under chrony, and its correlation time; chosen


class Hosts:
    """State of all nodes; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 50), layout.nodes
        self.layout, self.interval, self.seed, self.state = layout, interval, seed, state
        self._drifts = {
            name: SlowDrift(state, f"node.{name}", rng, n, interval, _STEADY)
            for name in ("load", "memory", "read", "written")
        }
        self._clock = SlowDrift(state, "node.clock", rng, n, interval, _STEADY, _CLOCK_S)
        self._bursts = {name: Bursts(state, f"node.{name}", n, interval) for name in ("load", "read", "written", "io")}
        state["node.booted"] = -rng.uniform(1e5, 4e6, n)
        self._disk = rng.uniform(0.2, 0.5, n) * DISK
        state["node.load5"] = np.full(n, np.nan)
        names = ("cpu_busy_time", "cpu_idle_time", "cpu_pressure", "memory_pressure", "io_pressure")
        self._counters = {name: Counter(state, f"node.{name}", rng.integers(10**9, 10**10, n)) for name in names}
        self._counters |= {
            name: Counter(state, f"node.{name}", rng.integers(10**12, 10**13, n))
            for name in ("disk_read", "disk_written")
        }
        self._memory = {
            name: Counter(state, f"node.{name}", np.zeros(n, np.int64))
            for name in ("memory_corrected", "memory_uncorrected")
        }

    def step(self, block: int, activity: GpuActivity, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class node."""
        rng, ticks = generator(self.seed, 51, block), len(effects.time)
        width = self.layout.gpus_per_node
        load, saving = activity.load[:, ::width], activity.saving[:, ::width]
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items()}
        bursts = {name: each.draw(rng, ticks) for name, each in self._bursts.items()}
        usual, used = self._levels(load, effects)
        share = usual * np.maximum(1 + _CPU_SD * noise["load"] + _QUICK_CPU * bursts["load"], 0.1)
        share = np.clip(share + effects.node.cpu.values, 0, 1)
        used = np.clip(used * (1 + _USED_SD * noise["memory"]), 0, _MOST_USED) + effects.node.memory.values
        free = np.clip(1 - used, 0.01, 1) * MEMORY
        runnable = (share + effects.node.pressure.values) * CPUS
        wide = share.shape
        columns: dict[str, NDArray[Any]] = {
            "node.load1": runnable,
            "node.load5": self._smooth(runnable),
            "node.cpu_count": np.full(wide, CPUS),
            "node.memory_total": np.full(wide, MEMORY),
            "node.memory_available": np.rint(free / 4096) * 4096,
            "node.swap_used": np.zeros(wide),
            "node.uptime": np.round(self._uptime(effects), 2),
            "node.disk_used": np.broadcast_to(self._disk, wide),
            "node.disk_total": np.full(wide, DISK),
            "node.tasks_blocked": np.broadcast_to(np.rint(_READERS * effects.node.io_pressure.values), wide),
            "node.clock_offset": _CLOCK_SD_S * self._clock.draw(rng, ticks) - effects.node.clock_offset.values,
        }
        growth = self._growth(share, saving, noise, bursts, effects) | self._errors(block, wide, effects)
        restarted = resets(effects, "node")
        counters = (self._counters | self._memory).items()
        return columns | {f"node.{name}": counter.add(growth[name], restarted) for name, counter in counters}

    def _levels(self, load: Floats, effects: Effects) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns (ticks, nodes) the normal shares of the processors and of the memory for the job there."""
        job = effects.job_of_gpu[:, :: self.layout.gpus_per_node]
        share = np.full(job.shape, _IDLE_SHARE, np.float32)
        used = np.full(job.shape, _IDLE_USED, np.float32)
        for number in np.unique(job[job >= 0]).tolist():
            rng = generator(self.seed, 54, number)
            there = (job == number) & (load > 0)
            common, own = rng.standard_normal(2), rng.standard_normal((2, job.shape[1])).clip(-3, 3)
            for k, (out, level) in enumerate(((share, _BUSY_SHARE), (used, _USED))):
                factor = np.exp(_JOB_SD[k] * common[k].clip(-2, 2) + _NODE_SD[k] * own[k]).astype(np.float32)
                np.copyto(out, np.float32(level) * factor, where=there)
        return share, used

    def _errors(self, block: int, shape: tuple[int, int], effects: Effects) -> dict[str, NDArray[np.int64]]:
        """Returns errors of host memory within each tick; those of faults have their own generator: healthy nodes do
        not change."""
        found = rare(generator(self.seed, 52, block), _CORRECTED_PER_HOUR / 3600 * self.interval, shape)
        if effects.node.corrected:
            found += generator(self.seed, 53, block).poisson(effects.node.corrected.array() * self.interval)
        lost = np.broadcast_to(effects.node.uncorrected.values, shape)
        return {"memory_corrected": found, "memory_uncorrected": lost}

    def _uptime(self, effects: Effects) -> NDArray[np.float64]:
        """Returns (ticks, nodes) s since the node booted."""
        booted, time = self.state["node.booted"], effects.time[:, None]
        if effects.node.reset:
            begun = np.where(effects.node.reset.array(), time, -np.inf)
            booted = np.maximum(np.maximum.accumulate(begun, axis=0), booted)
            self.state["node.booted"] = booted[-1].copy()
        return np.asarray(time - booted)

    def _growth(
        self,
        share: NDArray[Any],
        saving: NDArray[np.bool_],
        noise: dict[str, Floats],
        bursts: dict[str, Floats],
        effects: Effects,
    ) -> dict[str, NDArray[np.int64]]:
        """Returns the increase of each counter within a tick."""
        busy = share * CPUS * 1000 * self.interval
        disk = {name: np.exp(_DISK_SD * noise[name]) * (1 + _DISK_SD * bursts[name]) for name in ("read", "written")}
        blocked = np.where(saving, 5e4, 1e2) * (1 + bursts["io"])
        written = _WRITTEN * disk["written"] + _CHECKPOINT_BYTES * saving
        gains = {
            "cpu_busy_time": busy,
            "cpu_idle_time": CPUS * 1000 * self.interval - busy,
            "cpu_pressure": (share * 2e3 + 1e6 * effects.node.pressure.values) * self.interval,
            "memory_pressure": np.zeros(share.shape),
            "io_pressure": (blocked + 1e6 * effects.node.io_pressure.values) * self.interval,
            "disk_read": _READ * (share / _BUSY_SHARE) * disk["read"] * self.interval,
            "disk_written": written * self.interval,
        }
        return {name: np.asarray(np.maximum(gain, 0), np.int64) for name, gain in gains.items()}

    def _smooth(self, load: NDArray[Any]) -> NDArray[np.float64]:
        """Returns (ticks, nodes) the exponential mean over 5 minutes, as the kernel computes it."""
        share, now = 1 - np.exp(-self.interval / 300), self.state["node.load5"]
        now = np.where(np.isnan(now), load[0], now)
        out = np.empty(load.shape)
        for k, value in enumerate(load):
            out[k] = now = now + share * (value - now)
        self.state["node.load5"] = now
        return out


_LIFE, _WORN_A_DAY = (0.02, 0.7), (-4.0, -3.0)
"""Share of the rated life that disks have used, and log10 of what they use in a day: a drive write a day for 5 years is
0.00055 a day."""
_SPARE_THRESHOLD, _DISK_C = 0.1, 38.0  # share of spare blocks below which a disk warns (usual of NVMe); Celsius, chosen
_SPARE_LOW, _READ_ONLY = np.uint8(0x1), np.uint8(0x8)  # NVMe log page 02h, byte 0
_LIVE = 1  # disk.state
_ERRORS_PER_S = 0.002  # reads without data per second of a disk without spare blocks; chosen


class Disks:
    """One NVMe disk per node: health log as agents read it."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 62), layout.nodes
        self._interval, self._seed = interval, seed
        self._life, self._pace = rng.uniform(*_LIFE, n), 10 ** rng.uniform(*_WORN_A_DAY, n) / 86_400
        self._on, self._heat = rng.integers(500, 30_000, n), _DISK_C + 4 * rng.standard_normal(n)
        self._errors = Counter(state, "disk.media_errors", rng.poisson(0.1, n))

    def step(self, block: int, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class disk."""
        rng, node, time = generator(self._seed, 63, block), effects.node, effects.time[:, None]
        shape = len(time), len(self._on)
        spare = np.clip(1 - np.broadcast_to(node.disk_spare.values, shape), 0, 1)
        lost = np.where(spare < 1, (1 - spare) * self._interval * _ERRORS_PER_S, 0.0)
        warning = np.where(spare < _SPARE_THRESHOLD, _SPARE_LOW, np.uint8(0)) | np.where(
            spare <= 0.01, _READ_ONLY, np.uint8(0)
        )
        life = self._life + self._pace * time + node.disk_wear.values
        return {
            "disk.state": np.full(shape, _LIVE, np.uint8),
            "disk.temperature": np.rint(self._heat + 0.5 * rng.standard_normal(shape)),
            "disk.critical_warning": warning,
            "disk.spare": np.floor(100 * spare) / 100,
            "disk.spare_threshold": np.full(shape, _SPARE_THRESHOLD),
            "disk.endurance_used": np.floor(100 * np.minimum(life, 2.55)) / 100,
            "disk.media_errors": self._errors.add(rng.poisson(lost)),
            "disk.power_on_time": np.asarray(self._on + time // 3600, np.uint64),
        }
