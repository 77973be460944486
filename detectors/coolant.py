"""Finds coolant loops that lose flow or deliver warm coolant, against their own past and the other loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.baseline import CELL, LEARN, Cells, Floats, Pcc, grouped_median
from detectors.cohorts import likeness
from detectors.conditions import Open, close, tell
from detectors.detector import Detector, memory, notes
from pipeline.records import SECOND, Finding, Frame, Level
from pipeline.topology import kind_of

_PEERS = 4  # loops below which the median is no witness, and a loop is judged by its own past alone; chosen
_LEAST_FLOW = 1.0  # L/min; a loop that runs with less is idle; chosen


@dataclass
class Coolant(Detector):
    """PCC on ln(flow) downwards and on supply temperature upwards; pressure and pump speed corroborate.

    Suspect once the sum passes `threshold` and the smoothed effect `flow_delta` (natural logarithm) or
    `temperature_delta` (K). Page: two samples in a row below `collapse` of the expected flow; a second sensor of the
    loop that moved too; or after `hold` s, with fewer than 4 comparable loops a ticket instead.

    Source: heat balance dT = 15.1 * kW / (L/min) for 25 % propylene glycol: a lost pump spends a GPU's margin in
    about 12 s, so flow under 70 % of the loop's own past pages without waiting for statistics; CUSUM of Page (1954).
    """

    name: ClassVar[str] = "coolant"
    family: ClassVar[str] = "coolant"
    device_class: ClassVar[str] = "coolant"
    needs: ClassVar[tuple[str, ...]] = ("coolant.flow",)
    wants: ClassVar[tuple[str, ...]] = ("coolant.supply_temperature", "coolant.pressure", "pump.speed")
    blind: ClassVar[str] = (
        "A single node's cold plate, drifts over weeks, and why a loop runs warmer: a new set-point looks like a fault."
    )

    threshold: float = 21.0
    flow_delta: float = 0.1
    temperature_delta: float = 3.0
    collapse: float = 0.7
    hold: float = 600.0

    flow: Cells = memory(0, CELL)
    warmth: Cells = memory(0, CELL)
    pressure: Cells = memory(0, CELL)
    speed: Cells = memory(0, CELL)
    low: NDArray[np.int64] = memory(0, np.int64)
    low_since: NDArray[np.int64] = memory(0, np.int64)
    conditions: Open = notes()
    _key: tuple[int, int] = field(default=(-1, -1), init=False, repr=False)
    _alike: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), init=False, repr=False)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        frame = frames.get("coolant")
        if frame is None or not len(frame.entities):
            return []
        n = len(frame.entities)
        self.grow(n)
        drop = Pcc(0.02, self.flow_delta, self.threshold, phi=0.6)
        rise = Pcc(0.5, self.temperature_delta, self.threshold, phi=0.6)
        flow = frame["coolant.flow"]
        self._collapsed(frame, self._step(drop, self.flow, -_logarithm(flow), frame))
        self._step(rise, self.warmth, frame["coolant.supply_temperature"], frame)
        self._step(drop, self.pressure, -_logarithm(frame["coolant.pressure"]), frame)
        self._step(drop, self.speed, -_logarithm(frame["pump.speed"]), frame)
        bad = self.flow["on"][:n] | self.warmth["on"][:n] | (self.low[:n] >= 2)
        close(self.conditions, {frame.entities[i] for i in np.flatnonzero(bad).tolist()})
        measured = np.isfinite(flow) | np.isfinite(frame["coolant.supply_temperature"])
        found = [self._finding(frame, i) for i in np.flatnonzero(bad & measured).tolist()]
        return [finding for finding in found if finding is not None]

    def _step(self, kernel: Pcc, cells: Cells, values: Floats, frame: Frame) -> Floats:
        """One sample of one signal; returns what was expected. What comparable loops have in common is no departure."""
        mine, groups = cells[: len(values)], self._comparable(frame)
        expected = mine["baseline"].copy()
        learnt = mine["count"] >= LEARN
        shift, size = grouped_median(np.where(learnt, values - expected, np.nan), groups)
        common = np.where(size >= _PEERS, shift, 0.0)
        kernel.step(mine, values - common, groups, frame.time)
        return np.where(learnt, expected + common, np.nan)

    def _collapsed(self, frame: Frame, expected: Floats) -> None:
        """Counts samples in a row with less than 70 % of the expected flow; two decide, one may be a broken reading."""
        flow, usual = frame["coolant.flow"], np.exp(-expected)
        known = np.isfinite(flow) & np.isfinite(usual) & (usual >= _LEAST_FLOW)
        bad = flow < self.collapse * usual
        low, since = self.low[: len(flow)], self.low_since[: len(flow)]
        since[known & bad & (low == 0)] = frame.time
        low[known] = np.where(bad, low + 1, 0)[known]

    def _comparable(self, frame: Frame) -> NDArray[np.int32]:
        """Group numbers of loops of one kind that are alike."""
        key = (frame.topology.version, len(frame.entities))
        if key != self._key:
            numbers: dict[str, int] = {}
            looks = [f"{kind_of(e)} {likeness(frame.topology.attributes.get(e, {}))}" for e in frame.entities]
            self._alike = np.array([numbers.setdefault(look, len(numbers)) for look in looks], np.int32)
            self._key = key
        return self._alike

    def _finding(self, frame: Frame, i: int) -> Finding | None:
        entity, time = frame.entities[i], frame.time
        level, others = self._level(i, time, int(np.count_nonzero(self._alike == self._alike[i])))
        began = [int(c["since"][i]) for c in (self.flow, self.warmth) if c["on"][i]]
        began += [int(self.low_since[i])] * int(self.low[i] >= 2)
        due = tell(self.conditions, entity, time, min(began), level)
        if due is None:
            return None
        flow, supply = float(frame["coolant.flow"][i]), float(frame["coolant.supply_temperature"][i])
        usual = float(np.exp(-self.flow["baseline"][i]))
        evidence: dict[str, Any] = {"value": flow, "expected": round(usual, 2), "corroborated_by": others}
        told = []
        if self.flow["on"][i] or self.low[i] >= 2:
            low = flow < (1 - self.flow_delta) * usual
            now = "is" if low else "was low and is back at"
            told.append(f"flow {now} {flow:.4g} L/min, {flow / usual:.0%} of its usual {usual:.4g} L/min")
        if self.warmth["on"][i]:
            rise = float(self.warmth["effect"][i])
            told.append(f"supply temperature is {supply:.1f} Cel, {rise:.1f} K above what is usual")
            evidence |= {"supply_temperature": supply, "supply_rise": round(rise, 2)}
        flow_first = self.flow["on"][i] or self.low[i] >= 2
        signals = ["coolant.flow"] if flow_first else []
        signals += ["coolant.supply_temperature"] * int(self.warmth["on"][i])
        score = float(max(self.flow["sum"][i], self.warmth["sum"][i]))
        summary = f"{entity}: " + " and ".join(told)
        signals += [s for s in others if s not in signals]
        return Finding(time, due[0], entity, self.name, due[1], score, summary, evidence, tuple(signals))

    def _level(self, i: int, time: int, alike: int) -> tuple[Level, list[str]]:
        """Page on collapse or with a second sensor; else after the hold, by its own past alone only a ticket."""
        moved = {
            "pump.speed": self._moved(self.speed, i, self.flow_delta),
            "coolant.pressure": self._moved(self.pressure, i, self.flow_delta),
            "coolant.supply_temperature": self._moved(self.warmth, i, self.temperature_delta),
            "coolant.flow": self._moved(self.flow, i, self.flow_delta),
        }
        own = "coolant.flow" if self.flow["on"][i] or self.low[i] >= 2 else "coolant.supply_temperature"
        others = [signal for signal, told in moved.items() if told and signal != own]
        if self.low[i] >= 2 or others:
            return "page", others
        above = [int(c["above"][i]) for c in (self.flow, self.warmth) if c["on"][i] and c["above"][i] > 0]
        if above and time - min(above) >= self.hold * SECOND:
            return ("page" if alike >= _PEERS else "ticket"), others
        return "suspect", others

    def _moved(self, cells: Cells, i: int, delta: float) -> bool:
        return bool(cells["effect"][i] >= delta and cells["sum"][i] > self.threshold / 2)


def _logarithm(values: Floats) -> Floats:
    """ln of the value, of at most a thousandth of a unit below it; negative readings are none."""
    return np.log(np.where(values >= 0, np.maximum(values, 1e-3), np.nan))
