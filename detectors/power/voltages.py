"""Voltages that are off: of feeds, of the inputs of power supplies, and of a board's 12 V and 48 to 54 V rails.

Measured: the newest voltage of each entity against its usual one. Grouped: many that are off together below one feed,
rack or row are one departure. Reported: a sag or overvoltage, with its level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, build_finding
from detectors.base.power_feeds import LIVE
from detectors.base.state import N, State, memory, notes, parts, piece_of
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import TopologyIndex, per_device_topology
from detectors.telemetry.silence import shared_ancestors
from pipeline.model.compiling import compiled
from pipeline.model.entity_names import pager_title
from pipeline.model.records import SECOND, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

OF_FEEDS = ("power.voltage", "power.voltage_line1", "power.voltage_line2", "power.voltage_line3")
OF_SUPPLIES, OF_RAILS, STATUS = "psu.input_voltage", "sensor.voltage", "psu.input_status"
SIGNALS = (*OF_FEEDS, OF_SUPPLIES, OF_RAILS, STATUS)
LOOKS = 2
"""Readings in a row that must be off: 30 s apart they mean more than the 10 s that equipment must bear; chosen."""
MAINS, DEEP = 0.10, 0.20
"""Departures from the usual: IT equipment works within 10 % permanently, with 20 % too little for 10 s, with 20 % too
much for half a second (ITI curve, Information Technology Industry Council, 2000). The same for busbars of 48 to 54 V;
chosen."""
RAIL = 0.05
"""Of 12 V: what a server's supply must keep (EPS12V Power Supply Design Guide, section on DC voltage regulation)."""
LAPSES = 3600 * SECOND
"""us without a reading after which a departure ends; chosen, as for supplies."""
_OUT_OF_RANGE = CATALOGUE[STATUS].states.index("out_of_range")
_LEARN, _GAIN = 20, 0.02  # readings until the usual is known; memory of about 50 readings; chosen
_AGAIN = 3.0 * LAPSES  # us at one level next to nothing until that is the usual; chosen: work on a feed is shorter
_ENDS = 0.8  # of the limit: nearer to the usual than that is normal again; chosen
_TWELVE, _BUSBAR = (11.0, 13.0), (40.0, 60.0)  # V; a sensor of another usual is of a core, a memory or a battery
_USUAL, _COUNT, _OFF, _SINCE, _HEARD, _NOW, _GONE, _CELLS = range(8)


@dataclass(frozen=True, slots=True)
class Departure:
    """Voltages that are off together.

    members: entities of the readings.   units: their chassis or feeds.   others: similar readings there that are not
    off.   value, usual: of the worst.   deep: beyond what equipment bears for 10 s.
    """

    entity: str
    signal: str
    since: int
    members: tuple[str, ...]
    units: tuple[str, ...]
    others: int
    value: float
    usual: float
    deep: bool


@dataclass
class VoltageReadings(State):
    """Readings of one signal: rows of `cells` by entity (_USUAL, _COUNT, ...)."""

    cells: Floats = memory(0.0, shape=(_CELLS, N))


@dataclass
class Voltages(State):
    """By signal the usual voltage of each entity, learned while it is not off, and since when it is off.

    _off: entities that are off, by signal.   _off_entities: names of the entities of signals with any that are off.
    """

    readings: dict[str, VoltageReadings] = parts(VoltageReadings)
    _off: dict[str, int] = notes()
    _off_entities: dict[str, list[str]] = notes()
    _entities: dict[str, Sequence[str]] = field(default_factory=dict, init=False, repr=False)

    def update(self, frames: Mapping[str, Frame], time: int) -> None:
        """Adds an instant."""
        for signal in (*OF_FEEDS, OF_SUPPLIES, OF_RAILS):
            frame = frames.get(signal.partition(".")[0])
            values = None if frame is None else frame.values.get(signal)
            status = frame.values.get(STATUS) if frame is not None and signal == OF_SUPPLIES else None
            if frame is not None and (values is not None or status is not None):
                self._entities[signal] = frame.entities
            elif not self._off.get(signal):
                continue
            entities = self._names(signal)
            missing = np.full(len(entities), np.nan)
            readings = piece_of(self.readings, signal, VoltageReadings)
            readings.grow(len(entities))
            columns = missing if values is None else values, missing if status is None else status
            off = self._off[signal] = _add_readings(readings.cells, *columns, float(time), signal == OF_RAILS)
            if off:
                self._off_entities[signal] = list(entities)
            else:
                self._off_entities.pop(signal, None)

    def _names(self, signal: str) -> Sequence[str]:
        return self._entities.get(signal) or self._off_entities.get(signal) or ()

    def find_departures(self, topology: Topology) -> Iterator[Departure]:
        """Yields those that hold now; many below one feed, rack or row are one of that entity, of the feed's own meter
        where there is one."""
        covered: set[str] = set()
        for signal in (*OF_FEEDS, OF_SUPPLIES, OF_RAILS):
            if not self._off.get(signal):
                continue
            for found in self._group(signal, topology):
                around = (found.entity, *topology.ancestors(found.entity))
                if covered.isdisjoint(around):
                    yield found
                    covered.add(found.entity)

    def _group(self, signal: str, topology: Topology) -> Iterator[Departure]:
        names, cells = self._names(signal), self.readings[signal].cells
        off = cells[_OFF, : len(names)] >= LOOKS
        if not off.any():
            return
        units, unit, index = self._find_units(signal, names, topology)
        hit, known = np.zeros(len(units), bool), np.zeros(len(units), bool)
        hit[unit[off]] = True
        known[unit[cells[_COUNT, : len(names)] >= _LEARN]] = True
        left = hit.copy()
        found = shared_ancestors(hit, hit, known | hit, index)
        for entity in sorted(found, key=lambda e: -len(found[e])):
            if left[found[entity]].all():
                left[found[entity]] = False
                yield self._describe(entity, signal, off & np.isin(unit, found[entity]), units, unit)
        for i in np.flatnonzero(left).tolist():
            members = off & (unit == i)
            alone = np.count_nonzero(members) == 1 and signal != OF_RAILS
            entity = names[int(np.flatnonzero(members)[0])] if alone else units[i]
            yield self._describe(entity, signal, members, units, unit)

    def _describe(
        self, entity: str, signal: str, members: Bools, units: list[str], unit: NDArray[np.intp]
    ) -> Departure:
        names, cells = self._names(signal), self.readings[signal].cells[:, : len(members)]
        away = np.abs(cells[_NOW] / np.maximum(cells[_USUAL], 1e-9) - 1)
        worst = int(np.flatnonzero(members)[np.argmax(np.nan_to_num(away[members], nan=-1.0))])
        hit = dict.fromkeys(unit[members].tolist())
        similar = np.isin(unit, list(hit)) & (cells[_COUNT] >= _LEARN) & ~members
        similar &= np.abs(cells[_USUAL] / max(cells[_USUAL, worst], 1e-9) - 1) < MAINS
        return Departure(
            entity,
            signal,
            int(cells[_SINCE, members].min()),
            tuple(names[i] for i in np.flatnonzero(members).tolist()),
            tuple(units[i] for i in hit),
            int(np.count_nonzero(similar)),
            float(cells[_NOW, worst]),
            float(cells[_USUAL, worst]),
            bool(away[worst] > DEEP),
        )

    def share_below(self, entity: str, lower: bool, topology: Topology) -> float | None:
        """Returns the share of the supplies fed from an entity that show at least half of a departure; None if none is
        read."""
        names = self._names(OF_SUPPLIES)
        if not len(names) or OF_SUPPLIES not in self.readings:
            return None
        _, unit, index = self._find_units(OF_SUPPLIES, names, topology)
        below = np.isin(unit, index.devices_below(entity))
        cells = self.readings[OF_SUPPLIES].cells[:, : len(names)]
        below &= cells[_COUNT] >= _LEARN
        if not below.any():
            return None
        away = (cells[_NOW] / np.maximum(cells[_USUAL], 1e-9) - 1)[below]
        return float(np.mean(away < -MAINS / 2 if lower else away > MAINS / 2))

    def relearn(self, entity: str, topology: Topology | None) -> None:
        """Relearns the voltage of an entity, and those that are off below it, after feedback that it is not a fault."""
        for signal, readings in self.readings.items():
            for i, name in enumerate(self._names(signal)[: readings.cells.shape[1]]):
                unit = topology.parents.get(name, ())[:1] if topology is not None else ()
                off = topology is not None and readings.cells[_OFF, i] > 0 and entity in topology.ancestors(name)
                if off or entity in (name, *unit):
                    readings.cells[:, i] = 0

    @per_device_topology
    def _find_units(
        self, signal: str, names: Sequence[str], topology: Topology
    ) -> tuple[list[str], NDArray[np.intp], TopologyIndex]:
        """Returns the units (feeds, chassis), the unit of each entity, and the ancestors of the units."""
        above = [() if signal in OF_FEEDS else topology.parents.get(name, ()) for name in names]
        owners = [parents[0] if parents else name for parents, name in zip(above, names, strict=True)]
        units = list(dict.fromkeys(owners))
        number, index = {name: i for i, name in enumerate(units)}, TopologyIndex()
        index.update(units, topology)
        return units, np.array([number[owner] for owner in owners], np.intp), index


@compiled
def _limit(usual: float, rails: bool) -> float:
    """Returns the departure that is too much; that of a rail depends on its usual voltage."""
    if not rails or _BUSBAR[0] <= usual <= _BUSBAR[1]:
        return MAINS
    return RAIL if _TWELVE[0] <= usual <= _TWELVE[1] else np.inf


@compiled
def _vote(usual: float, count: float, x: float) -> tuple[float, float]:
    """Returns the usual value and the readings in favour of it, after one more reading.

    The majority vote of Boyer and Moore (1981): the majority value wins, as a median would.
    """
    if count < 1.0:
        return x, 1.0
    if abs(x - usual) <= MAINS * usual:
        return usual + (x - usual) / (count + 1.0), count + 1.0
    return usual, count - 1.0


@compiled
def _live(x: float, rails: bool) -> bool:
    """Returns whether equipment runs on it; the rest voltage of a dead feed is too low."""
    return x >= _BUSBAR[0] if not rails else _limit(x, True) < np.inf


@compiled
def _add_readings(cells: Floats, values: Floats, status: Floats, time: float, rails: bool) -> int:
    """Adds a reading of each entity; returns how many are off. status: psu.input_status, NaN where not reported."""
    count = 0
    for i in range(len(values)):
        x, usual, off = values[i], cells[_USUAL, i], cells[_OFF, i]
        reported = status[i] == _OUT_OF_RANGE
        cells[_HEARD, i] = min(cells[_HEARD, i], time)  # the clock may have been set back
        if x > 0.0 or reported:
            before = cells[_NOW, i]
            cells[_HEARD, i] = time
            cells[_NOW, i] = x
            limit = _limit(usual, rails)
            known = cells[_COUNT, i] >= _LEARN
            away = abs(x - usual) / usual if known and x > 0.0 else 0.0
            gone = known and x < LIVE * usual  # a loss, which other rules report
            steady = gone and abs(x - before) <= MAINS * x and 0.0 < cells[_GONE, i] <= time
            cells[_GONE, i] = cells[_GONE, i] if steady else (time if gone else 0.0)
            if steady and time - cells[_GONE, i] >= _AGAIN and _live(x, rails):  # the usual was misread
                cells[:, i] = 0.0
                continue
            if reported or (away > limit and not gone):
                if off == 0.0:
                    cells[_SINCE, i] = time
                cells[_OFF, i] = off + 1.0
            elif gone or away < _ENDS * limit:
                cells[_OFF, i] = 0.0
                if not known:
                    cells[_USUAL, i], cells[_COUNT, i] = _vote(usual, cells[_COUNT, i], x)
                elif not gone:
                    cells[_COUNT, i] += 1.0
                    cells[_USUAL, i] += max(_GAIN, 1.0 / cells[_COUNT, i]) * (x - usual)
        elif x <= 0.0 or time - cells[_HEARD, i] > LAPSES:
            cells[_OFF, i] = 0.0
        if cells[_OFF, i] > 0.0:
            count += 1
    return count


_CONFIRMS = 0.5
"""Share of the supplies below a meter that must show it, too; chosen: with two feeds half of them are on the other."""


def find_voltage_findings(
    voltages: Voltages,
    braked: Collection[str],
    topology: Topology,
    time: int,
    detector: str,
    in_maintenance: Callable[[str], bool],
) -> Iterator[Finding]:
    """Yields a ticket for each departure; a page where many nodes have less than equipment bears; a suspect where the
    meter is the likelier cause. braked: nodes held by the power brake."""
    for each in voltages.find_departures(topology):
        if any(in_maintenance(e) for e in (each.entity, *each.units)):
            continue
        lower = not each.value > each.usual
        share = voltages.share_below(each.entity, lower, topology)
        level, note = _decide_level(each, share, _count_braked(braked, each, topology))
        read = each.value > 0 and each.usual > 0  # else the BMC alone reports it as out of range
        off = each.value / each.usual - 1 if read else 0.0
        what = (
            f"{'sag to' if lower else 'high,'} {each.value:.3g} V, usual {each.usual:.3g} V" if read else "out of range"
        )
        yield build_finding(
            detector,
            time,
            each.entity,
            (each.since, level),
            score=float(len(each.units)),
            summary=pager_title(each.entity, f"{_describe_members(each)} {what}{note}"),
            signals=(each.signal, STATUS) if each.signal == OF_SUPPLIES else (each.signal,),
            clears="clears when the voltage is near its usual value, or reported in range",
            compared=Comparison(each.value, each.usual, None, "own past", 0, off, "V") if read else None,
            readings=list(each.members[:64]),
            chassis=list(each.units[:64]),
            others_well=each.others,
            share=to_json(off),
        )


def find_explained_brakes(braked: Collection[str], found: Sequence[Finding], topology: Topology) -> set[str]:
    """Returns the braked nodes whose feed or rail pages already, which explains the brake."""
    off = {e for f in found if f.level == "page" for e in (f.entity, *f.evidence["chassis"])}
    return {node for node in braked if off and not off.isdisjoint((node, *topology.ancestors(node)))}


def _count_braked(braked: Collection[str], each: Departure, topology: Topology) -> int:
    """Returns how many braked nodes are below the units that are off."""
    around = {each.entity, *each.units}
    return sum(1 for node in braked if not around.isdisjoint((node, *topology.ancestors(node))))


def _describe_members(each: Departure) -> str:
    """Returns the entity that is off, and on how many units."""
    many, chassis = len(each.members), len(each.units)
    where = "" if chassis == 1 else f" in {chassis} chassis"
    if each.signal == OF_RAILS:
        return "rail voltage" if many == 1 else f"{many} rails{where}"
    if each.signal == OF_SUPPLIES:
        return "input voltage" if many == 1 else f"input of {many} supplies{where}"
    return "voltage"


def _decide_level(each: Departure, share: float | None, braked: int) -> tuple[Level, str]:
    """Returns the level, and a note for the title. share: of the supplies below a meter that show it too."""
    if each.signal == OF_RAILS and len(each.members) <= each.others:
        return "suspect", "; likely its sensor"  # a brake there is reported by itself
    if each.signal in OF_FEEDS and share is not None and share < _CONFIRMS and not braked:
        return "suspect", "; likely its meter"
    if braked:
        return "page", f"; brake on {braked} node{'s' * (braked > 1)}"
    many = len(each.units) > 1 or (each.signal in OF_FEEDS and share is not None)
    if each.deep and many and each.signal != OF_RAILS:
        return "page", ""
    return "ticket", ""
