"""Training jobs: how loaded their GPUs are, how long a step takes, and what each rank reports.

In synchronous training a step ends for all ranks when the slowest has computed: step = max(compute) + collectives. So
one slow rank shows in the step time of all ranks, and only its compute time identifies it; the others wait inside the
collective, where a GPU counts as busy and draws less.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.noise import Drift, Floats, SlowDrift, generator, heavy
from agents.sim.physics.state import State
from agents.sim.schedule import Allocation, Job, Schedule
from agents.sim.world import DEFAULT, Work

CHECKPOINT_TAKES = 45.0  # s; chosen
DIURNAL = 0.015  # throughput swing over a day that large training runs report [Llama 3]
WARM_UP = 200  # steps until kernels are tuned and graphs captured; published mutes are 50 to 200 steps
_COMPUTE, _COLLECTIVE = 4.2, 0.8  # s per step of the default world: a large model on H100; chosen
_ONLY_STEP = DEFAULT.work.step
_BUSY_EXPERTS = 0.1  # share of the ranks of a mixture of experts with more work than the others; chosen
_FIRST_STAGE, _STAGE_SD, _LAST_STAGE = 0.05, 0.01, 0.30
"""Maximum extra compute of the first stage (embedding), spread of the others, and maximum extra compute of the last
(loss and head). [ByteDance StragglerAnalysis] shows equal middle stages and a heavy last one, there 0.6."""
_REPLICA_SD, _COMMON_SD, _STEP_PHI = 0.0037, 0.005, 0.3
"""Spread from step to step of the stages of one replica, and of all ranks together (same)."""
_LIGHT_RATE, _LIGHT_TICKS, _LIGHT = 0.05, 3, (0.05, 0.065)
"""Runs of lighter batches: probability per tick that one begins, length in ticks, saved share of the time (5 of 32
sampled steps)."""
_PAUSE_RATE, _PAUSE = 1e-3, (0.05, 0.20)  # garbage collection stretches one step in a thousand; its size is chosen
_WARM_LOSS = 0.35  # a first step takes a third longer; chosen
_CHECKPOINT_LOAD, _EVALUATION_LOAD, _STALL_LOAD, _HANG_LOAD = 0.25, 0.55, 0.04, 0.18  # of full load; chosen
_WAITING = 0.45  # load of a GPU that spins in a collective, as its power shows; chosen
_LOSS, _NORM = 2.1, 0.35  # of a model well into its training; chosen
REPORTED = ("step_time", "compute_time", "communication_time", "loss", "gradient_norm")


@dataclass(slots=True)
class GpuActivity:
    """One block of all GPUs, (ticks, GPUs): load 0 to 1; working: has a job; saving: writes a checkpoint; spinning:
    waits in a collective and counts as busy; and once known pace = nominal / actual step, 0 without steps."""

    load: Floats
    working: NDArray[np.bool_]
    saving: NDArray[np.bool_]
    spinning: NDArray[np.bool_] | None
    pace: Floats


@dataclass(frozen=True)
class Workload:
    """Constant properties of a job: base (ranks,) s of compute per step; checkpoints at `offset` + n * `every`."""

    job: Job
    seed: int
    lottery: Floats
    work: Work

    @cached_property
    def step(self) -> tuple[float, float]:
        """Returns the compute and collective time of a usual step (s)."""
        rng = generator(self.seed, 17, self.job.number)
        seconds = float(np.exp(rng.uniform(*np.log(self.work.step))))
        share = float(rng.uniform(*self.work.collective)) if self.job.networked else 0.0
        if self.work.step == _ONLY_STEP:
            return _COMPUTE, _COLLECTIVE
        return seconds * (1 - share), max(seconds * share, 0.02 * seconds)

    @cached_property
    def pauses(self) -> tuple[float, float, float, float] | None:
        """Returns (first, every, length, load) of the job's evaluations, rollouts or data loads; None: it has none."""
        if not self.work.pause_every[1]:
            return None
        rng = generator(self.seed, 17, self.job.number, 1)
        every = float(rng.uniform(*self.work.pause_every))
        length = every * float(rng.uniform(*self.work.pause_share))
        return float(rng.uniform(0, every)), every, length, float(rng.uniform(0.05, 0.8))

    @cached_property
    def base(self) -> Floats:
        """Returns the (ranks,) compute time of a step without faults (s)."""
        rng = generator(self.seed, 12, self.job.number)
        stages = 1 + _STAGE_SD * np.clip(rng.standard_normal(self.job.stages), -2.5, 2.5)
        first, last = rng.uniform(0, _FIRST_STAGE), rng.uniform(0, _LAST_STAGE)
        if self.job.stages > 1:
            stages[0], stages[-1] = 1 + first, 1 + last
        uneven = np.zeros(self.job.ranks)
        if self.job.kind == "moe":  # busy experts and embedding ranks stay the same for the whole job
            own = generator(self.seed, 17, self.job.number, 2)
            uneven += own.uniform(*self.work.experts) * (own.random(self.job.ranks) < _BUSY_EXPERTS)
            uneven += self.work.experts[0] * 0.2 * own.standard_normal(self.job.ranks).clip(-2, 2)
        return np.asarray(self.step[0] * stages[self.job.stage_of_rank] * (1 + uneven), np.float32)

    @cached_property
    def checkpoints(self) -> tuple[float, float]:
        """Returns the time of the first checkpoint and the interval between checkpoints (s)."""
        rng = generator(self.seed, 13, self.job.number)
        every = float(rng.uniform(*self.work.checkpoint_every))
        return float(rng.uniform(300.0, every) if every > 300 else every), every

    @cached_property
    def checkpoint_takes(self) -> float:
        """Returns the length of a checkpoint (s)."""
        return float(generator(self.seed, 17, self.job.number, 3).uniform(*self.work.checkpoint_takes))


def _in_pause(work: Workload, effects: Effects) -> NDArray[np.bool_] | np.bool_:
    """Returns (ticks,) whether the job evaluates, rolls out or loads data and makes no step."""
    if work.pauses is None:
        return np.bool_(False)
    first, every, length, _ = work.pauses
    return np.asarray(np.mod(effects.time - first, every) < length)


def collective_share(seed: int, work: Work, job: Job) -> float:
    """Returns the share of a usual step for which a job is in collectives."""
    mine = Workload(job, seed, np.ones(1, np.float32), work)
    return float(mine.step[1] / (mine.base.max() + mine.step[1]))


class Jobs:
    """State of all jobs of the fleet; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        rng = generator(seed, 10)
        self.layout, self.schedule, self.interval, self.seed, self.state = layout, schedule, interval, seed, state
        self._noise, spread = layout.world.noise, layout.world.spread
        self._lottery = (1 + spread.rank * np.clip(rng.standard_normal(layout.gpus), -3, 3)).astype(np.float32)
        self._work = [Workload(job, seed, self._lottery, layout.world.work) for job in schedule.jobs]
        starts = generator(seed, 14).uniform(1e3, 1e5, len(self._work))
        warm = {s.job.number for s in schedule.allocations if s.warm}
        state["jobs.progress"] = np.array([p if n in warm else 0.0 for n, p in enumerate(starts)], np.float64)
        state["jobs.age"] = np.where(state["jobs.progress"] > 0, 1e6, 0.0)  # steps since the job last began
        state["jobs.waited"] = np.zeros(len(self._work))  # s without data since the last step was finished
        state["ranks.held"] = np.full((len(REPORTED), layout.gpus), np.nan, np.float32)
        state["ranks.holder"] = np.full(layout.gpus, -1)
        state["ranks.nonfinite"] = np.zeros(layout.gpus, np.uint64)
        phi = _STEP_PHI if self._noise.tau_factor else 0.0
        self._drift = Drift(state, "step", rng, layout.gpus, phi, interval, self._noise.tails)
        self._serves = any(job.kind == "serving" for job in schedule.jobs)
        if self._serves:
            self._requests = SlowDrift(state, "requests", generator(seed, 28), layout.nodes, interval, 0.5, 900.0)
        self._norm = Drift(state, "norm", rng, layout.gpus, 0.2, interval)

    def load(self, block: int, effects: Effects, allocations: list[Allocation]) -> GpuActivity:
        """Returns the load of each GPU and which ranks write a checkpoint; adds the events of jobs."""
        time, shape = effects.time, effects.job_of_gpu.shape
        load, pace, saving = np.zeros(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
        activity = GpuActivity(load, effects.job_of_gpu >= 0, saving, None, pace)
        swing = 1 - DIURNAL * (0.5 + 0.5 * np.sin(2 * np.pi * time / 86_400))
        for allocation in self._serve(block, activity, effects, allocations):
            level, saving = self._level(allocation, effects, swing)
            activity.load[:, allocation.gpus] += level[:, None] * self._waiting(allocation, effects)
            activity.saving[:, allocation.gpus] |= saving[:, None]
            self._checkpoints(allocation, effects)
        if effects.gpu.starved:
            activity.load *= 1 - effects.gpu.starved.array()
        if effects.site.hung:
            hung = np.append(effects.site.hung.array(), np.zeros((len(time), 1), np.bool_), axis=1)
            activity.spinning = np.take_along_axis(hung, effects.job_of_gpu, axis=1)
        resting = effects.gpu.gone.values | self._of_nodes(effects.node.dead.values)
        activity.load = np.maximum(np.where(resting, 0, activity.load), effects.gpu.busy.values).astype(np.float32)
        return activity

    def step(
        self, block: int, activity: GpuActivity, clock: Floats, effects: Effects, allocations: list[Allocation]
    ) -> list[tuple[Allocation, dict[str, NDArray[Any]]]]:
        """Returns per allocation the columns of its ranks from the GPUs' clocks (factor on nominal); sets
        activity.pace."""
        rng = generator(self.seed, 11, block)
        ticks, gpus = len(effects.time), self.layout.gpus
        noise = 1 + np.float32(self._noise.step_time) * self._drift.draw(rng, ticks)
        pauses = rng.random((ticks, gpus), np.float32) < _PAUSE_RATE
        noise[pauses] += rng.uniform(*_PAUSE, int(pauses.sum())).astype(np.float32)
        compute = self._lottery * noise / clock * effects.gpu.compute.values / (1 - effects.gpu.starved.values)
        norms = 1 + np.float32(0.02) * self._norm.draw(rng, ticks)
        return [
            (allocation, self._ranks(allocation, block, activity, compute, norms, effects))
            for allocation in allocations
            if allocation.job.trains
        ]

    def _serve(
        self, block: int, activity: GpuActivity, effects: Effects, allocations: list[Allocation]
    ) -> list[Allocation]:
        """Sets the load of services: by requests, with the day and in bursts of minutes. Returns the training jobs."""
        services = [one for one in allocations if not one.job.trains] if self._serves else []
        if not self._serves:
            return allocations
        demand = self._requests.draw(generator(self.seed, 29, block), len(effects.time))
        day = 0.5 + 0.5 * np.sin(2 * np.pi * effects.time / 86_400 - 1.5)
        for one in services:
            rng, on = generator(self.seed, 17, one.job.number, 4), effects.active(one.begin, one.end)
            usual, swing, burst = rng.uniform(0.05, 0.6), rng.uniform(0, 0.7), rng.uniform(0.1, 0.9)
            first = int(self.layout.node_of_gpu[one.gpus[0]])  # a service's replicas share its requests
            level = usual * (1 - swing * day) * np.exp(burst * demand[:, first])
            activity.load[:, one.gpus] = (np.clip(level, 0.0, 1.0) * on)[:, None]
            activity.pace[:, one.gpus] = activity.load[:, one.gpus]
        return [one for one in allocations if one.job.trains]

    def _ranks(
        self,
        allocation: Allocation,
        block: int,
        activity: GpuActivity,
        compute: Floats,
        norms: Floats,
        effects: Effects,
    ) -> dict[str, NDArray[Any]]:
        """Returns the columns of the ranks of one allocation."""
        number, gpus, site = allocation.job.number, allocation.gpus, effects.site
        work = self._work[number]
        rng = generator(self.seed, 16, block, number)
        age = self._begin(allocation, effects)
        mine = work.base * compute[:, gpus] * self._batches(allocation, rng, len(compute))
        on = (effects.time >= allocation.begin) & (effects.time < allocation.end)
        if age < 10 * WARM_UP:
            steps = age + np.cumsum(on) * self.interval / work.step[0]
            mine = mine * (1 + _WARM_LOSS * np.exp(-3 * steps / WARM_UP))[:, None].astype(np.float32)
        wait = np.float32(work.step[1]) * (1 + np.float32(0.03) * np.abs(heavy(rng, (len(mine),))))
        working = (mine.max(axis=1) + wait * site.network.of_devices(number)) * site.step.of_devices(number)
        still = activity.saving[:, gpus[0]] | site.stalled.of_devices(number) | site.hung.of_devices(number)
        still = still | site.evaluating.of_devices(number) | ~on | _in_pause(work, effects)
        nominal = np.float32(work.base.max() + work.step[1])
        activity.pace[:, gpus] += np.where(still, 0, nominal / working)[:, None].astype(np.float32)
        before = self.state["jobs.progress"][number]
        done = before + np.cumsum(np.where(still, 0, self.interval / working))
        self.state["jobs.progress"][number] = done[-1]
        self.state["jobs.age"][number] += done[-1] - before
        if not allocation.job.hooked:
            return {}
        finished = np.diff(np.floor(done), prepend=np.floor(before)) > 0
        held = self._hold(allocation, self._report(allocation, rng, mine, working, norms, finished, effects), finished)
        steps_done = np.broadcast_to(done[:, None].astype(np.uint64), mine.shape)
        named = {f"rank.{n}": held[i] for i, n in enumerate(REPORTED)}
        return {"rank.step": steps_done, **named, "rank.nonfinite": self._nonfinite(allocation, effects, finished)}

    def _report(
        self,
        allocation: Allocation,
        rng: np.random.Generator,
        mine: Floats,
        working: NDArray[Any],
        norms: Floats,
        finished: NDArray[np.bool_],
        effects: Effects,
    ) -> Floats:
        """Returns (REPORTED, ticks, ranks) what the ranks report of a step that ends there."""
        number, site = allocation.job.number, effects.site
        loss = (_LOSS * (1 + 0.01 * heavy(rng, (len(mine),))) * site.loss.of_devices(number)).astype(np.float32)
        norm = _NORM * (1 + 0.08 * np.abs(heavy(rng, (len(mine),)))) * site.loss.of_devices(number)
        reported = np.empty((len(REPORTED), *mine.shape), np.float32)
        reported[1], reported[2], reported[3] = mine, working[:, None] - mine, loss[:, None]
        reported[0] = (working + self._waited(number, effects, finished))[:, None]
        reported[4] = norm[:, None] * norms[:, allocation.gpus]
        reported[4] *= effects.gpu.gradient.of_devices(allocation.gpus)
        return reported

    def _nonfinite(self, allocation: Allocation, effects: Effects, finished: NDArray[np.bool_]) -> NDArray[np.uint64]:
        """Returns (ticks, ranks) the number of non-finite gradients since the job started, one per step."""
        count, shape = self.state["ranks.nonfinite"], (len(finished), len(allocation.gpus))
        if effects.since < allocation.begin <= effects.until:
            count[allocation.gpus] = 0
        bad = np.isnan(effects.gpu.gradient.of_devices(allocation.gpus)) & finished[:, None]
        if not bad.any():
            return np.broadcast_to(count[allocation.gpus], shape)
        out = count[allocation.gpus] + np.cumsum(bad, axis=0, dtype=np.uint64)
        count[allocation.gpus] = out[-1]
        return np.asarray(out, np.uint64)

    def _batches(self, allocation: Allocation, rng: np.random.Generator, ticks: int) -> Floats:
        """Returns (ticks, ranks) the factor of the batches: common to all ranks, and to the stages of each replica."""
        common = 1 + np.float32(_COMMON_SD) * heavy(rng, (ticks,))
        begins = (rng.random(ticks) < _LIGHT_RATE) * rng.uniform(*_LIGHT, ticks)
        lighter = np.convolve(begins, np.ones(_LIGHT_TICKS))[:ticks]
        replicas = max(1, allocation.job.ranks // allocation.job.stages)
        share = 1 + np.float32(_REPLICA_SD) * rng.standard_normal((ticks, replicas), np.float32)
        factor = (common * (1 - np.minimum(lighter, _LIGHT[1]))).astype(np.float32)
        return np.asarray(factor[:, None] * share[:, np.arange(allocation.job.ranks) % replicas], np.float32)

    def _begin(self, allocation: Allocation, effects: Effects) -> float:
        """Returns the steps since the job began here; a job that begins in this block warms up."""
        if effects.since < allocation.begin <= effects.until and not allocation.warm:
            self.state["jobs.age"][allocation.job.number] = 0.0
        return float(self.state["jobs.age"][allocation.job.number])

    def _waited(self, number: int, effects: Effects, finished: NDArray[np.bool_]) -> Any:
        """Returns (ticks,) s for which the step that ends there waited for data before it began."""
        carried = float(self.state["jobs.waited"][number])
        if not effects.site.stalled and not carried:
            return 0.0
        stalled = np.where(effects.site.stalled.of_devices(number), self.interval, 0.0)
        total = carried + np.cumsum(np.broadcast_to(stalled, finished.shape))
        spent = np.maximum.accumulate(np.where(finished, total, 0.0))
        self.state["jobs.waited"][number] = total[-1] - spent[-1]
        return total - np.concatenate([[0.0], spent[:-1]])

    def _hold(self, allocation: Allocation, reported: Floats, finished: NDArray[np.bool_]) -> Floats:
        """Returns the reported values: those of the last finished step, unchanged until the next one is finished."""
        held, holder = self.state["ranks.held"], self.state["ranks.holder"]
        known = held[:, allocation.gpus]
        known = np.where((holder[allocation.gpus] != allocation.job.number) | np.isnan(known), reported[:, 0], known)
        newest = np.maximum.accumulate(np.where(finished, np.arange(1, len(finished) + 1), 0))
        out = np.concatenate([known[:, None], reported], axis=1)[:, newest]
        held[:, allocation.gpus], holder[allocation.gpus] = out[:, -1], allocation.job.number
        return out

    def _level(
        self, allocation: Allocation, effects: Effects, swing: NDArray[np.float64]
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Returns (ticks,) the load of the job's GPUs, and whether it writes a checkpoint."""
        number, (offset, every) = allocation.job.number, self._work[allocation.job.number].checkpoints
        on = (effects.time >= allocation.begin) & (effects.time < allocation.end)
        since = effects.time - offset
        saving = (
            on
            & (np.mod(since, every) < self._work[number].checkpoint_takes)
            & (since >= max(0.0, allocation.begin - offset))
        )
        saving = saving & ~(effects.site.hung.of_devices(number) | effects.site.stalled.of_devices(number))
        level = np.where(saving, _CHECKPOINT_LOAD, 1.0) * swing
        if pauses := self._work[number].pauses:
            level = np.where(_in_pause(self._work[number], effects), pauses[3], level)
        for channel, load in (
            (effects.site.evaluating, _EVALUATION_LOAD),
            (effects.site.stalled, _STALL_LOAD),
            (effects.site.hung, _HANG_LOAD),
        ):
            level = np.where(channel.of_devices(number), load, level)
        return np.where(on, level, 0).astype(np.float32), saving

    def _waiting(self, allocation: Allocation, effects: Effects) -> Floats:
        """Returns (1 or ticks, ranks) the factor on the load of ranks that wait for slower ones."""
        took = self._work[allocation.job.number].base * self._lottery[allocation.gpus]
        took = (
            took
            * effects.gpu.compute.of_devices(allocation.gpus)
            / (1 - effects.gpu.starved.of_devices(allocation.gpus))
        )
        took = took / (effects.gpu.clock.of_devices(allocation.gpus) * effects.gpu.capped.of_devices(allocation.gpus))
        took = np.atleast_2d(took)
        share = took / took.max(axis=1, keepdims=True)
        return np.asarray(np.float32(_WAITING) + np.float32(1 - _WAITING) * share, np.float32)

    def _of_nodes(self, values: Any) -> Any:
        """Returns a node's value for each of its GPUs."""
        return values if np.ndim(values) == 0 else values[:, self.layout.node_of_gpu]

    def _checkpoints(self, allocation: Allocation, effects: Effects) -> None:
        """Adds an event at the start of each checkpoint."""
        if not allocation.job.hooked:
            return
        work = self._work[allocation.job.number]
        (offset, every), takes = work.checkpoints, work.checkpoint_takes
        first = max(0, int(np.floor((max(effects.since, allocation.begin) - offset) / every)) + 1)
        last = int(np.floor((min(effects.until, allocation.end) - offset) / every))
        home = int(self.layout.node_of_gpu[allocation.gpus[0]])
        rests = effects.site.hung.of_devices(allocation.job.number) | effects.site.stalled.of_devices(
            allocation.job.number
        )
        rests = np.broadcast_to(rests, effects.time.shape)
        for n in range(first, last + 1):
            if rests[min(int(np.searchsorted(effects.time, offset + n * every)), len(rests) - 1)]:
                continue
            effects.add_event(offset + n * every, allocation.job.entity, "checkpoint", home, seconds=takes)
