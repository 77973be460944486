"""After an outage of the brokers all agents send what they kept, as fast as they can: who is done first must wait.

On Kafka nobody sees what an agent still has to send. What is seen is when the brokers took a message in: one older than
the lateness tells that its sender is catching up. Until those who fell silent together have caught up, or stay silent,
the watermark stands with the last of them; else all but the quickest would be late, and never be judged.

Nobody is waited for who does not gain on the clock: a clock that stands, is slow or was set back is not a backlog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.model.records import SECOND

PATIENCE = 10 * SECOND
"""How long one that was there before the outage is waited for, from the first that is back and from its last message;
in so long one that is catching up must also gain on the clock. Chosen: clients come back within 1 s (RECONNECT_MS of
brokers.py), and send without a pause."""
TOGETHER = 60 * SECOND
"""Who was heard so shortly before the newest fell silent together with it; an agent counts as silent after as long."""


@dataclass(slots=True)
class _Behind:
    """A sender that is waited for: when it was last heard, and where it stood at the beginning of this stretch."""

    heard: int
    since: int
    stood: int


class CatchUp:
    """Who is catching up. All times in UTC us; `lateness` as in [pipeline]. For one thread."""

    def __init__(self, lateness: int) -> None:
        self._lateness = lateness
        self._last: int | None = None  # newest event time of all but clocks that are ahead
        self._behind: dict[str, _Behind] = {}

    def heard(self, node: str, newest: int, appended: int, now: int, known: Mapping[str, int]) -> None:
        """A message of `node` up to event time `newest`, taken in by the brokers at `appended`.

        known: newest event time of every node before this message.
        """
        if self._last is None:
            self._last = max((time for time in known.values() if time <= now), default=0)
        late = appended - newest > self._lateness
        if late and not self._behind and known.get(node, 0) >= self._last - TOGETHER:
            together = (other for other, time in known.items() if time >= (self._last or 0) - TOGETHER)
            self._behind = {other: _Behind(now, now, known[other]) for other in together}
        if node in self._behind and not (late and self._gains(self._behind[node], newest, now)):
            del self._behind[node]
        if newest <= appended + self._lateness:  # else its clock is ahead, and would make all others look cut off
            self._last = max(self._last, newest)

    def hold(self, now: int, newest: Mapping[str, int]) -> int | None:
        """Event time beyond which nothing may be judged yet; None if nobody is waited for."""
        for node in [node for node, behind in self._behind.items() if now - behind.heard > PATIENCE]:
            del self._behind[node]
        return min((newest[node] for node in self._behind), default=None)

    @staticmethod
    def _gains(behind: _Behind, newest: int, now: int) -> bool:
        """Whether the sender came nearer to the clock in the last PATIENCE."""
        behind.heard = now
        if now - behind.since < PATIENCE:
            return True
        gained = newest - behind.stood > now - behind.since
        behind.since, behind.stood = now, newest
        return gained
