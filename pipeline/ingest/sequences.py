"""Recent messages of each sender, by checksum, to distinguish a repeated message from a different one.

A repeat has sequence number and content of an earlier message. Different content under a known sequence number means
that two senders share a name and a spool: a forgery, or a cloned machine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from pipeline.store.gaps import Sender
from pipeline.transport.wire import read_checksum

WINDOW = 256
"""Checksums kept per sender (1 KiB); chosen: twice the messages that an agent has in flight (512 KiB)."""
SENDERS = 65_536
"""Most recent senders with checksums: at most 100 MB. Chosen: two topics of 32,768 nodes."""
SECOND_MESSAGES = 4096
"""Different messages under a known sequence number that are kept, over all senders; chosen: 0.5 MB."""


class _Window:
    """Checksums of the newest WINDOW messages of one sender."""

    __slots__ = ("_checksums", "_newest")

    def __init__(self) -> None:
        self._checksums = array("I", bytes(4 * WINDOW))  # by sequence modulo WINDOW; 0: unknown
        self._newest = -1

    def add_checksum(self, sequence: int, found: int) -> None:
        """Stores the checksum of a message; one older than the window is ignored."""
        if sequence == self._newest + 1:
            self._newest = sequence
        elif sequence > self._newest:
            for missing in range(max(self._newest + 1, sequence - WINDOW), sequence):
                self._checksums[missing % WINDOW] = 0
            self._newest = sequence
        if sequence > self._newest - WINDOW:
            self._checksums[sequence % WINDOW] = found

    def add_checksums(self, numbers: Sequence[int], found: Sequence[int]) -> None:
        """Stores the checksums of at most WINDOW messages with ascending sequence numbers."""
        first, count = numbers[0], len(numbers)
        follows = first == self._newest + 1 or (count == WINDOW and first > self._newest)
        if not follows or numbers[-1] - first != count - 1:
            for sequence, checksum in zip(numbers, found, strict=True):
                self.add_checksum(sequence, checksum)
            return
        at = first % WINDOW
        space = min(WINDOW - at, count)
        self._checksums[at : at + space] = array("I", found[:space])
        self._checksums[: count - space] = array("I", found[space:])
        self._newest = numbers[-1]

    def checksum_of(self, sequence: int) -> int:
        """The checksum of a message; 0 if unknown."""
        return self._checksums[sequence % WINDOW] if self._newest - WINDOW < sequence <= self._newest else 0


class RecentMessages:
    """Checksums of recent messages by sender. Different messages take effect with `commit`."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Sender, _Window] = OrderedDict()
        self._second: dict[tuple[Sender, int, int], None] = {}
        self._pending: dict[tuple[Sender, int, int], None] = {}

    def begin(self) -> None:
        """Starts a transaction; drops what a failed one left."""
        self._pending.clear()

    def commit(self) -> None:
        """Keeps the changes of the durable transaction."""
        self._second.update(self._pending)
        while len(self._second) > SECOND_MESSAGES:
            del self._second[next(iter(self._second))]

    def add_messages(self, sender: Sender, numbers: Sequence[int], messages: Sequence[bytes]) -> None:
        """Adds messages with new, ascending sequence numbers. Harmless if the transaction fails: they come again."""
        window = self._windows.get(sender)
        if window is None:
            window = self._windows[sender] = _Window()
            if len(self._windows) > SENDERS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(sender)
        window.add_checksums(numbers[-WINDOW:], [read_checksum(message) for message in messages[-WINDOW:]])

    def is_repeat(self, sender: Sender, sequence: int, message: bytes, made: int | None, newest: int | None) -> bool:
        """Whether a message with a known sequence number is a repeat; a different message is recorded.

        made: `sent` time, None if its clock is wrong.  newest: newest `sent` time of the sender, None if unknown. A
        real sender creates messages in order, so a message later than all known ones is not a repeat, however many
        sequence numbers a forger used before.
        """
        found = read_checksum(message)
        window = self._windows.get(sender)
        known = window.checksum_of(sequence) if window is not None else 0
        key = (sender, sequence, found)
        if known == found or key in self._second or key in self._pending:
            return True
        if not known and (made is None or newest is None or made <= newest):
            return True
        self._pending[key] = None
        return False
