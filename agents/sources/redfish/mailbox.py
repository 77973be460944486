"""What one BMC's threads found since the last look: each value is given once. All of it is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.sources.redfish.rows import Row
from pipeline.model.records import Event

MAX_ENTITIES = 4096
"""Most entities of one BMC; chosen: twice a floor PDU with 1000 outlets and their circuits."""
MAX_EVENTS = 256
"""Most events that wait for a look; chosen: the looks are a second apart."""
EVENTS_PER_MINUTE = 120
"""Most events that one BMC's stream may tell in a minute; chosen: what is a storm tells nothing more by its length."""


@dataclass
class Mailbox:
    """Values by entity, newest first. wall: UTC microseconds, the time of events."""

    wall: Callable[[], int]
    lost: int = 0
    """Events that were dropped."""
    _values: dict[str, tuple[str, dict[str, float]]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _minute: int = 0
    _told: int = 0

    def put(self, row: Row) -> bool:
        """Adds what a row tells; False where there is no room for one more entity."""
        told = {signal: value for signal, value in row.values.items() if value is not None}
        with self._lock:
            if row.entity not in self._values and len(self._values) >= MAX_ENTITIES:
                return False
            if told:
                self._values.setdefault(row.entity, (row.device_class, {}))[1].update(told)
        return True

    def tell(self, entity: str, kind: str, data: dict[str, object], always: bool = False) -> None:
        """Adds an event that happened now; `always` for our own, of which there are few."""
        time = self.wall()
        with self._lock:
            minute = time // 60_000_000
            if minute != self._minute:
                self._minute, self._told = minute, 0
            if len(self._events) >= MAX_EVENTS or (not always and self._told >= EVENTS_PER_MINUTE):
                self.lost += 1
                return
            self._told += 0 if always else 1
            self._events.append(Event(time, entity, kind, data))

    def take(self) -> tuple[dict[str, tuple[str, dict[str, float]]], list[Event]]:
        """Everything since the last call."""
        with self._lock:
            values, self._values = self._values, {}
            events, self._events = self._events, []
        return values, events
