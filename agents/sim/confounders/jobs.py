"""What jobs do of themselves: they restart, evaluate, share their work unevenly, and their loss jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.schedule import Stay, Stop

_UNEVEN = 0.1  # share of the ranks that get long sequences or busy experts in a step; chosen


@dataclass(frozen=True)
class JobRestart(Kind):
    """A job is stopped by its owner and started again some minutes later, with a warm-up."""

    name = "job_restart"
    row = 1
    strikes = "job"
    detectability = "benign"
    attribution = "job"
    seen = "end and start of the job; power, clocks and traffic of its nodes fall and rise; slow first steps"
    unseen = "why the job ended"
    rate = Rate(25.0, "1,000 node-days", "chosen: often enough to count false alarms")
    lasts = Span(1500.0, high=2400.0)  # restart and 200 steps of warm-up

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (), 0.0, fault.device)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Nothing beside the schedule."""


@dataclass(frozen=True)
class Evaluation(Kind):
    """A job evaluates for some minutes: no gradient, no step, other load."""

    name = "evaluation"
    row = 2
    strikes = "job"
    detectability = "benign"
    attribution = "job"
    seen = "no step and less power on all GPUs of the job, together"
    unseen = "that it is an evaluation: no event says so"
    rate = Rate(25.0, "1,000 node-days", "chosen: often enough to count false alarms")
    lasts = Span(120.0, high=900.0)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.site.evaluating.add(fault.device, effects.active(fault.onset, fault.end))


@dataclass(frozen=True)
class StageImbalance(Kind):
    """A job shares its work unevenly: one stage computes longer, or other ranks in each step (experts, sequences)."""

    name = "stage_imbalance"
    row = 3
    strikes = "job"
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
        for stay in effects.stays:
            if stay.job.number == fault.device:
                when = effects.active(max(fault.onset, stay.begin), min(fault.end, stay.end))
                more = self._share(fault, stay, effects) * when[:, None]
                effects.gpu.compute.scale(stay.gpus, 1 + np.float32(self.longer) * more)

    def _share(self, fault: Fault, stay: Stay, effects: Effects) -> NDArray[np.float64]:
        """(1 or ticks, ranks) how much of the growth each rank has."""
        if self.pattern == "stage" and stay.job.stages > 1:
            slow = int(fault.rng(1).integers(stay.job.stages))
            return np.asarray(stay.job.stage_of_rank == slow, np.float64)[None, :]
        rng = fault.rng(2, round(1000 * float(effects.time[0])))
        affected = rng.random((len(effects.time), stay.job.ranks)) < _UNEVEN
        return np.asarray(affected * rng.uniform(0.5, 1.0, affected.shape))


@dataclass(frozen=True)
class LossSpike(Kind):
    """Bad data or too high a learning rate: loss and gradient norm jump on all ranks alike, and come back."""

    name = "loss_spike"
    row = 12
    strikes = "job"
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
