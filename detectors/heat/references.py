"""What cools each GPU: the coolant of its loop, and the air at its node's inlet as far as its sensor is believed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.statistics import grouped_median
from detectors.base.streams import Floats
from detectors.base.topology_index import per_device_topology
from detectors.heat.inlet_sensors import FRESH, InletIndex
from pipeline.model.records import SECOND, Frame

_STEP_K = 1.0
"""K that a reading may be below what the other inlets let expect: a step of a BMC's rounding, 2 % of a usual rise."""
_USUAL_S = 86_400.0  # s of the mean of what an inlet is above the others: their daily swings differ; chosen
_LEAST = 4  # inlets whose median is that of the others with one of them wrong; chosen


@dataclass
class CoolingReferences(State):
    """Temperatures of coolant and air. An inlet that is stuck or reads too low would make its node look worse cooled:
    it counts as no cooler than those of its rack, row or hall let expect, with what it usually is above them.

    (N,) by sensor. above: K that it usually is above the median of the others.   age: s that are in it.
    newest, read_at: its newest reading, and when that was (us).   last: time of the newest frame of sensors (us).
    """

    above: Floats = memory(0.0)
    age: Floats = memory(0.0)
    newest: Floats = memory(np.nan)
    read_at: NDArray[np.int64] = memory(0, np.int64)
    last: int = notes(int)
    _inlets: InletIndex = field(default_factory=InletIndex, init=False, repr=False)

    def read(self, frame: Frame, coolant: Frame | None, sensors: Frame | None) -> tuple[Floats, Floats]:
        """Returns (N,) Cel of coolant and of air; NaN where it is not measured."""
        supply, inlet = np.full((2, len(frame.entities)), np.nan)
        if coolant is not None and len(coolant.entities):
            supply = np.append(coolant["coolant.supply_temperature"], np.nan)[self._find_supplies(frame, coolant)]
        if sensors is not None and len(sensors.entities):
            inlet = np.append(self._read_air(sensors), np.nan)[self._find_inlets(frame, sensors)]
        return supply, inlet

    def _read_air(self, sensors: Frame) -> Floats:
        """Returns (N,) Cel of the air at each inlet, NaN of other sensors."""
        n, time = len(sensors.entities), sensors.time
        self.grow(n)
        passed = min(max((time - self.last) / SECOND, 0.0), _USUAL_S) if self.last else 0.0
        air, newest, read_at = sensors["sensor.temperature"], self.newest[:n], self.read_at[:n]
        np.copyto(newest, air, where=np.isfinite(air))
        read_at[np.isfinite(air)] = self.last = time
        groups = self._groups(sensors)
        others, count = grouped_median(np.where(np.abs(time - read_at) <= FRESH, newest, np.nan), groups)
        apart = np.where(count >= _LEAST, air - others, np.nan)
        known, above, age = np.isfinite(apart), self.above[:n], self.age[:n]
        off = np.where(age > 0, np.clip(apart - above, -_STEP_K, _STEP_K), apart - above)
        age[known] += max(passed, 1.0)
        above[known] += (off * np.minimum(max(passed, 1.0) / np.minimum(np.maximum(age, 1.0), _USUAL_S), 1.0))[known]
        return np.fmax(np.where(groups >= 0, air, np.nan), np.where(known, others + above - _STEP_K, np.nan))

    @per_device_topology
    def _groups(self, sensors: Frame) -> NDArray[np.int32]:
        """(N,) number of the rack, row, hall or site in which an inlet is compared; -1 of other sensors."""
        inlet, found, number = self._inlets.find(sensors).inlet, np.full(len(sensors.entities), -1, np.int32), 0
        for kind in ("rack", "row", "hall"):
            unit = np.where(inlet & (found < 0), sensors.topology.group_numbers(sensors.entities, kind), -1)
            enough = np.append(np.bincount(unit[unit >= 0], minlength=int(unit.max(initial=-1)) + 1) >= _LEAST, False)
            found[enough[unit]] = unit[enough[unit]] + number
            number = 1 + int(found.max(initial=-1))
        return np.where(inlet & (found < 0), number, found).astype(np.int32)

    @per_device_topology
    def _find_inlets(self, frame: Frame, sensors: Frame) -> NDArray[np.int64]:
        of_node, above = self._inlets.find(sensors).of_node, frame.topology.ancestor_of_kind
        return np.array([of_node.get(above(e, "node") or "", [-1])[0] for e in frame.entities], np.int64)

    @per_device_topology
    def _find_supplies(self, frame: Frame, coolant: Frame) -> NDArray[np.int64]:
        place = {e: i for i, e in enumerate(coolant.entities)}
        above = frame.topology.ancestors
        nearest = (next((place[a] for a in above(e) if a in place), -1) for e in frame.entities)
        return np.fromiter(nearest, np.int64, len(frame.entities))
