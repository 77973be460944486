"""Transport: ordered reading of partitions from an offset. One contract, one test suite, several implementations.

spool  partition = node, offset = sequence number in the agent's spool of that topic
kafka  partition = Kafka partition with messages of many nodes, offset = Kafka offset
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Partition:
    """One ordered stream of messages. `incarnation` changes when its offsets begin anew (a new spool, a new topic).

    spooled: it is one sender's spool: `name` is the node, `incarnation` its epoch, offsets are sequence numbers.
    """

    topic: str
    name: str
    incarnation: str
    spooled: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Message:
    """`value` is a sealed message of wire.py, or whatever a stranger put there; offset, its place in the partition.

    appended: when the brokers took it in (UTC us, their clock); 0 where that is not known.
    key, signature: those of its record on Kafka; None where it has none.
    """

    partition: Partition
    offset: int
    value: bytes
    appended: int = 0
    key: bytes | None = None
    signature: bytes | None = None

    @property
    def sender(self) -> bytes | None:
        """The node that the folder of the spool or the key of the record names; None for a record without a key."""
        return self.partition.name.encode() if self.partition.spooled else self.key


class Transport(Protocol):
    """What ingest needs of a transport. All calls come from one thread; none blocks longer than a second."""

    def partitions(self) -> Sequence[Partition]:
        """All partitions that exist now, in a stable order."""

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """(first offset that can be read, offset after the last durable message)."""

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        """Messages from `offset` on, contiguous, at least one if there is one; [] at the end.

        Raises GapError if `offset` is gone or damaged (it says where to go on), Retryable if it is not known now
        whether there is more: its broker is away, or has not answered yet.
        """

    def committed(self, partition: Partition, next_offset: int) -> None:
        """Tells that everything before next_offset is durable in the store, to lag tools and the spool's writer."""

    def dead_letter(self, message: Message, reason: str) -> None:
        """Passes on a copy of a message that cannot be stored, where there is a place for it. Best effort."""

    def reachable(self) -> str | None:
        """None if the source can be reached, else why not, for /readyz."""

    def close(self) -> None:
        """Releases files and connections; may be called twice."""
