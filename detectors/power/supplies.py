"""Lost power supplies: reported by their BMC, or without output while the others of their chassis carry the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.streams import Bools, Floats
from detectors.base.topology_index import TopologyIndex, per_device_topology
from detectors.telemetry.silence import shared_ancestors
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

SIGNALS = ("psu.status", "psu.input_status", "psu.output_power", "psu.capacity")
LOOKS = 2
"""Readings in a row that a supply must be bad, or good again; chosen: a busy BMC gives one wrong answer."""
NO_OUTPUT = 0.1
"""Share of its usual output below which a supply gives none; chosen: below what any load sharing leaves it."""
CARRIED = 0.7
"""Share of the chassis' usual power that the others must give: else the load is gone, not the supply; chosen."""
TOGETHER = 60 * SECOND
"""us between losses of one cause, or two usual readings of a supply if that is longer: two confirm a loss."""
LAPSES = 3600 * SECOND
"""us without a reading after which a loss ends: the chassis may be gone; chosen: many times the longest update of a
BMC's firmware."""
_KNOWN, _GAIN = 20, 0.02  # readings until an output is usual; memory of about 50 readings; chosen
_STATES = CATALOGUE["psu.status"].states
_OK, _CRITICAL, _UNAVAILABLE, _ABSENT = (_STATES.index(s) for s in ("ok", "critical", "unavailable", "absent"))
_SPARE = (_STATES.index("standby"), _STATES.index("disabled"))
"""States of a supply that is meant to give nothing: cold redundancy turns supplies off at low load and changes them in
turns (Redfish Status.State StandbySpare)."""
_FOLLOWS = 0.2  # gain of the usual time between readings; chosen
_LOST_INPUT = CATALOGUE["psu.input_status"].states.index("loss_of_input")
STATUS, INPUT, OUTPUT, REMOVED = 1, 2, 3, 4  # why a supply counts as lost; 0: it does not


@dataclass(frozen=True, slots=True)
class Lost:
    """Supplies of one chassis, or one of each chassis of a shared feed, that are lost now.

    why: of the first.   others: supplies left in the worst chassis.   overload: why those cannot carry it, else empty.
    """

    entity: str
    since: int
    supplies: tuple[str, ...]
    chassis: tuple[str, ...]
    why: int
    others: int
    overload: str


@dataclass(frozen=True, slots=True)
class Chassis:
    """Names of the chassis, the chassis of each supply, and the ancestors of the chassis."""

    names: list[str]
    of_supply: NDArray[np.intp]
    index: TopologyIndex


@dataclass
class Supplies(State):
    """State by supply.

    bad, well:    readings in a row.   why, since: of the loss.   status: state reported last, plus 1.   read_at: newest
    reading.   every: usual time between readings (us).   count, usual: readings learned from, and the usual output (W).
    output, capacity: newest (W).
    """

    bad: NDArray[np.int32] = memory(0, np.int32)
    well: NDArray[np.int32] = memory(0, np.int32)
    why: NDArray[np.int32] = memory(0, np.int32)
    count: NDArray[np.int32] = memory(0, np.int32)
    status: NDArray[np.int32] = memory(0, np.int32)
    usual: Floats = memory(0.0)
    output: Floats = memory(0.0)
    capacity: Floats = memory(0.0)
    since: NDArray[np.int64] = memory(0, np.int64)
    read_at: NDArray[np.int64] = memory(0, np.int64)
    every: Floats = memory(np.nan)
    _names: Sequence[str] = notes(tuple)

    def update(self, frame: Frame | None, time: int) -> None:
        """Adds the frame of class psu; None if there is none at this instant."""
        if self.bad.any():
            self._end_unread(time)
        if frame is None or not frame.values:
            return
        n = len(frame.entities)
        self.grow(n)
        self._names = frame.entities
        status, feed, output = frame["psu.status"], frame["psu.input_status"], frame["psu.output_power"]
        np.copyto(self.capacity[:n], frame["psu.capacity"], where=~np.isnan(frame["psu.capacity"]))
        read = ~(np.isnan(status) & np.isnan(feed) & np.isnan(output))
        self._follow_readings(read, frame.time)
        known = (status >= 0) & (status < len(_STATES))  # other values are not states
        self.status[:n][known] = status[known].astype(np.int32) + 1
        spare = np.isin(self.status[:n] - 1, _SPARE)
        why = np.zeros(n, np.int32)
        measured = ~np.isnan(output)
        usual = self.count[:n] >= _KNOWN
        why[measured & usual & ~spare & (output < NO_OUTPUT * self.usual[:n])] = OUTPUT
        why[(status == _CRITICAL) | (status == _UNAVAILABLE)] = STATUS
        why[(status == _ABSENT) & usual] = REMOVED
        why[feed == _LOST_INPUT] = INPUT
        np.copyto(self.output[:n], output, where=measured)
        learns = measured & (why == 0) & ~spare
        self.count[:n] += learns
        gain = np.maximum(_GAIN, 1 / np.maximum(self.count[:n], 1))
        self.usual[:n] += np.where(learns, gain * (output - self.usual[:n]), 0)
        if why.any() or self.bad.any():
            self._judge(why, read, frame.time)

    def _follow_readings(self, read: Bools, time: int) -> None:
        """Updates when supplies were read, and how often they usually are."""
        n = len(read)
        before, every = self.read_at[:n], self.every[:n]
        gap = np.where(read & (before > 0) & (before < time), time - before, np.nan)
        gap = np.where(gap > 3 * every, 3 * every, gap)  # a BMC that restarts does not make readings rare
        every[:] = np.where(np.isnan(every), gap, every + _FOLLOWS * np.nan_to_num(gap - every))
        before[read] = time

    def _end_unread(self, time: int) -> None:
        """Ends losses without a reading for long."""
        np.minimum(self.read_at, time, out=self.read_at)  # the clock may have been set back
        self.bad[time - self.read_at > LAPSES] = 0

    def _judge(self, why: NDArray[np.int32], read: Bools, time: int) -> None:
        n = len(why)
        bad, well = read & (why > 0), read & (why == 0)
        self.since[:n][bad & (self.bad[:n] == 0)] = time
        self.bad[:n][bad] += 1
        self.why[:n][bad] = why[bad]
        self.well[:n][bad] = 0
        self.well[:n][well] += 1
        over = well & ((self.well[:n] >= LOOKS) | (self.bad[:n] < LOOKS))
        self.bad[:n][over] = 0

    def find_lost(self, topology: Topology) -> list[Lost]:
        """Returns the losses that hold now; those of one moment on one shared feed are one."""
        if not (self.bad >= LOOKS).any() or not len(self._names):
            return []
        chassis = self._find_chassis(self._names, topology)
        bad = self.bad[: len(self._names)] > 0
        bad &= self._is_own_loss(bad, chassis)
        sure = bad & (self.bad[: len(bad)] >= LOOKS)
        found, reported = [], np.zeros(len(bad), bool)
        for i in np.flatnonzero(sure).tolist():
            if not reported[i]:
                entity, members = self._group(i, bad & ~reported, chassis)
                reported[members] = True
                found.append(self._describe(entity, members, chassis))
        return found

    def reports_ok(self, supply: str) -> bool:
        """Returns whether the BMC reports a supply as well."""
        return bool(self.status[list(self._names).index(supply)] == _OK + 1)

    @per_device_topology
    def _find_chassis(self, names: Sequence[str], topology: Topology) -> Chassis:
        above = [topology.parents.get(name, ()) for name in names]
        owners = [parents[0] if parents else name for parents, name in zip(above, names, strict=True)]
        found = list(dict.fromkeys(owners))
        number, index = {name: i for i, name in enumerate(found)}, TopologyIndex()
        index.update(found, topology)
        return Chassis(found, np.array([number[owner] for owner in owners], np.intp), index)

    def _is_own_loss(self, bad: Bools, chassis: Chassis) -> Bools:
        """Returns which losses of output are the supply's own: the others of its chassis carry its load."""
        n = len(bad)
        silent = bad & (self.why[:n] == OUTPUT)
        if not silent.any():
            return np.ones(n, bool)
        count = len(chassis.names)
        given = np.bincount(chassis.of_supply, self.output[:n], count)
        usual = np.bincount(chassis.of_supply, self.usual[:n], count)
        return np.asarray(~silent | (given >= CARRIED * usual)[chassis.of_supply])

    def _group(self, i: int, bad: Bools, chassis: Chassis) -> tuple[str, list[int]]:
        """Returns the entity that caused a loss, and all supplies that are lost with it."""
        since, of_supply = self.since[: len(bad)], chassis.of_supply
        window = np.fmax(TOGETHER, LOOKS * np.nan_to_num(self.every[: len(bad)]))
        same = bad & (np.abs(since - since[i]) <= window)
        hit = np.zeros(len(chassis.names), bool)
        hit[of_supply[same]] = True
        first = np.zeros(len(hit), bool)
        first[of_supply[i]] = True
        if hit.sum() > 1:
            found = shared_ancestors(first, hit, np.ones(len(hit), bool), chassis.index)
            if found:
                order = list(found)
                best = max(order, key=lambda e: (len(found[e]), -order.index(e)))
                return best, np.flatnonzero(same & np.isin(of_supply, found[best])).tolist()
        members = np.flatnonzero(same & (of_supply == of_supply[i])).tolist()
        return (self._names[i] if len(members) == 1 else chassis.names[of_supply[i]]), members

    def _describe(self, entity: str, members: list[int], chassis: Chassis) -> Lost:
        of_supply = chassis.of_supply
        hit = dict.fromkeys(int(of_supply[i]) for i in members)
        others = min(int(np.count_nonzero(of_supply == c)) for c in hit) - max(
            sum(1 for i in members if of_supply[i] == c) for c in hit
        )
        return Lost(
            entity,
            int(self.since[members].min()),
            tuple(self._names[i] for i in members),
            tuple(chassis.names[c] for c in hit),
            int(self.why[members[0]]),
            others,
            next((text for c in hit if (text := self._find_overload(c, chassis))), ""),
        )

    def _find_overload(self, number: int, chassis: Chassis) -> str:
        """Returns why the supplies left cannot carry a chassis; empty if they can, or that is not known."""
        n = len(chassis.of_supply)
        members = chassis.of_supply == number
        left = members & (self.bad[:n] == 0)
        if 2 * left.sum() < members.sum():
            return f"{left.sum()} of {members.sum()} supplies left"
        capacity, need = self.capacity[:n][left], float(self.usual[:n][members].sum())
        if left.any() and (capacity > 0).all() and capacity.sum() < need:
            return f"{left.sum()} left give {capacity.sum():.0f} W, usual load {need:.0f} W"
        return ""
