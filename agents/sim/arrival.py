"""Waiting until the brokers have what a simulated fleet spooled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from agents import disk
from pipeline import config

if TYPE_CHECKING:
    from agents.sender import Sender

BACKLOG = 32 << 20
"""Bytes spooled and perhaps not acknowledged after which a simulation waits for the brokers; chosen: a second of what
one core makes. Of a small spool it is a quarter: what was sent makes room there only segment by segment."""
POLL_S = 0.02
"""Between two looks whether all has arrived; chosen: the sender itself needs milliseconds."""

GRACE_S = 0.5
"""What a simulation that is to end still gives a healthy broker; chosen: an answer takes milliseconds."""


class Arrival:
    """A Sender, and how far a simulation may run ahead of it. `wait` answers True when somebody wants the end."""

    def __init__(self, sender: Sender, spool: config.Spool, wait: Callable[[float], bool]) -> None:
        self.sender, self.backlog = sender, min(BACKLOG, (spool.max_bytes or disk.cap(spool.directory)) // 4)
        self._wait = wait

    def wait(self) -> bool:
        """Until all that is spooled is acknowledged, however long the brokers are away; False if somebody ends that."""
        ticket = self.sender.ask()
        while not self.sender.settled(ticket):
            if self._wait(POLL_S):
                return self._last_chance(ticket)
        return True

    def _last_chance(self, ticket: int) -> bool:
        end = time.monotonic() + GRACE_S
        while not self.sender.settled(ticket) and not self.sender.trouble() and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.sender.settled(ticket)
