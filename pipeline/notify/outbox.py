"""The notifier: sends what the outbox holds, one thread per receiver, until each payload is delivered or dead.

At least once: a payload is delivered when its receiver answered 2xx, and that is written down afterwards. A crash
between the two sends it again under the same idempotency key. A receiver that is down is probed; when it responds,
everything that waits for it is sent at once. What one receiver does not accept is reported to the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import duckdb

from pipeline.config.sections import Notify
from pipeline.incidents import ledger
from pipeline.incidents.cases import Change
from pipeline.incidents.ledger import Payload
from pipeline.model.errors import ConfigError
from pipeline.model.records import SECOND
from pipeline.notify import alertmanager, delivery
from pipeline.notify.alertmanager import Sender, payloads_of
from pipeline.notify.delivery import FAILURES, ReceiverHealth
from pipeline.runtime.heartbeat import Heartbeat

log = logging.getLogger("fleetpulse.notify")
T = TypeVar("T")

RETRY_S = (1, 5, 30, 120, 600, 1800, 7200, 21600)
"""Seconds between attempts of one message: quick for a restart of the receiver, then up to a night. A message that is
refused after all of them, while its receiver accepts others, is dead. Probes of a receiver do not count."""
JITTER_FROM_S, JITTER = 120, 0.1
"""From two minutes on a delay varies by a tenth, so that what failed together does not come back together. Chosen."""
WATCHDOG_S = 300
"""How often the Watchdog fires: twice within the ten minutes after which a dead man's switch should trip. Chosen."""
KEEP_S = 7 * 86400
"""How long delivered and dead payloads of resolved incidents are kept, and how long a receiver that is down is waited
for: then only the ends of what it was sent before are kept for it. Chosen."""
DEAD_S = 3600
"""How long a message that was given up is reported. Chosen."""
HUNG_S = 60.0
"""Seconds without a heartbeat after which a receiver's thread hangs: four times the limit of a post. Chosen."""
POLL_S = 0.5
"""How often a thread looks into the outbox, besides when it is woken. Chosen: far below the first retry."""
END_S = 2.0
"""How long the end waits for a post under way; what was not written down is sent again at the next start. Chosen."""
FAULT_S = 5.0
"""Pause after a look that failed: what cannot be written down as delivered is not sent twice a second. Chosen."""
FAULTS = 100  # distinct faults remembered as logged; chosen
SET_BACK_S = 5.0
"""A step back of our clock from which on no time planned before it holds. Chosen: below it all waits are short."""
BATCH = 100  # bound of what one look takes

_HEADS = """
SELECT o.id, o.incident, o.body, o.attempts, epoch_us(o.created) FROM (
    SELECT id, incident, payload AS body, attempts, next_attempt, created, number,
           row_number() OVER (PARTITION BY incident ORDER BY number) AS place
    FROM outbox WHERE receiver = $1 AND state = 'pending') o LEFT JOIN incidents i ON i.id = o.incident
WHERE place = 1 AND epoch_us(next_attempt) <= $2
ORDER BY coalesce(i.severity, 'page') <> 'page', o.created, o.incident LIMIT $3
"""
_SETTLE = """
UPDATE outbox SET state = $2, attempts = attempts + $5, answer = $3, next_attempt = make_timestamptz($4::BIGINT)
WHERE id = $1
"""
_ALL_DUE = """
UPDATE outbox SET next_attempt = make_timestamptz($2::BIGINT)
WHERE receiver = $1 AND state = 'pending' AND epoch_us(next_attempt) > $2
"""
_EXPIRE = """
UPDATE outbox SET state = 'dead', answer = concat('older than 7 days; ', answer)
WHERE state = 'pending' AND epoch_us(created) < $1 AND (receiver, incident) NOT IN
    (SELECT (receiver, incident) FROM outbox WHERE kind = 'firing' AND state = 'delivered')
"""
_PRUNE = """
DELETE FROM outbox WHERE state <> 'pending' AND epoch_us(created) < $1
AND incident NOT IN (SELECT id FROM incidents WHERE resolved IS NULL OR epoch_us(resolved) >= $1)
AND NOT list_contains($2::VARCHAR[], incident)
AND (receiver, incident) NOT IN (SELECT (receiver, incident) FROM outbox WHERE state = 'pending')
"""
_REPORTED = """
SELECT incident, epoch_us(max(created)) FROM outbox WHERE starts_with(incident, $1) GROUP BY incident
HAVING arg_max(kind, number) = 'firing'
"""
_MOST_AGE = 1 << 62  # us: whatever its next attempt


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
    created: int


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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.receivers = {w.name: w for w in notify.webhooks}
        if len(self.receivers) < len(notify.webhooks):
            raise ConfigError("[[notify.webhooks]] name: two receivers have the same; wanted each one once")
        for receiver in notify.webhooks:
            delivery.check(receiver)
        self.health = {name: ReceiverHealth() for name in self.receivers}
        self.beats = {name: Heartbeat(monotonic) for name in self.receivers}
        self._store, self._clock, self._alive, self._timeout_s = store, clock, alive, timeout_s
        self._sender = Sender(site, notify.external_url.rstrip("/"))
        self._started = clock()
        self._watchdog_due = dict.fromkeys(self.receivers, self._started)
        self._seen = dict.fromkeys(self.receivers, self._started)  # what our clock showed last
        self._random, self._running = random.Random(), False
        self._news = {name: threading.Event() for name in self.receivers}
        self._refused: dict[str, dict[str, tuple[str, int | None]]] = {name: {} for name in self.receivers}
        self._reported: dict[str, int] = {}  # receiver -> since when (us) the others know that it fails
        self._troubles: dict[str, str] = {}
        self._logged: set[str] = set()

    def payloads(self, changes: Sequence[Change], now: int) -> list[Payload]:
        """What receivers are to be told of changes; to be written in the transaction that writes the changes."""
        return [p for c in changes for p in payloads_of(c, tuple(self.receivers.values()), self._sender, now)]

    def wake(self) -> None:
        """Payloads are durable: nobody waits for the next look."""
        for news in self._news.values():
            news.set()

    def trouble(self) -> str | None:
        """A sentence on what fails now, for whoever watches the pipeline; None if all is well."""
        found = [text for _, text in sorted(dict(self._troubles).items())]
        for name in self.receivers:
            found += [f"receiver {name}: {text}" for text in self._problems(name)]
        return "; ".join(found) or None

    def _problems(self, name: str) -> list[str]:
        """What is wrong with one receiver and its thread."""
        found = [text] if (text := self.health[name].trouble()) else []
        if self._running and (age := self.beats[name].age_s) > HUNG_S:
            found.append(f"its thread has hung for {age:.0f} s in {self.beats[name].doing}")
        if refused := list(self._refused[name].values()):
            found.append(f"{len(refused)} alert{'' if len(refused) == 1 else 's'} refused: {refused[-1][0]}")
        return found

    def run(self, stop: threading.Event) -> None:
        """Delivers until `stop`."""
        tidied = self._attempt("outbox", self._tidy, stop)
        threads = [
            threading.Thread(target=self._serve, args=(name, stop), name=f"notify-{name}", daemon=True)
            for name in self.receivers
        ]
        for name, thread in zip(self.receivers, threads, strict=True):
            self.beats[name].beat("its start")
            thread.start()
        self._running = True
        while not stop.wait(3600.0 if tidied else FAULT_S):
            tidied = self._attempt("outbox", self._tidy, stop)
        self._running = False
        self.wake()
        for thread in threads:
            thread.join(END_S / len(threads))

    def recover(self) -> None:
        """Takes from the outbox what a restart forgot: receivers that were down, and which of them were reported."""
        with contextlib.closing(self._store.cursor()) as cursor:
            rows = cursor.execute(
                "SELECT receiver, arg_max(answer, attempts), epoch_us(min(created)) FROM outbox "
                f"WHERE state = 'pending' AND attempts >= {FAILURES} GROUP BY receiver"
            ).fetchall()
            reported = cursor.execute(_REPORTED, [alertmanager.RECEIVER]).fetchall()
        for name, answer, since in rows:
            if name in self.health:
                self.health[name] = ReceiverHealth(FAILURES, since, answer, self._clock())
        self._reported = {incident.removeprefix(alertmanager.RECEIVER): since for incident, since in reported}

    def step(self, name: str, ended: Callable[[], bool] = lambda: False) -> int:
        """Tries once each payload of this receiver whose turn it is; returns how many that were.

        While the receiver is down that is one payload per probe: the one that was tried least, oldest page first.
        """
        health = self.health[name]
        self._follow_the_clock(name)
        due = self._probe(name) if health.down else self._due(name, self._clock())
        for payload in due:
            self.beats[name].beat("a post")
            answer = delivery.post(
                self.receivers[name], payload.body.encode(), {"Idempotency-Key": payload.id}, self._timeout_s
            )
            if ended():
                return len(due)
            self._settle(name, payload, answer)
            if health.down:
                break
        self._report(name)
        return len(due)

    def _follow_the_clock(self, name: str) -> None:
        """After our clock was set back everything is due: what was planned before lies hours ahead."""
        now, before = self._clock(), self._seen[name]
        if before - now > SET_BACK_S * SECOND:
            with self._store.transaction() as connection:
                connection.execute(_ALL_DUE, [name, now])
            health = self.health[name]
            health.since, health.next_probe = min(health.since, now), min(health.next_probe, now)
            self._watchdog_due[name] = min(self._watchdog_due[name], now + WATCHDOG_S * SECOND)
        self._seen[name] = now

    def watch(self, name: str) -> None:
        """Fires the Watchdog if its time has come. It is never retried: its absence is what tells."""
        now = self._clock()
        if now < self._watchdog_due[name] or not self._alive():
            return
        self._watchdog_due[name] = now + WATCHDOG_S * SECOND
        body = alertmanager.watchdog(self._sender.site, self._started, name, self._sender.external_url)
        headers = {"Idempotency-Key": f"watchdog.{now}.{name}"}
        answer = delivery.post(self.receivers[name], json.dumps(body).encode(), headers, self._timeout_s)
        self._note(name, answer)
        if answer.outcome != "delivered":
            log.warning("receiver %s: Watchdog not delivered: %s", name, answer.told)

    def _note(self, name: str, answer: delivery.Answer) -> None:
        """Takes what a post showed of its receiver; one that was down and responds gets all that waits for it."""
        health = self.health[name]
        if answer.outcome != "delivered":
            health.failed(self._clock(), answer.told, answer.after_s)
            return
        if health.down:
            with self._store.transaction() as connection:
                connection.execute(_ALL_DUE, [name, self._clock()])
            log.info("receiver %s responds again", name)
        health.accepted()

    def _serve(self, name: str, stop: threading.Event) -> None:
        step = functools.partial(self.step, name, stop.is_set)
        watch = functools.partial(self.watch, name)
        while not stop.is_set():
            self.beats[name].beat("the Watchdog")
            self._attempt(f"receiver {name}: Watchdog", watch, stop)  # apart: its faults hold up no alert
            self.beats[name].beat("the outbox")
            self._news[name].clear()
            busy = self._attempt(f"receiver {name}: alerts", step, stop)
            if busy is None:
                stop.wait(FAULT_S)
            elif not busy:
                self._news[name].wait(POLL_S)

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

    def _due(self, name: str, until: int) -> list[Due]:
        with contextlib.closing(self._store.cursor()) as cursor:
            return [Due(*row) for row in cursor.execute(_HEADS, [name, until, BATCH]).fetchall()]

    def _probe(self, name: str) -> list[Due]:
        """The payload to probe a receiver with that is down; none before its time."""
        health = self.health[name]
        if self._clock() < health.next_probe:
            return []
        waiting = self._due(name, _MOST_AGE)
        return [min(waiting, key=lambda payload: health.probes[payload.id])] if waiting else []

    def _settle(self, name: str, payload: Due, answer: delivery.Answer) -> None:
        """Writes down what became of a payload."""
        now, probe = self._clock(), self.health[name].down
        self._note(name, answer)
        state, told, later = "delivered", answer.told, now
        if answer.outcome == "retry":
            state, told, later = self._refusal(name, payload, answer, probe)
        with self._store.transaction() as connection:
            connection.execute(_SETTLE, [payload.id, state, told, later, int(state == "delivered" or not probe)])
        if state == "delivered":
            self._refused[name].pop(payload.id, None)
        elif payload.attempts + 1 >= FAILURES and not probe:
            self._refused[name][payload.id] = told, now + DEAD_S * SECOND if state == "dead" else None
        if state == "dead":
            log.error("receiver %s: %s given up: %s", name, payload.id, told)

    def _refusal(self, name: str, payload: Due, answer: delivery.Answer, probe: bool) -> tuple[str, str, int]:
        """(state, answer, next attempt) of a payload that was not accepted."""
        now, health = self._clock(), self.health[name]
        if probe:
            health.probes[payload.id] += 1
            return "pending", answer.told, health.next_probe
        whole = payload.attempts >= len(RETRY_S)
        if whole and now - payload.created >= RETRY_S[-1] * SECOND:
            return "dead", f"{answer.told}, {payload.attempts + 1} times", now
        delay = max(self._delay_s(min(payload.attempts, len(RETRY_S) - 1)), min(answer.after_s, RETRY_S[-1]))
        return "pending", answer.told, now + int(delay * SECOND)

    def _report(self, name: str) -> None:
        """Reports a receiver that does not accept alerts to all others, and that it does so again."""
        now, refused = self._clock(), self._refused[name]
        for message in [m for m, (_, until) in refused.items() if until is not None and until <= now]:
            del refused[message]
        failing = self.health[name].failing(now) or bool(refused)
        if failing == (name in self._reported):
            return
        told = self.health[name].answer or next((text for text, _ in refused.values()), "")
        since, ended = self._reported.get(name, now), None if failing else now
        body = functools.partial(alertmanager.receiver_down, self._sender, name, told, since=since, ended=ended)
        kind: Literal["firing", "resolved"] = "firing" if failing else "resolved"
        incident, others = f"{alertmanager.RECEIVER}{name}", [other for other in self.receivers if other != name]
        payloads = [Payload(incident, other, kind, json.dumps(body(receiver=other)), now) for other in others]
        with self._store.transaction() as connection:
            ledger.write_changes(connection, [], [], payloads, now)
        if failing:
            self._reported[name] = now
        else:
            del self._reported[name]
        log.log(logging.ERROR if failing else logging.INFO, "receiver %s: %s", name, told or "accepts alerts again")

    def _delay_s(self, attempts: int) -> float:
        delay = RETRY_S[attempts]
        return delay if delay < JITTER_FROM_S else delay * self._random.uniform(1 - JITTER, 1 + JITTER)

    def _tidy(self) -> bool:
        """Gives up what is for receivers that are no longer configured, and forgets what is long over; True."""
        if not self._running:
            self.recover()
        with self._store.transaction() as connection:
            connection.execute(
                "UPDATE outbox SET state = 'dead', answer = 'the receiver is no longer configured' "
                "WHERE state = 'pending' AND NOT list_contains($1::VARCHAR[], receiver)",
                [list(self.receivers)],
            )
            old = self._clock() - KEEP_S * SECOND
            connection.execute(_EXPIRE, [old])
            connection.execute(_PRUNE, [old, [f"{alertmanager.RECEIVER}{name}" for name in self._reported]])
        return True
