"""Framer: rows of any order and any commit boundary -> aligned frames on an event-time grid, closed by a watermark.

A cell of the grid is [k * step, (k + 1) * step). It is closed when the watermark reaches its end; rows that come
later are counted, not judged. Of several samples of one device in a cell the newest holds. The time of an instant is
that of its newest sample or event.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.records import Event, Frame, Rows
from pipeline.signals import CATALOGUE, CLASSES, Signal
from pipeline.topology import Topology, kind_of

Floats = NDArray[np.float64]
_CLASS_OF_KIND = {kind: device_class for device_class, kind in CLASSES.items()}


def class_of(entity: str) -> str:
    """Device class whose frames carry the events of `entity`: that of its kind, else the kind itself."""
    kind = kind_of(entity)
    return _CLASS_OF_KIND.get(kind, kind)


@dataclass(frozen=True, slots=True)
class Instant:
    """All frames of one cell, by device class. `end` is the cell's end: state after it covers everything before it."""

    time: int
    end: int
    frames: Mapping[str, Frame]


class Framer:
    """Buffers what the watermark has not passed; at most `lateness` plus what a backlog holds back.

    step:     length of a cell (us).
    names:    device class -> names of its devices by id; grows, never changes.
    start:    cells before it are closed already (a restart goes on where the snapshot was made).
    """

    def __init__(
        self,
        step: int,
        topology: Topology,
        names: Callable[[str], Sequence[str]],
        catalogue: Mapping[str, Signal] = CATALOGUE,
        start: int | None = None,
    ) -> None:
        self.step, self.topology, self.catalogue = step, topology, catalogue
        self._names = names
        self._rows: dict[str, list[Rows]] = defaultdict(list)
        self._events: list[Event] = []
        self.closed = -(1 << 62) if start is None else start // step * step
        self.late: Counter[str] = Counter()

    def add(self, rows: Rows) -> None:
        """Takes rows of one class in any order."""
        fresh = rows.time >= self.closed
        late = len(rows.time) - int(np.count_nonzero(fresh))
        if late:
            self.late[rows.device_class] += late
            rows = select(rows, fresh)
        if len(rows.time):
            self._rows[rows.device_class].append(rows)

    def add_events(self, events: Iterable[Event]) -> None:
        """Takes events in any order."""
        for event in events:
            if event.time < self.closed:
                self.late["events"] += 1
            else:
                self._events.append(event)

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

    def _instant(self, cell: int, ready: Mapping[str, _Planes], events: list[Event]) -> Instant:
        events.sort(key=lambda e: (e.time, e.entity, e.kind))
        here = {c: planes for c, planes in ready.items() if cell in planes.index}
        times = [int(p.newest[p.index[cell]]) for p in here.values()] + [e.time for e in events]
        time = max(times)
        by_class: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            by_class[class_of(event.entity)].append(event)
        frames = {}
        for device_class in sorted({*here, *by_class}):
            found = here.get(device_class)
            row = found.index[cell] if found else 0
            values = {name: plane[row] for name, plane in found.values.items()} if found else {}
            names = self._names(device_class)[: found.width] if found else tuple(self._names(device_class))
            mine = tuple(by_class.get(device_class, ()))
            frames[device_class] = Frame(time, device_class, names, values, self.topology, mine)
        return Instant(time, (cell + 1) * self.step, frames)

    def _take(self, device_class: str, end: int) -> _Planes | None:
        """Rows before `end` of one class as planes; what is later stays."""
        chunks = self._rows.pop(device_class)
        now: list[Rows] = []
        for rows in chunks:
            before = rows.time < end
            if before.all():
                now.append(rows)
                continue
            self._rows[device_class].append(select(rows, ~before))
            if before.any():
                now.append(select(rows, before))
        if not now:
            return None
        return _planes(now, self.step, len(self._names(device_class)), self.catalogue)

    def _take_events(self, end: int) -> dict[int, list[Event]]:
        ready: dict[int, list[Event]] = defaultdict(list)
        later: list[Event] = []
        for event in self._events:
            if event.time < end:
                ready[event.time // self.step].append(event)
            else:
                later.append(event)
        self._events = later
        return ready


@dataclass(frozen=True, slots=True)
class _Planes:
    """One class over several cells. values: signal -> (cells, devices), read-only; newest: (cells,) sample time."""

    index: Mapping[int, int]
    newest: NDArray[np.int64]
    values: Mapping[str, Floats]
    width: int


def _planes(chunks: Sequence[Rows], step: int, devices: int, catalogue: Mapping[str, Signal]) -> _Planes:
    time = np.concatenate([rows.time for rows in chunks])
    order = np.argsort(time, kind="stable")
    cells, place = np.unique(time // step, return_inverse=True)
    flat = place * devices + np.concatenate([rows.device for rows in chunks])
    newest = np.full(len(cells), np.iinfo(np.int64).min)
    np.maximum.at(newest, place, time)
    values = {}
    for name in dict.fromkeys(name for rows in chunks for name in rows.columns):
        column = np.concatenate([_measured(rows, name, catalogue) for rows in chunks])[order]
        seen = ~np.isnan(column)
        plane = np.full(len(cells) * devices, np.nan)
        plane[flat[order][seen]] = column[seen]
        plane.flags.writeable = False
        values[name] = plane.reshape(len(cells), devices)
    return _Planes({int(c): i for i, c in enumerate(cells)}, newest, values, devices)


def _measured(rows: Rows, name: str, catalogue: Mapping[str, Signal]) -> Floats:
    """Column as float64; missing values, and those outside the signal's valid range, are NaN."""
    column = rows.columns.get(name)
    if column is None:
        return np.full(len(rows.time), np.nan)
    out = as_float(column)
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


def select(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """The rows where `mask` holds."""
    columns = {name: column[mask] for name, column in rows.columns.items()}
    return Rows(rows.device_class, rows.time[mask], rows.device[mask], columns)
