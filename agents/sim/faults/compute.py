"""GPUs that heat slows at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span

THERMAL_BITS = (0x20, 0x40)  # NVML clock event reasons: software and hardware thermal slowdown


@dataclass(frozen=True)
class Straggler(Kind):
    """GPU slowed by heat (bad thermal contact): SM clock falls, a throttle bit is set, the whole job waits for it."""

    name = "straggler"
    row = 11
    strikes = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = (
        "its rank's compute time, its clock, temperature and throttle bits; everybody's step time as far as its rank "
        "is then among the slowest, as in the last stage"
    )
    unseen = "who is slow, from step times alone: all ranks of the job share them"
    rate = Rate(0.3, "1M GPU-hours", "Llama 3: 0.28 thermal; slow ones are those of cold_plate")
    lasts = Span(1200.0, 2 * HOUR)
    signals = ("rank.compute_time", "gpu.sm_clock", "gpu.throttle_reasons", "gpu.temperature")
    ranges: ClassVar = {"slowdown": (0.10, 0.30), "reason": (0.0, 1.0)}
    limits: ClassVar = {"slowdown": (0.0, 0.9), "reason": (0, 1), "ramp": (1.0, 1e6)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    slowdown: float | None = None  # share of the SM clock that is lost
    reason: float | None = None  # which thermal bit is set: below 0.5 the software's (0x20), else the hardware's (0x40)
    ramp: float = 60.0  # time until the slowdown is fully grown (s)

    def effect(self) -> float:
        assert self.slowdown is not None
        return 1 / (1 - self.slowdown) - 1

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.slowdown is not None
        assert self.reason is not None
        gpu, grown = effects.gpu, effects.ramp(fault.onset, fault.end, self.ramp)
        gpu.clock.scale(fault.device, 1 - np.float32(self.slowdown) * grown)
        gpu.hot.lift(fault.device, grown)
        bit = THERMAL_BITS[int(self.reason >= 0.5)]
        gpu.reasons.add(fault.device, np.where(grown > 0, np.uint64(bit), np.uint64(0)))
