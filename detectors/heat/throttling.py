"""GPUs that report thermal throttling, whatever their resistance is: single GPUs, nodes, and whole cooling units.

A logged fact, with its size: most nodes of a loop, CDU or rack that throttle together are one finding on it, most GPUs
of a node one on the node. GPUs of no loop, CDU or rack of three nodes form one unit, the rest of the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import SpanningCohorts
from detectors.base.findings import Comparison
from detectors.base.state import State, memory, notes
from detectors.base.streams import Bools, Floats
from detectors.base.throttle import has_reason, read_reasons
from pipeline.model.compiling import compiled
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import SECOND, Frame, Level

Times = NDArray[np.int64]
HEAT = np.uint64(0x20 | 0x40)  # NVML clock event reasons: software and hardware thermal slowdown
_SLOWDOWN, _BRAKE = np.uint64(0x8), np.uint64(0x80)
"""Hardware slowdown, which NVML sets for heat, for the power brake and for an external signal alike: without the bit of
the brake it counts here, and is called heat only beside a bit of HEAT."""
_HELD = 2  # frames in a row; one may be a reading of a moment; chosen
MOST, FEWEST = 0.6, 3  # share and number of a node's GPUs from which the node is named; half may be chance; chosen
_NODES = 3  # on which a unit's GPUs throttle: two coincide, or share a fault of their own; chosen
_MANY = 0.3  # share of its working GPUs from which a unit is faulty: a median does not hold any more (Huber, 1981)
_WIDE = 0.5  # share of its nodes from which a unit is named; chosen
_GAP = 120 * SECOND  # us without it that end it: GPUs at their limit throttle in every other frame; chosen
_IDLE = 0.2  # share of the highest power of a quarter of its unit: idle parts of 700 W draw 70 to 130
RECURS = 24 * 3600 * SECOND
"""us since its last throttling during which a GPU with normal resistance stays one ticket: a GPU close to its limit
throttles in each warm hour, and one ticket is enough. Chosen: a day."""


@dataclass(frozen=True, slots=True)
class HeatVerdict:
    """The verdict on one entity. gpus: positions of the GPUs that it covers."""

    level: Level
    onset: int
    summary: str
    clears: str
    score: float
    gpus: Times
    evidence: Mapping[str, Any]
    compared: Comparison | None = None


@compiled
def is_throttled_by_heat(reasons: Floats) -> Bools:
    """Returns (N,) GPUs that heat slows down, or their hardware for a reason that no other bit names."""
    found = np.zeros(len(reasons), np.bool_)
    for i in range(len(reasons)):
        if (reasons[i] >= 0) and (reasons[i] < 2.0**63):  # False for NaN
            bits = np.uint64(reasons[i])
            slowdown = (bits & _SLOWDOWN) != 0 and (bits & _BRAKE) == 0
            found[i] = (bits & HEAT) != 0 or slowdown
    return found


@compiled
def _count_frames(count: Times, since: Times, last: Times, known: Bools, throttled: Bools, time: int) -> None:
    for i in range(len(count)):
        if throttled[i] and not 0 <= time - last[i] <= _GAP:
            count[i] = 0  # it was not read for long, or the clock was set
        if throttled[i] and ((count[i] == 0) or (since[i] > time)):
            since[i] = time
        if throttled[i]:
            last[i] = time
        if known[i]:
            count[i] = count[i] + 1 if throttled[i] else 0


@dataclass
class ThermalThrottling(State):
    """(N,) each. count: frames in a row with thermal throttling.   since: of the first of them.   last: newest of them.

    by_heat: whether a bit of heat was set when it last throttled, not only that of a hardware slowdown.
    well_at: last throttling with a normal resistance, 0 never.   accepted: a person called the present one no fault.
    units:   unit -> onset, last, many, many_last: the units that throttle, and since when so many of one do.
    """

    count: Times = memory(0, np.int64)
    since: Times = memory(0, np.int64)
    last: Times = memory(0, np.int64)
    by_heat: Bools = memory(False, np.bool_)
    well_at: Times = memory(0, np.int64)
    accepted: Bools = memory(False, np.bool_)
    units: dict[str, dict[str, int]] = notes()
    _cohorts: SpanningCohorts = field(
        default_factory=lambda: SpanningCohorts("loop", "cdu", "rack", least=_NODES), init=False, repr=False
    )

    def update(self, reasons: Floats, time: int) -> Bools:
        """Adds the clock event reasons; returns (N,) GPUs that throttle for long enough. Unknown reasons change
        nothing."""
        n = len(reasons)
        self.grow(n)
        throttled = is_throttled_by_heat(reasons)
        np.copyto(self.by_heat[:n], has_reason(read_reasons(reasons)[0], int(HEAT)), where=throttled)
        _count_frames(self.count[:n], self.since[:n], self.last[:n], np.isfinite(reasons), throttled, time)
        if self.accepted[:n].any():
            self.accepted[:n] &= np.abs(time - self.last[:n]) <= _GAP
        return np.asarray(throttled & (self.count[:n] >= _HELD))

    def accept(self, mask: Bools, time: int) -> None:
        """Ignores the present throttling of some GPUs until it ends, after feedback "no fault"."""
        n = len(mask)
        self.well_at[:n][mask] = 0
        self.accepted[:n] |= mask & (np.abs(time - self.last[:n]) <= _GAP)

    def find_units(
        self, frame: Frame, throttled: Bools, powers: tuple[Floats, Floats], nodes: NDArray[np.int32], hold: float
    ) -> tuple[dict[str, HeatVerdict], Bools]:
        """Returns unit -> verdict of the units that throttle as a whole: a suspect, a ticket once it lasts for _GAP or
        many of its GPUs do, a page once so many did for `hold` s. And (N,) all GPUs of these units.

        powers: (N,) now and highest one.   nodes: (N,) number of the node.
        """
        time, found = frame.time, dict[str, HeatVerdict]()
        self.units = {
            unit: {name: min(at, time) for name, at in state.items()}  # the clock may have been set back
            for unit, state in self.units.items()
            if time - state["last"] <= _GAP
        }
        if not (throttled.any() or self.units):
            return found, np.zeros(len(throttled), bool)
        groups, (power, peak) = self._cohorts.groups(frame), powers
        counts = np.isfinite(frame["gpu.throttle_reasons"]) & (nodes >= 0)
        for group in np.unique(groups[counts & throttled]).tolist():
            working = counts & (groups == group)
            usual = peak[working & np.isfinite(peak)]  # a quarter of them, so that one glitch does not count
            working &= ~(power < _IDLE * (np.quantile(usual, 0.75) if len(usual) else 0.0))
            if self._cohorts.names[group] in self.units:  # its GPUs stall, and cool down last
                working |= counts & (groups == group) & throttled
            hot = working & throttled
            on, every = len(np.unique(nodes[hot])), len(np.unique(nodes[working]))
            many = int(np.count_nonzero(hot)) > _MANY * int(np.count_nonzero(working))
            if on >= _NODES and (many or on > _WIDE * every) and not self.accepted[: len(hot)][hot].all():
                unit = self._cohorts.names[group]
                state = self._update_unit(unit, int(self.since[: len(hot)][hot].min()), many, time, int(hold))
                what = "thermal throttle" if self.by_heat[: len(hot)][hot].any() else "in HW slowdown"
                found[unit] = _judge_unit(frame, unit, state, hot, working, on, many, hold, what)
        members = np.isin(groups, [g for g, name in enumerate(self._cohorts.names) if name in self.units])
        self.since[: len(members)][members] = time  # what throttles after its unit is judged from then on
        self.well_at[: len(members)][members] = 0
        return found, members

    def find_nodes_and_gpus(
        self,
        frame: Frame,
        throttled: Bools,
        left: Floats,
        nodes: tuple[NDArray[np.int32], list[str]],
        normal: Bools,
        warm: Bools,
        patience: float,
        hold: float,
    ) -> dict[str, HeatVerdict]:
        """Returns entity -> verdict of a GPU, or the node whose GPUs mostly throttle: a suspect, a ticket after
        `patience` s (fans take a minute to follow a load that starts), a page after `hold` s.

        throttled: (N,) without those of units.   left: (N,) K to the GPU's own limit, NaN unknown.   normal: (N,) known
        to have a normal resistance: a ticket at most, since a job that they slow down is the stragglers' page.   warm:
        (N,) whose coolant or air is warm: with a normal resistance a suspect, since that is the ticket.
        """
        numbers, names = nodes
        throttled = throttled & ~self.accepted[: len(throttled)]
        self.well_at[: len(throttled)][throttled & normal] = frame.time
        found, covered, times = dict[str, HeatVerdict](), np.zeros(len(throttled), bool), (patience, hold)
        for node in np.unique(numbers[throttled & (numbers >= 0)]).tolist():
            members = throttled & (numbers == node)
            if members.sum() >= max(FEWEST, MOST * np.count_nonzero(numbers == node)):
                found[names[node]] = self._judge(frame, names[node], np.flatnonzero(members), left, normal, warm, times)
                covered |= members
        for i in np.flatnonzero(throttled & ~covered).tolist():
            entity = frame.entities[i]
            found[entity] = self._judge(frame, entity, np.array([i]), left, normal, warm, times)
        return found

    def find_recurring(self, frame: Frame, reported: Mapping[str, Any], well: Bools) -> dict[str, HeatVerdict]:
        """Returns entity -> verdict of GPUs reported before that throttle from time to time and cool normally."""
        found = dict[str, HeatVerdict]()
        for i in np.flatnonzero((self.well_at[: len(well)] > 0) & well).tolist():
            entity, at = frame.entities[i], min(int(self.well_at[i]), frame.time)
            known = reported.get(entity)
            if known is not None and known["level"] != "suspect" and frame.time - at <= RECURS:
                ago = f"last {(frame.time - at) / 60 / SECOND:.0f} min ago"
                what = "thermal throttle" if self.by_heat[i] else "HW slowdown"
                title = pager_title(entity, f"recurring {what}, {ago}, cools normally")
                clears = f"ends {RECURS // SECOND // 3600} h after the last throttling"
                more = {"throttled": False, "gpus": [entity], "resistance_known": True}
                found[entity] = HeatVerdict("ticket", at, title, clears, 0.0, np.array([i]), more)
        return found

    def _update_unit(self, unit: str, onset: int, many: bool, time: int, hold: int) -> dict[str, int]:
        """Returns the state of a unit. many: since when so many throttle that the whole unit is faulty."""
        onset = min(max(onset, time - hold * SECOND), time)  # one GPU may have been close to its limit for days
        new = {"onset": onset, "last": time, "many": time, "many_last": time - _GAP - 1}
        state = self.units.setdefault(unit, new)
        state["last"] = time
        if many:
            lasts = time - state["many_last"] <= _GAP
            state["many"], state["many_last"] = state["many"] if lasts else time, time
        return state

    def _judge(
        self,
        frame: Frame,
        entity: str,
        at: Times,
        left: Floats,
        normal: Bools,
        warm: Bools,
        times: tuple[float, float],
    ) -> HeatVerdict:
        onset = int(self.since[at].min())
        held = (frame.time - onset) / SECOND
        level: Level = "ticket" if held >= times[0] and not (normal & warm)[at].all() else "suspect"
        if held >= times[1] and not normal[at].all():
            level = "page"
        heat = frame["gpu.temperature"][at]
        degrees = f" at {np.nanmax(heat):.0f} °C" if np.isfinite(heat).any() else ""
        subject = "" if len(at) == 1 else f"{len(at)} GPUs, "
        what = "thermal throttle" if self.by_heat[at].any() else "HW slowdown"
        title = pager_title(entity, f"{subject}{what} for {short_duration(held)}{degrees}")
        nearest = float(np.min(left[at][np.isfinite(left[at])], initial=np.inf))
        more = {
            "throttled": True,
            "reasons": int(frame["gpu.throttle_reasons"][at[0]]),
            "gpus": sorted(frame.entities[i] for i in at.tolist())[:16],
            "kelvin_left": round(nearest, 1) if np.isfinite(nearest) else None,
            "resistance_known": bool(normal[at].any()),
        }
        return HeatVerdict(level, onset, title, "ends when no such bit slows it down", held, at, more)


def _judge_unit(
    frame: Frame,
    unit: str,
    state: Mapping[str, int],
    hot: Bools,
    working: Bools,
    nodes: int,
    many: bool,
    hold: float,
    what: str,
) -> HeatVerdict:
    level: Level = "ticket" if many or frame.time - state["onset"] >= _GAP else "suspect"
    if many and frame.time - state["many"] >= hold * SECOND:
        level = "page"
    gpus, every = np.flatnonzero(hot), int(np.count_nonzero(working))
    held = (frame.time - state["onset"]) / SECOND
    title = pager_title(unit, f"{len(gpus)} of {every} GPUs {what} on {nodes} nodes")
    clears = f"ends when for {_GAP // SECOND} s fewer of them are slowed down"
    shown = sorted(frame.entities[i] for i in gpus.tolist())[:16]
    more = {"throttled": True, "gpus": shown, "slowed": len(gpus), "at_work": every, "nodes": nodes}
    return HeatVerdict(level, state["onset"], title, clears, held, gpus, more)
