"""Finds racks, rows and halls with warm intake air: warmer than air elsewhere, or warming faster than the weather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from detectors.base.budget import rule_line
from detectors.base.detector import Detector, memory, notes, part
from detectors.base.findings import Comparison, OpenConditions, close_ended, due_report
from detectors.base.gates import Gates
from detectors.base.state import State
from detectors.base.statistics import group_quantiles
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import per_device_topology, pop_members_mask
from detectors.heat.inlet_sensors import CHASSIS_AIR, FRESH, AirPlaces, InletIndex, Inlets
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level

_FEWEST = 3  # inlets of a rack, or racks, from which a median is valid; chosen
_MOST = 0.6  # share of a rack's inlets, and of a row's racks, with one cause; chosen
_COOLEST = 0.25  # quantile of the racks' departures that is the weather: a row may be most of a hall; chosen
_MEAN_S = 1800.0  # s of the mean that a hall as a whole is compared with; chosen
_WEATHER_K = 2.75  # K above that mean: outdoor air moves by 3 K an hour and is 1.5 above it; ASHRAE TC 9.9 allows 20
_UNITS = ("row", "hall", "facility")  # what racks with warm air share


@dataclass
class NewestDepartures(State):
    """(N,) newest value of each sensor, how far it departs from its past, and when it was read (us): the sensors of a
    rack are read at different moments. judged: known and read recently."""

    value: Floats = memory(np.nan)
    effect: Floats = memory(np.nan)
    read_at: NDArray[np.int64] = memory(0, np.int64)
    judged: Bools = field(default_factory=lambda: np.zeros(0, bool), init=False, repr=False)

    def update(self, value: Floats, step: Step, gate: Bools, time: int) -> None:
        """Adds an instant. gate: (N,) sensors that count."""
        n, known = len(value), step.judged
        self.grow(n)
        np.copyto(self.value[:n], value, where=known)
        np.copyto(self.effect[:n], step.effect, where=known)
        self.read_at[:n][known] = time
        np.minimum(self.read_at, time, out=self.read_at)  # the clock may have been set back
        self.judged = gate & (self.read_at[:n] > 0) & (time - self.read_at[:n] <= FRESH)


@dataclass
class ThermalInlet(Detector):
    """Inlets against their own past, less what the coolest quarter of the racks did: the weather. Reports a rack where
    most inlets are `delta` K up; racks that are warm together are one finding on their row or hall, or else on the
    warmest one.

    Ticket after `hold` s if its fans run `fans` faster than usual, if the air is `calm` K warmer, or, where the fans of
    less than half of its nodes are measured, `alone` K. Fans that run up by less mean two warm afternoons together, or
    fans at their limit: then `alone` K are a ticket after `lasts` s. One warm inlet alone is a sensor, and not reported
    here. Where three in four racks warm together, as in a hall of one row, all are reported once they are 2.75 K above
    the mean of half an hour: outdoor air does not move as fast.

    The intake air of a chassis, as Redfish reports it, counts where neither chassis nor node has a sensor of it.

    Source: 3 K are what ASHRAE's classes leave between recommended (27 Cel) and usual supply air (24); delta leaves
    half a step of a BMC's rounding. A fan that runs 0.7 faster takes 4.9 times the power (fan laws): it needs to.
    """

    name: ClassVar[str] = "thermal_inlet"
    family: ClassVar[str] = "thermal"
    device_class: ClassVar[str] = "sensor"
    needs: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ("sensor.temperature", CHASSIS_AIR)
    wants: ClassVar[tuple[str, ...]] = ("sensor.fan_speed", "event:maintenance_start", "event:maintenance_end")
    cannot_see: ClassVar[str] = (
        "Inlets whose sensor is not named inlet, intake or ambient; a hall that warms as slowly as the weather; and "
        "which panel or air handler is to blame."
    )

    delta: float = 2.75
    alone: float = 3.5
    calm: float = 6.0
    """K; two warm afternoons of 3 K each; chosen."""
    fans: float = 0.7
    hold: float = 600.0
    lasts: float = 4 * 3600.0
    """s; an afternoon; chosen."""

    warmth: Streams = part(lambda: Streams(Channel(floor=0.5, delta=2.75, phi=0.9)))
    speeds: Streams = part(lambda: Streams(Channel(floor=0.05, delta=0.2, phi=0.9)))
    air: NewestDepartures = part(NewestDepartures)
    blowers: NewestDepartures = part(NewestDepartures)
    places: AirPlaces = part(AirPlaces)
    hour: Floats = memory(np.nan)
    above: Floats = memory(np.nan)
    last: int = notes(int)
    before: float = notes(float)
    """K by which the weather was above its own past before the whole hall warmed; back at it, that is over."""
    gates: Gates = part(Gates)
    conditions: OpenConditions = notes()
    warm: dict[str, dict[str, Any]] = notes()  # entity -> since, racks
    accepted: list[str] = notes(list)
    _index: InletIndex = field(default_factory=InletIndex, init=False, repr=False)

    def __post_init__(self) -> None:
        self.warmth.channel = Channel(floor=0.5, delta=self.delta, phi=0.9)

    def observe(self, frames: Mapping[str, Frame]) -> list[Finding]:
        """Returns findings on racks, rows and halls with warm air at their inlets."""
        self.gates.update(frames)
        frame = self.places.join(frames, len(self.hour))
        if frame is None or not len(frame.entities):
            return []
        inlets, own = self._index.find(frame), self._own_past(frame)
        if (mask := pop_members_mask(self.accepted, frame)) is not None:
            for piece in (self.warmth, self.speeds, self.air, self.blowers):
                piece.reset(mask)
            self.reset_hours(mask)
        gate = ~self.gates.maintenance_mask(frame)
        air = np.where(inlets.inlet & gate & (inlets.rack >= 0), frame["sensor.temperature"], np.nan)
        step = self.warmth.step(air, own, frame.time)
        speed = frame["sensor.fan_speed"]
        fans = self.speeds.step(np.log(np.where(speed > 0, speed, np.nan)), own, frame.time, gate)
        sudden, share = self._follow_mean(air, frame.time)
        self.air.update(air, step, gate, frame.time)
        self.blowers.update(speed, fans, gate, frame.time)
        if not step.judged.any():
            return []  # nothing was read
        up, found = self._find_warm_racks(inlets, sudden, share)
        joined = self._join(frame, inlets, up, found)
        self.warm = {e: self.warm.get(e, {"since": frame.time}) | {"racks": racks} for e, racks in joined.items()}
        close_ended(self.conditions, set(joined))
        reports = [self._report(frame, inlets, up, entity) for entity in sorted(joined)]
        return [one for one in reports if one is not None]

    def budget(self) -> list[str]:
        """Returns the false alarm rates of its tests."""
        most = f"{_FEWEST} inlets and {_MOST:.0%} of a rack"
        return [rule_line(f"how many inlets are warm together: {most}, so that no single one reports")]

    def accept_as_normal(self, entity: str, frames: Mapping[str, Frame]) -> None:
        """Learns all sensors of a rack or row again from the next frame of sensors on."""
        self.accepted.append(entity)

    def reset_hours(self, mask: NDArray[np.bool_]) -> None:
        """Starts the hourly means of some inlets again."""
        self.hour[: len(mask)][mask] = np.nan

    @per_device_topology
    def _own_past(self, frame: Frame) -> NDArray[np.int32]:
        return np.full(len(frame.entities), -1, np.int32)

    def _follow_mean(self, air: Floats, time: int) -> tuple[Floats, float]:
        """Returns (N,) K above the mean of the last half hour, and the share of this instant in that mean."""
        self.grow(n := len(air))
        hour = self.hour[:n]
        seconds = min(max((time - self.last) / SECOND, 0.0), _MEAN_S) if self.last else 0.0
        since = np.clip((time - self.air.read_at[:n]) / SECOND, 0.0, _MEAN_S) if len(self.air.read_at) >= n else seconds
        self.last = time
        fresh = np.isnan(hour) & np.isfinite(air)
        hour[fresh] = air[fresh]
        above = air - hour
        hour += np.nan_to_num((1 - np.exp(-since / _MEAN_S)) * above)
        np.copyto(self.above[:n], above, where=np.isfinite(above))
        return self.above[:n], float(1 - np.exp(-seconds / _MEAN_S))

    def _find_warm_racks(self, inlets: Inlets, sudden: Floats, share: float) -> tuple[Floats, list[int]]:
        """Returns (R,) K by which each rack is warm, NaN unknown, and the racks where most inlets are. sudden, share:
        see `_follow_mean`."""
        n, count = len(inlets.rack), len(inlets.racks)
        rack = np.where(self.air.judged, inlets.rack, -1)
        raw, most = (group_quantiles(self.air.effect[:n], rack, count, q) for q in (0.5, 1 - _MOST))  # of most inlets
        lately = group_quantiles(sudden, rack, count, 0.5)
        raw[np.bincount(rack[rack >= 0], minlength=count) < _FEWEST] = np.nan
        known = np.flatnonzero(np.isfinite(raw))
        if not len(known):
            return raw, []
        weather = float(np.quantile(raw[known], _COOLEST)) if len(known) >= _FEWEST else float(raw[known].min())
        up = raw - max(weather, 0.0)
        held = self._held()
        least = np.where([name in held for name in inlets.racks], self.delta / 2, self.delta)
        warm = [r for r in known.tolist() if up[r] >= least[r] and most[r] - max(weather, 0.0) >= least[r] / 2]
        whole, reported = weather >= self.delta and float(np.median(lately[known])) >= _WEATHER_K, self._is_whole()
        if not (whole or reported):
            self.before += share * (weather - self.before)
        if whole or (reported and not warm and weather - self.before >= self.delta / 2):
            return raw, known.tolist()
        return up, warm

    def _held(self) -> frozenset[str]:
        """Returns the racks that are reported now."""
        return frozenset(rack for one in self.warm.values() for rack in one["racks"] if not one.get("whole"))

    def _is_whole(self) -> bool:
        return any(one.get("whole") for one in self.warm.values())

    def _join(self, frame: Frame, inlets: Inlets, up: Floats, warm: list[int]) -> dict[str, list[str]]:
        """Returns entity -> its warm racks: a row or hall in place of racks that it shares, else the warmest of all."""
        names = [inlets.racks[r] for r in warm]
        above = frame.topology.ancestor_of_kind
        found, left = dict[str, list[str]](), names
        for kind in _UNITS:
            groups: dict[str, list[str]] = {}
            for name in left:
                if unit := above(name, kind):
                    groups.setdefault(unit, []).append(name)
            for unit, mine in groups.items():
                size = sum(above(rack, kind) == unit for rack in inlets.racks)
                if len(mine) >= 2 and len(mine) >= _MOST * size:
                    found[unit], left = mine, [name for name in left if name not in mine]
        if len(left) >= _FEWEST:
            known = next((name for name in left if name in self.warm), None)
            found[known or max(left, key=lambda name: (up[inlets.racks.index(name)], name))] = left
        else:
            found |= {name: [name] for name in left}
        return found

    def _report(self, frame: Frame, inlets: Inlets, up: Floats, entity: str) -> Finding | None:
        """Returns the finding on a warm rack, row or hall, if it is due."""
        state, air = self.warm[entity], self.air
        racks = [inlets.racks.index(name) for name in state["racks"]]
        state["since"] = min(state["since"], frame.time)  # the clock may have been set back
        here = np.isin(inlets.rack, racks)
        inside, faster = np.flatnonzero(here & air.judged), _fan_rise(inlets, self.blowers, here)
        kelvin, held = float(np.median(up[racks])), (frame.time - state["since"]) / SECOND
        everywhere = len(racks) == int(np.count_nonzero(np.isfinite(up))) and len(racks) > 1
        state["whole"] = everywhere
        least = self.alone if np.isnan(faster) or everywhere else self.calm
        sure = kelvin >= least or (kelvin >= self.delta and faster >= self.fans)
        long = held >= self.hold if sure else (kelvin >= self.alone and held >= self.lasts)
        level: Level = "ticket" if long else "suspect"
        due = due_report(self.conditions, entity, frame.time, state["since"], level)
        if due is None:
            return None
        value = float(np.median(air.value[inside])) if len(inside) else float("nan")
        warm = f" {value:.0f} °C," if np.isfinite(value) else ""
        quicker = "" if np.isnan(faster) else f", fans {100 * faster:.0f} % faster"
        others = 0 if everywhere else int(np.count_nonzero(air.judged & inlets.inlet)) - len(inside)
        cohort = "own past" if everywhere else "inlets elsewhere"
        where = f"{len(racks)} racks: " if len(racks) > 1 else ""
        return self.finding(
            *(frame.time, entity, due),
            score=kelvin,
            summary=pager_title(entity, f"{where}intake air{warm} {kelvin:.1f} K above usual{quicker}"),
            signals=("sensor.temperature", "sensor.fan_speed") if faster >= self.fans else ("sensor.temperature",),
            clears=f"ends when less than {self.delta / 2:.2g} K is left of it",
            compared=Comparison(value, value - kelvin, None, cohort, others, kelvin, "K"),
            racks=state["racks"],
            inlets=sorted(frame.entities[i] for i in inside.tolist())[:16],
            fans_faster=None if np.isnan(faster) else round(faster, 3),
        )


def _fan_rise(inlets: Inlets, fans: NewestDepartures, here: Bools) -> float:
    """Returns the share by which fans in some racks run faster; NaN if too few are measured."""
    blowers = here & ~inlets.inlet & fans.judged
    enough = 2 * len(np.unique(inlets.node[blowers])) >= len(np.unique(inlets.node[here & inlets.inlet]))
    return float(np.expm1(np.median(fans.effect[blowers]))) if enough and blowers.any() else float("nan")
