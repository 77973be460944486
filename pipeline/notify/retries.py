"""When a message is sent again that its receiver did not accept while it accepts others.

`Retry-After` delays it by MAX_PROBE_WAIT_S at most, and only until the receiver accepts another message: it is about
the receiver, and a page must not stay behind later ones.

A limit of the rate is no refusal of a message, which is sent again after the pause, before all others. A message that
is limited again and again may be the reason itself: then another one is sent right after it. If that is accepted, which
no limit of the rate would do a moment after it refused, the first was refused.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import duckdb

from pipeline.model.records import SECOND
from pipeline.notify.delivery import PostResult
from pipeline.notify.health import MAX_PROBE_WAIT_S, PROBE_S
from pipeline.notify.held_messages import Store
from pipeline.notify.sending import DuePayload, load_states

RETRY_S = (1, 5, 30, 120, 600, 1800, 7200, 21600)
"""Delays between attempts of one message (s): short for a restart of the receiver, then up to 6 h. A message that is
still refused afterwards, while its receiver accepts others, is dead. Probes do not count."""
JITTER_FROM_S, JITTER = 120, 0.1
"""Delays from 2 min on vary by 10 %, so that messages that failed together are not retried together. Chosen."""
TRIES, TRIES_AFTER_LONG = 3, 2
"""Limits in a row of one message after which another is sent right after it; the second if the receiver asks for a
pause longer than PROBE_S, which is then over once. Chosen: a receiver that others use too may refuse twice."""
MAX_DOUBLINGS = 4
"""Doublings of these tries after another message was limited too, since each costs a request in the pause. Chosen."""
MAX_LIMITED = 1000
"""Messages whose limits are counted, or that are known as refused; then it begins again. Chosen: twice what is read of
a queue."""
FARTHEST_S = 7 * 3600
"""Longest wait of a message that is planned (s): the last delay with its 10 %, rounded up."""
_FAR = """
UPDATE outbox SET next_attempt = make_timestamptz($1::BIGINT) WHERE state = 'pending' AND epoch_us(next_attempt) > $2
"""
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
        self._limited: Counter[str] = Counter()  # message -> how often it was limited since something was accepted
        self._known: set[str] = set()  # messages that were refused by a limit while another was accepted
        self._checks = 0  # how often another one was limited too since something was accepted
        self._suspect: tuple[DuePayload, PostResult] | None = None  # one is to be sent right after it

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

    @property
    def is_checking(self) -> bool:
        """Whether one other message is to be sent in spite of the pause, since it may be about a single message."""
        return self._suspect is not None

    def count_limit(self, payload: DuePayload, answer: PostResult) -> None:
        """Counts that a message was not accepted because of the rate."""
        was_check, self._suspect = self.is_checking, None
        if was_check:  # another one is limited too, so it is the rate
            self._limited.clear()
            self._checks = min(self._checks + 1, MAX_DOUBLINGS)
            return
        if len(self._limited) >= MAX_LIMITED:
            self._limited.clear()
        self._limited[payload.id] += 1
        tries = TRIES if answer.retry_after_s <= PROBE_S else TRIES_AFTER_LONG
        if self._limited[payload.id] >= (1 if payload.id in self._known else tries) << self._checks:
            self._suspect = payload, replace(answer, retry_after_s=0.0)

    def choose(self, due: Sequence[DuePayload]) -> Sequence[DuePayload]:
        """Returns the messages to be sent, in order: all, or only the first besides the one that is suspected."""
        if self._suspect is None:
            return due
        return [one for one in due if one.id != self._suspect[0].id][:1]

    def take_refused(self, accepted: str) -> tuple[DuePayload, PostResult] | None:
        """Returns the message after whose limit another was accepted, with its answer; forgets all limits."""
        suspect, self._suspect = self._suspect, None
        self._limited.clear()
        self._checks = 0
        self._known.discard(accepted)
        if suspect is None or suspect[0].id == accepted:
            return None
        id_ = suspect[0].id
        if load_states(self._store, [id_]).get(id_) != "pending":  # a person may have ended it since
            return None
        if len(self._known) >= MAX_LIMITED:
            self._known.clear()
        self._known.add(id_)
        return suspect

    def end_check(self) -> None:
        """Ends a check: the pause is over, so that the oldest is the first again."""
        self._suspect = None

    def _draw_delay_s(self, attempts: int) -> float:
        delay = RETRY_S[attempts]
        return delay if delay < JITTER_FROM_S else delay * self._random.uniform(1 - JITTER, 1 + JITTER)


def end_far_waits(connection: duckdb.DuckDBPyConnection, now: int) -> None:
    """Makes messages due that wait for longer than any is planned: the clock was ahead when they were tried."""
    connection.execute(_FAR, [now, now + FARTHEST_S * SECOND])
