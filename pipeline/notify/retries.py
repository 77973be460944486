"""When a message is sent again that its receiver did not accept while it accepts others.

`Retry-After` delays it by MAX_PROBE_WAIT_S at most, and only until the receiver accepts another message: it is about
the receiver, and a page must not stay behind later ones.
"""

from __future__ import annotations

import random

from pipeline.model.records import SECOND
from pipeline.notify.delivery import MAX_PROBE_WAIT_S, PostResult
from pipeline.notify.held_messages import Store
from pipeline.notify.sending import DuePayload

RETRY_S = (1, 5, 30, 120, 600, 1800, 7200, 21600)
"""Delays between attempts of one message (s): short for a restart of the receiver, then up to 6 h. A message that is
still refused afterwards, while its receiver accepts others, is dead. Probes do not count."""
JITTER_FROM_S, JITTER = 120, 0.1
"""Delays from 2 min on vary by 10 %, so that messages that failed together are not retried together. Chosen."""
_EARLIER = """
UPDATE outbox SET next_attempt = least(next_attempt, make_timestamptz(n.due))
FROM (SELECT unnest($1::VARCHAR[]) AS id, unnest($2::BIGINT[]) AS due) n
WHERE outbox.id = n.id AND outbox.state = 'pending'
"""


class Retries:
    """Plans the attempts of the messages of one receiver."""

    def __init__(self, store: Store) -> None:
        self._store, self._random = store, random.Random()
        self._postponed: dict[str, int] = {}  # message that waits because of Retry-After -> when it was due else

    def plan(self, payload: DuePayload, answer: PostResult, now: int) -> tuple[str, str, int]:
        """Returns (state, answer, next attempt) of a payload that was not accepted."""
        if payload.attempts >= len(RETRY_S) and now - payload.created >= RETRY_S[-1] * SECOND:
            return "dead", f"{answer.text}, {payload.attempts + 1} times", now
        delay = self._draw_delay_s(min(payload.attempts, len(RETRY_S) - 1))
        if (asked := min(answer.retry_after_s, MAX_PROBE_WAIT_S)) > delay:
            self._postponed[payload.id] = now + int(delay * SECOND)
            delay = asked
        return "pending", answer.text, now + int(delay * SECOND)

    def end_postponement(self) -> None:
        """Plans what waits because of Retry-After as without it: the receiver accepted another message."""
        if not self._postponed:
            return
        with self._store.transaction() as connection:
            connection.execute(_EARLIER, [list(self._postponed), list(self._postponed.values())])
        self._postponed = {}

    def _draw_delay_s(self, attempts: int) -> float:
        delay = RETRY_S[attempts]
        return delay if delay < JITTER_FROM_S else delay * self._random.uniform(1 - JITTER, 1 + JITTER)
