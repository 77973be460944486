"""Framer: builds aligned frames on an event-time grid from rows in any order; a watermark closes the frames.

A cell of the grid is [k * step, (k + 1) * step). It closes when the watermark reaches its end; rows that come later are
counted, not evaluated. A late event is evaluated in the first open cell. Of several samples of a device in a cell, the
newest counts. The time of an instant is that of its newest sample or event.
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
    """Buffers rows that the watermark has not passed: at most the lateness plus a backlog.

    step:     length of a cell (us).
    names:    device class -> names of its devices by slot; grows, never changes.
    start:    cells before it are closed (a restart continues at the snapshot).
    signals:  signals to include in frames; of others only the presence of a sample is recorded. None: all.
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
        self._events: list[tuple[int, Event]] = []  # with the time of the cell that evaluates it
        self.closed = -(1 << 62) if start is None else start // step * step
        self.late: Counter[str] = Counter()

    def add_rows(self, rows: Rows) -> None:
        """Adds rows of one class, in any order."""
        fresh = rows.time >= self.closed
        late = len(rows.time) - int(np.count_nonzero(fresh))
        if late:
            self.late[rows.device_class] += late
            rows = select_rows(rows, fresh)
        if len(rows.time):
            self._rows[rows.device_class].append(rows)

    def add_events(self, events: Iterable[Event]) -> None:
        """Adds events in any order; a late one is counted, and evaluated in the first open cell."""
        for event in events:
            if event.time < self.closed:
                self.late["events"] += 1
            self._events.append((max(event.time, self.closed), event))

    def add_dated_events(self, events: Iterable[tuple[int, Event]]) -> None:
        """Adds stored events with the time of their cell, so that a restart evaluates them in the same cell."""
        self._events += events

    def advance(self, watermark: int) -> Iterator[Instant]:
        """Closes every cell that ends at or before `watermark`, oldest first; yields no instant for empty cells."""
        end = watermark // self.step * self.step
        if end <= self.closed:
            return
        ready = {c: planes for c in sorted(self._rows) if (planes := self._close_rows(c, end)) is not None}
        events = self._close_events(end)
        self.closed = end
        for cell in sorted({*events, *(c for planes in ready.values() for c in planes.index)}):
            yield self._build_instant(cell, ready, events.get(cell, []))

    def _build_instant(self, cell: int, ready: Mapping[str, _Planes], events: list[tuple[int, Event]]) -> Instant:
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

    def _close_rows(self, device_class: str, end: int) -> _Planes | None:
        """Removes the rows of a class before `end`, as planes; None if there are none."""
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
        return self._build_planes(now, len(self._names(device_class)))

    def _build_planes(self, chunks: Sequence[Rows], devices: int) -> _Planes:
        """Rows of one class on the grid. Each signal uses only the rows that have it."""
        time = np.concatenate([rows.time for rows in chunks])
        cells, place = np.unique(time // self.step, return_inverse=True)
        flat = place * devices + np.concatenate([rows.device for rows in chunks])
        newest = np.full(len(cells), np.iinfo(np.int64).min)
        np.maximum.at(newest, place, time)
        seen = np.zeros(len(cells) * devices, bool)
        seen[flat[np.concatenate([_has_sample(rows, self.catalogue) for rows in chunks])]] = True
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
            column = np.concatenate([_read_column(chunks[i], name, self.catalogue) for i in having])[order]
            there = ~np.isnan(column)
            plane = np.full(len(cells) * devices, np.nan)
            plane[where[there]] = column[there]
            plane.flags.writeable = False
            values[name] = plane.reshape(len(cells), devices)
        index = {int(c): i for i, c in enumerate(cells)}
        return _Planes(index, newest, values, seen.reshape(len(cells), devices), devices)

    def _close_events(self, end: int) -> dict[int, list[tuple[int, Event]]]:
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

    values: signal -> (cells, devices), read-only.  seen: (cells, devices), had a sample.  newest: (cells,) newest time.
    """

    index: Mapping[int, int]
    newest: NDArray[np.int64]
    values: Mapping[str, Floats]
    seen: Bools
    width: int


def _has_sample(rows: Rows, catalogue: Mapping[str, Signal]) -> Bools:
    """(R,) whether a row has any value; usually the first signal decides for all rows."""
    out = np.zeros(len(rows.time), bool)
    for name in rows.columns:
        out |= ~np.isnan(_read_column(rows, name, catalogue))
        if out.all():
            break
    return out


def _read_column(rows: Rows, name: str, catalogue: Mapping[str, Signal]) -> Floats:
    """A column as float64; missing values and those outside the valid range are NaN."""
    out = to_float(rows.columns[name])
    signal = catalogue.get(name)
    if signal is not None and signal.valid != (-np.inf, np.inf):
        low, high = signal.valid
        out[(out < low) | (out > high)] = np.nan
    return out


def to_float(column: NDArray[Any]) -> Floats:
    """A new float64 array; the highest value of an unsigned type means missing and becomes NaN."""
    out = column.astype(np.float64)
    if column.dtype.kind == "u":
        out[column == np.iinfo(column.dtype).max] = np.nan
    return out
