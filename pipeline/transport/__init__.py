"""Transport: ordered reading of partitions from an offset. One contract, one test suite, two implementations.

spool  partition = node, offset = sequence number in the agent's spool of that topic
kafka  partition = Kafka partition with messages of many nodes, offset = Kafka offset
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Partition:
    """One ordered stream of messages. `incarnation` changes when its offsets restart (a new spool, a new topic).

    spooled: a sender's spool; `name` is the node, `incarnation` its epoch, offsets are sequence numbers.
    """

    topic: str
    name: str
    incarnation: str
    spooled: bool = field(default=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.topic, self.name, self.incarnation)))

    def __hash__(self) -> int:  # ingest looks up each partition twenty times per read
        return self._hash


class Message(NamedTuple):
    """One message of a partition. `value` should be a sealed message of wire.py, but may be anything.

    appended: when the broker appended it (UTC us, broker clock); 0 if unknown.
    key, signature: key and signature header of the Kafka record; None without.
    """

    partition: Partition
    offset: int
    value: bytes
    appended: int = 0
    key: bytes | None = None
    signature: bytes | None = None

    @property
    def sender(self) -> bytes | None:
        """The node named by the spool folder or the record key; None for a record without a key."""
        return self.partition.name.encode() if self.partition.spooled else self.key


class Transport(Protocol):
    """The contract between ingest and a transport. All calls come from one thread; none blocks over a second."""

    def partitions(self) -> Sequence[Partition]:
        """All partitions that exist now, in a stable order."""

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """(first offset that can be read, offset after the last durable message)."""

    def read(self, partition: Partition, offset: int, max_messages: int, max_bytes: int) -> list[Message]:
        """Messages from `offset` on, contiguous, at least one if there is one; [] at the end.

        Raises GapError if `offset` is lost or damaged (with the offset to continue at), Retryable if it is unknown
        whether there is more: the broker is away or has not responded yet. Offline, without a wait, if the brokers
        report that the partition has no leader.
        """

    def commit_offset(self, partition: Partition, next_offset: int) -> None:
        """Publishes that all before next_offset is durable in the store, for lag tools and the spool's writer."""

    def send_dead_letter(self, message: Message, reason: str) -> None:
        """Sends a copy of a message that cannot be stored to its dead-letter topic, if any. Best effort."""

    def find_problem(self) -> str | None:
        """Describes why the source cannot be reached, for /readyz; None if it can."""

    def close(self) -> None:
        """Releases files and connections; may be called twice."""
