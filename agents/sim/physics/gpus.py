"""GPUs: power follows load and clock, temperature follows power with a lag, heat reduces the clock.

    P = idle + (P_load - idle) * level * load * clock^1.7  C dT/dt = P - (T - T_supply) / R

The clock falls while T is above the slowdown temperature; at the shutdown temperature a GPU stops. R: see cooling.py.
The level is a property of the job: models differ in the power they draw and in the memory they fill. Shapes and
spreads are fitted to [AcmeTrace] unless stated otherwise. Values of the part and its cooling are the world's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.cooling import build_cooler
from agents.sim.physics.counter_generations import resets
from agents.sim.physics.edge import add_rise_events
from agents.sim.physics.jobs import GpuActivity
from agents.sim.physics.memory import Memory
from agents.sim.physics.noise import Counter, Drift, Floats, correlation, generator, rare, stepped
from agents.sim.physics.state import State
from agents.sim.schedule import Allocation, Job

_FILLED = (0.65, 0.96)  # share of the memory that a job fills; quartiles in [AcmeTrace] 0.67, 0.77 and 0.78
_STAGE, _RANK_SD, _MOST_DEMAND = (
    0.04,
    0.005,
    0.985,
)  # pipeline stages hold different layers, ranks nearly the same; chosen


class JobDemand:
    """Power level and memory use of each job, drawn from the seed and the job's number: the same wherever the job
    moves."""

    def __init__(self, seed: int, light: float) -> None:
        """`light`: share by which the lightest job draws less than the most; most sit at the limit [AcmeTrace]."""
        self.seed, self._light = seed, light
        self._filled = cache(self._of_ranks)

    def level(self, number: int) -> float:
        """Returns the share of the power above idle that a job draws."""
        return float(1 - self._light * generator(self.seed, 22, number).random() ** 2)

    def levels(self, allocations: list[Allocation], effects: Effects) -> tuple[Floats, NDArray[np.float64]]:
        """Returns (ticks, GPUs) the level of power and the share of memory; 1 without a job."""
        level = np.ones(effects.job_of_gpu.shape, np.float32)
        filled = np.ones(effects.job_of_gpu.shape)
        for allocation in allocations:
            on = np.flatnonzero(effects.active(allocation.begin, allocation.end))
            where = np.s_[:, allocation.gpus] if len(on) == len(level) else np.ix_(on, allocation.gpus)
            level[where], filled[where] = self.level(allocation.job.number), self._filled(allocation.job)
        return level, filled

    def _of_ranks(self, job: Job) -> NDArray[np.float64]:
        """Returns (ranks,) the share of the memory that each fills."""
        rng = generator(self.seed, 23, job.number)
        level = rng.uniform(*_FILLED)
        stages = rng.uniform(-_STAGE, _STAGE, job.stages)[job.stage_of_rank]
        return np.minimum(level + stages + _RANK_SD * rng.standard_normal(job.ranks).clip(-3, 3), _MOST_DEMAND)


MEMORY_CLOCK = 2619  # MHz
_PAGE = 2**21  # bytes: CUDA allocates device memory in such pages
_WELL_C = 60.0  # Celsius at which a stopped GPU, of lowest clock and idle power, works again; chosen
_IDLE_CLOCK, _CLOCK_STEP = 345.0, 15.0  # MHz; NVML clocks move in steps of 15 MHz
_LIMIT_BELOW = 2.0  # K from the operating limit to the slowdown: nvidia-smi -q of H100
_MEMORY_SD = 2.0  # K between the memories of equal GPUs
_MEMORY_LAG_S = 45.0  # memory stacks next to the core: slower than the core; chosen
EXPONENT = 1.7
_DIPS, _DEEP = 0.08, 0.025  # share of busy readings below 0.97 (data waits, small steps) and below a half
_TAUS = {"power": 15.0, "clock": 20.0, "use": 11.0}  # s, correlation time of noise; chosen
_GIVE_BACK, _MOST = 0.0015, 0.01  # clock per K and second, and per K and tick: slow enough not to swing at 10 s; chosen
_MEAN_S = 10.0  # s up to which the power of a tick is that of a second; chosen
_AHEAD_S = 20.0  # s of look-ahead of a GPU above its limit; chosen: no overshoot
_REPLAY_PER_HOUR = 0.02  # background per GPU; chosen, so that a quiet day has a few
_IDLE_BIT, _THERMAL_BIT, _SHUTDOWN_BITS = np.uint64(0x1), np.uint64(0x40), np.uint64(0x48)


class Gpus:
    """State of all GPUs; advances block by block."""

    def __init__(
        self, layout: Layout, interval: float, seed: int, supply: float, running: NDArray[np.int32], state: State
    ) -> None:
        """`running`: the job on each GPU at first, -1 for none."""
        rng, n = generator(seed, 20), layout.gpus
        self.layout, self.interval, self.seed, self.state = layout, interval, seed, state
        self.world = world = layout.world
        part, cooling, noise = world.part, world.cooling, world.noise
        self._slowest = np.float32(_IDLE_CLOCK / part.clock)
        self._shut = np.float32(0.99 * _IDLE_CLOCK / part.clock)
        lottery = np.abs(rng.standard_t(4, n)).clip(0, 6) * world.spread.lottery
        self._clock = (1 - 0.5 * lottery).astype(np.float32)  # half of the spread shows in clock, half in power
        self._busy_w = (part.load_w * (1 + 0.5 * lottery - 0.005)).astype(np.float32)
        self._idle_w = (part.idle_w * (1 + 0.04 * rng.standard_normal(n))).astype(np.float32)
        r_th = (cooling.r_th * np.exp(cooling.r_spread * rng.standard_normal(n).clip(-3, 3))).astype(np.float32)
        self.cooler = build_cooler(layout, interval, r_th, state)
        errors = generator(seed, 27).standard_normal((2, n)).clip(-3, 3).astype(np.float32)
        self._offset = np.float32(world.spread.temperature_offset) * errors[0]
        self._watts = 1 + np.float32(world.spread.power_offset) * errors[1]
        self._demand = JobDemand(seed, world.work.level)
        level = np.array([self._demand.level(job) if job >= 0 else 0.0 for job in running.tolist()])
        draw = np.minimum(self._idle_w + level * (self._busy_w - self._idle_w), part.board_w)
        warm = self.cooler.rest_temperature(draw, supply)
        state["gpu.shut"] = np.zeros(n, np.bool_)
        state["gpu.limit"], state["gpu.heat"] = np.ones(n, np.float32), warm.astype(np.float32)
        state["gpu.heat_last"] = state["gpu.heat"]
        above = part.above_idle + (part.above_load - part.above_idle) * (running >= 0)
        self._above = (_MEMORY_SD * rng.standard_normal(n).clip(-3, 3)).astype(np.float32)
        state["gpu.memory_heat"] = (warm + above + self._above).astype(np.float32)
        self._rest = np.rint((0.006 * part.memory + rng.integers(0, 2**24, n)) / _PAGE) * _PAGE
        self._drifts = {
            name: Drift(state, f"gpu.{name}", rng, n, correlation(tau, noise.tau_factor), interval, noise.tails)
            for name, tau in _TAUS.items()
        }
        state["gpu.heat_before"] = state["gpu.power_before"] = np.zeros(n, np.float32)
        self._energy = Counter(state, "gpu.energy", rng.integers(10**12, 10**13, n))
        self._ecc = Memory(layout, interval, seed, state)
        self._replays = Counter(state, "gpu.pcie_replays", rng.poisson(2.0, n))

    def step(
        self,
        block: int,
        activity: GpuActivity,
        coolant: tuple[Floats, Floats],
        effects: Effects,
        allocations: list[Allocation],
    ) -> tuple[dict[str, NDArray[Any]], Floats]:
        """Returns (columns of class gpu, effective factor on the nominal clock). coolant: Celsius of the supplies,
        (ticks, loops), and of the air inlets, (ticks, nodes)."""
        rng, shape = generator(self.seed, 21, block), activity.load.shape
        level, memory = self._demand.levels(allocations, effects)
        noise = 1 + np.float32(self.world.noise.power) * self._drifts["power"].draw(rng, shape[0])
        clock = self._clock * (1 + np.float32(self.world.noise.clock) * self._drifts["clock"].draw(rng, shape[0]))
        clock = np.asarray(clock * effects.gpu.clock.values * effects.gpu.capped.values, np.float32)
        last = self.state["gpu.heat"]
        power, heat, limit = self._heat_up(activity.load * level, clock, noise, coolant, effects)
        self._edge(np.vstack([last, heat]), power, effects)
        effective = clock * limit
        busy = activity.load > 0
        seen = np.where(busy, np.maximum(self.world.part.clock * effective, _IDLE_CLOCK), _IDLE_CLOCK)
        sensor = np.float32(self.world.noise.temperature) * rng.standard_normal(shape, np.float32)
        replays = rare(rng, _REPLAY_PER_HOUR / 3600 * self.interval, shape)
        restarted = resets(effects, "gpu")
        columns: dict[str, NDArray[Any]] = {
            **self._use(rng, activity, memory),
            "gpu.sm_clock": (np.rint(seen / _CLOCK_STEP) * _CLOCK_STEP).astype(np.uint16),
            "gpu.memory_clock": np.full(shape, MEMORY_CLOCK, np.uint16),
            "gpu.throttle_reasons": self._reasons(busy, limit, effects),
            **self._read_heat(heat, activity.load, sensor, effects),
            "gpu.power": stepped(power * self._watts, self.world.instruments.power_step),
            "gpu.energy": self._energy.add(
                (self._mean_power(power, noise) * (1000 * self.interval)).astype(np.int64), restarted
            ),
            **self._ecc.step(block, effects, restarted),
            "gpu.pcie_generation": np.broadcast_to(effects.gpu.pcie_generation.values, shape),
            "gpu.pcie_width": np.broadcast_to(effects.gpu.pcie_width.values, shape),
            "gpu.pcie_replays": self._replays.add(replays + effects.gpu.pcie_replays.values, restarted),
        }
        return columns, effective

    def _reasons(self, busy: NDArray[np.bool_], limit: Floats, effects: Effects) -> NDArray[np.uint64]:
        """Returns the clock event reasons."""
        reasons = effects.gpu.reasons.values * busy | np.where(busy, np.uint64(0), _IDLE_BIT)
        reasons |= np.where(limit < 0.995, _THERMAL_BIT, np.uint64(0))
        return np.asarray(reasons | np.where(limit <= self._shut, _SHUTDOWN_BITS, np.uint64(0)))

    def _read_heat(self, heat: Floats, load: Floats, sensor: Floats, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the temperatures as the sensors of the GPUs report them."""
        step, slowdown = self.world.instruments.temperature_step, self.world.part.slowdown
        shown = stepped(heat + sensor + self._offset, step)
        memory = stepped(self._memory_heat(heat, load, effects) + sensor + self._offset, step)
        found = {"gpu.temperature": shown, "gpu.memory_temperature": memory}
        if not self.world.instruments.margins:
            return found
        # as nvidia-smi -q: the slowdown is 2 K above the operating limit, from which margins count
        margins = {
            "gpu.thermal_margin": slowdown - _LIMIT_BELOW - shown,
            "gpu.slowdown_margin": 0 * shown - _LIMIT_BELOW,
        }
        return found | margins

    def _use(
        self, rng: np.random.Generator, activity: GpuActivity, filled: NDArray[np.float64]
    ) -> dict[str, NDArray[Any]]:
        """Returns utilisation and memory, of which jobs take `filled`. A GPU that waits in a collective is busy."""
        used = np.where(activity.working, np.rint(filled * (self.world.part.memory / _PAGE)) * _PAGE, self._rest)
        noise, on = np.float32(0.01) * np.abs(self._drifts["use"].draw(rng, len(activity.load))), activity.load > 0
        # some kernel nearly always runs during a step, even if it only waits
        busy = np.where(activity.load > 0.3, 1, np.where(on, 0.3 + 0.7 * activity.load, 0)).astype(np.float32)
        for share, low, high in ((_DIPS, 0.5, 0.97), (_DEEP, 0.1, 0.5)):
            count = rng.poisson(share * busy.size)
            busy.reshape(-1)[rng.integers(0, busy.size, count)] *= rng.uniform(low, high, count).astype(np.float32)
        busy = busy if activity.spinning is None else np.where(activity.spinning, np.float32(1), busy)
        return {
            "gpu.utilization": np.rint(busy * 100) / np.float32(100),
            "gpu.memory_utilization": np.rint(np.clip(busy * np.float32(0.55) - noise, 0, 1) * 100) / np.float32(100),
            "gpu.sm_active": np.clip(np.float32(0.82) * activity.load - noise * on, 0, 1),
            "gpu.memory_used": used,
            "gpu.memory_total": np.full(used.shape, float(self.world.part.memory)),
        }

    def _memory_heat(self, core: Floats, load: Floats, effects: Effects) -> Floats:
        """Returns (ticks, GPUs) the memory temperature: above the core, less so under load, and slower."""
        share = np.float32(1 - np.exp(-self.interval / _MEMORY_LAG_S))
        part = self.world.part
        target = core + (self._above + np.float32(part.above_idle))
        target = target + np.float32(part.above_load - part.above_idle) * load
        target = target + effects.gpu.memory_heat.values * load
        now, out = self.state["gpu.memory_heat"], np.empty_like(core)
        for k in range(len(core)):
            now = now + share * (target[k] - now)
            out[k] = now
        self.state["gpu.memory_heat"] = now.astype(np.float32)
        return out

    def _heat_up(
        self, load: Floats, clock: Floats, noise: Floats, coolant: tuple[Floats, Floats], effects: Effects
    ) -> tuple[Floats, Floats, Floats]:
        """Returns (power, temperature, clock limit) tick by tick: heat lowers the clock, and with it the power."""
        part, cooler = self.world.part, self.cooler
        gain = np.float32(min(_GIVE_BACK * self.interval, _MOST))
        power, heat, limits = np.empty_like(clock), np.empty_like(clock), np.empty_like(clock)
        swing = (self._busy_w - self._idle_w) * load * clock ** np.float32(EXPONENT)
        cooler.begin(*coolant, effects)
        hot = np.broadcast_to(effects.gpu.hot.values, clock.shape)
        highest = np.broadcast_to(np.minimum(effects.gpu.watts.values, np.float32(part.board_w)), clock.shape)
        if effects.node.dead:
            highest = np.where(effects.node.dead.array()[:, self.layout.node_of_gpu], np.float32(0), highest)
        last, ahead = self.state["gpu.heat_last"], np.float32(_AHEAD_S / self.interval)
        now, limit, shut = self.state["gpu.heat"], self.state["gpu.limit"], self.state["gpu.shut"]
        for k in range(len(clock)):
            above = now - part.slowdown + np.where(now > part.slowdown, ahead * (now - last), 0)
            limit = np.clip(limit - gain * np.clip(above, -8, 8), self._slowest, np.float32(1))
            wanted = swing[k] * limit ** np.float32(EXPONENT)
            if shut.any():
                limit, wanted = np.where(shut, self._shut, limit), np.where(shut, np.float32(0), wanted)
            power[k] = noise[k] * np.minimum(self._idle_w + wanted, highest[k])
            inlet, resistance, share = cooler.at(k, now, power[k])
            target = inlet + resistance * self._mean_power(power[k], noise[k])
            target = target + hot[k] * load[k] * np.maximum(part.slowdown - 0.5 - target, 0)
            last = now  # a GPU that gets too hot within a tick is shut down in it, and gets no hotter
            now = np.minimum(now + share * (target - now), np.float32(part.shutdown))
            heat[k], limits[k] = now, limit
            if shut.any() or now.max() >= part.shutdown:
                shut = (now >= part.shutdown) | (shut & (now > _WELL_C))
        self.state["gpu.shut"], self.state["gpu.heat_last"] = shut, last.astype(np.float32)
        self.state["gpu.heat"], self.state["gpu.limit"] = now.astype(np.float32), limit.astype(np.float32)
        return power, heat, limits

    def _mean_power(self, power: Floats, noise: Floats) -> Floats:
        """Returns the mean power of a tick, which heats and which the energy counter counts: of the noise in a reading
        less is left than in that reading."""
        left = np.float32(min(1.0, (_MEAN_S / self.interval) ** 0.5))
        return power if left == 1 else np.asarray(power * (1 - (1 - left) * (1 - 1 / noise)), np.float32)

    def _edge(self, heat: Floats, power: Floats, effects: Effects) -> None:
        """Keeps the state before each loss of flow, and adds the agents' events; `heat` starts one tick before the
        block."""
        for collapse in effects.collapses:
            if collapse.real and effects.contains(collapse.onset):
                at = int(np.searchsorted(effects.time, collapse.onset))
                for name, values in (("heat", heat[at]), ("power", power[max(at - 1, 0)])):
                    mine = self.layout.loop_of_gpu == collapse.loop
                    self.state[f"gpu.{name}_before"] = np.where(mine, values, self.state[f"gpu.{name}_before"])
        if effects.collapses:
            before = self.state["gpu.heat_before"], self.state["gpu.power_before"]
            add_rise_events(effects, *before, self.cooler.r_th, self.cooler.warming)
