"""Which voltages are off: of feeds, of what supplies take in, and of a board's 12 V and 48 to 54 V rails.

Voltages that are off, in words and levels: who is told of a sag and how loudly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, make_evidence
from detectors.base.kernel import compiled
from detectors.base.power_feeds import LIVE
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import shared_ancestors
from pipeline.model.records import SECOND, Finding, Frame, Level, to_json
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

OF_FEEDS = ("power.voltage", "power.voltage_line1", "power.voltage_line2", "power.voltage_line3")
OF_SUPPLIES, OF_RAILS, TOLD = "psu.input_voltage", "sensor.voltage", "psu.input_status"
SIGNALS = (*OF_FEEDS, OF_SUPPLIES, OF_RAILS, TOLD)
LOOKS = 2
"""Readings in a row that must be off: 30 s apart they mean more than the 10 s that equipment must bear; chosen."""
MAINS, DEEP = 0.10, 0.20
"""Departures from the usual: IT equipment works within 10 % for ever, with 20 % too little for 10 s, with 20 % too
much for half a second (ITI curve, Information Technology Industry Council, 2000). Busbars of 48 to 54 V: as much, by
choice."""
RAIL = 0.05
"""Of 12 V: what a server's supply must keep (EPS12V Power Supply Design Guide, section on DC voltage regulation)."""
LAPSES = 3600 * SECOND
"""A departure of which nothing was read for so long is not known any more; chosen, as of supplies."""
_OUT_OF_RANGE = CATALOGUE[TOLD].states.index("out_of_range")
_LEARN, _GAIN = 20, 0.02  # readings until the usual is known; memory of about 50 readings; chosen
_AGAIN = 1000.0  # readings in a row that say the same, next to nothing, until they are the usual; chosen: 3 h at 10 s
_ENDS = 0.8  # of the limit: what is nearer to the usual than that is well again; chosen
_TWELVE, _BUSBAR = (11.0, 13.0), (40.0, 60.0)  # V; a sensor of another usual is of a core, a memory or a battery
_USUAL, _COUNT, _OFF, _SINCE, _HEARD, _NOW, _GONE, _CELLS = range(8)


@dataclass(frozen=True, slots=True)
class Departure:
    """Voltages that are off together. members: whose readings they are; units: the chassis or feeds that these are of;
    others: readings of the like there that are not off; deep: beyond what equipment bears for 10 s."""

    entity: str
    signal: str
    since: int
    members: tuple[str, ...]
    units: tuple[str, ...]
    others: int
    value: float
    usual: float
    deep: bool


class Voltages:
    """By signal the usual value of each entity, learnt while it is not off, and since when it is; a part()."""

    def __init__(self) -> None:
        self.cells: dict[str, Floats] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._off: dict[str, int] = {}
        self._units: dict[str, tuple[tuple[int, int, int], list[str], NDArray[np.intp], TopologyIndex]] = {}

    def look(self, frames: Mapping[str, Frame], time: int) -> None:
        """Takes an instant."""
        for signal in (*OF_FEEDS, OF_SUPPLIES, OF_RAILS):
            frame = frames.get(signal.partition(".")[0])
            values = None if frame is None else frame.values.get(signal)
            said = frame.values.get(TOLD) if frame is not None and signal == OF_SUPPLIES else None
            if frame is not None and (values is not None or said is not None):
                self._names[signal] = frame.entities
            elif not self._off.get(signal):
                continue
            n = len(self._names[signal])
            read = np.full(n, np.nan) if values is None else values
            told = np.full(n, np.nan) if said is None else said
            self._off[signal] = _look(self._grown(signal, n), read, told, float(time), signal == OF_RAILS)

    def _grown(self, signal: str, size: int) -> Floats:
        cells = self.cells.get(signal)
        if cells is None or cells.shape[1] < size or cells.shape[0] < _CELLS:
            wider = np.zeros((_CELLS, max(size, 0 if cells is None else cells.shape[1])))
            if cells is not None:
                wider[: cells.shape[0], : cells.shape[1]] = cells
            self.cells[signal] = cells = wider
        return cells

    def departures(self, topology: Topology) -> Iterator[Departure]:
        """Those that hold now; of many below one feed, rack or row it is that one's, told by the feed's own meter
        where there is one."""
        over: set[str] = set()
        for signal in (*OF_FEEDS, OF_SUPPLIES, OF_RAILS):
            if not self._off.get(signal):
                continue
            for found in self._of(signal, topology):
                around = (found.entity, *topology.ancestors(found.entity))
                if over.isdisjoint(around):
                    yield found
                    over.add(found.entity)

    def _of(self, signal: str, topology: Topology) -> Iterator[Departure]:
        names, cells = self._names.get(signal, ()), self.cells[signal]
        off = cells[_OFF, : len(names)] >= LOOKS
        if not off.any():
            return
        units, unit, homes = self._places(signal, topology)
        hit, known = np.zeros(len(units), bool), np.zeros(len(units), bool)
        hit[unit[off]] = True
        known[unit[cells[_COUNT, : len(names)] >= _LEARN]] = True
        left = hit.copy()
        found = shared_ancestors(hit, hit, known | hit, homes)
        for entity in sorted(found, key=lambda e: -len(found[e])):
            if left[found[entity]].all():
                left[found[entity]] = False
                yield self._told(entity, signal, off & np.isin(unit, found[entity]))
        for i in np.flatnonzero(left).tolist():
            mine = off & (unit == i)
            alone = np.count_nonzero(mine) == 1 and signal != OF_RAILS
            yield self._told(names[int(np.flatnonzero(mine)[0])] if alone else units[i], signal, mine)

    def _told(self, entity: str, signal: str, mine: Bools) -> Departure:
        names, cells = self._names[signal], self.cells[signal][:, : len(mine)]
        units, unit = self._units[signal][1:3]
        away = np.abs(cells[_NOW] / np.maximum(cells[_USUAL], 1e-9) - 1)
        worst = int(np.flatnonzero(mine)[np.argmax(np.nan_to_num(away[mine], nan=-1.0))])
        hit = dict.fromkeys(unit[mine].tolist())
        like = np.isin(unit, list(hit)) & (cells[_COUNT] >= _LEARN) & ~mine
        like &= np.abs(cells[_USUAL] / max(cells[_USUAL, worst], 1e-9) - 1) < MAINS
        return Departure(
            entity,
            signal,
            int(cells[_SINCE, mine].min()),
            tuple(names[i] for i in np.flatnonzero(mine).tolist()),
            tuple(units[i] for i in hit),
            int(np.count_nonzero(like)),
            float(cells[_NOW, worst]),
            float(cells[_USUAL, worst]),
            bool(away[worst] > DEEP),
        )

    def share_below(self, entity: str, lower: bool, topology: Topology) -> float | None:
        """Share of the supplies fed from an entity that show at least half of a departure, too; None: none is read."""
        names = self._names.get(OF_SUPPLIES, ())
        if not len(names) or OF_SUPPLIES not in self.cells:
            return None
        _, unit, homes = self._places(OF_SUPPLIES, topology)
        below = np.isin(unit, homes.devices_below(entity))
        cells = self.cells[OF_SUPPLIES][:, : len(names)]
        below &= cells[_COUNT] >= _LEARN
        if not below.any():
            return None
        away = (cells[_NOW] / np.maximum(cells[_USUAL], 1e-9) - 1)[below]
        return float(np.mean(away < -MAINS / 2 if lower else away > MAINS / 2))

    def forget(self, entity: str, topology: Topology | None) -> None:
        """A person said that its voltage is as it should be: it is learnt anew, and what is off anywhere below it."""
        for signal, cells in self.cells.items():
            for i, name in enumerate(self._names.get(signal, ())[: cells.shape[1]]):
                of = topology.parents.get(name, ())[:1] if topology is not None else ()
                off = topology is not None and cells[_OFF, i] > 0 and entity in topology.ancestors(name)
                if off or entity in (name, *of):
                    cells[:, i] = 0

    def _places(self, signal: str, topology: Topology) -> tuple[list[str], NDArray[np.intp], TopologyIndex]:
        """Units (feeds, chassis), the unit of each entity, and what lies above the units."""
        names = self._names[signal]
        key = (id(topology), topology.version, len(names))
        if signal not in self._units or self._units[signal][0] != key:
            above = [() if signal in OF_FEEDS else topology.parents.get(name, ()) for name in names]
            owners = [parents[0] if parents else name for parents, name in zip(above, names, strict=True)]
            units = list(dict.fromkeys(owners))
            place, homes = {name: i for i, name in enumerate(units)}, TopologyIndex()
            homes.update(units, topology)
            self._units[signal] = key, units, np.array([place[owner] for owner in owners], np.intp), homes
        return self._units[signal][1:]

    def snapshot(self) -> dict[str, Any]:
        names = {signal: list(names) for signal, names in self._names.items() if self._off.get(signal)}
        return {"cells": {s: c.copy() for s, c in self.cells.items()}, "off": dict(self._off), "names": names}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells, self._off, self._units = dict(state["cells"]), dict(state["off"]), {}
        self._names = {signal: tuple(names) for signal, names in state["names"].items()}


@compiled
def _limit(usual: float, rails: bool) -> float:
    """Departure that is too much: of rails it depends on what they are."""
    if not rails or _BUSBAR[0] <= usual <= _BUSBAR[1]:
        return MAINS
    return RAIL if _TWELVE[0] <= usual <= _TWELVE[1] else np.inf


@compiled
def _vote(usual: float, count: float, x: float) -> tuple[float, float]:
    """Usual value and readings that speak for it, from one reading more.

    The vote of Boyer and Moore (1981): what most readings agree on wins whatever the others say, as a median would.
    """
    if count < 1.0:
        return x, 1.0
    if abs(x - usual) <= MAINS * usual:
        return usual + (x - usual) / (count + 1.0), count + 1.0
    return usual, count - 1.0


@compiled
def _live(x: float, rails: bool) -> bool:
    """Whether equipment runs on it: what is left on a dead feed is none."""
    return x >= _BUSBAR[0] if not rails else _limit(x, True) < np.inf


@compiled
def _look(cells: Floats, values: Floats, said: Floats, time: float, rails: bool) -> int:
    """Takes a reading of each entity; how many are off. said: psu.input_status, NaN where it is not told."""
    count = 0
    for i in range(len(values)):
        x, usual, off = values[i], cells[_USUAL, i], cells[_OFF, i]
        told = said[i] == _OUT_OF_RANGE
        cells[_HEARD, i] = min(cells[_HEARD, i], time)  # a time that stepped back is no future
        if x > 0.0 or told:
            before = cells[_NOW, i]
            cells[_HEARD, i] = time
            cells[_NOW, i] = x
            limit = _limit(usual, rails)
            known = cells[_COUNT, i] >= _LEARN
            away = abs(x - usual) / usual if known and x > 0.0 else 0.0
            gone = known and x < LIVE * usual  # a loss, which others tell
            cells[_GONE, i] = cells[_GONE, i] + 1.0 if gone and abs(x - before) <= MAINS * x else 0.0
            if cells[_GONE, i] >= _AGAIN and _live(x, rails):  # the usual was misread, or of another unit
                cells[:, i] = 0.0
                continue
            if told or (away > limit and not gone):
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
"""Share of the supplies below a meter that must show it, too; chosen: with two feeds half of them hang on the other."""


def findings(
    voltages: Voltages,
    braked: Collection[str],
    topology: Topology,
    time: int,
    name: str,
    at_work: Callable[[str], bool],
) -> Iterator[Finding]:
    """A ticket each; a page where many nodes have less than equipment bears; a suspect where the meter is likelier."""
    for each in voltages.departures(topology):
        if any(at_work(e) for e in (each.entity, *each.units)):
            continue
        lower = not each.value > each.usual
        level, why = _level(each, voltages.share_below(each.entity, lower, topology), _below(braked, each, topology))
        what = "is off" if not each.value > 0 else "sags" if lower else "is too high"
        read = each.value > 0 and each.usual > 0  # else its BMC alone says that it is out of range
        off = each.value / each.usual - 1 if read else 0.0
        size = f"{each.value:.4g} V, usual are {each.usual:.4g} V" if read else "its BMC calls it out of range"
        summary = f"{each.entity}: {_whose(each)} {what} ({size}){why}"
        compared = Comparison(each.value, each.usual, None, "own past", 0, off, "V") if read else None
        told = make_evidence(
            "over when the voltage is near its usual, or told to be in range",
            compared,
            readings=list(each.members[:64]),
            chassis=list(each.units[:64]),
            others_well=each.others,
            share=to_json(off),
        )
        signals = (each.signal, TOLD) if each.signal == OF_SUPPLIES else (each.signal,)
        yield Finding(time, each.since, each.entity, name, level, float(len(each.units)), summary, told, signals)


def below(braked: Collection[str], found: Sequence[Finding], topology: Topology) -> set[str]:
    """Nodes that the brake holds whose feed or rail pages: that tells why, and as loudly."""
    off = {e for f in found if f.level == "page" for e in (f.entity, *f.evidence["chassis"])}
    return {node for node in braked if off and not off.isdisjoint((node, *topology.ancestors(node)))}


def _below(braked: Collection[str], each: Departure, topology: Topology) -> int:
    """Nodes among those that the brake holds that hang on what is off."""
    around = {each.entity, *each.units}
    return sum(1 for node in braked if not around.isdisjoint((node, *topology.ancestors(node))))


def _whose(each: Departure) -> str:
    """What is off, and on how many."""
    many, chassis = len(each.members), len(each.units)
    if each.signal == OF_RAILS:
        rails = f"voltage of its rail {each.members[0]}" if many == 1 else f"voltage of {many} rails"
        return rails if chassis == 1 else f"{rails} in {chassis} chassis"
    if each.signal == OF_SUPPLIES:
        return "its input voltage" if many == 1 else f"input voltage of {many} supplies in {chassis} chassis"
    return "voltage"


def _level(each: Departure, share: float | None, braked: int) -> tuple[Level, str]:
    """And what speaks for it."""
    if each.signal == OF_RAILS and len(each.members) <= each.others:
        return "suspect", "; the other rails there are well: more likely its meter"  # a brake there is told by itself
    if each.signal in OF_FEEDS and share is not None and share < _CONFIRMS and not braked:
        return "suspect", f"; {share:.0%} of the supplies below show it: more likely its meter"
    if braked:
        return "page", f"; the power brake slows the GPUs of {braked} node{'s' * (braked > 1)} there"
    many = len(each.units) > 1 or (each.signal in OF_FEEDS and share is not None)
    if each.deep and many and each.signal != OF_RAILS:
        return "page", f" on {max(len(each.units), 1)} at once; equipment bears {DEEP:.0%} less for 10 s"
    return "ticket", ""
