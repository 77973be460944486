"""The notifier: sends what the outbox holds, one thread per receiver, until each payload is delivered or dead.

At least once: a payload is delivered when its receiver answered 2xx, and that is written down afterwards. A crash
between the two sends it again under the same idempotency key. All state is in the outbox table.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import duckdb

from pipeline.cases import Change
from pipeline.config import Notify, Webhook
from pipeline.errors import ConfigError
from pipeline.records import SECOND
from pipeline.respond import alertmanager, delivery
from pipeline.respond.payloads import Sender, payloads_of
from pipeline.store.ledger import Payload

log = logging.getLogger("fleetpulse.notify")
T = TypeVar("T")

RETRY_S = (1, 5, 30, 120, 600, 1800, 7200, 21600)
"""Seconds between attempts: quick for a restart of the receiver, then up to a night. After the last one it is dead."""
JITTER_FROM_S, JITTER = 120, 0.1
"""From two minutes on a delay varies by a tenth, so that what failed together does not come back together. Chosen."""
WATCHDOG_S = 300
"""How often the Watchdog fires: twice within the ten minutes after which a dead man's switch should trip. Chosen."""
KEEP_S = 7 * 86400
"""How long delivered and dead payloads of resolved incidents are kept. Chosen."""
POLL_S = 0.5
"""How often a thread looks into the outbox. Chosen: far below the first retry."""
END_S = 2.0
"""How long the end waits for a post under way; what was not written down is sent again at the next start. Chosen."""
FAULT_S = 5.0
"""Pause after a look that failed: what cannot be written down as delivered is not sent twice a second. Chosen."""
FAULTS = 100  # distinct faults remembered as logged; chosen
BATCH = 100  # bound of what one look takes

_HEADS = """
SELECT id, incident, body, attempts FROM (
    SELECT id, incident, payload AS body, attempts, next_attempt, created, number,
           row_number() OVER (PARTITION BY incident ORDER BY number) AS place
    FROM outbox WHERE receiver = $1 AND state = 'pending')
WHERE place = 1 AND epoch_us(next_attempt) <= $2 ORDER BY created, incident LIMIT $3
"""
_SETTLE = """
UPDATE outbox SET state = $2, attempts = attempts + 1, answer = $3, next_attempt = make_timestamptz($4::BIGINT)
WHERE id = $1
"""
_PRUNE = """
DELETE FROM outbox WHERE state <> 'pending' AND epoch_us(created) < $1
AND incident IN (SELECT id FROM incidents WHERE resolved IS NOT NULL AND epoch_us(resolved) < $1)
"""


class Store(Protocol):
    """What the notifier needs of the store."""

    def transaction(self) -> AbstractContextManager[duckdb.DuckDBPyConnection]: ...

    def cursor(self) -> duckdb.DuckDBPyConnection: ...


@dataclass(frozen=True, slots=True)
class Due:
    """A payload whose turn it is: the oldest of its incident that this receiver has not got."""

    id: str
    incident: str
    body: str
    attempts: int


class Notifier:
    """Makes payloads of changes, and delivers them. Raises ConfigError on receivers that can never be called.

    alive: whether the pipeline does its work; while it does not, the Watchdog is not sent.
    """

    def __init__(
        self,
        store: Store,
        notify: Notify,
        site: str,
        clock: Callable[[], int],
        alive: Callable[[], bool] = lambda: True,
        timeout_s: float = delivery.TIMEOUT_S,
    ) -> None:
        self.receivers = {w.name: w for w in notify.webhooks}
        if len(self.receivers) < len(notify.webhooks):
            raise ConfigError("[[notify.webhooks]] name: two receivers have the same; wanted each one once")
        for receiver in notify.webhooks:
            delivery.check(receiver)
        self.gone: set[str] = set()
        self._store, self._clock, self._alive, self._timeout_s = store, clock, alive, timeout_s
        self._sender = Sender(site, notify.external_url.rstrip("/"))
        self._started = clock()
        self._watchdog_due = dict.fromkeys(self.receivers, self._started)
        self._random = random.Random()
        self._troubles: dict[str, str] = {}
        self._logged: set[str] = set()

    def payloads(self, changes: Sequence[Change], now: int) -> list[Payload]:
        """What receivers are to be told of changes; to be written in the transaction that writes the changes."""
        return [p for c in changes for p in payloads_of(c, tuple(self.receivers.values()), self._sender, now)]

    def trouble(self) -> str | None:
        """A sentence on what fails now, for whoever watches the pipeline; None if all is well."""
        return "; ".join(text for _, text in sorted(dict(self._troubles).items())) or None

    def run(self, stop: threading.Event) -> None:
        """Delivers until `stop`."""
        self._attempt("outbox", self._tidy, stop)
        threads = [
            threading.Thread(target=self._serve, args=(name, stop), name=f"notify-{name}", daemon=True)
            for name in self.receivers
        ]
        for thread in threads:
            thread.start()
        while not stop.wait(3600.0):
            self._attempt("outbox", self._tidy, stop)
        for thread in threads:
            thread.join(END_S / len(threads))

    def step(self, name: str, ended: Callable[[], bool] = lambda: False) -> int:
        """Tries once each payload of this receiver whose turn it is; returns how many that were."""
        receiver = self.receivers[name]
        due = self._due(name)
        for payload in due:
            if ended():
                break
            answer = self._post(receiver, payload)
            if not ended():
                self._settle(receiver, payload, answer)
        return len(due)

    def watch(self, name: str) -> None:
        """Fires the Watchdog if its time has come. It is never retried: its absence is what tells."""
        now = self._clock()
        if now < self._watchdog_due[name] or name in self.gone or not self._alive():
            return
        self._watchdog_due[name] = now + WATCHDOG_S * SECOND
        receiver = self.receivers[name]
        body = alertmanager.watchdog(self._sender.site, self._started, name, self._sender.external_url)
        headers = {"Idempotency-Key": f"watchdog.{now}.{name}"}
        answer = delivery.post(receiver, json.dumps(body).encode(), headers, self._timeout_s)
        if answer.outcome == "gone":
            self._disable(receiver, answer.told)
        elif answer.outcome != "delivered":
            log.warning("receiver %s: Watchdog not delivered: %s", name, answer.told)

    def _serve(self, name: str, stop: threading.Event) -> None:
        step = functools.partial(self.step, name, stop.is_set)
        watch = functools.partial(self.watch, name)
        while not stop.is_set():
            self._attempt(f"receiver {name}: Watchdog", watch, stop)  # apart: its faults hold up no alert
            busy = self._attempt(f"receiver {name}: alerts", step, stop)
            if not busy:
                stop.wait(FAULT_S if busy is None else POLL_S)

    def _attempt(self, what: str, act: Callable[[], T], stop: threading.Event) -> T | None:
        """What `act` returns; None if it failed, which is a trouble until it succeeds. No fault ends the thread."""
        try:
            done = act()
        except Exception as error:  # noqa: BLE001 # a thread that ends is an alert that nobody gets
            if not (stop.is_set() and isinstance(error, duckdb.Error)):  # the store may be closed at the end
                self._fail(what, error)
            return None
        self._troubles.pop(what, None)
        return done

    def _fail(self, what: str, error: Exception) -> None:
        self._troubles[what] = text = f"{what}: {type(error).__name__}: {error}"
        if text not in self._logged:
            if len(self._logged) >= FAULTS:
                self._logged.clear()
            self._logged.add(text)
            log.error("%s; tried again until it works, said once", text, exc_info=error)

    def _due(self, name: str) -> list[Due]:
        with contextlib.closing(self._store.cursor()) as cursor:
            return [Due(*row) for row in cursor.execute(_HEADS, [name, self._clock(), BATCH]).fetchall()]

    def _post(self, receiver: Webhook, payload: Due) -> delivery.Answer:
        if receiver.name in self.gone:
            return delivery.Answer("dead", "the receiver answered 410 before and is off until the next start")
        return delivery.post(receiver, payload.body.encode(), {"Idempotency-Key": payload.id}, self._timeout_s)

    def _settle(self, receiver: Webhook, payload: Due, answer: delivery.Answer) -> None:
        now = self._clock()
        state, told, later = answer.outcome, answer.told, now
        if answer.outcome == "retry":
            if payload.attempts >= len(RETRY_S):
                state, told = "dead", f"{answer.told}, {payload.attempts + 1} times"
            else:
                later = now + int(max(self._delay_s(payload.attempts), min(answer.after_s, RETRY_S[-1])) * SECOND)
        row_state = {"retry": "pending", "gone": "dead"}.get(state, state)
        with self._store.transaction() as connection:
            connection.execute(_SETTLE, [payload.id, row_state, told, later])
        if row_state == "dead":
            log.error("receiver %s: %s given up: %s", receiver.name, payload.id, told)
        if state == "gone":
            self._disable(receiver, told)

    def _delay_s(self, attempts: int) -> float:
        delay = RETRY_S[attempts]
        return delay if delay < JITTER_FROM_S else delay * self._random.uniform(1 - JITTER, 1 + JITTER)

    def _disable(self, receiver: Webhook, told: str) -> None:
        self.gone.add(receiver.name)
        log.error("receiver %s is off until the next start: %s", receiver.name, told)

    def _tidy(self) -> None:
        """Gives up what is for receivers that are no longer configured, and forgets what is long over."""
        with self._store.transaction() as connection:
            connection.execute(
                "UPDATE outbox SET state = 'dead', answer = 'the receiver is no longer configured' "
                "WHERE state = 'pending' AND NOT list_contains($1::VARCHAR[], receiver)",
                [list(self.receivers)],
            )
            connection.execute(_PRUNE, [self._clock() - KEEP_S * SECOND])
