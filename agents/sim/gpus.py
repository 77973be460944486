"""GPUs: power follows load and clock, temperature follows power with a lag, heat takes the clock down.

    P = idle + (P_load - idle) * load * clock^1.7          T -> T_supply + P * R(flow), first order with 12 s
    R(flow) = R_th * (0.3 + 0.7 / flow) + warming / flow   clock falls while T is above 87 C

R_th is about 0.03 K/W for a cold plate of H100 class, and the coolant warms by about 5 K on its way at full load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.jobs import Tempo
from agents.sim.layout import Layout
from agents.sim.noise import Counter, Drift, Floats, generator, rare

CLOCK, MEMORY_CLOCK, MEMORY = 1755.0, 2619, 80 * 2**30  # MHz, MHz, bytes of an H100 SXM under load
SLOWDOWN_C = 87.0  # where current parts begin to slow down
_IDLE_CLOCK, _CLOCK_STEP = 345.0, 15.0  # MHz; NVML clocks move in steps of 15 MHz
_IDLE_W, _LOAD_W, _BOARD_W = 78.0, 660.0, 700.0
_R_TH, _WARMING = 0.030, 0.0074  # K/W
_LAG_S, _EXPONENT = 12.0, 1.7
_LOTTERY = 0.012  # mean spread between equal GPUs
_GIVE_BACK, _MOST = 0.0015, 0.01  # clock per K and second, and per K and tick: slow enough not to swing at 10 s; chosen
_ECC_PER_HOUR, _REPLAY_PER_HOUR = 0.005, 0.02  # background per GPU; chosen, so that a quiet day has a few
_IDLE_BIT, _THERMAL_BIT = np.uint64(0x1), np.uint64(0x40)


class Gpus:
    """State of all GPUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, supply: float) -> None:
        rng, n = generator(seed, 20), layout.gpus
        self.layout, self.interval, self.seed = layout, interval, seed
        lottery = np.abs(rng.standard_t(4, n)).clip(0, 6) * _LOTTERY
        self._clock = (1 - 0.5 * lottery).astype(np.float32)  # half of the spread shows in clock, half in power
        self._busy_w = (_LOAD_W * (1 + 0.5 * lottery - 0.005)).astype(np.float32)
        self._idle_w = (_IDLE_W * (1 + 0.04 * rng.standard_normal(n))).astype(np.float32)
        self._r_th = (_R_TH * np.exp(0.06 * rng.standard_normal(n).clip(-3, 3))).astype(np.float32)
        self._limit = np.ones(n, np.float32)
        warm = (self._r_th + _WARMING) * np.where(layout.job_of_gpu >= 0, self._busy_w, self._idle_w)
        self._heat = (supply + warm).astype(np.float32)
        self._memory = np.where(layout.job_of_gpu >= 0, 0.86 * MEMORY, 0.006 * MEMORY) + rng.integers(0, 2**28, n)
        self._drifts = {name: Drift(rng, n, phi) for name, phi in (("power", 0.5), ("clock", 0.6), ("use", 0.4))}
        self._energy = Counter(rng.integers(10**12, 10**13, n))
        self._ecc = Counter(rng.poisson(0.3, n))
        self._replays = Counter(rng.poisson(2.0, n))

    def advance(
        self, block: int, tempo: Tempo, supply: Floats, effects: Effects
    ) -> tuple[dict[str, NDArray[Any]], Floats]:
        """(columns of class gpu, factor on the nominal clock as the ranks feel it)."""
        rng, shape = generator(self.seed, 21, block), effects.clock.shape
        power_noise = 1 + np.float32(0.01) * self._drifts["power"].draw(rng, shape[0])
        clock = self._clock * effects.clock * (1 + np.float32(0.002) * self._drifts["clock"].draw(rng, shape[0]))
        power, heat, limit = self._heat_up(tempo.load, clock, power_noise, supply, effects)
        felt = clock * limit
        busy = tempo.load > 0
        seen = np.where(busy, CLOCK * felt, _IDLE_CLOCK)
        reasons = effects.reasons * busy | np.where(busy, np.uint64(0), _IDLE_BIT)
        reasons |= np.where(limit < 0.995, _THERMAL_BIT, np.uint64(0))
        watts = np.rint(power)
        sensor = np.float32(0.3) * rng.standard_normal(shape, np.float32)
        columns: dict[str, NDArray[Any]] = {
            **self._use(rng, tempo.load),
            "gpu.sm_clock": (np.rint(seen / _CLOCK_STEP) * _CLOCK_STEP).astype(np.uint16),
            "gpu.memory_clock": np.full(shape, MEMORY_CLOCK, np.uint16),
            "gpu.throttle_reasons": reasons,
            "gpu.temperature": np.rint(heat + sensor),
            "gpu.power": watts,
            "gpu.energy": self._energy.add((power * (1000 * self.interval)).astype(np.int64)),
            "gpu.ecc_corrected": self._ecc.add(rare(rng, _ECC_PER_HOUR / 3600 * self.interval, shape)),
            "gpu.ecc_uncorrected": np.zeros(shape, np.uint64),
            "gpu.pcie_generation": np.full(shape, 5, np.uint8),
            "gpu.pcie_width": np.full(shape, 16, np.uint8),
            "gpu.pcie_replays": self._replays.add(rare(rng, _REPLAY_PER_HOUR / 3600 * self.interval, shape)),
        }
        return columns, felt

    def _use(self, rng: np.random.Generator, load: Floats) -> dict[str, NDArray[Any]]:
        """Utilisation and memory. A GPU that waits in a collective counts as busy, as NVML has it."""
        noise = np.float32(0.01) * np.abs(self._drifts["use"].draw(rng, len(load)))
        busy = np.where(load > 0, 0.3 + 0.7 * load, 0).astype(np.float32)
        memory = np.broadcast_to(self._memory, load.shape)
        return {
            "gpu.utilization": np.rint(np.clip(busy - noise * (load > 0), 0, 1) * 100) / np.float32(100),
            "gpu.memory_utilization": np.rint(np.clip(busy * np.float32(0.55) - noise, 0, 1) * 100) / np.float32(100),
            "gpu.memory_used": np.ascontiguousarray(memory, np.float64),
            "gpu.memory_total": np.full(load.shape, float(MEMORY)),
        }

    def _heat_up(
        self, load: Floats, clock: Floats, noise: Floats, supply: Floats, effects: Effects
    ) -> tuple[Floats, Floats, Floats]:
        """(power, temperature, clock limit) tick by tick: heat takes the clock down, and with it the power."""
        loop = self.layout.loop_of_gpu
        share = np.float32(1 - np.exp(-self.interval / _LAG_S))
        gain = np.float32(min(_GIVE_BACK * self.interval, _MOST))
        power, heat, limits = np.empty_like(clock), np.empty_like(clock), np.empty_like(clock)
        swing = (self._busy_w - self._idle_w) * load * noise * clock ** np.float32(_EXPONENT)
        inlet = supply[:, loop]
        cooling = 1 / effects.flow[:, loop]
        resistance = self._r_th * (np.float32(0.3) + np.float32(0.7) * cooling) + np.float32(_WARMING) * cooling
        now, limit = self._heat, self._limit
        for k in range(len(clock)):
            limit = np.clip(limit + gain * np.clip(SLOWDOWN_C - now, -8, 8), np.float32(0.4), np.float32(1))
            power[k] = np.minimum(self._idle_w + swing[k] * limit ** np.float32(_EXPONENT), _BOARD_W)
            target = inlet[k] + resistance[k] * power[k]
            target = target + effects.hot[k] * load[k] * np.maximum(SLOWDOWN_C - 0.5 - target, 0)
            now = now + share * (target - now)
            heat[k], limits[k] = now, limit
        self._heat, self._limit = now.astype(np.float32), limit.astype(np.float32)
        return power, heat, limits
