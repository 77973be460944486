"""Framer: rows of any order and any commit boundary -> aligned frames on an event-time grid, closed by a watermark.

A cell of the grid is [k * step, (k + 1) * step). It is closed when the watermark reaches its end; rows that come
later are counted, not judged. An event that comes later is judged in the first open cell. Of several samples of one
device in a cell the newest holds. The time of an instant is that of its newest sample or event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Event, Frame, Instant, Rows, select_rows
from pipeline.model.signals import CATALOGUE, Signal, class_of_entity
from pipeline.model.topology import Topology

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Framer:
    """Buffers what the watermark has not passed; at most `lateness` plus what a backlog holds back.

    step:     length of a cell (us).
    names:    device class -> names of its devices by id; grows, never changes.
    start:    cells before it are closed already (a restart goes on where the snapshot was made).
    signals:  those that frames are made of; of others it is only told who had one. None: all.
    """

    def __init__(
        self,
        step: int,
        topology: Topology,
        names: Callable[[str], Sequence[str]],
        catalogue: Mapping[str, Signal] = CATALOGUE,
        start: int | None = None,
        signals: Collection[str] | None = None,
    ) -> None:
        self.step, self.topology, self.catalogue = step, topology, catalogue
        self._names, self._signals = names, signals
        self._classes = {
            catalogue[name].device_class if name in catalogue else name.split(".", 1)[0] for name in signals or ()
        }
        self._rows: dict[str, list[Rows]] = defaultdict(list)
        self._events: list[tuple[int, Event]] = []  # with the time at which each is judged
        self.closed = -(1 << 62) if start is None else start // step * step
        self.late: Counter[str] = Counter()

    def add(self, rows: Rows) -> None:
        """Takes rows of one class in any order."""
        fresh = rows.time >= self.closed
        late = len(rows.time) - int(np.count_nonzero(fresh))
        if late:
            self.late[rows.device_class] += late
            rows = select_rows(rows, fresh)
        if len(rows.time):
            self._rows[rows.device_class].append(rows)

    def add_events(self, events: Iterable[Event]) -> None:
        """Takes events in any order; one that is late is judged in the first open cell, and counted."""
        for event in events:
            if event.time < self.closed:
                self.late["events"] += 1
            self._events.append((max(event.time, self.closed), event))

    def place_events(self, events: Iterable[tuple[int, Event]]) -> None:
        """Takes events of the store with the time at which each was judged: a restart judges them in the same cell."""
        self._events += events

    def advance(self, watermark: int) -> Iterator[Instant]:
        """Closes every cell that ends at or before `watermark`, oldest first; empty cells give no instant."""
        end = watermark // self.step * self.step
        if end <= self.closed:
            return
        ready = {c: planes for c in sorted(self._rows) if (planes := self._take(c, end)) is not None}
        events = self._take_events(end)
        self.closed = end
        for cell in sorted({*events, *(c for planes in ready.values() for c in planes.index)}):
            yield self._instant(cell, ready, events.get(cell, []))

    def _instant(self, cell: int, ready: Mapping[str, _Planes], events: list[tuple[int, Event]]) -> Instant:
        events.sort(key=lambda placed: (placed[1].time, placed[1].entity, placed[1].kind))
        here = {c: planes for c, planes in ready.items() if cell in planes.index}
        time = max([int(p.newest[p.index[cell]]) for p in here.values()] + [at for at, _ in events])
        by_class: dict[str, list[Event]] = defaultdict(list)
        for _, event in events:
            by_class[class_of_entity(event.entity)].append(event)
        frames = {}
        framed = here if self._signals is None else {c for c in here if c in self._classes}
        for device_class in sorted({*framed, *by_class}):
            found = here.get(device_class)
            row = found.index[cell] if found else 0
            values = {name: plane[row] for name, plane in found.values.items()} if found else {}
            names = self._names(device_class)[: found.width] if found else tuple(self._names(device_class))
            mine = tuple(by_class.get(device_class, ()))
            frames[device_class] = Frame(time, device_class, names, values, self.topology, mine)
        seen = {c: (self._names(c), planes.seen[planes.index[cell]]) for c, planes in here.items()}
        return Instant(time, (cell + 1) * self.step, frames, seen)

    def _take(self, device_class: str, end: int) -> _Planes | None:
        """Rows before `end` of one class as planes; what is later stays."""
        chunks = self._rows.pop(device_class)
        now: list[Rows] = []
        for rows in chunks:
            before = rows.time < end
            if before.all():
                now.append(rows)
                continue
            self._rows[device_class].append(select_rows(rows, ~before))
            if before.any():
                now.append(select_rows(rows, before))
        if not now:
            return None
        return self._planes(now, len(self._names(device_class)))

    def _planes(self, chunks: Sequence[Rows], devices: int) -> _Planes:
        """Rows of one class on the grid; each signal is worked on with the rows that have it."""
        time = np.concatenate([rows.time for rows in chunks])
        cells, place = np.unique(time // self.step, return_inverse=True)
        flat = place * devices + np.concatenate([rows.device for rows in chunks])
        newest = np.full(len(cells), np.iinfo(np.int64).min)
        np.maximum.at(newest, place, time)
        seen = np.zeros(len(cells) * devices, bool)
        seen[flat[np.concatenate([_with_sample(rows, self.catalogue) for rows in chunks])]] = True
        starts = np.cumsum([0, *(len(rows.time) for rows in chunks)]).tolist()
        orders: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        values = {}
        for name in dict.fromkeys(name for rows in chunks for name in rows.columns):
            if self._signals is not None and name not in self._signals:
                continue
            having = tuple(i for i, rows in enumerate(chunks) if name in rows.columns)
            if having not in orders:
                mine = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in having])
                order = np.argsort(time[mine], kind="stable")
                orders[having] = order, flat[mine[order]]
            order, where = orders[having]
            column = np.concatenate([_measured(chunks[i], name, self.catalogue) for i in having])[order]
            there = ~np.isnan(column)
            plane = np.full(len(cells) * devices, np.nan)
            plane[where[there]] = column[there]
            plane.flags.writeable = False
            values[name] = plane.reshape(len(cells), devices)
        index = {int(c): i for i, c in enumerate(cells)}
        return _Planes(index, newest, values, seen.reshape(len(cells), devices), devices)

    def _take_events(self, end: int) -> dict[int, list[tuple[int, Event]]]:
        ready: dict[int, list[tuple[int, Event]]] = defaultdict(list)
        later: list[tuple[int, Event]] = []
        for at, event in self._events:
            if at < end:
                ready[at // self.step].append((at, event))
            else:
                later.append((at, event))
        self._events = later
        return ready


@dataclass(frozen=True, slots=True)
class _Planes:
    """One class over several cells.

    values: signal -> (cells, devices), read-only.  seen: (cells, devices), who had a sample.  newest: (cells,) when.
    """

    index: Mapping[int, int]
    newest: NDArray[np.int64]
    values: Mapping[str, Floats]
    seen: Bools
    width: int


def _with_sample(rows: Rows, catalogue: Mapping[str, Signal]) -> Bools:
    """(R,) whether anything was measured; usually the first signal tells it of all rows."""
    out = np.zeros(len(rows.time), bool)
    for name in rows.columns:
        out |= ~np.isnan(_measured(rows, name, catalogue))
        if out.all():
            break
    return out


def _measured(rows: Rows, name: str, catalogue: Mapping[str, Signal]) -> Floats:
    """Column as float64; missing values, and those outside the signal's valid range, are NaN."""
    out = as_float(rows.columns[name])
    signal = catalogue.get(name)
    if signal is not None and signal.valid != (-np.inf, np.inf):
        low, high = signal.valid
        out[(out < low) | (out > high)] = np.nan
    return out


def as_float(column: NDArray[Any]) -> Floats:
    """A new float64 array; the highest value of an unsigned type means "not measured" and becomes NaN."""
    out = column.astype(np.float64)
    if column.dtype.kind == "u":
        out[column == np.iinfo(column.dtype).max] = np.nan
    return out
