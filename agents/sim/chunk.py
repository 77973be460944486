"""Chunk and Table: output of a simulated fleet, as ticks of all devices or as rows of one class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Event


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one class that exist, in order of time, then device: time (rows,) us, device (rows,), columns (rows,)."""

    time: NDArray[np.int64]
    device: NDArray[np.int32]
    columns: Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive ticks of the whole fleet.

    times:    (ticks,) UTC microseconds.
    entities: device class -> names of its devices; of ranks those that exist in these ticks.
    columns:  device class -> signal -> (ticks, devices) in wire type.
    senders:  device class -> (devices,) number of the sender that reports each.
    present:  device class -> (ticks, devices) rows that exist.
    late:     (ticks, senders) us added to the time of a sender's samples; less than a tick.
    silent:   (ticks, senders) whether nothing was sent: these rows and events do not exist.
    events:   (sender, event) in order of time, up to the chunk's last tick.
    """

    times: NDArray[np.int64]
    entities: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, Mapping[str, NDArray[Any]]]
    senders: Mapping[str, NDArray[np.intp]]
    present: Mapping[str, NDArray[np.bool_]]
    late: NDArray[np.int64]
    silent: NDArray[np.bool_]
    events: tuple[tuple[int, Event], ...]

    def between(self, begin: int, end: int, since: int) -> Chunk:
        """Returns ticks [begin, end) with the events later than `since`."""
        until = int(self.times[end - 1])
        columns = {c: {n: v[begin:end] for n, v in block.items()} for c, block in self.columns.items()}
        present = {c: rows[begin:end] for c, rows in self.present.items()}
        events = tuple((s, e) for s, e in self.events if since < e.time <= until)
        late, silent = self.late[begin:end], self.silent[begin:end]
        return Chunk(self.times[begin:end], self.entities, columns, self.senders, present, late, silent, events)

    def sample_times(self, device_class: str) -> NDArray[np.int64]:
        """Returns the (ticks, devices) time of each sample."""
        return self.times[:, None] + self.late[:, self.senders[device_class]]

    def table(self, device_class: str) -> Table:
        """Returns the rows of one class."""
        time, present = self.sample_times(device_class), self.present[device_class]
        device = np.broadcast_to(np.arange(time.shape[1], dtype=np.int32), time.shape)
        columns = self.columns[device_class]
        if not self.late.any() and present.all():
            return Table(time.ravel(), device.ravel(), {n: v.reshape(-1) for n, v in columns.items()})
        keep = np.flatnonzero(present)
        time, device = time.ravel()[keep], device.ravel()[keep]
        if self.late.any():
            order = np.lexsort((device, time))
            keep, time, device = keep[order], time[order], device[order]
        return Table(time, device, {n: v.reshape(-1)[keep] for n, v in columns.items()})
