"""Benign events of nodes and jobs.

Nodes: short slowdowns, maintenance, other versions, late data, our canary, and work that no one announces. Jobs:
restarts, evaluations, uneven work and jumps of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects, EventTime
from agents.sim.faults.cluster import starve_node
from agents.sim.faults.kind import DAY, HOUR, Fault, Kind, Rate, Span
from agents.sim.faults.link import flap_link
from agents.sim.faults.restriction import apply_maintenance
from agents.sim.layout import Layout
from agents.sim.physics import canary
from agents.sim.schedule import Allocation, Stop

_OFTEN = "chosen: often enough to count false alarms"


@dataclass(frozen=True)
class NodeTransient(Kind):
    """A node is slow for half a minute to five: garbage collection, a noisy neighbour, a delay of its data loader."""

    name = "node_transient"
    row = 4
    target = "node"
    detectability = "benign"
    attribution = "host"
    seen = "compute time of the node's ranks; sometimes also CPU pressure"
    unseen = "the cause"
    rate = Rate(100.0, "1,000 node-days", "chosen: 0.1 for each node and day")
    lasts = Span(30.0, high=300.0)
    choices: ClassVar = {"trace": ("pressure", "none")}
    ranges: ClassVar = {"slowdown": (0.05, 0.40)}
    limits: ClassVar = {"slowdown": (0.0, 10.0)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    trace: str | None = None  # pressure: CPU pressure shows it; none: only the ranks do
    slowdown: float | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        when = effects.active(fault.onset, fault.end)
        starve_node(effects, fault, self.slowdown, when)
        if self.trace == "pressure":
            effects.node.cpu.add(fault.device, 0.3 * when)
            effects.node.pressure.add(fault.device, min(0.1 + self.slowdown, 1.0) * when)


@dataclass(frozen=True)
class Maintenance(Kind):
    """Announced maintenance of a node: it is drained, cables are reseated, it boots with new firmware, and returns to
    service."""

    name = "maintenance"
    row = 7
    target = "node"
    detectability = "benign"
    attribution = "node"
    seen = "maintenance_start and maintenance_end, flaps, no data, counters that restart, a new version"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(1800.0, high=3 * HOUR)
    choices: ClassVar = {"change": ("firmware", "driver", "none")}
    change: str | None = None  # which version differs afterwards

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        length, rng = fault.end - fault.onset, fault.rng(1)
        ports = effects.layout.gpus_of(np.array([fault.device]))
        for port in rng.choice(ports, min(2, len(ports)), replace=False).tolist():
            begin = fault.onset + float(rng.uniform(0.10, 0.20)) * length
            end = begin + min(float(rng.uniform(20.0, 90.0)), 0.1 * length)  # a cable is reseated; chosen
            if end > effects.since and begin <= effects.until:
                flap_link(effects, effects.layout.entities["nic"][port], port, begin, end)
        apply_maintenance(fault, effects, fault.end, str(self.change))


@dataclass(frozen=True)
class MixedSilicon(Kind):
    """After short maintenance, for which its job waits, a node has another driver or VBIOS and stays slightly
    slower."""

    name = "mixed_silicon"
    row = 5
    target = "node"
    detectability = "benign"
    attribution = "node"
    seen = "the maintenance, a changed version, then longer compute time; with another VBIOS also clock and power"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(30 * DAY, high=30 * DAY)
    exclusive = 2 * HOUR
    choices: ClassVar = {"change": ("driver", "vbios")}
    ranges: ClassVar = {"offset": (0.02, 0.08), "work": (900.0, 1800.0)}
    limits: ClassVar = {"offset": (0.0, 0.5), "work": (60.0, 1e5)}
    severe = "offset"
    effect_unit = "time"
    loaded = True
    change: str | None = None
    offset: float | None = None  # share of compute time (driver) or clock (VBIOS)
    work: float | None = None  # s of the maintenance before

    def _done(self, fault: Fault) -> float:
        assert self.work is not None
        return fault.onset + min(self.work, 0.5 * (fault.end - fault.onset))

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), self._done(fault) - fault.onset, waits=True)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.offset is not None
        done = self._done(fault)
        apply_maintenance(fault, effects, done, str(self.change))
        gpus, other = effects.layout.gpus_of(np.array([fault.device])), effects.active(done, fault.end)
        if self.change == "vbios":
            effects.gpu.clock.scale(gpus, 1 - self.offset * other)
        else:
            effects.gpu.compute.scale(gpus, 1 + self.offset * other)


@dataclass(frozen=True)
class LateTelemetry(Kind):
    """A node's samples are late because of a wrong clock, or some are missing while its agent restarts."""

    name = "late_telemetry"
    row = 9
    target = "node"
    detectability = "benign"
    attribution = "telemetry"
    seen = "samples with later timestamps, clock offset and clock jumps; or a gap of a few samples"
    unseen = "how late a batch arrived: stored data has only the sample time"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(300.0, high=1800.0)
    choices: ClassVar = {"how": ("skew", "hole")}
    ranges: ClassVar = {"ahead": (0.6, 8.0), "hole": (15.0, 45.0)}
    limits: ClassVar = {"ahead": (0.0, 3600.0), "hole": (0.0, 60.0)}
    how: str | None = None  # skew: the clock is wrong; hole: the agent restarts
    ahead: float | None = None  # s by which the clock is ahead; above the agent's jump threshold of 0.5 s
    hole: float | None = None  # s without samples: less than the minute after which an entity counts as absent

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.ahead is not None
        assert self.hole is not None
        if self.how == "hole":
            end = min(fault.end, fault.onset + self.hole)
            effects.node.silent.add(fault.device, effects.active(fault.onset, end))
            return
        when = effects.active(fault.onset, fault.end)
        effects.node.clock_offset.add(fault.device, self.ahead * when)
        effects.node.late.add(fault.device, self.ahead * when)
        effects.add_event(fault.onset, fault.entity, "clock_jump", seconds=self.ahead)
        effects.add_event(fault.end, fault.entity, "clock_jump", seconds=-self.ahead)


@dataclass(frozen=True)
class OwnCanary(Kind):
    """Fleetpulse's own canary runs on a busy GPU for seconds to a minute, and its rank waits for it."""

    name = "own_canary"
    row = 13
    target = "gpu"
    detectability = "benign"
    attribution = "gpu"
    seen = "longer compute time of one rank, and a digest event with start and duration of the canary"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(5.0, high=60.0)
    ranges: ClassVar = {"slowdown": (0.05, 0.30)}
    limits: ClassVar = {"slowdown": (0.0, 10.0)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    slowdown: float | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        tick = float(effects.time[0]) - effects.since
        both = np.minimum(effects.time, fault.end) - np.maximum(effects.time - tick, fault.onset)
        share = np.clip(both / tick, 0.0, 1.0)  # share of each tick that the canary uses
        effects.gpu.compute.scale(fault.device, 1 + self.slowdown * share)
        effects.gpu.busy.raise_to(fault.device, share)
        problem = canary.PROBLEMS[fault.number % len(canary.PROBLEMS)]
        data = canary.correct_round(problem, EventTime(fault.onset), fault.end - fault.onset)
        effects.add_event(fault.end, fault.entity, "digest", **data)


_UNEVEN = 0.1  # share of the ranks that get long sequences or busy experts in a step; chosen


@dataclass(frozen=True)
class JobRestart(Kind):
    """A job is stopped by its owner and started again some minutes later, with a warm-up."""

    name = "job_restart"
    row = 1
    target = "job"
    detectability = "benign"
    attribution = "job"
    seen = "end and start of the job; power, clocks and traffic of its nodes fall and rise; slow first steps"
    unseen = "why the job ended"
    rate = Rate(25.0, "1,000 node-days", "chosen: often enough to count false alarms")
    lasts = Span(1500.0, high=2400.0)  # restart and 200 steps of warm-up

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (), 0.0, fault.device)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Does nothing: only the schedule changes."""


@dataclass(frozen=True)
class Evaluation(Kind):
    """A job evaluates for some minutes: no gradient, no step, other load."""

    name = "evaluation"
    row = 2
    target = "job"
    detectability = "benign"
    attribution = "job"
    seen = "no step and less power on all GPUs of the job, together"
    unseen = "that it is an evaluation: no event reports it"
    rate = Rate(25.0, "1,000 node-days", "chosen: often enough to count false alarms")
    lasts = Span(120.0, high=900.0)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.site.evaluating.add(fault.device, effects.active(fault.onset, fault.end))


@dataclass(frozen=True)
class StageImbalance(Kind):
    """Work of a job is uneven: one stage computes longer, or different ranks in each step (experts, sequences)."""

    name = "stage_imbalance"
    row = 3
    target = "job"
    detectability = "benign"
    attribution = "job"
    seen = "compute time of a whole stage, or of changing ranks; step time of all ranks"
    unseen = "tokens of each rank: the length of sequences is not reported"
    rate = Rate(25.0, "1,000 node-days", "chosen; What-if, OSDI'25: 42.5 % of jobs are slowed by 10 %, few by workers")
    lasts = Span(1800.0, HOUR, 8 * HOUR)
    choices: ClassVar = {"pattern": ("stage", "stage", "random")}
    ranges: ClassVar = {"longer": (0.10, 0.30)}
    limits: ClassVar = {"longer": (0.0, 10.0)}
    severe = "longer"
    effect_unit = "time"
    pattern: str | None = None  # stage: all ranks of one stage; random: some ranks, others in each step
    longer: float | None = None  # by which their compute time grows

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.longer is not None
        for allocation in effects.allocations:
            if allocation.job.number == fault.device:
                when = effects.active(max(fault.onset, allocation.begin), min(fault.end, allocation.end))
                more = self._share(fault, allocation, effects) * when[:, None]
                effects.gpu.compute.scale(allocation.gpus, 1 + np.float32(self.longer) * more)

    def _share(self, fault: Fault, allocation: Allocation, effects: Effects) -> NDArray[np.float64]:
        """Returns (1 or ticks, ranks): the part of the growth that each rank has."""
        if self.pattern == "stage" and allocation.job.stages > 1:
            slow = int(fault.rng(1).integers(allocation.job.stages))
            return np.asarray(allocation.job.stage_of_rank == slow, np.float64)[None, :]
        rng = fault.rng(2, round(1000 * float(effects.time[0])))
        affected = rng.random((len(effects.time), allocation.job.ranks)) < _UNEVEN
        return np.asarray(affected * rng.uniform(0.5, 1.0, affected.shape))


@dataclass(frozen=True)
class LossSpike(Kind):
    """Bad data or a too high learning rate: loss and gradient norm of all ranks jump together and recover."""

    name = "loss_spike"
    row = 12
    target = "job"
    detectability = "benign"
    attribution = "job"
    seen = "loss and gradient norm of all ranks of the job, together"
    unseen = "which batch it was"
    rate = Rate(25.0, "1,000 node-days", "chosen: often enough to count false alarms")
    lasts = Span(60.0, high=900.0)
    ranges: ClassVar = {"jump": (1.2, 3.0)}
    limits: ClassVar = {"jump": (1.0, 100.0)}
    severe = "jump"
    jump: float | None = None  # factor on the loss at first; the norm of the gradient jumps by its square; chosen

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.jump is not None
        since = np.maximum(effects.time - fault.onset, 0.0)
        left = np.exp(-4 * since / (fault.end - fault.onset)) * effects.active(fault.onset, fault.end)
        factor = np.asarray(1 + (self.jump - 1) * left, np.float32)
        effects.site.loss.scale(fault.device, factor)
        there = effects.job_of_gpu == fault.device
        effects.gpu.gradient.scale(slice(None), np.where(there, factor[:, None], np.float32(1)))


_HABIT = "chosen: what only some sites do; agents/sim/world.py has each site's rate"


@dataclass(frozen=True)
class SilentReboot(Kind):
    """A drained node is booted, and perhaps gets another driver or firmware, without an announcement."""

    name = "silent_reboot"
    row = 16
    target = "node"
    detectability = "benign"
    attribution = "node"
    seen = "its job ends, no data for minutes, then counters that restart; with an upgrade a new version"
    unseen = "that it was intended"
    rate = Rate(10.0, "1,000 node-days", _HABIT)
    lasts = Span(900.0, high=3600.0)
    world_only = True
    choices: ClassVar = {"change": ("none", "none", "driver", "firmware", "vbios")}
    change: str | None = None  # which version differs afterwards

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        apply_maintenance(fault, effects, fault.end, str(self.change), announced=False)


@dataclass(frozen=True)
class Drain(Kind):
    """A scheduler takes a healthy node out of service for hours: it idles beside nodes that train."""

    name = "drain"
    row = 17
    target = "node"
    detectability = "benign"
    attribution = "node"
    seen = "its job ends or moves to a spare node; then no load"
    unseen = "why it was drained"
    rate = Rate(10.0, "1,000 node-days", _HABIT)
    lasts = Span(HOUR, 6 * HOUR, 2 * DAY)
    world_only = True

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Does nothing: only the schedule changes."""
