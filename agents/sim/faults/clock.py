"""GPUs whose clock stands still below its own: nothing heats, nothing throttles, no bit says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.gpu import node_of, reset
from agents.sim.faults.kind import DAY, HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import Index, Layout
from agents.sim.schedule import Stop

_OUT_S = 600.0  # s that a node is out for drain, reset and check; chosen, as after GspTimeout


@dataclass(frozen=True)
class ClockStuck(Kind):
    """Clock of a GPU, or of all of its node, is stuck low or lost its lock: no throttle bit is set, until a reset."""

    name = "clock_stuck"
    row = 12
    strikes = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = (
        "SM clock below its peers' under load without a bit that says why, power and temperature lower, its rank's "
        "compute time; the job's steps only as far as its rank is then among the slowest; the reset at the end"
    )
    unseen = "why; anything while the GPU is idle, whose clock is low in any case"
    rate = Rate(0.3, "1M GPU-hours", "assumed; seen once after a vendor diagnostic")
    lasts = Span(1800.0, 2 * HOUR, DAY)  # until somebody resets it; assumed
    signals = ("gpu.sm_clock", "gpu.power", "gpu.temperature", "rank.compute_time", "event:counter_reset")
    ranges: ClassVar = {"lost": (0.05, 0.40)}
    limits: ClassVar = {"lost": (0.0, 0.8)}  # below a fifth of its clock a GPU is idle or shut down
    choices: ClassVar = {"extent": ("gpu", "gpu", "gpu", "node")}  # assumed
    severe = "lost"
    effect_unit = "clock"
    loaded = True
    lost: float | None = None  # share of the SM clock
    extent: str | None = None  # "gpu": this one; "node": all GPUs of its node by the same share

    def guilty(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        if self.extent == "gpu":
            return (fault.entity,)
        names = layout.entities["gpu"]
        node = layout.entities["node"][node_of(fault.device, layout)]
        return node, *(names[gpu] for gpu in self._gpus(fault, layout).tolist())

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.lost is not None
        gpus = self._gpus(fault, effects.layout)
        effects.gpu.clock.scale(gpus, 1 - np.float32(self.lost) * effects.within(fault.onset, fault.end))
        for gpu in gpus.tolist():
            reset(effects, gpu, fault.end)

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        return Stop(fault.end, (node_of(fault.device, layout),), _OUT_S)

    def _gpus(self, fault: Fault, layout: Layout) -> Index:
        """Numbers of the GPUs whose clock is low."""
        if self.extent == "gpu":
            return np.array([fault.device])
        return layout.gpus_of(np.array([node_of(fault.device, layout)]))
