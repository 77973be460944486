"""After an outage of the brokers all agents send what they kept, as fast as they can: who is done first must wait.

On Kafka nobody sees what an agent still has to send. What is seen is when the brokers took a message in: one older than
the lateness tells that its sender is catching up. Until those who fell silent together have caught up, or stay silent,
the watermark stands with the last of them; else all but the quickest would be late, and never be judged.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.records import SECOND

PATIENCE = 10 * SECOND
"""How long one that was there before the outage is waited for, from the first that is back and from its last message.
Chosen: clients come back within 1 s (RECONNECT_MS of brokers.py), and send without a pause."""
TOGETHER = 60 * SECOND
"""Who was heard so shortly before the newest fell silent together with it; an agent counts as silent after as long."""


class CatchUp:
    """Who is catching up. All times in UTC us; `lateness` as in [pipeline]. For one thread."""

    def __init__(self, lateness: int) -> None:
        self._lateness = lateness
        self._since = 0
        self._behind: dict[str, int] = {}  # node -> when it was last heard

    def heard(self, node: str, newest: int, appended: int, now: int, known: Mapping[str, int]) -> None:
        """A message of `node` up to event time `newest`, taken in by the brokers at `appended`.

        known: newest event time of every node before this message.
        """
        behind = appended - newest > self._lateness
        if behind and not self._behind:
            self._begin(node, now, known)
        if node in self._behind:
            if behind:
                self._behind[node] = now
            else:
                del self._behind[node]

    def hold(self, now: int, newest: Mapping[str, int]) -> int | None:
        """Event time beyond which nothing may be judged yet; None if nobody is waited for."""
        for node in [n for n, heard in self._behind.items() if now - max(heard, self._since) > PATIENCE]:
            del self._behind[node]
        return min((newest[node] for node in self._behind), default=None)

    def _begin(self, node: str, now: int, known: Mapping[str, int]) -> None:
        """Waits for all that fell silent together; one that was cut off alone is late already and holds nobody."""
        last = max(known.values(), default=0)
        if known.get(node, 0) >= last - TOGETHER:
            self._since = now
            self._behind = {other: now for other, time in known.items() if time >= last - TOGETHER}
