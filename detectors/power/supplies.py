"""Power supplies that are lost: told by their BMC, or giving nothing while the others carry their share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.topology_index import TopologyIndex
from detectors.telemetry.silence import shared_ancestors
from pipeline.model.records import SECOND, Frame
from pipeline.model.signals import CATALOGUE
from pipeline.model.topology import Topology

SIGNALS = ("psu.status", "psu.input_status", "psu.output_power", "psu.capacity")
LOOKS = 2
"""Readings in a row that a supply must be bad, or well again; chosen: a BMC that is busy gives one odd answer."""
NOTHING = 0.1
"""Share of its usual output below which a supply gives nothing; chosen: below what any load sharing leaves it."""
CARRIED = 0.7
"""Share of the chassis' power before that the others must give: else the load is gone, not the supply; chosen."""
TOGETHER = 60 * SECOND
"""Losses so far apart have one cause: BMCs are read each 30 s, twice for a loss; chosen."""
LAPSES = 3600 * SECOND
"""A loss of which no BMC told anything for so long is not known any more: the chassis may be gone; chosen: the longest
that a BMC takes to come back from an update of its firmware, many times over."""
_KNOWN, _GAIN = 20, 0.02  # readings until an output is usual; memory of about 50 readings; chosen
_OK, _CRITICAL, _UNAVAILABLE, _ABSENT = (
    CATALOGUE["psu.status"].states.index(s) for s in ("ok", "critical", "unavailable", "absent")
)
_STATES = len(CATALOGUE["psu.status"].states)
_LOST_INPUT = CATALOGUE["psu.input_status"].states.index("loss_of_input")
STATUS, INPUT, OUTPUT, PULLED = 1, 2, 3, 4  # why a supply counts as lost; 0: it does not


@dataclass(frozen=True, slots=True)
class Lost:
    """Supplies of one chassis, or one of each chassis of a shared feed, that are lost now."""

    entity: str
    since: int
    supplies: tuple[str, ...]
    chassis: tuple[str, ...]
    why: int
    others: int
    overload: str


class Supplies:
    """Per supply why it counts as lost and since when, and its usual output."""

    def __init__(self) -> None:
        self.cells: dict[str, NDArray[Any]] = {
            **{name: np.zeros(0, np.int32) for name in ("bad", "well", "why", "count", "status")},
            **{name: np.zeros(0) for name in ("usual", "output", "capacity")},
            **{name: np.zeros(0, np.int64) for name in ("since", "heard")},
        }
        self._names: Sequence[str] = ()
        self._key: tuple[int, int, int] = (0, -1, 0)
        self._parent = np.zeros(0, np.intp)
        self._parents: list[str] = []
        self._homes = TopologyIndex()

    def look(self, frame: Frame | None, time: int) -> None:
        """Takes the frame of class psu, None if there is none at this instant."""
        if self.cells["bad"].any():
            self._lapse(time)
        if frame is None or not frame.values:
            return
        self._grow(len(frame.entities))
        self._names, c, n = frame.entities, self.cells, len(frame.entities)
        status, feed, output = frame["psu.status"], frame["psu.input_status"], frame["psu.output_power"]
        np.copyto(c["capacity"][:n], frame["psu.capacity"], where=~np.isnan(frame["psu.capacity"]))
        spoke = ~(np.isnan(status) & np.isnan(feed) & np.isnan(output))
        why = np.zeros(n, np.int32)
        measured = ~np.isnan(output)
        usual = c["count"][:n] >= _KNOWN
        why[measured & usual & (output < NOTHING * c["usual"][:n])] = OUTPUT
        why[(status == _CRITICAL) | (status == _UNAVAILABLE)] = STATUS
        why[(status == _ABSENT) & usual] = PULLED
        why[feed == _LOST_INPUT] = INPUT
        named = (status >= 0) & (status < _STATES)  # what is no state is no whole number either, as a rule
        c["status"][:n][named] = status[named].astype(np.int32) + 1
        np.copyto(c["output"][:n], output, where=measured)
        learn = measured & (why == 0)
        c["count"][:n] += learn
        gain = np.maximum(_GAIN, 1 / np.maximum(c["count"][:n], 1))
        c["usual"][:n] += np.where(learn, gain * (output - c["usual"][:n]), 0)
        if why.any() or c["bad"].any():
            self._judge(why, spoke, frame.time)

    def _lapse(self, time: int) -> None:
        """Forgets the losses of which nothing was heard for long."""
        heard = self.cells["heard"]
        np.minimum(heard, time, out=heard)  # a time that stepped back is no future
        self.cells["bad"][time - heard > LAPSES] = 0

    def _judge(self, why: NDArray[np.int32], spoke: NDArray[np.bool_], time: int) -> None:
        c, n = self.cells, len(why)
        bad, well = spoke & (why > 0), spoke & (why == 0)
        fresh = bad & (c["bad"][:n] == 0)
        c["since"][:n][fresh] = time
        c["heard"][:n][spoke] = time
        c["bad"][:n][bad] += 1
        c["why"][:n][bad] = why[bad]
        c["well"][:n][bad] = 0
        c["well"][:n][well] += 1
        over = well & ((c["well"][:n] >= LOOKS) | (c["bad"][:n] < LOOKS))
        c["bad"][:n][over] = 0

    def lost(self, topology: Topology, time: int) -> list[Lost]:
        """Losses that hold now; those of one moment on one shared feed are one."""
        c = self.cells
        if not (c["bad"] >= LOOKS).any() or not len(self._names):
            return []
        self._renew(topology)
        bad = c["bad"][: len(self._names)] > 0
        bad &= self._carried(bad)
        sure = bad & (c["bad"][: len(bad)] >= LOOKS)
        out, told = [], np.zeros(len(bad), bool)
        for i in np.flatnonzero(sure).tolist():
            if not told[i]:
                entity, mine = self._with(i, bad & ~told)
                told[mine] = True
                out.append(self._told(entity, mine))
        return out

    def _carried(self, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which losses of output are the supply's own: the others of its chassis carry what it gave."""
        c, n = self.cells, len(bad)
        silent = bad & (c["why"][:n] == OUTPUT)
        if not silent.any():
            return np.ones(n, bool)
        count = len(self._parents)
        given = np.bincount(self._parent, c["output"][:n], count)
        usual = np.bincount(self._parent, c["usual"][:n], count)
        carried: NDArray[np.bool_] = ~silent | (given >= CARRIED * usual)[self._parent]
        return carried

    def _with(self, i: int, bad: NDArray[np.bool_]) -> tuple[str, list[int]]:
        """What is blamed for a loss, and all that are lost with it."""
        since = self.cells["since"][: len(bad)]
        same = bad & (np.abs(since - since[i]) <= TOGETHER)
        hit = np.zeros(len(self._parents), bool)
        hit[self._parent[same]] = True
        first = np.zeros(len(hit), bool)
        first[self._parent[i]] = True
        if hit.sum() > 1:
            found = shared_ancestors(first, hit, np.ones(len(hit), bool), self._homes)
            if found:
                order = list(found)
                best = max(order, key=lambda e: (len(found[e]), -order.index(e)))
                return best, np.flatnonzero(same & np.isin(self._parent, found[best])).tolist()
        mine = np.flatnonzero(same & (self._parent == self._parent[i])).tolist()
        return (self._names[i] if len(mine) == 1 else self._parents[self._parent[i]]), mine

    def _told(self, entity: str, mine: list[int]) -> Lost:
        c = self.cells
        chassis = dict.fromkeys(int(self._parent[i]) for i in mine)
        others = min(int(np.count_nonzero(self._parent == p)) for p in chassis) - max(
            sum(1 for i in mine if self._parent[i] == p) for p in chassis
        )
        overload = next((text for p in chassis if (text := self._overload(p))), "")
        names = tuple(self._names[i] for i in mine)
        why = int(c["why"][mine[0]])
        return Lost(
            entity, int(c["since"][mine].min()), names, tuple(self._parents[p] for p in chassis), why, others, overload
        )

    def _overload(self, parent: int) -> str:
        """Why the supplies that are left cannot carry the chassis; empty if they can, or nobody knows."""
        c, n = self.cells, len(self._parent)
        mine = self._parent == parent
        left = mine & (c["bad"][:n] == 0)
        if 2 * left.sum() < mine.sum():
            return f"{left.sum()} of {mine.sum()} supplies are left"
        capacity, need = c["capacity"][:n][left], float(c["usual"][:n][mine].sum())
        if left.any() and (capacity > 0).all() and capacity.sum() < need:
            return f"the {left.sum()} that are left can give {capacity.sum():.0f} W of the usual {need:.0f} W"
        return ""

    def explicit(self, supply: str) -> bool:
        """Whether the BMC says that a supply is well."""
        return bool(self.cells["status"][list(self._names).index(supply)] == _OK + 1)

    def _renew(self, topology: Topology) -> None:
        key = (id(topology), topology.version, len(self._names))
        if key != self._key:
            self._key = key
            above = [topology.parents.get(name, ()) for name in self._names]
            owners = [parents[0] if parents else name for parents, name in zip(above, self._names, strict=True)]
            self._parents = list(dict.fromkeys(owners))
            place = {name: i for i, name in enumerate(self._parents)}
            self._parent = np.array([place[owner] for owner in owners], np.intp)
            self._homes.update(self._parents, topology)

    def _grow(self, size: int) -> None:
        more = size - len(self.cells["bad"])
        if more > 0:
            self.cells = {name: np.append(a, np.zeros(more, a.dtype)) for name, a in self.cells.items()}

    def snapshot(self) -> dict[str, Any]:
        return {"cells": {name: a.copy() for name, a in self.cells.items()}, "names": list(self._names)}

    def restore(self, state: Mapping[str, Any]) -> None:
        saved, size = state["cells"], len(state["cells"]["bad"])
        self.cells = {name: saved.get(name, np.zeros(size, a.dtype)) for name, a in self.cells.items()}
        self._names, self._key = tuple(state["names"]), (0, -1, 0)
