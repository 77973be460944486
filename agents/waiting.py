"""Messages that wait for the disk: the queue between the agent's loop, which never waits, and the thread that writes.

The queue of one topic holds at most `max_bytes` and `max_seconds` of messages. Beyond that the oldest are given up and
counted; they take their places in the sequence as a gap, so that the reader of the spool counts them too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

BITE = 1 << 20
"""Bytes that are taken from the queue at once, and so the most that is held beyond `max_bytes`; as spool.BUFFER."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wire body. made: UTC us; since: monotonic seconds at which it was queued."""

    body: bytes
    kind: int
    made: int
    since: float


class WaitingMessages:
    """The queue of one topic. For any thread.

    accepted: messages ever added.  given_up: those of them that were dropped for want of room or time.
    handled: messages that were written or given up, and that the spool has numbered.
    """

    def __init__(self, max_bytes: int, max_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.accepted = self.given_up = self.handled = 0
        self._max_bytes, self._max_seconds, self._monotonic = max_bytes, max_seconds, monotonic
        self._queue: deque[Waiting] = deque()
        self._bytes = self._dropped = self._in_hand = 0
        self._oldest_in_hand = 0.0
        self._lock = threading.Lock()

    def add(self, body: bytes, kind: int, made: int) -> None:
        """Queues one message; gives up the oldest ones if there are too many bytes or they waited too long."""
        now = self._monotonic()
        with self._lock:
            self.accepted += 1
            self._queue.append(Waiting(body, kind, made, now))
            self._bytes += len(body)
            while len(self._queue) > 1 and (
                self._bytes > self._max_bytes or now - self._queue[0].since > self._max_seconds
            ):
                self._bytes -= len(self._queue.popleft().body)
                self._dropped += 1
                self.given_up += 1

    def take(self) -> tuple[int, list[Waiting]]:
        """(messages given up before these, the oldest messages up to BITE bytes); `finish` says what became of them."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            taken: list[Waiting] = []
            size = 0
            while self._queue and (not taken or size + len(self._queue[0].body) <= BITE):
                taken.append(self._queue.popleft())
                size += len(taken[-1].body)
            self._bytes -= size
            self._in_hand = dropped + len(taken)
            self._oldest_in_hand = taken[0].since if taken else self._monotonic()
            return dropped, taken

    def finish(self) -> None:
        """What was taken last is durable, or counted as lost."""
        with self._lock:
            self.handled += self._in_hand
            self._in_hand = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is queued; what was taken may still be in hand."""
        return not self._queue and not self._dropped

    @property
    def count(self) -> int:
        """Messages that are neither durable nor given up."""
        return len(self._queue) + self._in_hand

    def age(self) -> float:
        """Seconds that the oldest message has waited for the disk; 0 if none waits."""
        with self._lock:
            oldest = [self._oldest_in_hand] if self._in_hand else [m.since for m in list(self._queue)[:1]]
            return self._monotonic() - oldest[0] if oldest else 0.0
