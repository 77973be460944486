"""What is remembered of senders' newest messages, so that a message sent again is told from another one.

A repeat has the sequence and the content of a message that came before. Another content under a known sequence means
that two senders use one name and one spool: a forgery, or a copied machine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from pipeline.store.gaps import Sender
from pipeline.transport.wire import read_checksum

WINDOW = 256
"""Messages of each sender whose checksums are kept, 1 KiB; chosen: twice what an agent has in flight (512 KiB)."""
SENDERS = 65_536
"""Senders of which checksums are kept, those that sent last: 100 MB at most. Chosen: two topics of 32,768 nodes."""
SECOND_MESSAGES = 4096
"""Second messages that are remembered, over all senders; chosen: 0.5 MB, and far more than a sender has in flight."""


class _Window:
    """Checksums of the newest WINDOW messages of one sender."""

    __slots__ = ("_checksums", "_newest")

    def __init__(self) -> None:
        self._checksums = array("I", bytes(4 * WINDOW))  # by sequence modulo WINDOW; 0: not known
        self._newest = -1

    def add(self, sequence: int, found: int) -> None:
        if sequence == self._newest + 1:
            self._newest = sequence
        elif sequence > self._newest:
            for missing in range(max(self._newest + 1, sequence - WINDOW), sequence):
                self._checksums[missing % WINDOW] = 0
            self._newest = sequence
        if sequence > self._newest - WINDOW:
            self._checksums[sequence % WINDOW] = found

    def of(self, sequence: int) -> int:
        """The checksum of a message; 0 if it is not known."""
        return self._checksums[sequence % WINDOW] if self._newest - WINDOW < sequence <= self._newest else 0


class Sequences:
    """Checksums of newest messages by sender. Second messages count once `commit` says that they are durable."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Sender, _Window] = OrderedDict()
        self._second: dict[tuple[Sender, int, int], None] = {}
        self._pending: dict[tuple[Sender, int, int], None] = {}

    def begin(self) -> None:
        """A transaction begins."""
        self._pending.clear()

    def commit(self) -> None:
        """The transaction is durable."""
        self._second.update(self._pending)
        while len(self._second) > SECOND_MESSAGES:
            del self._second[next(iter(self._second))]

    def add(self, sender: Sender, sequence: int, message: bytes) -> None:
        """Remembers a message whose sequence is new. Harmless if its transaction fails: it comes again as it is."""
        window = self._windows.get(sender)
        if window is None:
            window = self._windows[sender] = _Window()
            if len(self._windows) > SENDERS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(sender)
        window.add(sequence, read_checksum(message))

    def repeats(self, sender: Sender, sequence: int, message: bytes, made: int | None, newest: int | None) -> bool:
        """Whether a message whose sequence is not new is one that came before; one that is not is remembered.

        made: when it was made, None where its clock is wrong.  newest: when the newest known message of its sender was,
        None if the store does not know. An honest sender makes its messages in order, so what is made later than all
        known ones is no repeat, however many sequences a forger took ahead of it.
        """
        found = read_checksum(message)
        window = self._windows.get(sender)
        known = window.of(sequence) if window is not None else 0
        key = (sender, sequence, found)
        if known == found or key in self._second or key in self._pending:
            return True
        if not known and (made is None or newest is None or made <= newest):
            return True
        self._pending[key] = None
        return False
