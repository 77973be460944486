"""The server side of a worker: waits for requests, reads its collector once per request, sends back the result.

It is the same in a thread and in a process. A request is one byte. A response is its length and a packed, pickled
ReadResult: columns of one type travel as one array, because pickling an array costs more than its content. Both sides
are our own code on one machine, so pickle is as safe as the memory that it comes from.
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
from agents.node.batches import check_reading

State = Literal["starting", "ok", "no data", "fault", "hung"]
READ, READ_WITH_INVENTORY = b"l", b"i"
"""Requests: one read; one read with the inventory, changed or not."""
LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of one read: readings, or the reason why there are none.

    inventory: None if unchanged.  took: duration of the read in s.
    """

    state: State
    reason: str = ""
    readings: tuple[Reading, ...] = ()
    inventory: Mapping[str, Device] | None = None
    took: float = 0.0


def pack_result(result: ReadResult) -> bytes:
    """Encodes a result for the socket."""
    readings = [(r.device_class, r.entities, _stack_columns(r.columns), r.events) for r in result.readings]
    return pickle.dumps((result.state, result.reason, readings, result.inventory, result.took), pickle.HIGHEST_PROTOCOL)


def unpack_result(data: bytes | memoryview) -> ReadResult:
    """Decodes a packed result."""
    state, reason, readings, inventory, took = pickle.loads(data)
    return ReadResult(
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


def _stack_columns(columns: Mapping[str, NDArray[Any]]) -> list[tuple[tuple[str, ...], NDArray[Any]]]:
    """Groups columns by type: their names, and their values as the rows of one array."""
    groups: dict[np.dtype[Any], list[str]] = {}
    for name, values in columns.items():
        groups.setdefault(values.dtype, []).append(name)
    return [(tuple(names), np.array([columns[name] for name in names])) for names in groups.values()]


def serve_reads(channel: socket.socket, collector: Collector, node: str) -> None:
    """Answers requests until the other end is closed, then closes the collector."""
    server = _ReadServer(collector, node)
    with channel:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the agent abandoned this worker
            while request := channel.recv(1):
                answer = pack_result(server.read(request == READ_WITH_INVENTORY))
                channel.sendall(LENGTH.pack(len(answer)) + answer)
        collector.close()


class _ReadServer:
    """One collector, and the entities of its last read."""

    def __init__(self, collector: Collector, node: str) -> None:
        self._collector, self._node = collector, node
        self._opened = False
        self._entities: dict[str, frozenset[str]] = {}

    def read(self, with_inventory: bool) -> ReadResult:
        """Opens the collector if needed and reads it once."""
        began = time.monotonic()
        try:
            if not self._opened:
                self._collector.open(self._node)
                self._opened, self._entities = True, {}
            readings = self._collector.read()
            inventory = self._changed_inventory(readings, with_inventory)
            for reading in readings:
                check_reading(reading, inventory)
            return ReadResult("ok", "", readings, inventory, time.monotonic() - began)
        except NoData as absent:
            return self._close_collector("no data", str(absent), began)
        except Exception as fault:  # noqa: BLE001 - no error of a driver may end the agent; it is reported and counted
            return self._close_collector("fault", f"{type(fault).__name__}: {fault}", began)

    def _changed_inventory(self, readings: tuple[Reading, ...], requested: bool) -> Mapping[str, Device] | None:
        """The inventory, if requested or if the entities of a class differ from the last read; else None."""
        found: dict[str, frozenset[str]] = {}
        for reading in readings:
            found[reading.device_class] = found.get(reading.device_class, frozenset()) | frozenset(reading.entities)
        same = self._collector.partial or all(self._entities.get(c) == entities for c, entities in found.items())
        first, self._entities = not self._entities, self._entities | found
        renewed = self._collector.inventory_changed()
        return None if same and not first and not requested and not renewed else dict(self._collector.inventory())

    def _close_collector(self, state: State, reason: str, began: float) -> ReadResult:
        """Closes the collector, so that the next read opens it again; the result of the failed read."""
        self._opened = False
        try:
            self._collector.close()
        except Exception as fault:  # noqa: BLE001 - as above
            reason = f"{reason}; closing it: {type(fault).__name__}: {fault}"
        return ReadResult(state, reason, took=time.monotonic() - began)
