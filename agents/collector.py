"""The page that somebody who adds a collector reads: Collector, Reading, NoData.

A collector is a dataclass in `agents/collectors/NAME.py` and one line in `agents/collectors/registry.py`. Its fields
are its configuration (`[collector.NAME]`). It measures; it never judges, keeps history or sends.
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
"""A source that a collector's own thread has waited for so long is reported as not answering, however long the thread
may go on waiting. Chosen: with a look, a tick and a frame within the 30 s that are promised."""


def wall_clock() -> int:
    """UTC microseconds now."""
    return time.time_ns() // 1000


class NoData(Exception):  # noqa: N818 - it is no error: there is nothing here to measure
    """The hardware or file that a collector reads is not there. The message says what is missing, for a person."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the devices of one class.

    columns: signal -> (devices,) in any numeric type; NaN = not measured. The agent converts to the wire type and takes
    values outside the signal's valid range for missing. What was not looked at this time has no column. A collector of
    events alone gives no entities and no columns.
    """

    device_class: str
    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    events: tuple[Event, ...] = ()


@dataclass
class Collector(ABC):
    """Reads one source. The agent runs each collector in a worker of its own, under `deadline` seconds.

    isolated: whether that worker is outside of the agent's process. It must be where a call can hang in the kernel or
    in a driver's library; only what reads the kernel's own bookkeeping may run as a thread of the agent.
    lane: whom it shares that process with, each in a thread. Who was given up once goes on in a process of its own.
    remote: whether it tells of things beyond this node (a BMC, a switch, a job), which are not named after the node.
    settling: seconds after its start within which the first values come; who looks once waits so long for them.
    partial: whether a look tells of some of its entities alone; a change of them is then told by `renewed` alone.
    """

    name: ClassVar[str]
    signals: ClassVar[tuple[str, ...]]
    events: ClassVar[tuple[str, ...]] = ()
    isolated: ClassVar[bool] = True
    lane: ClassVar[str] = "node"
    remote: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    settling: ClassVar[float] = 0.0
    interval: float = 1.0
    deadline: float = 5.0

    def wanted(self) -> bool:
        """Whether its configuration gives it anything to do; where not, the agent makes no worker for it."""
        return True

    def open(self, node: str) -> None:  # noqa: B027 - most collectors need no preparation
        """Called before the first read, and again after a NoData: 60 s later, then more seldom, at last every 10 min.

        Raises NoData where the source is absent.
        """

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """One look; one Reading per device class. Raises NoData if the source went away, anything else is a fault."""

    def inventory(self) -> Mapping[str, Device]:
        """Entities that this collector sees, with parents and attributes; asked at start, on change and hourly."""
        return {}

    def renewed(self) -> bool:
        """Whether the inventory is another one though the entities are the same; asked once after each read."""
        return False

    def close(self) -> None:  # noqa: B027 - most collectors hold nothing
        """Releases what open took; may be called twice, and without open."""


def settings(collector: Collector) -> dict[str, Any]:
    """What a collector was configured with: enough to make another one like it."""
    return {f.name: getattr(collector, f.name) for f in fields(collector) if f.init}


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of an entity: parents, nearest first, and attributes such as SKU, serial number and driver."""

    parents: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Rhythm:
    """Tells which of a collector's slower signals are due at this look: the first one, then every so many seconds.

    All collectors of a node keep one beat, whole multiples of wall time, so that a node sends few layouts of message;
    the node's name shifts it by up to an hour, so that a fleet does not read everything at the same second.
    """

    def __init__(self, node: str, now: Callable[[], int] = wall_clock) -> None:
        self._shift, self._now = zlib.crc32(node.encode()) % 3600 * SECOND, now
        self._last: dict[float, int] = {}

    def due(self, seconds: float) -> bool:
        """Whether a multiple of `seconds` has passed since this was last asked for the same `seconds`."""
        beat = (self._now() + self._shift) // round(seconds * SECOND)
        fresh = self._last.get(seconds) != beat
        self._last[seconds] = beat
        return fresh
