"""What the faults of one block do to the fleet: factors, rates and masks that the physics multiplies in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.layout import Layout
from agents.sim.noise import Floats


@dataclass(frozen=True, slots=True)
class Happening:
    """An event before the fleet has a calendar: `time` in seconds after the start of the scenario."""

    time: float
    entity: str
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Defect:
    """A GPU that computes wrongly in [onset, end): each canary round gives a wrong digest with `probability`."""

    gpu: int
    onset: float
    end: float
    probability: float


@dataclass(slots=True)
class Effects:
    """One block of ticks. Arrays are (ticks, devices); without a fault every factor is 1 and every rate 0.

    time:     (ticks,) seconds after the start.   since: the tick before the block, events lie in (since, time[-1]].
    clock:    factor on a GPU's SM clock.         reasons: throttle bits.   hot: lost share of a GPU's thermal contact.
    flow:     factor on a loop's coolant flow.
    symbols, crc: errors per second of a port.    down: link is down.       flips: carrier changes within the tick.
    network:  (ticks, jobs) factor on the time a job spends in collectives.
    silent:   (ticks, shippers) the agent sends nothing.
    """

    time: NDArray[np.float64]
    since: float
    layout: Layout
    clock: Floats = field(init=False)
    hot: Floats = field(init=False)
    reasons: NDArray[np.uint64] = field(init=False)
    flow: Floats = field(init=False)
    symbols: NDArray[np.float64] = field(init=False)
    crc: NDArray[np.float64] = field(init=False)
    down: NDArray[np.bool_] = field(init=False)
    flips: NDArray[np.int64] = field(init=False)
    network: Floats = field(init=False)
    silent: NDArray[np.bool_] = field(init=False)
    defects: list[Defect] = field(default_factory=list)
    events: list[Happening] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticks, gpus = len(self.time), self.layout.gpus
        self.clock, self.hot = np.ones((ticks, gpus), np.float32), np.zeros((ticks, gpus), np.float32)
        self.reasons = np.zeros((ticks, gpus), np.uint64)
        self.flow = np.ones((ticks, len(self.layout.entities["coolant"])), np.float32)
        self.symbols, self.crc = np.zeros((ticks, gpus)), np.zeros((ticks, gpus))
        self.down, self.flips = np.zeros((ticks, gpus), np.bool_), np.zeros((ticks, gpus), np.int64)
        self.network = np.ones((ticks, len(self.layout.jobs)), np.float32)
        self.silent = np.zeros((ticks, len(self.layout.shippers)), np.bool_)

    @property
    def until(self) -> float:
        """Time of the block's last tick."""
        return float(self.time[-1])

    def ramp(self, onset: float, end: float, rise: float) -> Floats:
        """(ticks,) 0 before `onset`, grows to 1 within `rise` seconds, 0 again from `end` on."""
        share = np.clip((self.time - onset) / rise, 0.0, 1.0)
        share[self.time >= end] = 0.0
        return share.astype(np.float32)

    def within(self, onset: float, end: float) -> NDArray[np.bool_]:
        """(ticks,) whether the tick lies in [onset, end)."""
        return (self.time >= onset) & (self.time < end)
