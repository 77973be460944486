"""Whether a receiver accepts posts: after three failures in a row it is probed until it responds.

The retry schedule limits a single message. A receiver that responds again gets everything that waits for it at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipeline.model.records import SECOND, iso

FAILURES = 3
"""Failures in a row after which a receiver counts as down. Chosen: 0, 1 and 6 s, a restart of a small service."""
PROBE_S, PROBE_LATER_S, PROBE_OFTEN_S = 5, 30, 600
"""Seconds between probes: 5 for the first 10 minutes, then 30. Chosen: a page waits 30 s at most after a recovery."""
MOST_WAIT_S = 300.0
"""Longest wait for the next probe that a Retry-After may ask for. Chosen: a header holds no page back for hours."""
REPORT_S = 30
"""A receiver that fails for so long is reported to the others. Chosen: a restart takes less."""


@dataclass(slots=True)
class ReceiverHealth:
    """What the last posts to one receiver showed. Times in UTC us.

    failures: posts in a row that were not accepted.  since: of the first of them.  answer: to the last of them.
    probes: message -> probes made with it, so that one message that is always refused does not hide a recovery.
    """

    failures: int = 0
    since: int = 0
    answer: str = ""
    next_probe: int = 0
    probes: Counter[str] = field(default_factory=Counter)

    @property
    def down(self) -> bool:
        """Whether the receiver is probed instead of sent everything that is due."""
        return self.failures >= FAILURES

    def accepted(self) -> bool:
        """Takes a 2xx; True if the receiver was down."""
        recovered = self.down
        self.failures, self.answer = 0, ""
        self.probes.clear()
        return recovered

    def failed(self, now: int, answer: str, after_s: float) -> None:
        """Takes a post that was not accepted. after_s: what Retry-After asked for."""
        self.since = self.since if self.failures else now
        self.failures, self.answer = self.failures + 1, answer
        often = now - self.since < PROBE_OFTEN_S * SECOND
        wait = max(PROBE_S if often else PROBE_LATER_S, min(after_s, MOST_WAIT_S))
        self.next_probe = now + int(wait * SECOND)

    def failing(self, now: int) -> bool:
        """Whether the others have to hear of it."""
        return self.down and now - self.since >= REPORT_S * SECOND

    def trouble(self) -> str | None:
        """A sentence for readiness; None while the receiver is not down."""
        return f"accepts no alert since {iso(self.since)[:19]}Z: {self.answer}" if self.down else None
