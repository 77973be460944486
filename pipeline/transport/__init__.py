"""Transport: ordered reading of partitions from an offset. One contract, one test suite, several implementations.

spool  partition = node, offset = sequence number in the agent's spool of that topic
kafka  partition = Kafka partition, offset = Kafka offset (arrives with the Kafka transport)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Partition:
    """One ordered stream of messages. `incarnation` changes when its offsets begin anew (a new spool, a new topic)."""

    topic: str
    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Message:
    """`value` is a sealed message of wire.py, or whatever a stranger put there; offset, its place in the partition."""

    partition: Partition
    offset: int
    value: bytes


class Transport(Protocol):
    """What ingest needs of a transport. All calls come from one thread; none blocks longer than a second."""

    def partitions(self) -> Sequence[Partition]:
        """All partitions that exist now, in a stable order."""

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """(first offset that can be read, offset after the last durable message)."""

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        """Messages from `offset` on, contiguous, at least one if there is one; [] at the end.

        Raises GapError if `offset` is gone or damaged (it says where to go on), Retryable if the broker is away.
        """

    def committed(self, partition: Partition, next_offset: int) -> None:
        """Tells that everything before next_offset is durable in the store, to lag tools and the spool's writer."""

    def reachable(self) -> str | None:
        """None if the source can be reached, else why not, for /readyz."""

    def close(self) -> None:
        """Releases files and connections; may be called twice."""
