"""What a sender lost for good, as events `gap` that wait for the next batch of events of the node."""

from __future__ import annotations

import threading
import time
from collections import deque

from pipeline.records import Event
from pipeline.transport import Partition

WAITING = 64
"""Gaps of one stream and cause that may wait; chosen: 64 events are 15 kB, which fit even where the brokers take
little. Beyond that the oldest is left to ingest, which sees its hole from the messages behind it, without the cause."""


class Losses:
    """Gaps by stream and cause; those that touch are one. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gaps: dict[tuple[Partition, str], deque[tuple[int, int, int]]] = {}  # (time, first, next)

    def add(self, partition: Partition, first: int, behind: int, cause: str) -> None:
        """Messages [first, behind) will never arrive."""
        now = time.time_ns() // 1000
        with self._lock:
            gaps = self._gaps.setdefault((partition, cause), deque(maxlen=WAITING))
            if gaps and gaps[-1][2] == first:
                _, first, _ = gaps.pop()
            gaps.append((now, first, behind))

    def take(self) -> list[Event]:
        """All that came since the last call."""
        with self._lock:
            taken, self._gaps = self._gaps, {}
        return [
            Event(now, f"node:{partition.name}", "gap", _data(partition, first, behind, cause))
            for (partition, cause), gaps in taken.items()
            for now, first, behind in gaps
        ]


def _data(partition: Partition, first: int, behind: int, cause: str) -> dict[str, object]:
    return {"topic": partition.topic, "epoch": partition.incarnation, "first": first, "next": behind, "cause": cause}
