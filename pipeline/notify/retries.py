"""When a message is sent again that its receiver did not accept while it accepts others.

`Retry-After` delays it by MAX_PROBE_WAIT_S at most, and only until the receiver accepts another message: it is about
the receiver, and a page must not stay behind later ones.

A limit of the rate is no refusal of a message, which is sent again after the pause, before all others. After TRIES of
them others have their turn; if the next one is accepted at once, the message was refused after all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from pipeline.model.records import SECOND
from pipeline.notify.delivery import PostResult
from pipeline.notify.health import MAX_PROBE_WAIT_S
from pipeline.notify.held_messages import Store
from pipeline.notify.sending import DuePayload, load_states

RETRY_S = (1, 5, 30, 120, 600, 1800, 7200, 21600)
"""Delays between attempts of one message (s): short for a restart of the receiver, then up to 6 h. A message that is
still refused afterwards, while its receiver accepts others, is dead. Probes do not count."""
JITTER_FROM_S, JITTER = 120, 0.1
"""Delays from 2 min on vary by 10 %, so that messages that failed together are not retried together. Chosen."""
TRIES = 3
"""Pauses after which a message that is limited each time lets another be tried. Chosen: as many as the failures after
which a receiver is down; a receiver that others use too may refuse twice."""
MAX_LIMITED = 1000
"""Messages whose limits are counted; then their turns begin again. Chosen: twice what is read of a queue."""
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
        self._limited: dict[str, int] = {}  # message -> how often it was limited since something was accepted
        self._last_limited: tuple[DuePayload, PostResult] | None = None

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

    def count_limit(self, payload: DuePayload, answer: PostResult) -> None:
        """Counts that a message was not accepted because of the rate."""
        if len(self._limited) >= MAX_LIMITED:
            self._limited = {}
        self._limited[payload.id] = self._limited.get(payload.id, 0) + 1
        self._last_limited = payload, replace(answer, retry_after_s=0.0)

    def choose(self, due: Sequence[DuePayload]) -> Sequence[DuePayload]:
        """Returns the messages to be sent, in order: all, or only the first of those with the fewest turns of TRIES."""
        turns = [self._limited.get(one.id, 0) // TRIES for one in due]
        return due if not any(turns) else [due[turns.index(min(turns))]]

    def take_refused(self, accepted: str) -> tuple[DuePayload, PostResult] | None:
        """Returns the message whose TRIES were over when another was accepted at once, with its answer; forgets all
        limits. Where a limiter accepts now and then, whatever is tried, messages have their limits in turn."""
        last, limited = self._last_limited, self._limited
        self._last_limited, self._limited = None, {}
        if last is None or accepted in limited or limited.get(last[0].id, 0) < TRIES:
            return None
        id_ = last[0].id  # somebody may have withdrawn it meanwhile
        return last if load_states(self._store, [id_]).get(id_) == "pending" else None

    def _draw_delay_s(self, attempts: int) -> float:
        delay = RETRY_S[attempts]
        return delay if delay < JITTER_FROM_S else delay * self._random.uniform(1 - JITTER, 1 + JITTER)
