"""Catch-up after a broker outage: holds the watermark until agents that were cut off together have sent their backlog.

Kafka does not show what an agent still has to send. It shows when the brokers appended a message: if a message is older
than the lateness, its sender is catching up. The watermark stays at the slowest sender that fell silent at the same
time, until all have caught up or stay silent; otherwise all but the fastest would be late and never be evaluated.

A sender that does not gain on the clock is not waited for: a stopped, slow or reset clock is not a backlog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.records import SECOND

MAX_WAIT = 10 * SECOND
"""How long a sender is waited for, from the return of the first and from its own last message; within this time it
must also gain on the clock (us). Chosen: clients reconnect within 1 s (kafka_clients.RECONNECT_MS), then send without a
pause."""
OUTAGE_SPREAD = 60 * SECOND
"""Senders whose last messages are this close together fell silent together (us); also the silence timeout."""


@dataclass(slots=True)
class _CatchingUp:
    """A sender that is waited for: its last message, and start and event time of the present measurement."""

    last_message: int
    since: int
    event_time: int


class CatchUp:
    """Senders that are catching up. Times in UTC us; `lateness` as in [pipeline]. For one thread."""

    def __init__(self, lateness: int) -> None:
        self._lateness = lateness
        self._newest: int | None = None  # newest event time, except of clocks that are ahead
        self._catching_up: dict[str, _CatchingUp] = {}

    def record_message(self, node: str, newest: int, appended: int, now: int, known: Mapping[str, int]) -> None:
        """Records a message of `node` with event times up to `newest`, appended by the broker at `appended`.

        known: newest event time of every node before this message.
        """
        if self._newest is None:
            self._newest = max((time for time in known.values() if time <= now), default=0)
        late = appended - newest > self._lateness
        if late and not self._catching_up and known.get(node, 0) >= self._newest - OUTAGE_SPREAD:
            together = (other for other, time in known.items() if time >= (self._newest or 0) - OUTAGE_SPREAD)
            self._catching_up = {other: _CatchingUp(now, now, known[other]) for other in together}
        if node in self._catching_up and not (late and self._is_gaining(self._catching_up[node], newest, now)):
            del self._catching_up[node]
        if newest <= appended + self._lateness:  # otherwise its clock is ahead, and all others would look cut off
            self._newest = max(self._newest, newest)

    def limit_watermark(self, now: int, newest: Mapping[str, int]) -> int | None:
        """Upper bound of the watermark (event time); None if no sender is waited for."""
        for node in [node for node, sender in self._catching_up.items() if now - sender.last_message > MAX_WAIT]:
            del self._catching_up[node]
        return min((newest[node] for node in self._catching_up), default=None)

    @staticmethod
    def _is_gaining(sender: _CatchingUp, newest: int, now: int) -> bool:
        """Whether the sender gained on the clock within the last MAX_WAIT."""
        sender.last_message = now
        if now - sender.since < MAX_WAIT:
            return True
        gained = newest - sender.event_time > now - sender.since
        sender.since, sender.event_time = now, newest
        return gained
