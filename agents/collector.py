"""The page that somebody who adds a collector reads: Collector, Reading, NoData.

A collector is a dataclass in `agents/collectors/NAME.py` and one line in `agents/collectors/__init__.py`. Its fields
are its configuration (`[collector.NAME]`). It measures; it never judges, keeps history or sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy.typing import NDArray

from pipeline.records import Event


class NoData(Exception):  # noqa: N818 - it is no error: there is nothing here to measure
    """The hardware or file that a collector reads is not there. The message says what is missing, for a person."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the devices of one class.

    columns: signal -> (devices,) in any numeric type; NaN = not measured. The agent converts to the wire type and takes
    values outside the signal's valid range for missing.
    """

    device_class: str
    entities: tuple[str, ...]
    columns: Mapping[str, NDArray[Any]]
    events: tuple[Event, ...] = ()


@dataclass
class Collector(ABC):
    """Reads one source. The agent runs each collector in a worker of its own, under `deadline` seconds."""

    name: ClassVar[str]
    signals: ClassVar[tuple[str, ...]]
    interval: float = 1.0
    deadline: float = 5.0

    def open(self, node: str) -> None:  # noqa: B027 - most collectors need no preparation
        """Called before the first read, and again 60 s after a NoData. Raises NoData where the source is absent."""

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """One look; one Reading per device class. Raises NoData if the source went away, anything else is a fault."""

    def inventory(self) -> Mapping[str, Device]:
        """Entities that this collector sees, with parents and attributes; asked at start, on change and hourly."""
        return {}

    def close(self) -> None:  # noqa: B027 - most collectors hold nothing
        """Releases what open took; may be called twice, and without open."""


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of an entity: parents, nearest first, and attributes such as SKU, serial number and driver."""

    parents: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
