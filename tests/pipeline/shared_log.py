"""A transport in memory whose partitions are shared by many senders, as in Kafka; the test places each message."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from pipeline.model.errors import GapError, Offline, Retryable, WireError
from pipeline.model.records import EVENTS, TELEMETRY, Batch, Block, Origin
from pipeline.transport import Message, Partition, wire

ONE, TWO, WORD = Partition(TELEMETRY, "0", "id"), Partition(TELEMETRY, "1", "id"), Partition(EVENTS, "0", "id")
Record = tuple[bytes, int, bytes | None, bytes | None]
"""Value, append time, key and signature."""


class SharedLog:
    """Messages of each partition, with their append time (0: unknown).

    starts: messages before it are deleted.  mute: partitions that do not answer.  offline: partitions
    without a leader.  letters: (offset, reason).
    """

    def __init__(self) -> None:
        self.held: dict[Partition, list[Record]] = {ONE: [], TWO: [], WORD: []}
        self.starts: dict[Partition, int] = {}
        self.mute: set[Partition] = set()
        self.offline: set[Partition] = set()
        self.letters: list[tuple[int, str]] = []

    def add(
        self,
        partition: Partition,
        values: Sequence[bytes],
        appended: int = 0,
        key: bytes | None = b"",
        signatures: Sequence[bytes | None] = (),
    ) -> None:
        """Appends records with the key `key`; the default is the sending node, as agents set it."""
        for value, signature in zip_longest(values, signatures):
            self.held[partition].append((value, appended, _node(value) if key == b"" else key, signature))

    def partitions(self) -> list[Partition]:
        return list(self.held)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        return self.starts.get(partition, 0), len(self.held[partition])

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        if partition in self.offline:
            raise Offline("no leader")
        if partition in self.mute:
            raise Retryable("no answer")
        if offset < (start := self.starts.get(partition, 0)):
            raise GapError(partition.topic, partition.name, offset, start, "retention")
        found = self.held[partition][offset : offset + max_messages]
        return [Message(partition, offset + i, *record) for i, record in enumerate(found)]

    def commit_offset(self, partition: Partition, next_offset: int) -> None: ...

    def send_dead_letter(self, message: Message, reason: str) -> None:
        self.letters.append((message.offset, reason))

    def find_problem(self) -> None: ...

    def close(self) -> None: ...


def _node(value: bytes) -> bytes:
    try:
        return wire.open_telemetry(value).layout.node.encode()
    except WireError:  # not telemetry
        with contextlib.suppress(WireError):
            return wire.decode_events(value).origin.node.encode()
        return b"?"


def one_row(node: str, epoch: bytes, sequence: int, time: int) -> bytes:
    """Returns a message with one row of one GPU, whose temperature is the sequence."""
    block = Block("gpu", (f"gpu:{node}.0",), {"gpu.temperature": np.full((1, 1), sequence, "f4")})
    body = wire.encode(Batch(Origin("local", node, bytes(16)), np.array([time]), (block,)))
    return wire.seal(body, wire.TELEMETRY_KIND, epoch, sequence, time)
