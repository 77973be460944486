"""The interface that a new collector implements: Collector, Reading, NoData.

A collector is a dataclass in a module below `agents/collectors/` and one line in `agents/collectors/registry.py`. Its
fields are its configuration (`[collector.NAME]`). A collector measures. It does not evaluate, keep history or send.

Helpers: agents/collectors/columns.py marks missing values in columns; agents/collectors/kernel_files.py reads files of
/proc and /sys. Each signal and event must be in a row of docs/coverage/*.toml; then run `make docs`. The contract tests
are tests/agents/test_collectors.py.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from numpy.typing import NDArray

from pipeline.model.records import SECOND, Event

HANG_S = 20.0
"""Seconds after which a source that a collector's own thread still waits for is reported as not answering, even if the
thread waits longer. Chosen: with one read, one tick and one frame it stays within the promised 30 s."""


def wall_clock() -> int:
    """Returns the current UTC time in microseconds."""
    return time.time_ns() // 1000


class NoData(Exception):  # noqa: N818 - not an error: there is nothing to measure
    """The hardware or file that a collector reads does not exist. The message names the missing source."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One read of the devices of one class.

    columns: signal -> (devices,) in any numeric type; NaN = not measured. The agent converts to the wire type and
    treats values outside the signal's valid range as missing. A signal that was not read this time has no column. A
    collector that only emits events returns no entities and no columns.
    """

    device_class: str
    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    events: tuple[Event, ...] = ()


@dataclass
class Collector(ABC):
    """Reads one source. The agent runs each collector in a worker with a time limit of `deadline` seconds.

    isolated: whether that worker runs outside the agent's process. Required where a call can hang in the kernel or in a
    driver library. Only collectors that read the kernel's own counters may run as a thread of the agent. lane:
    collectors with the same lane share a process, each in a thread. After one timeout a collector runs in its own
    process. remote: whether it reports devices beyond this node (a BMC, a switch, a job), which are not named after the
    node. settling: seconds after the start within which the first values arrive; `fleetpulse once` waits that long for
    them. partial: whether a read covers only some of its entities. Changes of the entities are then reported only by
    `inventory_changed`. exclusive: whether only one process of a host can read it, as it binds a socket: beside a
    running agent `fleetpulse doctor` reports the agent's state of it.
    """

    name: ClassVar[str]
    signals: ClassVar[tuple[str, ...]]
    events: ClassVar[tuple[str, ...]] = ()
    isolated: ClassVar[bool] = True
    lane: ClassVar[str] = "node"
    remote: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    exclusive: ClassVar[bool] = False
    settling: ClassVar[float] = 0.0
    interval: float = 1.0
    deadline: float = 5.0

    def has_work(self) -> bool:
        """Returns whether its configuration gives it anything to do. If not, the agent starts no worker for it."""
        return True

    def open(self, node: str) -> None:  # noqa: B027 - most collectors need no preparation
        """Prepares the collector. Called before the first read and again after NoData: after 60 s, then at growing
        intervals up to 10 min.

        Raises NoData if the source does not exist.
        """

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """Reads the source once and returns one Reading per device class.

        Raises NoData if the source has disappeared. Any other exception is a fault.
        """

    def inventory(self) -> Mapping[str, Device]:
        """Returns the entities of this collector with parents and attributes. Called at start, on change and hourly.

        Every entity that `read` returns must be in it. On a node the last parent is `node:NAME`; the node has none.
        """
        return {}

    def inventory_changed(self) -> bool:
        """Returns whether the inventory changed while the entities stayed the same. Called once after each read."""
        return False

    def close(self) -> None:  # noqa: B027 - most collectors hold no resources
        """Releases what `open` acquired. May be called twice, and without `open`."""


def collector_settings(collector: Collector) -> dict[str, Any]:
    """Returns the settings of a collector, enough to create another one with the same configuration."""
    return {f.name: getattr(collector, f.name) for f in fields(collector) if f.init}


@dataclass(frozen=True, slots=True)
class Device:
    """Parents of an entity, nearest first, and attributes such as SKU, serial number and driver."""

    parents: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


class SamplingSchedule:
    """Decides which of a collector's slower signals are due: at the first read, then at fixed intervals.

    All collectors of a node use the same multiples of wall time, so that a node sends few different message layouts.
    The node's name shifts them by up to an hour, so that not all nodes of a fleet read everything in the same second.
    """

    def __init__(self, node: str, now: Callable[[], int] = wall_clock) -> None:
        self._offset, self._now = zlib.crc32(node.encode()) % 3600 * SECOND, now
        self._last_slots: dict[float, int] = {}

    def due(self, seconds: float) -> bool:
        """Returns whether a multiple of `seconds` has passed since the last call with the same `seconds`."""
        slot = (self._now() + self._offset) // round(seconds * SECOND)
        is_new = self._last_slots.get(seconds) != slot
        self._last_slots[seconds] = slot
        return is_new
