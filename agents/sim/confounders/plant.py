"""What a site does on purpose, or has every summer: set-points, power caps, warm air, instruments after service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.faults.cooling import warm_air
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.faults.telemetry import LINGERS, misread
from agents.sim.physics.gpus import BOARD_W, EXPONENT
from agents.sim.physics.noise import Floats

OFTEN = Rate(25.0, "1,000 node-days", "chosen: at least 20 of each benign kind in 1,000 node-days")
CAP_BIT = np.uint64(0x4)  # NVML clock event reasons: software power cap


@dataclass(frozen=True)
class SetpointShift(Kind):
    """Set-point of a loop's supply is moved by 1 to 3 K within 10 to 30 minutes, and back hours later."""

    name = "setpoint_shift"
    row = 6
    strikes = "coolant"
    detectability = "benign"
    attribution = "cooling"
    seen = "supply, return and all GPUs of the loop warmer or colder by the same"
    unseen = "that it was intended"
    rate = OFTEN
    lasts = Span(HOUR, 3 * HOUR, 12 * HOUR)
    signals = ("coolant.supply_temperature", "coolant.return_temperature", "gpu.temperature")
    ranges: ClassVar = {"shift": (1.0, 3.0), "ramp": (600.0, 1800.0)}
    limits: ClassVar = {"shift": (0.0, 5.0), "ramp": (1.0, 1e6)}
    choices: ClassVar = {"direction": ("up", "down")}
    shift: float | None = None  # K
    ramp: float | None = None  # s that it takes, there and back
    direction: str | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.shift is not None
        assert self.ramp is not None
        shift = np.float32(self.shift if self.direction == "up" else -self.shift)
        effects.site.supply.add(fault.device, shift * there_and_back(fault, effects, self.ramp))


@dataclass(frozen=True)
class PowerCap(Kind):
    """Power policy caps the GPUs of a unit, of a job or of the whole fleet: clocks fall by 5 to 15 % together."""

    name = "power_cap"
    row = 10
    strikes = "power"
    detectability = "benign"
    attribution = "power"
    seen = (
        "the software power cap bit, clock and power of all its GPUs at the same time, and the step time of their jobs"
    )
    unseen = "who set the cap, and why"
    rate = OFTEN
    lasts = Span(600.0, 2 * HOUR, 12 * HOUR)
    signals = ("gpu.throttle_reasons", "gpu.sm_clock", "gpu.power", "rank.compute_time")
    ranges: ClassVar = {"share": (0.05, 0.15)}
    limits: ClassVar = {"share": (0.0, 0.9)}
    choices: ClassVar = {"reach": ("unit", "unit", "jobs", "jobs", "fleet")}
    share: float | None = None  # of the clock that is taken
    reach: str | None = None  # "unit": a power distribution unit; "jobs": all that run on it; "fleet"

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.share is not None
        on = effects.active(fault.onset, fault.end)[:, None] & self._capped(fault, effects)
        effects.gpu.capped.lower_to(slice(None), np.where(on, 1 - self.share, 1.0))
        effects.gpu.watts.lower_to(slice(None), np.where(on, BOARD_W * (1 - self.share) ** EXPONENT, np.inf))
        effects.gpu.reasons.add(slice(None), np.where(on, CAP_BIT, np.uint64(0)))

    def _capped(self, fault: Fault, effects: Effects) -> NDArray[np.bool_]:
        """Returns (ticks or 1, GPUs): whether the policy applies."""
        unit: NDArray[np.bool_] = (effects.layout.pdu_of_gpu == fault.device)[None]
        if self.reach == "unit":
            return unit
        if self.reach == "fleet":
            return np.ones_like(unit)
        running = effects.job_of_gpu
        return np.stack([unit[0] | np.isin(row, np.unique(row[unit[0] & (row >= 0)])) for row in running])


@dataclass(frozen=True)
class InletRise(Kind):
    """A warm afternoon: the air at the inlets of a row of racks is 1 to 3 K warmer for some hours."""

    name = "inlet_rise"
    row = 11
    strikes = "rack"
    detectability = "benign"
    attribution = "cooling"
    seen = "air inlets of the row warmer by less than 3 K, fans a little faster"
    unseen = "that it is the weather"
    rate = OFTEN
    lasts = Span(2 * HOUR, 4 * HOUR, 12 * HOUR)
    signals = ("sensor.temperature", "sensor.fan_speed")
    ranges: ClassVar = {"rise": (1.0, 3.0), "ramp": (1800.0, 3600.0)}
    limits: ClassVar = {"rise": (0.0, 5.0), "ramp": (1.0, 1e6)}
    rise: float | None = None  # K
    ramp: float | None = None  # s that it takes, there and back

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.rise is not None
        assert self.ramp is not None
        warm_air(fault.device, np.float32(self.rise) * there_and_back(fault, effects, self.ramp), effects)


@dataclass(frozen=True)
class SensorOffset(Kind):
    """After an announced service an instrument reads slightly high or low: the device is healthy."""

    name = "sensor_offset"
    row = 15
    strikes = "instrument"
    detectability = "benign"
    attribution = "instrument"
    seen = "the service, then one reading moved by up to 2 K while all that hangs together with it is as ever"
    unseen = "whether it reads right now, or did before"
    rate = OFTEN
    lasts = Span(2 * HOUR, 12 * HOUR, 3 * 24 * HOUR)
    signals = (
        *("gpu.temperature", "gpu.power", "coolant.flow", "coolant.supply_temperature", "sensor.temperature"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    ranges: ClassVar = {"size": (0.5, 2.0), "which": (0.0, 1.0), "work": (300.0, 900.0)}
    limits: ClassVar = {"size": (0.0, 5.0), "which": (0.0, 1.0), "work": (1.0, 1e5)}
    choices: ClassVar = {"direction": ("up", "down")}
    lingers = LINGERS
    size: float | None = None  # K, or its like in W and flow
    which: float | None = None  # which signal of the instrument, from its first (0) to its last (1)
    work: float | None = None  # s of the service before, at most a fifth of its time; chosen
    direction: str | None = None  # "up": it reads high; "down": low

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.size is not None
        assert self.which is not None
        done, planner = self.done(fault), effects.layout.nodes
        data = {"reason": "calibration", "seconds": done - fault.onset}
        effects.add_event(fault.onset, fault.entity, "maintenance_start", planner, **data)
        effects.add_event(done, fault.entity, "maintenance_end", planner, reason="calibration")
        size = self.size if self.direction == "up" else -self.size
        misread(fault, effects, "biased", size, self.which, done)

    def done(self, fault: Fault) -> float:
        """Second in which the service is over, and the reading another."""
        assert self.work is not None
        return fault.onset + min(self.work, 0.2 * (fault.end - fault.onset))


def there_and_back(fault: Fault, effects: Effects, ramp: float) -> Floats:
    """(ticks,) 0 to 1: grows within `ramp` s from the onset, and is 0 again at the end after as long a way down."""
    ramp = min(ramp, (fault.end - fault.onset) / 2)
    share = np.minimum((effects.time - fault.onset) / ramp, (fault.end - effects.time) / ramp)
    return np.clip(share, 0, 1).astype(np.float32)
