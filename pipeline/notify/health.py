"""State of one receiver by its answers: whether it responds, whether it limits its rate, and what is reported of it.

After three consecutive failures a receiver is down: it is probed until it accepts something. A receiver that limits its
rate works: nothing is sent to it before the end of the pause that it asked for, then the oldest page first. The retry
schedule limits a single message; a receiver that accepts again gets everything that is due.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipeline.model.records import SECOND, iso

MAX_FAILURES = 3
"""Consecutive failures after which a receiver is down. Chosen: at 0, 1 and 6 s, a restart of a small service."""
PROBE_S, SLOW_PROBE_S, FAST_PROBES_S = 5, 30, 600
"""Time between probes (s): 5 in the first 10 minutes, then 30. Chosen: a page waits at most 30 s after a recovery."""
MAX_PROBE_WAIT_S = 300.0
"""Longest wait before a probe, before a message is sent again, or of a pause, by Retry-After (s). Chosen: a header
cannot delay a page by hours."""
REPORT_AFTER_S = 30
"""Time after which a failing receiver is reported to the others (s). Chosen: longer than a restart."""
PAUSE_S = 1.0
"""First pause of a receiver that limits its rate and does not say for how long (s), doubled up to the time between
probes. Chosen: Slack, which says so, accepts one message per second and channel."""
FLOWS_S = 60
"""Time for which a receiver that was reported for its limit accepts without a gap of REPORT_AFTER_S before it is
reported no longer (s). Chosen: above that gap, so that one that accepts a message now and then is reported once."""


@dataclass(slots=True)
class RateLimit:
    """The limit of the rate of one receiver. Times in UTC us.

    until: end of the pause.  refusals: times it was asked, after a pause, and refused, since it accepted something.
    since: time of the first of them.  pause_s: pause that followed that one.
    blocks: whether it accepts too little for too long, so that the others must be told.
    flows_since: when it accepted something after a gap of REPORT_AFTER_S.
    """

    until: int = 0
    refusals: int = 0
    since: int = 0
    pause_s: float = 0.0
    blocks: bool = False
    flows_since: int = 0

    def record_refusal(self, now: int, after_s: float) -> int:
        """Records a limited answer and returns the end of the pause. after_s: wait by Retry-After (s); 0: none."""
        if now < self.until:  # it was on its way when the pause began
            self.until = max(self.until, now + int(min(after_s, MAX_PROBE_WAIT_S) * SECOND))
            return self.until
        self.since = self.since if self.refusals else now
        often = now - self.since < FAST_PROBES_S * SECOND
        unsaid = min(PAUSE_S * 2 ** min(self.refusals, 10), PROBE_S) if often else SLOW_PROBE_S
        pause_s = min(after_s, MAX_PROBE_WAIT_S) or unsaid
        self.pause_s = self.pause_s if self.refusals else pause_s
        self.refusals += 1
        self.until = now + int(pause_s * SECOND)
        return self.until

    def record_success(self, now: int) -> None:
        """Records that something was accepted."""
        if self.refusals and now - self.since >= REPORT_AFTER_S * SECOND:
            self.flows_since = now
        self.refusals = 0

    def end_pause(self) -> None:
        """Ends the pause: it was about one message, since the receiver accepted another during it."""
        self.until = 0

    def judge(self, now: int) -> bool:
        """Returns `blocks` as of now. It begins when nothing was accepted for REPORT_AFTER_S, and for the pause that it
        asked for, of which as much counts; a single answer of the past, after which nothing was sent, says nothing."""
        refused = now - self.since if self.refusals else 0
        is_asked = self.refusals > 1 or now < self.until
        if is_asked and refused >= (REPORT_AFTER_S + min(self.pause_s, REPORT_AFTER_S)) * SECOND:
            self.blocks = True
        elif refused < REPORT_AFTER_S * SECOND and now - self.flows_since >= FLOWS_S * SECOND:
            self.blocks = False
        return self.blocks

    def move_back(self, now: int) -> None:
        """Ends the pause after a backward clock step."""
        self.until, self.since, self.flows_since = (
            min(self.until, now),
            min(self.since, now),
            min(self.flows_since, now),
        )


@dataclass(slots=True)
class ReceiverHealth:
    """State of one receiver by its last POSTs. Times in UTC us.

    failures: consecutive POSTs that were not accepted.  since: time of the first.  answer: result of the last.
    delivered: time of the last POST that was accepted; 0: none.
    probes: message -> number of probes with it, so that one message that is always refused cannot hide a recovery.
    """

    failures: int = 0
    since: int = 0
    answer: str = ""
    next_probe: int = 0
    delivered: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    limit: RateLimit = field(default_factory=RateLimit)

    @property
    def is_down(self) -> bool:
        """Whether the receiver is only probed, instead of sent everything that is due."""
        return self.failures >= MAX_FAILURES

    def is_paused(self, now: int) -> bool:
        """Whether nothing may be sent now, since the receiver limits its rate."""
        return now < self.limit.until

    def wait_s(self, now: int, most: float) -> float:
        """Returns the time until the end of the pause (s), at most `most`, which it is without one."""
        return min(most, (self.limit.until - now) / SECOND) if self.is_paused(now) else most

    def record_success(self, now: int = 0) -> bool:
        """Records a 2xx. Returns whether the receiver was down."""
        recovered = self.is_down
        self.failures, self.answer, self.delivered = 0, "", now
        self.probes.clear()
        self.limit.record_success(now)
        return recovered

    def record_failure(self, now: int, answer: str, after_s: float) -> None:
        """Records a POST that was not accepted. after_s: wait by Retry-After (s)."""
        self.since = self.since if self.failures else now
        self.failures, self.answer = self.failures + 1, answer
        often = now - self.since < FAST_PROBES_S * SECOND
        wait = max(PROBE_S if often else SLOW_PROBE_S, min(after_s, MAX_PROBE_WAIT_S))
        self.next_probe = now + int(wait * SECOND)

    def record_limit(self, now: int, answer: str, after_s: float) -> None:
        """Records a POST that was not accepted because the receiver limits its rate: it works, so this is no failure,
        but a receiver that is down stays so, as it accepts nothing. after_s: wait by Retry-After (s)."""
        self.answer = answer
        self.next_probe = self.limit.record_refusal(now, after_s)

    def move_back(self, now: int) -> None:
        """Makes everything due after a backward clock step."""
        self.since, self.next_probe = min(self.since, now), min(self.next_probe, now)
        self.limit.move_back(now)

    def must_report(self, now: int) -> bool:
        """Returns whether the other receivers must be notified."""
        blocks = self.limit.judge(now)
        return blocks or (self.is_down and now - self.since >= REPORT_AFTER_S * SECOND)

    def as_json(self) -> dict[str, str | None]:
        """Returns state, since when it fails or is limited, its last answer, and when it last accepted a message."""
        fails = self._fails_since()
        state = "down" if self._is_closed else "failing" if fails else "ok" if self.delivered else "unknown"
        since, accepted = (iso(time) if time else None for time in (fails, self.delivered))
        return {"state": state, "since": since, "answer": self.answer, "delivered": accepted}

    def describe_trouble(self) -> str | None:
        """Returns the reason for /readyz, None while the receiver is not down and accepts something."""
        return f"accepts no alerts since {iso(self._fails_since())[:19]}Z: {self.answer}" if self._is_closed else None

    @property
    def _is_closed(self) -> bool:
        return self.is_down or (self.limit.blocks and self.limit.refusals > 0)

    def _fails_since(self) -> int:
        """Returns since when nothing is accepted; 0 if the last POST was."""
        times = [self.since] * bool(self.failures) + [self.limit.since] * bool(self.limit.refusals)
        return min(times, default=0)
