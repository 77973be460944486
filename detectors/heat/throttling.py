"""GPUs that report thermal throttling, whatever their resistance is: single GPUs, nodes, and whole cooling units.

Cooling units without coolant telemetry: where a unit is monitored, the detector `coolant` reports what failed, and its
GPUs and ranks are left to it. Where it is not (no agent reads it, it reports half, it fell silent, or air cools the
rack), only its GPUs show it, and they are judged together. GPUs of no loop, CDU or rack of three nodes form one
unit, the rest of the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Cohorts, SpanningCohorts
from detectors.base.findings import make_evidence
from detectors.base.kernel import compiled
from detectors.base.state import State, memory, notes
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import per_topology
from detectors.heat.thermal_blame import CLOSE_K, GpuHeat, ThermalVerdict
from pipeline.model.entity_names import pager_title, short_duration
from pipeline.model.records import SECOND, Frame, Level
from pipeline.model.topology import kind_of

Times = NDArray[np.int64]
HEAT = np.uint64(0x20 | 0x40)  # NVML clock event reasons: software and hardware thermal slowdown
_SLOWDOWN, _BRAKE = np.uint64(0x8), np.uint64(0x80)  # hardware slowdown: by heat, unless the power brake is set too
_HELD = 2  # frames in a row; one may be a reading of a moment; chosen
_FEWEST, _MOST = 3, 0.6  # GPUs of a node, and share of them, from which the node is named; as for resistance, chosen
_COHORT_SHARE, _COHORT_NODES = 0.5, 3  # share of a cohort's nodes, and nodes: then the loop is the event; chosen
RECURS = 24 * 3600 * SECOND
"""us since its last throttling during which a GPU with normal resistance stays one ticket: a GPU close to its limit
throttles in each warm hour, and one ticket is enough. Chosen: a day."""


@compiled
def is_throttled_by_heat(reasons: NDArray[np.float64]) -> Bools:
    """Returns (N,) GPUs that heat slows down."""
    found = np.zeros(len(reasons), np.bool_)
    for i in range(len(reasons)):
        if (reasons[i] >= 0) and (reasons[i] < 2.0**63):  # False for NaN
            bits = np.uint64(reasons[i])
            slowdown = (bits & _SLOWDOWN) != 0 and (bits & _BRAKE) == 0
            found[i] = (bits & HEAT) != 0 or slowdown
    return found


@compiled
def _count_frames(count: Times, since: Times, known: Bools, throttled: Bools, time: int) -> None:
    for i in range(len(count)):
        if throttled[i] and ((count[i] == 0) or (since[i] > time)):  # the clock may have been set back
            since[i] = time
        if known[i]:
            count[i] = count[i] + 1 if throttled[i] else 0


@dataclass
class ThrottleStreaks(State):
    """(N,) each. count: frames in a row with thermal throttling.   since: of the first of them.

    last:     last throttling with a normal resistance; 0 never.   accepted: a person called the present one no fault.
    """

    count: Times = memory(0, np.int64)
    since: Times = memory(0, np.int64)
    last: Times = memory(0, np.int64)
    accepted: Bools = memory(False, np.bool_)

    def update(self, reasons: NDArray[np.float64], time: int) -> Bools:
        """Adds the clock event reasons; returns (N,) GPUs that throttle for long enough. Unknown reasons change
        nothing."""
        n = len(reasons)
        self.grow(n)
        throttled = is_throttled_by_heat(reasons)
        _count_frames(self.count[:n], self.since[:n], np.isfinite(reasons), throttled, time)
        self.accepted[:n] &= self.count[:n] > 0
        return np.asarray(throttled & (self.count[:n] >= _HELD))


def find_throttling(
    frame: Frame,
    on: Bools,
    since: Times,
    heat: GpuHeat,
    groups: NDArray[np.int32],
    hold: float,
    urgent: Bools,
    shared: Bools,
) -> dict[str, ThermalVerdict]:
    """Returns entity -> verdict: a GPU, or the node whose GPUs mostly throttle; none where a whole loop does.

    urgent: (N,) not known to have a normal resistance; others are a ticket at most: a job that they slow down is the
    stragglers' page.   shared: (N,) GPUs of units that are reported as a whole already.
    """
    nodes, names = heat.units["node"]
    counted = on & ~shared & ~_is_cohort_wide(on, groups, nodes)
    found: dict[str, ThermalVerdict] = {}
    covered = np.zeros(len(on), bool)
    for node in np.unique(nodes[counted & (nodes >= 0)]).tolist():
        members = counted & (nodes == node)
        if members.sum() >= max(_FEWEST, _MOST * np.count_nonzero(nodes == node)):
            at = np.flatnonzero(members)
            found[names[node]] = _judge_throttling(frame, at, names[node], since, heat, hold, urgent)
            covered |= members
    for i in np.flatnonzero(counted & ~covered).tolist():
        entity = frame.entities[i]
        found[entity] = _judge_throttling(frame, np.array([i]), entity, since, heat, hold, urgent)
    return found


def find_recurring(frame: Frame, conditions: Iterable[str], last: Times, well: Bools) -> dict[str, ThermalVerdict]:
    """Returns entity -> verdict of GPUs reported before that throttle from time to time.

    last: (N,) when each last throttled with a normal resistance; 0 never.   well: not known to cool worse.
    """
    reported, found = frozenset(conditions), dict[str, ThermalVerdict]()
    for i in np.flatnonzero((last > 0) & well).tolist():
        ago = max(frame.time - int(last[i]), 0)
        if frame.entities[i] in reported and ago <= RECURS:
            entity = frame.entities[i]
            title = pager_title(
                entity, f"recurring thermal throttle, last {ago / 60 / SECOND:.0f} min ago, cools normally"
            )
            clears = f"ends {RECURS // SECOND // 3600} h after the last thermal throttling"
            evidence = make_evidence(clears, None, throttled=False, gpus=[entity], resistance_known=True)
            found[entity] = ThermalVerdict("ticket", int(last[i]), title, evidence, 0.0)
    return found


def _is_cohort_wide(on: Bools, groups: NDArray[np.int32], nodes: NDArray[np.int32]) -> Bools:
    """Returns (N,) members of cohorts, or of the whole site, of which most nodes have such a GPU."""
    found = np.zeros(len(on), bool)
    for group in (None, *np.unique(groups[on & (groups >= 0)]).tolist()):
        members = nodes >= 0 if group is None else groups == group
        affected, every = np.unique(nodes[members & on]), np.unique(nodes[members])
        if len(affected) >= _COHORT_NODES and len(affected) > _COHORT_SHARE * len(every):
            found |= members
    return found


def _judge_throttling(
    frame: Frame, at: Times, entity: str, since: Times, heat: GpuHeat, hold: float, urgent: Bools
) -> ThermalVerdict:
    """Returns a ticket; a page once it is at its limit, throttled for long, and its resistance is not normal."""
    onset = int(since[at].min())
    left = heat.left[at]
    nearest = float(np.min(left[np.isfinite(left)], initial=np.inf))
    held = (frame.time - onset) / SECOND
    limited = nearest <= CLOSE_K and bool(urgent[at].any())
    level: Level = "page" if held >= hold and limited else "ticket"
    hottest = float(np.max(frame["gpu.temperature"][at][np.isfinite(frame["gpu.temperature"][at])], initial=-np.inf))
    warm = f" at {hottest:.0f} °C" if np.isfinite(hottest) else ""
    subject = "" if len(at) == 1 else f"{len(at)} GPUs, "
    reasons = int(frame["gpu.throttle_reasons"][at[0]])
    more: Mapping[str, Any] = {
        "throttled": True,
        "reasons": reasons,
        "gpus": [frame.entities[i] for i in at[:16].tolist()],
        "kelvin_left": round(nearest, 1) if np.isfinite(nearest) else None,
        "resistance_known": bool(heat.step.judged[at].any()),
    }
    title = pager_title(entity, f"{subject}thermal throttle for {short_duration(held)}{warm}")
    return ThermalVerdict(level, onset, title, make_evidence("ends when no heat slows it down", None, **more), held)


# --- cooling units without coolant telemetry -------------------------------------------------------------------------

READINGS = ("coolant.flow", "coolant.supply_temperature")
"""Readings that `coolant` needs both of: from one alone it does not see the other fail; a leak rope gives neither."""
SILENT = 600 * SECOND
"""us without a reading after which a unit is not monitored: its incidents end at the Desk after as much quiet, so that
no other detector reports its faults."""
NEVER = np.int64(2**63 - 1)
_KINDS = ("loop", "cdu", "rack")  # what GPUs share, nearest to the coolant first; as for stragglers' mass throttling
_NODES = 3  # on which they throttle: two coincide, or share a fault of their own; chosen
_MANY = 0.3  # share from which stragglers leave a whole cohort to others: its median does not hold any more
_WIDE = 0.5  # share of its nodes from which no GPU is named by itself; as _COHORT_SHARE
_GAP = 120 * SECOND  # us without it that end it: GPUs at their limit throttle in every other frame; chosen
_IDLE = 0.2  # share of the highest power, its own or that of a quarter of its unit: idle parts of 700 W draw 70 to 130


@dataclass(frozen=True, slots=True)
class UnitThrottling:
    """found: unit -> verdict now.   holding: units whose condition lasts, those with gaps too.

    since: (N,) since when each GPU is part of such a unit and needs no separate finding; else NEVER.
    """

    found: Mapping[str, ThermalVerdict] = field(default_factory=dict)
    holding: frozenset[str] = frozenset()
    since: Times = field(default_factory=lambda: np.full(1, NEVER))

    @property
    def members(self) -> Bools:
        """(N,) GPUs that are part of such a unit."""
        return np.asarray(self.since < NEVER)


@dataclass(frozen=True, slots=True)
class ThrottlingUnit:
    """One unit. working: (N,) its working GPUs.   throttled: (N,) those of them that throttle.   nodes: with such."""

    unit: str
    working: Bools
    throttled: Bools
    nodes: int

    @property
    def many(self) -> bool:
        """Whether so many throttle that the unit as a whole is faulty."""
        return int(np.count_nonzero(self.throttled)) > _MANY * int(np.count_nonzero(self.working))


@dataclass
class UnmonitoredUnits(State):
    """Which units are monitored, and which of the others throttle.

    _heard: reading -> entity of class coolant -> last reading.   _begun, _last: first instant, newest instant.
    units:  unit -> onset, last, many, many_last, excused (accepted as normal): the units that throttle.
    """

    _heard: dict[str, dict[str, int]] = notes(lambda: {reading: {} for reading in READINGS})
    _begun: int = notes(int)
    _last: int = notes(int)
    units: dict[str, dict[str, int]] = notes()
    _cohorts: SpanningCohorts = field(
        default_factory=lambda: SpanningCohorts(*_KINDS, least=_NODES), init=False, repr=False
    )
    _nodes: Cohorts = field(default_factory=lambda: Cohorts("node"), init=False, repr=False)

    def record_readings(self, frames: Mapping[str, Frame]) -> None:
        """Records which coolant readings an instant has."""
        if not frames:
            return
        time = max(frame.time for frame in frames.values())
        # nothing could be read in a time without frames; the same where the clock was set
        if not self._begun or abs(time - self._last) >= SILENT:
            self._begun = time
        self._begun, self._last = min(self._begun, time), time  # a restored state may be of a clock that was ahead
        if (coolant := frames.get("coolant")) is not None and len(coolant.entities):
            for reading, read_at in self._heard.items():
                read = np.flatnonzero(np.isfinite(coolant[reading])).tolist()
                read_at.update(dict.fromkeys((coolant.entities[i] for i in read), time))
        for reading, read_at in self._heard.items():
            if any(not 0 <= time - at < SILENT for at in read_at.values()):
                self._heard[reading] = {e: min(at, time) for e, at in read_at.items() if time - at < SILENT}

    def update(
        self, frame: Frame, throttled: Bools, since: Times, powers: tuple[Floats, Floats], others: Bools, hold: float
    ) -> UnitThrottling:
        """Returns the verdicts on units that are not monitored.

        throttled, since: (N,) GPUs that throttle by heat, and since when.   powers: (N,) now, and highest of late.
        others: (N,) GPUs whose heat has a known cause.   hold: s after which a ticket is a page.
        """
        time = frame.time
        if self.units:
            kept = {u: c for u, c in self.units.items() if time - c["last"] <= _GAP}
            self.units = {u: {name: min(at, time) for name, at in c.items()} for u, c in kept.items()}
        found, (power, peak) = dict[str, ThermalVerdict](), powers
        if throttled.any() and time - self._begun >= SILENT:  # before that it may only not have been read yet
            counts = np.isfinite(frame["gpu.throttle_reasons"]) & ~(power < _IDLE * peak) & ~others
            for unit in self._find_units(frame, counts, throttled, powers):
                state = self._update_unit(unit, since, time)
                if not state["excused"]:
                    found[unit.unit] = _judge_unit(frame, unit, state, hold)
        if not self.units:
            return UnitThrottling()
        groups, onsets = self._cohorts.groups(frame), np.full(len(throttled), NEVER)
        for group, name in enumerate(self._cohorts.names):
            if name in self.units:
                onsets[groups == group] = self.units[name]["onset"]
        return UnitThrottling(found, frozenset(u for u, c in self.units.items() if not c["excused"]), onsets)

    def accept_gpus(self, frame: Frame, mask: Bools) -> None:
        """Ignores units whose GPUs are all in `mask` until their throttling ends, after feedback "no fault"."""
        groups = self._cohorts.groups(frame)
        for group, unit in enumerate(self._cohorts.names):
            if unit in self.units and mask[groups == group].all():
                self.units[unit]["excused"] = 1

    def _find_units(
        self, frame: Frame, counts: Bools, throttled: Bools, powers: tuple[Floats, Floats]
    ) -> Iterator[ThrottlingUnit]:
        """Yields the units that are not monitored and throttle as a whole."""
        groups, nodes = self._cohorts.groups(frame), self._nodes.groups(frame)
        counts = counts & (nodes >= 0) & (groups >= 0) & ~self._is_monitored(frame)
        for group in np.unique(groups[counts & throttled]).tolist():
            working = counts & (groups == group)
            working &= ~(powers[0] < _IDLE * _usual_peak(powers[1][working]))  # spare GPUs never worked
            on, every = len(np.unique(nodes[working & throttled])), len(np.unique(nodes[working]))
            unit = ThrottlingUnit(self._cohorts.names[group], working, working & throttled, on)
            if on >= _NODES and (on > _WIDE * every or unit.many):
                yield unit

    def _update_unit(self, unit: ThrottlingUnit, since: Times, time: int) -> dict[str, int]:
        """Returns the state of a unit. many: since when so many throttle that the whole unit is faulty."""
        onset = int(since[: len(unit.throttled)][unit.throttled].min())
        onset = min(max(onset, time - SILENT), time)  # one GPU may have been close to its limit for days
        new = {"onset": onset, "last": time, "many": time, "many_last": time - _GAP - 1, "excused": 0}
        state = self.units.setdefault(unit.unit, new)
        state["last"] = time
        if unit.many:
            lasts = time - state["many_last"] <= _GAP
            state["many"], state["many_last"] = state["many"] if lasts else time, time
        return state

    def _is_monitored(self, frame: Frame) -> Bools:
        """Returns (N,) GPUs whose coolant is read: by what feeds it, or by something within what holds both."""
        return self._find_monitored(frame, frozenset.intersection(*map(frozenset, self._heard.values())))

    @per_topology
    def _find_monitored(self, frame: Frame, read: frozenset[str]) -> Bools:
        above = frame.topology.ancestors
        over = {a for e in frame.entities for a in above(e)}
        feeds = {next((a for a in (e, *above(e)) if a in over), e) for e in read}
        return np.fromiter((not feeds.isdisjoint(above(e)) for e in frame.entities), bool, len(frame.entities))


def _usual_peak(peaks: Floats) -> float:
    """Returns the power that a quarter of a unit has reached, so that one glitch does not count; NaN if unknown."""
    known = peaks[np.isfinite(peaks)]
    return float(np.quantile(known, 0.75)) if len(known) else np.nan


def _judge_unit(frame: Frame, unit: ThrottlingUnit, state: Mapping[str, int], hold: float) -> ThermalVerdict:
    """Returns a ticket; a page once many of it throttled for `hold` s."""
    lasts = unit.many and frame.time - state["many"] >= hold * SECOND
    level: Level = "page" if lasts else "ticket"
    gpus, every = np.flatnonzero(unit.throttled), int(np.count_nonzero(unit.working))
    held = (frame.time - state["onset"]) / SECOND
    unread = "no coolant telemetry" if kind_of(unit.unit) == "cdu" else "its CDU is not monitored"
    text = f"{len(gpus)} of {every} GPUs thermal throttle on {unit.nodes} nodes; {unread}"
    evidence = make_evidence(
        f"ends when for {_GAP // SECOND} s heat slows down fewer of them, or once its coolant is monitored",
        throttled=True,
        gpus=[frame.entities[i] for i in gpus[:16].tolist()],
        slowed=len(gpus),
        at_work=every,
        nodes=unit.nodes,
    )
    return ThermalVerdict(level, state["onset"], pager_title(unit.unit, text), evidence, held)
