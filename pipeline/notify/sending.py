"""Due messages of one receiver, sent in their order: one at a time, or several while a long queue would take too long.

A message is started only after all before it were started, and its result is returned after theirs.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeline.notify.held_messages import Store
from pipeline.notify.receivers import Message

WANTED_S = 4.0
"""Time in which everything that is due is to be sent (s). Chosen: contract 5 s, less the time of the last answer."""
MOST = 8
"""Messages to one receiver at a time. Chosen: 5,000 messages within 4 s at 6 ms each; a browser uses 6 connections."""
SMOOTHED = 0.2
"""Weight of the newest duration in the mean. Chosen: about the last five."""
T = TypeVar("T")
R = TypeVar("R")
LOOK_S = 0.2
"""Interval in which a page that is due by time is looked for between tickets (s). Chosen: a look reads the queue."""
TICKETS_S = 1.0
"""Longest time for which tickets are sent without a look at everything else (s). Chosen: group_wait is in seconds."""
BATCH_SIZE = 500
"""Payloads read at a time. Chosen: reading them sorts all that wait."""
_HEADS = """
SELECT o.id, o.incident, o.kind, o.body, o.attempts, epoch_us(o.created), coalesce(t.reference, ''),
    starts_with(o.incident, 'grp-')
        OR o.incident IN (SELECT incident FROM outbox WHERE receiver = $1 AND state = 'delivered' AND kind = 'firing'
                          AND part_of IS NULL),
    o.incident IN (SELECT incident FROM outbox WHERE receiver = $1 AND state = 'delivered' AND part_of IS NULL
                   AND incident IN (SELECT incident FROM outbox WHERE receiver = $1 AND state = 'pending')
                   GROUP BY incident HAVING arg_max(kind, number) = 'update'),
    coalesce(i.severity, 'page') = 'page'
FROM (
    SELECT id, incident, kind, payload AS body, attempts, next_attempt, created, number,
           row_number() OVER (PARTITION BY incident ORDER BY number) AS place
    FROM outbox WHERE receiver = $1 AND state = 'pending') o LEFT JOIN incidents i ON i.id = o.incident
    LEFT JOIN notify_threads t ON t.receiver = $1 AND t.thread = o.incident
WHERE place = 1 AND epoch_us(next_attempt) <= $2
ORDER BY coalesce(i.severity, 'page') <> 'page', o.created, i.onset NULLS FIRST, o.incident LIMIT $3
"""
"""A group that pages again was acknowledged, so it fired, also where the row of that is no longer kept."""
_ANY_DUE = """
SELECT 1 FROM outbox WHERE receiver = $1 AND state = 'pending' AND epoch_us(next_attempt) <= $2 LIMIT 1
"""
_PAGE = """
SELECT count(*) FROM (
    SELECT incident, arg_min(next_attempt, number) AS due FROM outbox WHERE receiver = $1 AND state = 'pending'
    GROUP BY incident) o LEFT JOIN incidents i ON i.id = o.incident
WHERE epoch_us(o.due) <= $2 AND coalesce(i.severity, 'page') = 'page'
"""
_WAITING = "SELECT count(*) FROM outbox WHERE receiver = $1 AND state = 'pending'"


@dataclass(frozen=True, slots=True)
class DuePayload:
    """A payload that is due: the oldest pending one of its incident for this receiver. has_fired, follows_update: see
    `Message`. is_page: whether its incident is a page now, or it is of no incident."""

    id: str
    incident: str
    kind: str
    body: str
    attempts: int
    created: int
    reference: str = ""
    has_fired: bool = False
    follows_update: bool = False
    is_page: bool = True

    def as_message(self, now: int) -> Message:
        """Returns it as receivers read it."""
        body = json.loads(self.body)
        fired, updated = self.has_fired, self.follows_update
        return Message(self.id, self.incident, self.kind, body, self.reference, now, fired, updated)


def load_due(store: Store, receiver: str, until: int) -> list[DuePayload]:
    """Returns the first payloads of a receiver that are due until a time (UTC us), the oldest page first; of those that
    were written together the one that began first."""
    with contextlib.closing(store.cursor()) as cursor:
        if not cursor.execute(_ANY_DUE, [receiver, until]).fetchall():  # as in most passes: a sixth of the time
            return []
        return [DuePayload(*row) for row in cursor.execute(_HEADS, [receiver, until, BATCH_SIZE]).fetchall()]


class PageWatch:
    """Whether tickets must wait because a page is due, or a group of alerts, a Watchdog or a health check may be.

    woken: set when payloads were committed, so that a new page is looked for immediately; others become due by time.
    """

    def __init__(self, store: Store, receiver: str, woken: threading.Event, clock: Callable[[], int]) -> None:
        self._store, self._receiver, self._woken, self._clock = store, receiver, woken, clock
        self._began, self._looked = time.monotonic(), -LOOK_S

    def is_due(self) -> bool:
        """Returns whether a page is due; looks again if something was committed, else after LOOK_S. True after
        TICKETS_S."""
        now = time.monotonic()
        if now - self._began >= TICKETS_S:
            return True
        if not self._woken.is_set() and now - self._looked < LOOK_S:
            return False
        self._woken.clear()
        self._looked = now
        with contextlib.closing(self._store.cursor()) as cursor:
            row = cursor.execute(_PAGE, [self._receiver, self._clock()]).fetchone()
        return bool(row and row[0])


def count_waiting(store: Store, receiver: str, due: Sequence[DuePayload]) -> int:
    """Returns how many payloads wait for a receiver, of which the first BATCH_SIZE are known."""
    if len(due) < BATCH_SIZE:
        return len(due)
    with contextlib.closing(store.cursor()) as cursor:
        row = cursor.execute(_WAITING, [receiver]).fetchone()
    return int(row[0]) if row else 0


def load_states(store: Store, ids: Sequence[str]) -> dict[str, str]:
    """Returns id -> state of those messages that are in the outbox."""
    with contextlib.closing(store.cursor()) as cursor:
        rows = cursor.execute("SELECT id, state FROM outbox WHERE id IN (SELECT unnest($1::VARCHAR[]))", [list(ids)])
        return dict(rows.fetchall())


class OrderedSender(Generic[T, R]):
    """Sends messages and returns their results in order. `close` ends the threads, which are daemons.

    send:    sends one message; never raises.
    waiting: number of messages that are due, those behind this batch included.
    """

    def __init__(self, send: Callable[[T], R], waiting: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._send, self._waiting, self._monotonic = send, waiting, monotonic
        self._jobs: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._mean_s = 0.0

    def send_all(self, due: Sequence[T], may_start: Callable[[], int]) -> Iterator[tuple[T, R]]:
        """Yields each message that was started, with its result. may_start: how many may be on their way now; 0: none
        is started any more, and those on their way end."""
        ahead, started = deque(due), deque[tuple[T, Future[R]]]()
        while True:
            width = min(may_start(), self.compute_width())
            if width == 1 and not started and ahead:
                message = ahead.popleft()
                yield message, self._send_timed(message)
                continue
            while ahead and len(started) < width:
                message = ahead.popleft()
                started.append((message, self._start(message)))
            if not started:
                return
            message, result = started.popleft()
            yield message, result.result()

    def compute_width(self) -> int:
        """Returns how many messages at a time send everything that is due within WANTED_S."""
        return max(1, min(MOST, math.ceil(self._waiting * self._mean_s / WANTED_S)))

    def close(self) -> None:
        """Ends the threads after what they send now."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _send_timed(self, message: T) -> R:
        began = self._monotonic()
        result = self._send(message)
        took = self._monotonic() - began
        self._mean_s = took if not self._mean_s else self._mean_s + SMOOTHED * (took - self._mean_s)
        return result

    def _start(self, message: T) -> Future[R]:
        future = Future[R]()
        self._jobs.put((message, future))
        if self._threads < MOST:
            self._threads += 1
            threading.Thread(target=self._run, name="notify-send", daemon=True).start()
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            message, future = job
            try:
                future.set_result(self._send_timed(message))
            except BaseException as error:  # noqa: BLE001 - the thread that waits for the result raises it
                future.set_exception(error)
