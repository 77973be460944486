"""How fast a backlog leaves the node, so that a fleet does not stampede brokers that have just come back.

Measured in the messages' own time: a stream may go out `catch_up` times as fast as it arose. While there is trouble,
and for a random share of `jitter` seconds after it or after the start, it goes out no faster than it arose: the fleet
then weighs on its brokers as it does every day, and catches up node after node. Order is kept throughout.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from agents.streams import Stream

BURST_S = 2.0
"""Seconds of its rate that a stream may save up. Chosen: the sender's turns come at least once a second."""
HOLE_S = 60.0
"""What one message costs at most, in s of its own time; chosen: a hole, when no agent ran, is not waited for."""


class Pace:
    """Admits messages of streams. For one thread. Without arguments it admits everything."""

    def __init__(
        self, catch_up: float = math.inf, jitter: float = 0.0, draw: Callable[[], float] = random.random
    ) -> None:
        self._catch_up, self._jitter, self._draw = catch_up, jitter, draw
        self._held = 0.0
        self._troubled: bool | None = None

    def turn(self, now: float, trouble: bool) -> None:
        """Whether messages get through at monotonic time `now`."""
        if self._troubled is not False and not trouble:
            self._held = now + self._jitter * self._draw()
        self._troubled = trouble

    def admits(self, stream: Stream, now: float) -> bool:
        """Whether the stream's next message may go out now, which is then counted. Sending one again costs nothing."""
        if math.isinf(self._catch_up):
            return True
        rate = 1.0 if self._troubled is not False or now < self._held else self._catch_up
        stream.allowance = min(stream.allowance + rate * (now - stream.counted), rate * BURST_S)
        stream.counted = now
        if stream.allowance <= 0:
            return False
        made = stream.made
        if made > stream.reached:
            first = stream.reached == 0
            stream.allowance -= 0.0 if first else min((made - stream.reached) / 1e6, HOLE_S)
            stream.reached = made
        return True
