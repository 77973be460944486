"""One partition of Kafka as it is being read: what was polled and waits, and where that stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.signatures import HEADER
from pipeline.transport import Message, Partition

APPEND_TIME = 1
"""Type of a record's time: the brokers' clock, as topics.py sets it."""


@dataclass(slots=True)
class Stream:
    """Records that wait, and the offset behind them. lost: that offset is out of range.  damage: what it suffered."""

    partition: Partition
    waiting: deque[Any] = field(default_factory=deque)
    behind: int = -1
    size: int = 0
    lost: bool = False
    damage: str = ""
    paused: bool = False

    @property
    def offset(self) -> int:
        """Of the next record that `take` would give."""
        return self.waiting[0].offset if self.waiting else self.behind

    @property
    def stuck(self) -> bool:
        """Whether nothing comes behind what waits until it begins elsewhere."""
        return self.lost or bool(self.damage)

    def begin_at(self, offset: int) -> None:
        """Forgets what waits and what was wrong there: the next record is sought at `offset`."""
        self.waiting.clear()
        self.behind, self.size, self.lost, self.damage = offset, 0, False, ""

    def add(self, records: Sequence[Any]) -> None:
        """Takes what was polled; at least one record."""
        self.waiting.extend(records)
        self.behind = records[-1].offset + 1
        self.size += sum(len(record.value or b"") for record in records)

    def take(self, max_messages: int, max_bytes: int) -> list[Message]:
        """What waits, contiguous, at least one if there is one."""
        out: list[Message] = []
        size = 0
        while self.waiting and len(out) < max_messages:
            record = self.waiting[0]
            value = record.value or b""
            if out and (size + len(value) > max_bytes or record.offset != out[-1].offset + 1):
                break
            self.waiting.popleft()
            size += len(value)
            appended = record.timestamp * 1000 if record.timestamp_type == APPEND_TIME else 0
            signature = _signature(record.headers)
            out.append(Message(self.partition, record.offset, value, appended, record.key, signature))
        self.size -= size
        return out


def _signature(headers: Sequence[tuple[str, bytes | None]]) -> bytes | None:
    """The signature among a record's headers; None without one."""
    return next((value for name, value in headers if name == HEADER), None) if headers else None
