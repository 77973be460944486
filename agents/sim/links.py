"""Network ports: traffic follows the pace of the job, errors are rare unless a fault makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.jobs import Tempo
from agents.sim.layout import Layout
from agents.sim.noise import Counter, Drift, generator, rare

SPEED = 400_000.0  # Mbit/s of an NDR or 400 GbE port
_BUSY, _IDLE, _PACKET = 11e9, 2e4, 4096  # bytes/s while training and idle, bytes per packet (RoCE MTU); chosen
_SYMBOL_PER_HOUR = 0.01  # background per port: BER 7e-18 at 400 Gb/s, far better than the 1e-15 of factory tests
_DROP_PER_HOUR = 0.01
_COUNTERS = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_errors",
    "tx_errors",
    "rx_dropped",
    "tx_dropped",
    "crc_errors",
    "carrier_changes",
    "symbol_errors",
)


class Links:
    """State of all ports; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int) -> None:
        rng, n = generator(seed, 30), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        self._drift = Drift(rng, n, 0.5)
        past = rng.integers(10**14, 10**15, (2, n))
        starts = {
            "rx_bytes": past[0],
            "tx_bytes": past[1],
            "rx_packets": past[0] // _PACKET,
            "tx_packets": past[1] // _PACKET,
            "carrier_changes": 2 * rng.integers(1, 4, n),
            "symbol_errors": rng.poisson(0.5, n),
        }
        self._counters = {name: Counter(starts.get(name, np.zeros(n, np.int64))) for name in _COUNTERS}

    def advance(self, block: int, tempo: Tempo, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class nic."""
        rng, shape = generator(self.seed, 31, block), effects.down.shape
        sent = self._traffic(rng, tempo, effects)
        received = sent + rng.integers(0, 1 << 16, shape)
        received[effects.down] = 0
        crc = rng.poisson(effects.crc * self.interval)
        growth: dict[str, NDArray[np.int64]] = {
            "rx_bytes": received,
            "tx_bytes": sent,
            "rx_packets": received // _PACKET,
            "tx_packets": sent // _PACKET,
            "rx_errors": crc,
            "crc_errors": crc,
            "rx_dropped": rare(rng, _DROP_PER_HOUR / 3600 * self.interval, shape),
            "carrier_changes": effects.flips,
            "symbol_errors": rare(rng, _SYMBOL_PER_HOUR / 3600 * self.interval, shape)
            + rng.poisson(effects.symbols * self.interval),
        }
        still = np.zeros(shape, np.int64)
        columns: dict[str, NDArray[Any]] = {
            "nic.state": (~effects.down).astype(np.uint8),
            "nic.speed": np.where(
                effects.down, np.float32(np.nan), np.float32(SPEED)
            ),  # sysfs has none while it is down
        }
        return columns | {f"nic.{name}": c.add(growth.get(name, still)) for name, c in self._counters.items()}

    def _traffic(self, rng: np.random.Generator, tempo: Tempo, effects: Effects) -> NDArray[np.int64]:
        """(ticks, ports) bytes sent within the tick."""
        job = self.layout.job_of_gpu
        pace = np.concatenate([tempo.pace, np.zeros((len(tempo.pace), 1), np.float32)], axis=1)[:, job]  # -1: idle
        noise = 1 + np.float32(0.02) * self._drift.draw(rng, len(pace))
        rate = np.where(effects.down, 0, _IDLE + _BUSY * pace.astype(np.float64) * noise)
        return np.asarray(np.maximum(rate, 0) * self.interval, np.int64)
