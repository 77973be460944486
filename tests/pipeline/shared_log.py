"""A transport in memory whose partitions many senders share, as Kafka's are: a test decides what lies where."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline import wire
from pipeline.errors import GapError, Retryable
from pipeline.records import EVENTS, TELEMETRY, Batch, Block, Origin
from pipeline.transport import Message, Partition

ONE, TWO, WORD = Partition(TELEMETRY, "0", "id"), Partition(TELEMETRY, "1", "id"), Partition(EVENTS, "0", "id")


class SharedLog:
    """What each partition holds, with the time at which it was taken in (0: not known).

    starts: what lies before has been deleted.  mute: partitions that do not answer.  letters: (offset, reason).
    """

    def __init__(self) -> None:
        self.held: dict[Partition, list[tuple[bytes, int]]] = {ONE: [], TWO: [], WORD: []}
        self.starts: dict[Partition, int] = {}
        self.mute: set[Partition] = set()
        self.letters: list[tuple[int, str]] = []

    def add(self, partition: Partition, values: Iterable[bytes], appended: int = 0) -> None:
        self.held[partition] += [(value, appended) for value in values]

    def partitions(self) -> list[Partition]:
        return list(self.held)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        return self.starts.get(partition, 0), len(self.held[partition])

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        if partition in self.mute:
            raise Retryable("no answer")
        if offset < (start := self.starts.get(partition, 0)):
            raise GapError(partition.topic, partition.name, offset, start, "retention")
        found = self.held[partition][offset : offset + max_messages]
        return [Message(partition, offset + i, value, appended) for i, (value, appended) in enumerate(found)]

    def committed(self, partition: Partition, next_offset: int) -> None: ...

    def dead_letter(self, message: Message, reason: str) -> None:
        self.letters.append((message.offset, reason))

    def reachable(self) -> None: ...

    def close(self) -> None: ...


def one_row(node: str, epoch: bytes, sequence: int, time: int) -> bytes:
    """A message with one row of one GPU, whose temperature is the sequence."""
    block = Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((1, 1), sequence, "f4")})
    body = wire.encode(Batch(Origin("local", node, bytes(16)), np.array([time]), (block,)))
    return wire.seal(body, wire.TELEMETRY_KIND, epoch, sequence, time)
