"""Readings of GPUs that straggler_inferred judges: clock, activity, power, links, clock event reasons; by GPU (N,)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.gates import Gates
from detectors.base.state import State, memory
from detectors.base.streams import Bools, Floats, Streams
from detectors.base.throttle import CAPPED, IDLE, THROTTLE, has_reason, read_reasons
from detectors.straggler.gpu_placement import GpuPlacement
from detectors.straggler.pressure import Pressure
from pipeline.model.records import Frame

Times = NDArray[np.int64]
_BUSY, _BUSY_UTILIZATION = 0.3, 0.5
"""Least SM activity, and where that is not reported least utilization, of a GPU that trains: one that writes a
checkpoint or waits for data shows less, and its clock then proves nothing. Chosen."""
_POWER_SMOOTH, _CAP_GAIN = 0.15, 1e-3  # gains: as the kernel's effect; over some hours. Chosen
OFTEN_CAPPED = 0.5  # share of the time under a power cap from which that is a GPU's usual load; chosen
_LIGHT = 0.005  # least activity that differs from none


@dataclass
class GpuReadings(State):
    """Newest finite readings. clock: MHz.   active: share of the time that SMs, or tensor cores, are active.

    power: W, smoothed.   width, generation: of the PCIe link.   tensor: tensor activity was ever reported.
    bits: clock event reasons.   throttled_since: since when a working GPU has a throttle bit; 0 it has none.
    capped_share: share of its working time under a power cap.
    """

    clock: Floats = memory(np.nan)
    active: Floats = memory(np.nan)
    power: Floats = memory(np.nan)
    width: Floats = memory(np.nan)
    generation: Floats = memory(np.nan)
    tensor: Bools = memory(False, np.bool_)
    bits: NDArray[np.uint64] = memory(0, np.uint64)
    throttled_since: Times = memory(0, np.int64)
    capped_share: Floats = memory(0.0)

    def find_new_tensor(self, frame: Frame) -> Bools:
        """Returns (N,) GPUs whose tensor activity is reported for the first time."""
        n = len(frame.entities)
        self.grow(n)
        first = np.isfinite(frame["gpu.tensor_active"]) & ~self.tensor[:n]
        self.tensor[:n] |= first
        return np.asarray(first)

    def read(self, frame: Frame) -> tuple[Floats, Floats, Bools]:
        """Adds a frame; returns (N,) SM clock (MHz), activity (share), NaN where not measured, and which are busy."""
        n, sm, tensor = len(frame.entities), frame["gpu.sm_active"], frame["gpu.tensor_active"]
        activity = np.where(self.tensor[:n], tensor, sm)
        busy = np.where(np.isfinite(sm), sm >= _BUSY, frame["gpu.utilization"] >= _BUSY_UTILIZATION)
        clock = np.where(frame["gpu.sm_clock"] > 0, frame["gpu.sm_clock"], np.nan)
        activity = np.where(np.isfinite(activity), np.maximum(activity, _LIGHT), np.nan)
        links = (self.width, frame["gpu.pcie_width"]), (self.generation, frame["gpu.pcie_generation"])
        for last, now in ((self.clock, clock), (self.active, activity), *links):
            np.copyto(last[:n], now, where=np.isfinite(now))
        watts, power = frame["gpu.power"], self.power[:n]
        smooth = np.where(np.isfinite(power), power + _POWER_SMOOTH * (watts - power), watts)
        np.copyto(power, smooth, where=np.isfinite(watts))
        return clock, activity, busy & ~self._read_reasons(frame, busy)

    def _read_reasons(self, frame: Frame, busy: Bools) -> Bools:
        """Adds the clock event reasons; returns (N,) idle GPUs."""
        n = len(frame.entities)
        now, known = read_reasons(frame["gpu.throttle_reasons"])
        np.copyto(self.bits[:n], now, where=known)
        throttled, since = has_reason(now, THROTTLE), self.throttled_since[:n]
        since[known & ~throttled] = 0
        since[busy & throttled & (since == 0)] = frame.time
        at_work, share = known & busy, self.capped_share[:n]
        share[at_work] += _CAP_GAIN * (has_reason(now[at_work], CAPPED) - share[at_work])
        return has_reason(now, IDLE)

    def is_newly_capped(self, n: int) -> Bools:
        """Returns (N,) GPUs under a power cap that they rarely were under."""
        return has_reason(self.bits[:n], CAPPED) & (self.capped_share[:n] < OFTEN_CAPPED)


@dataclass
class GpuSymptoms(State):
    """What each GPU shows over time. below: ln of its clock below its peers', smoothed.

    judged_at: last judged sample.   samples: judged so far.   stuck_since: since when its clock is very low;
    low_since, high_since: since when its activity is below or above theirs; 0 not.
    """

    below: Floats = memory(0.0)
    judged_at: Times = memory(0, np.int64)
    samples: Times = memory(0, np.int64)
    stuck_since: Times = memory(0, np.int64)
    low_since: Times = memory(0, np.int64)
    high_since: Times = memory(0, np.int64)


@dataclass(frozen=True, slots=True)
class GpuWatch:
    """Settings and state of straggler_inferred that its verdicts and its whole jobs need."""

    delta: float
    duty_delta: float
    hold: float
    job_hold: float
    clocks: Streams
    duty: Streams
    placement: GpuPlacement
    gates: Gates
    pressure: Pressure
    readings: GpuReadings
    symptoms: GpuSymptoms
