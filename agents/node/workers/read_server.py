"""The far end of a worker: waits to be asked, looks once with its collector, sends back what it found.

It is the same in a thread and in a process of its own. A request is one byte; an answer is its length and a pickled
Delivery, packed: columns of one type as one array, since an array costs more to pickle than what is in it. Both ends
are our own code on one machine, so pickle is as safe as the memory that it travels from.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading
from agents.node.batches import check

State = Literal["starting", "ok", "no data", "fault", "hung"]
LOOK, LOOK_AND_TELL = b"l", b"i"
"""Requests: one look; one look with the inventory, changed or not."""
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one look brought: readings, or why there are none. inventory: None where it is as it was. took: s."""

    state: State
    reason: str = ""
    readings: tuple[Reading, ...] = ()
    inventory: Mapping[str, Device] | None = None
    took: float = 0.0


def packed(found: Delivery) -> bytes:
    """A delivery as it travels."""
    readings = [(r.device_class, r.entities, _stacked(r.columns), r.events) for r in found.readings]
    return pickle.dumps((found.state, found.reason, readings, found.inventory, found.took), pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes | memoryview) -> Delivery:
    """The delivery that was packed."""
    state, reason, readings, inventory, took = pickle.loads(data)
    return Delivery(
        state,
        reason,
        tuple(
            Reading(
                device_class,
                entities,
                {n: row for names, rows in groups for n, row in zip(names, rows, strict=True)},
                events,
            )
            for device_class, entities, groups, events in readings
        ),
        inventory,
        took,
    )


def _stacked(columns: Mapping[str, NDArray[Any]]) -> list[tuple[tuple[str, ...], NDArray[Any]]]:
    """Columns by type: their names, and their values as the rows of one array."""
    groups: dict[np.dtype[Any], list[str]] = {}
    for name, values in columns.items():
        groups.setdefault(values.dtype, []).append(name)
    return [(tuple(names), np.array([columns[name] for name in names])) for names in groups.values()]


def serve(channel: socket.socket, collector: Collector, node: str) -> None:
    """Answers requests until the other end is closed, then closes the collector."""
    far_end = _FarEnd(collector, node)
    with channel:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # we were given up meanwhile
            while request := channel.recv(1):
                answer = packed(far_end.look(request == LOOK_AND_TELL))
                channel.sendall(LENGTH.pack(len(answer)) + answer)
        collector.close()


class _FarEnd:
    """One collector and what its last look found."""

    def __init__(self, collector: Collector, node: str) -> None:
        self._collector, self._node = collector, node
        self._opened = False
        self._entities: dict[str, frozenset[str]] = {}

    def look(self, tell: bool) -> Delivery:
        began = time.monotonic()
        try:
            if not self._opened:
                self._collector.open(self._node)
                self._opened, self._entities = True, {}
            readings = self._collector.read()
            inventory = self._inventory(readings, tell)
            for reading in readings:
                check(reading, inventory)
            return Delivery("ok", "", readings, inventory, time.monotonic() - began)
        except NoData as absent:
            return self._shut("no data", str(absent), began)
        except Exception as fault:  # noqa: BLE001 - whatever a driver does must not end the agent; it is told and counted
            return self._shut("fault", f"{type(fault).__name__}: {fault}", began)

    def _inventory(self, readings: tuple[Reading, ...], tell: bool) -> Mapping[str, Device] | None:
        """What there is, if that was asked for or differs from the last look at the same classes."""
        found: dict[str, frozenset[str]] = {}
        for reading in readings:
            found[reading.device_class] = found.get(reading.device_class, frozenset()) | frozenset(reading.entities)
        same = self._collector.partial or all(self._entities.get(c) == entities for c, entities in found.items())
        first, self._entities = not self._entities, self._entities | found
        renewed = self._collector.renewed()
        return None if same and not first and not tell and not renewed else dict(self._collector.inventory())

    def _shut(self, state: State, reason: str, began: float) -> Delivery:
        """Leaves the source so that the next look opens it anew."""
        self._opened = False
        try:
            self._collector.close()
        except Exception as fault:  # noqa: BLE001 - as above
            reason = f"{reason}; closing it: {type(fault).__name__}: {fault}"
        return Delivery(state, reason, took=time.monotonic() - began)
