"""Jobs that stop of themselves: no part of the fleet is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.schedule import Stop


@dataclass(frozen=True)
class JobHang(Kind):
    """Ranks of a job wait in collectives that do not match: GPUs spin, nothing moves, until the watchdog acts."""

    name = "job_hang"
    row = 31
    strikes = "job"
    detectability = "soft"
    attribution = "job"
    seen = "no step, no RDMA traffic, GPUs at 100 % and a quarter of their power; at last the end of the job"
    unseen = "which rank did not come, without flight recorder or stacks"
    rate = Rate(1.95, "1M GPU-hours", "ByteRobust, SOSP'25: 9.9 % of incidents hang; of 19.7 of Llama 3")
    lasts = Span(600.0, high=1800.0)  # PyTorch's watchdog waits 10 min, older versions 30
    signals = ("rank.step", "nic.tx_bytes", "gpu.utilization", "gpu.power")

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.end, (), 0.0, fault.device)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.site.hung.add(fault.device, effects.active(fault.onset, fault.end))


@dataclass(frozen=True)
class DataStall(Kind):
    """Storage gives a job no data: all its ranks wait before their next step, and their nodes wait for I/O."""

    name = "data_stall"
    row = 32
    strikes = "job"
    detectability = "soft"
    attribution = "job"
    seen = "no step, GPUs idle, I/O pressure and blocked loaders on all nodes of the job, then one very long step"
    unseen = "the storage itself: it sends nothing"
    rate = Rate(0.6, "1M GPU-hours", "assumed: 2 to 4 % of incidents; of 19.7 of Llama 3")
    lasts = Span(20.0, 300.0, HOUR)  # mean 5 min; assumed
    signals = ("rank.step", "rank.step_time", "node.io_pressure", "node.tasks_blocked", "gpu.power")
    ranges: ClassVar = {"pressure": (0.5, 1.0)}
    limits: ClassVar = {"pressure": (0.0, 1.0)}
    severe = "pressure"
    pressure: float | None = None  # share of the time in which some task waits for I/O; chosen

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.pressure is not None
        when = effects.active(fault.onset, fault.end)
        effects.site.stalled.add(fault.device, when)
        there = effects.job_of_gpu[:, :: effects.layout.gpus_per_node] == fault.device
        effects.node.io_pressure.raise_to(slice(None), np.float32(self.pressure) * (there & when[:, None]))
