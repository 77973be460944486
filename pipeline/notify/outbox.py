"""The notifier: sends the payloads of the outbox, with one thread per receiver, until each is delivered or dead.

Delivery is at least once: a payload is marked delivered after its receiver accepted it. A crash in between sends it
again with the same idempotency key. A receiver that is down is probed; when it responds, all waiting payloads are sent.
While a receiver limits its rate, it is sent nothing until the end of its pause. A failing receiver is reported to the
other receivers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import duckdb

from pipeline.config.receivers import Notify
from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.incidents.ledger import Payload
from pipeline.model.records import SECOND
from pipeline.notify import alertmanager, delivery, retention
from pipeline.notify.alertmanager import AlertSource, PayloadPlanner, make_body
from pipeline.notify.connections import ConnectionPool
from pipeline.notify.delivery import Call
from pipeline.notify.faults import Faults
from pipeline.notify.health import MAX_FAILURES, ReceiverHealth
from pipeline.notify.held_messages import HeldMessages, Store
from pipeline.notify.inhibition import Inhibitor
from pipeline.notify.missed_messages import plan_missed
from pipeline.notify.newest_texts import Annotate, read_sent_labels, renew_texts
from pipeline.notify.open_alerts import OpenAlertReader
from pipeline.notify.periodic import PeriodicMessage
from pipeline.notify.receivers import Message, build_endpoints
from pipeline.notify.remote_silences import build_remote_silences, load_resent
from pipeline.notify.retries import RETRY_S, Retries, end_far_waits
from pipeline.notify.routes import Rules, build_rules
from pipeline.notify.sending import DuePayload, OrderedSender, PageWatch, count_waiting, load_due, load_states
from pipeline.notify.settling import Result, Settlements
from pipeline.runtime.bounded_clock import BoundedClock
from pipeline.runtime.heartbeat import Heartbeat

log = logging.getLogger("fleetpulse.notify")
T = TypeVar("T")

DEAD_REPORT_S = 3600
"""Time for which a dead message is reported (s). Chosen."""
HANG_LIMIT_S = 60.0
"""Time without a heartbeat after which a receiver's thread hangs (s): four times the limit of a POST. Chosen."""
POLL_S = 0.5
"""Interval in which a thread reads the outbox without being woken (s). Chosen: below the first retry."""
STOP_TIMEOUT_S = 2.0
"""Longest wait for a POST in progress at stop (s); it is sent again after the next start. Chosen."""
FAULT_PAUSE_S = 5.0
"""Pause after a failed step (s), so that payloads that cannot be marked delivered are not sent twice a second.
Chosen."""
CLOCK_STEP_S = 5.0
"""Backward clock step after which planned times are invalid (s). Chosen: waits are short below it."""
_ALL_DUE = """
UPDATE outbox SET next_attempt = make_timestamptz($2::BIGINT)
WHERE receiver = $1 AND state = 'pending' AND epoch_us(next_attempt) > $2
"""
_REFUSED = """
SELECT receiver, id, answer, CASE WHEN state = 'dead' THEN epoch_us(next_attempt) + $3 END FROM outbox
WHERE (state = 'pending' AND attempts >= $1) OR (state = 'dead' AND attempts > $2 AND epoch_us(next_attempt) + $3 > $4)
"""
"""Messages refused before a restart: tried MAX_FAILURES times, or dead after its last attempt, which sets the time."""
_REPORTED = """
SELECT incident, epoch_us(max(created)) FROM outbox WHERE starts_with(incident, $1) GROUP BY incident
HAVING arg_max(kind, (created, number)) = 'firing'
"""
_ANY_TIME = 1 << 62  # UTC us: any time of the next attempt


class Notifier:
    """Makes payloads from changes and delivers them. Raises ConfigError on receivers that can never be called.

    alive: returns whether the pipeline is ready; while it is not, the Watchdog is not sent.
    locate: entity -> where it is, as labels of its alerts.
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
        locate: Callable[[str], Mapping[str, str]] = lambda entity: {},
        annotate: Annotate = lambda incident, impact: {},
    ) -> None:
        self.receivers = build_endpoints(notify.receivers)
        self.health = {name: ReceiverHealth() for name in self.receivers}
        self.beats = {name: Heartbeat(monotonic) for name in self.receivers}
        self._store, self._clock, self._alive = store, clock, alive
        self._call = functools.partial(delivery.exchange, timeout_s=timeout_s)
        self._source = AlertSource(site, notify.external_url.rstrip("/"))
        rules = self._rules = build_rules(notify)
        self._undecided = self._find_undecided()
        labels = functools.partial(read_sent_labels, store.cursor)
        self._planner = PayloadPlanner(self.receivers, rules, self._source, locate, labels, annotate, self._undecided)
        self._renew = functools.partial(renew_texts, external_url=self._source.external_url, annotate=annotate)
        self._held = self._build_held(rules)
        self._holding = dict.fromkeys(self.receivers, True)  # whether a receiver may have held messages
        self._inhibitor = Inhibitor(rules.inhibitions, self._planner.label_all, self._planner.is_for_people)
        self.find_inhibited = self._inhibitor.find_all if rules.inhibitions else None
        self.list_receivers_of = self._planner.list_routed
        self._started, self._old_rows = clock(), BoundedClock(clock, monotonic)
        self._periodic = {name: PeriodicMessage(one.resend_s, self._started) for name, one in self.receivers.items()}
        self._last_clock = dict.fromkeys(self.receivers, self._started)  # last time of our clock (UTC us)
        self._running, self._restored = False, False
        self._wake_events = {name: threading.Event() for name in self.receivers}
        self._refused: dict[str, dict[str, tuple[str, int | None]]] = {name: {} for name in self.receivers}
        self._retries = {name: Retries(store) for name in self.receivers}
        self._reported: dict[str, int] = {}  # failing receiver -> time of the report to the others (UTC us)
        self._faults = Faults()
        self.silences = build_remote_silences(store, self.receivers, clock, self._call)

    def make_payloads(self, changes: Sequence[Change], now: int) -> list[Payload]:
        """Returns the payloads of changes, to be written in the transaction of the changes."""
        return self._planner.plan(changes, now)

    @property
    def holding(self) -> frozenset[str]:
        """The endpoints about whose messages routes or inhibition decide."""
        return self._planner.holding

    def _build_held(self, rules: Rules) -> dict[str, HeldMessages]:
        alerts = OpenAlertReader(self._load_inhibited)
        return {
            name: HeldMessages(
                *(self._store, name, endpoint.receiver, rules, alerts),
                *(functools.partial(self._make_body, name), self._renew, endpoint.owns_groups),
            )
            for name, endpoint in self.receivers.items()
        }

    def _find_undecided(self) -> frozenset[str]:
        """Returns the receivers that have groups of alerts, or held messages, from before the start, maybe of routes
        that are no more."""
        query = "SELECT receiver FROM notify_groups UNION SELECT receiver FROM outbox WHERE state = 'held'"
        with contextlib.closing(self._store.cursor()) as cursor:
            rows = cursor.execute(query).fetchall()
        return frozenset(name for (name,) in rows)

    def _make_body(
        self, name: str, alerts: Sequence[Mapping[str, Any]], key: str, labels: Mapping[str, str], reason: str
    ) -> dict[str, Any]:
        return make_body(alerts, labels, self.receivers[name].receiver, self._source.external_url, reason, key)

    def _load_inhibited(self, cursor: duckdb.DuckDBPyConnection) -> Mapping[str, str]:
        """Returns incident -> the incident that inhibits it by a rule."""
        if not self._rules.inhibitions:
            return {}
        found = self._inhibitor.find_all(ledger.load_open_incidents(cursor))
        return {incident: source for incident, (source, _) in found.items()}

    def wake(self) -> None:
        """Wakes the threads after payloads were committed."""
        for event in self._wake_events.values():
            event.set()

    def describe_trouble(self) -> str | None:
        """Returns the reasons for /readyz in one text, None if there are none."""
        found = self._faults.list_texts()
        for name in self.receivers:
            found += [f"receiver {name}: {text}" for text in self._describe_problems(name)]
        return "; ".join(found) or None

    def _describe_problems(self, name: str) -> list[str]:
        """Returns the problems of one receiver and its thread."""
        found = [text] if (text := self.health[name].describe_trouble()) else []
        if self._running and (age := self.beats[name].age_s) > HANG_LIMIT_S:
            found.append(f"thread has not responded for {age:.0f} s in {self.beats[name].doing}")
        if refused := list(self._refused[name].values()):
            found.append(f"{len(refused)} alert{'' if len(refused) == 1 else 's'} refused: {refused[-1][0]}")
        return found

    def list_receivers(self, counts: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
        """Returns the state of each endpoint. counts: (endpoint, state of its messages) -> number."""
        return [
            {
                "name": name,
                "receiver": endpoint.receiver,
                "kind": endpoint.kind,
                **self.health[name].as_json(),
                **{state: counts.get((name, state), 0) for state in ("pending", "held", "dead")},
                "silences": self.silences[name].count if name in self.silences else 0,
            }
            for name, endpoint in self.receivers.items()
        ]

    def run(self, stop: threading.Event) -> None:
        """Delivers payloads until `stop` is set."""
        self._restored = False
        tidied = self._attempt("outbox", self._clean_outbox, stop)
        threads = [
            threading.Thread(target=self._run_receiver, args=(name, stop), name=f"notify-{name}", daemon=True)
            for name in self.receivers
        ]
        threads += [
            threading.Thread(target=one.run, args=(stop, self._attempt), name=f"silences-{name}", daemon=True)
            for name, one in self.silences.items()
        ]
        for beat in self.beats.values():
            beat.beat("start")
        for thread in threads:
            thread.start()
        self._running = True
        while not stop.wait(3600.0 if tidied else FAULT_PAUSE_S):
            tidied = self._attempt("outbox", self._clean_outbox, stop)
        self._running = False
        self.wake()
        for one in self.silences.values():
            one.request()
        for thread in threads:
            thread.join(STOP_TIMEOUT_S / len(threads))

    def load_state(self) -> None:
        """Restores from the outbox after a restart: receivers that were down, refused messages, and which of them were
        reported. A receiver that was reported is down until it accepts something."""
        now = self._clock()
        with self._store.transaction() as connection:
            end_far_waits(connection, now)
        with contextlib.closing(self._store.cursor()) as cursor:
            rows = cursor.execute(
                "SELECT receiver, arg_max(answer, (attempts, next_attempt)), epoch_us(min(created)), max(attempts) "
                "FROM outbox WHERE state = 'pending' GROUP BY receiver"
            ).fetchall()
            reported = cursor.execute(_REPORTED, [alertmanager.RECEIVER_PREFIX]).fetchall()
            bounds = [MAX_FAILURES, len(RETRY_S), DEAD_REPORT_S * SECOND, now]
            refused = cursor.execute(_REFUSED, bounds).fetchall()
            newest = cursor.execute("SELECT coalesce(epoch_us(max(created)), 0) FROM outbox").fetchone()
        if newest is not None:  # the clock may have been ahead before the start
            self._last_clock = {name: max(last, newest[0]) for name, last in self._last_clock.items()}
        self._reported = {incident.removeprefix(alertmanager.RECEIVER_PREFIX): since for incident, since in reported}
        for name, message, answer, until in refused:
            if name in self._refused:
                self._refused[name][message] = answer, until
        for name in self._reported.keys() & self.health.keys():
            self.health[name] = ReceiverHealth(MAX_FAILURES, self._reported[name], "as before the restart", now)
        for name, answer, since, attempts in rows:  # probes take turns, so that no message may have many attempts
            if name in self.health and (attempts >= MAX_FAILURES or name in self._reported):
                self.health[name] = ReceiverHealth(
                    MAX_FAILURES, min(since, self.health[name].since or since), answer, now
                )

    def write_missed(self) -> None:
        """Adds what receivers missed while they, or their routes, were not configured."""
        now = self._clock()
        with self._store.transaction() as connection:
            ledger.write_payloads(connection, plan_missed(connection, self._planner, self.receivers, now))

    def send_due(self, name: str, ended: Callable[[], bool] = lambda: False) -> int:
        """Sends each due payload of a receiver once and returns their number.

        While the receiver is down, it sends one payload per probe: the one with the fewest probes, oldest page first.
        After a limit of the rate it sends until the next one.
        """
        health = self.health[name]
        self._handle_clock_step(name)
        if self._holding[name]:
            is_holding = self._held[name].release(self._clock())
            self._holding[name] = is_holding or self._rules.hold or name in self._undecided
        found = self._load_probe(name) if health.is_down else self._load_due(name)
        due = found if health.is_down else self._retries[name].choose(found)
        if due:
            self._send_batch(name, due, ended, is_probe=health.is_down or len(due) < len(found))
        self._report_receiver(name)
        return len(due)

    def _load_due(self, name: str) -> list[DuePayload]:
        """Returns the payloads that are due; none while the receiver pauses, unless that may be about one of them."""
        now, retries = self._clock(), self._retries[name]
        if not self.health[name].is_paused(now):
            retries.end_check()
        elif not retries.is_checking:
            return []
        return load_due(self._store, name, now)

    def _send_batch(
        self, name: str, due: Sequence[DuePayload], ended: Callable[[], bool], is_probe: bool = False
    ) -> None:
        """Sends payloads in order over connections that stay open, tickets until a page is due, all until one is
        limited; the first alone, so that nothing more is sent while results cannot be stored. Each result is stored,
        also if the receiver fails. is_probe: it may be any message, and is one alone."""
        health, settled, pool = self.health[name], Settlements(self._store, name), ConnectionPool()
        call = functools.partial(self._call, pool=pool)
        sender: OrderedSender[DuePayload, delivery.PostResult] = OrderedSender(
            lambda payload: self._send(name, payload, call), count_waiting(self._store, name, due)
        )
        stored, limited = 0, False

        def may_start() -> int:
            if ended() or limited or (stored and (is_probe or health.is_down)):
                return 0
            return min(self.receivers[name].parallel, stored) if stored and not health.failures else 1

        pages, tickets = [p for p in due if p.is_page], [p for p in due if not p.is_page]
        watch = PageWatch(self._store, name, self._wake_events[name], self._clock)
        go_on = may_start if is_probe else lambda: not watch.is_due() and may_start()
        in_turn = sender.send_all(pages, may_start), sender.send_all(tickets, go_on)
        try:
            for payload, answer in itertools.chain(*in_turn):
                self.beats[name].beat("POST")
                self._store_result(name, payload, answer, settled)
                stored, limited = stored + 1, limited or answer.limited
            settled.write()  # not after an error of the store: what it wrote is unknown, and would be counted twice
        finally:
            sender.close()
            pool.close()

    def _send(self, name: str, payload: DuePayload, call: Call) -> delivery.PostResult:
        """Sends one payload. An error in making the request is a failed attempt, so that it delays no other payload."""
        try:
            return self.receivers[name].send(payload.as_message(self._clock()), call)
        except Exception as error:  # noqa: BLE001 - one message that cannot be made must not stop the others
            self._faults.log(f"receiver {name}: {payload.id}", error)  # its attempts are counted, and reported
            return delivery.PostResult("retry", f"not sent: {type(error).__name__}")

    def _handle_clock_step(self, name: str) -> None:
        """Makes everything due after a backward clock step, since planned times may be hours ahead."""
        now, before = self._clock(), self._last_clock[name]
        if before - now > CLOCK_STEP_S * SECOND:
            with self._store.transaction() as connection:
                connection.execute(_ALL_DUE, [name, now])
            self._held[name].forget()
            self.health[name].move_back(now)
            self._periodic[name].move_back(now)
        self._last_clock[name] = now

    def send_watchdog(self, name: str) -> None:
        """Sends periodic messages: the Watchdog, all firing alerts to what needs them, or a health check."""
        now, endpoint, periodic = self._clock(), self.receivers[name], self._periodic[name]
        if not periodic.is_due(now, self.health[name]) or (endpoint.watchdog and not self._alive()):
            return
        periodic.begin(now)
        answer = self._make_periodic_call(name, now)
        if answer is None:
            return
        self._record_result(name, answer)
        if answer.outcome == "delivered":
            periodic.record_success(now)
            self.health[name].limit.end_pause()
            if endpoint.resend_s:
                self.silences[name].request()
            return
        periodic.record_failure(now, self.health[name])
        what = "Watchdog" if endpoint.watchdog else "firing alerts" if endpoint.resend_s else "health check"
        log.warning("receiver %s: %s not delivered: %s", name, what, answer.text)

    def _make_periodic_call(self, name: str, now: int) -> delivery.PostResult | None:
        endpoint = self.receivers[name]
        watchdog = alertmanager.make_watchdog(self._source, self._started, endpoint.receiver)
        if endpoint.resend_s:
            alerts = load_resent(self._store, name, now, self._renew)
            return endpoint.resend([*alerts, *(watchdog["alerts"] if self._alive() else [])], now, self._call)
        if endpoint.watchdog:
            return endpoint.send(Message(f"watchdog.{now}.{name}", "watchdog", "firing", watchdog, "", now), self._call)
        return endpoint.probe(self._call)

    def _record_result(self, name: str, answer: delivery.PostResult) -> None:
        """Records the result of a POST. If a receiver that was down responds, all its payloads become due."""
        health = self.health[name]
        if answer.outcome != "delivered":
            record = health.record_limit if answer.limited else health.record_failure
            record(self._clock(), answer.text, answer.retry_after_s)
            return
        self._retries[name].end_postponement()
        if health.is_down:
            with self._store.transaction() as connection:
                connection.execute(_ALL_DUE, [name, self._clock()])
            if self.receivers[name].resend_s:
                self._periodic[name].due = self._clock()  # it may have forgotten what it was sent
            log.info("receiver %s responds again", name)
        health.record_success(self._clock())

    def _run_receiver(self, name: str, stop: threading.Event) -> None:
        step = functools.partial(self.send_due, name, stop.is_set)
        watch = functools.partial(self.send_watchdog, name)
        while not stop.is_set():
            self.beats[name].beat("Watchdog")
            self._attempt(f"receiver {name}: Watchdog", watch, stop)  # separate, so that its faults do not delay alerts
            self.beats[name].beat("outbox")
            self._wake_events[name].clear()
            busy = self._attempt(f"receiver {name}: alerts", step, stop)
            if busy is None:
                stop.wait(FAULT_PAUSE_S)
            elif not busy:
                self._wake_events[name].wait(self.health[name].wait_s(self._clock(), POLL_S))

    def _attempt(self, what: str, act: Callable[[], T], stop: threading.Event) -> T | None:
        """Returns the result of `act`, None if it failed. A fault is reported until `act` succeeds and never ends the
        thread."""
        try:
            done = act()
        except Exception as error:  # noqa: BLE001 # a thread that ends delivers no alerts
            if not (stop.is_set() and isinstance(error, duckdb.Error)):  # at stop, the store may be closed
                self._faults.record(what, error)
            return None
        self._faults.clear(what)
        return done

    def _load_probe(self, name: str) -> list[DuePayload]:
        """Returns the payload for the next probe of a receiver that is down; none before the probe is due."""
        health = self.health[name]
        self._retries[name].end_check()
        if self._clock() < health.next_probe:
            return []
        waiting = load_due(self._store, name, _ANY_TIME)
        return [min(waiting, key=lambda payload: health.probes[payload.id])] if waiting else []

    def _store_result(self, name: str, payload: DuePayload, answer: delivery.PostResult, settled: Settlements) -> None:
        """Adds the result of a payload to those that are written together. A limit of the rate says nothing about the
        payload, which stays due, so that it is the next also after a restart; nothing is sent during the pause."""
        now, probe = self._clock(), self.health[name].is_down
        self._record_result(name, answer)
        about = payload.id, payload.incident
        if answer.outcome == "delivered":
            settled.add(Result(*about, "delivered", answer.text, now, True, answer.reference, now))
            self._refused[name].pop(payload.id, None)
            if self._retries[name].is_checking:  # so the limit was about one message
                self.health[name].limit.end_pause()
            if (refused := self._retries[name].take_refused(payload.id)) is not None:
                self._store_refusal(name, *refused, settled)
        elif answer.limited and not probe:
            self._retries[name].count_limit(payload, answer)
            settled.add(Result(*about, "pending", answer.text, now, False, "", now))
        elif probe:
            health = self.health[name]
            health.probes[payload.id] += 1
            settled.add(Result(*about, "pending", answer.text, health.next_probe, False, answer.reference, now))
        else:
            self._store_refusal(name, payload, answer, settled)

    def _store_refusal(self, name: str, payload: DuePayload, answer: delivery.PostResult, settled: Settlements) -> None:
        """Adds that a payload was not accepted by a receiver that accepts others, as far as is known."""
        now = self._clock()
        state, text, later = self._retries[name].plan(payload, answer, now)
        settled.add(Result(payload.id, payload.incident, state, text, later, True, answer.reference, now))
        if payload.attempts + 1 >= MAX_FAILURES:
            self._refused[name][payload.id] = text, now + DEAD_REPORT_S * SECOND if state == "dead" else None
        if state == "dead":
            log.error("receiver %s: %s is dead: %s", name, payload.id, text)

    def _report_receiver(self, name: str) -> None:
        """Reports to the other receivers that this one accepts no alerts, or accepts them again."""
        now, refused = self._clock(), self._refused[name]
        self._forget_refused(name, now)
        is_down = self.health[name].is_down and name in self._reported  # also if the clock went back since
        failing = is_down or self.health[name].must_report(now) or bool(refused)
        if failing == (name in self._reported):
            return
        text = self.health[name].answer or next((refusal for refusal, _ in refused.values()), "")
        since, ended = self._reported.get(name, now), None if failing else now
        body = functools.partial(alertmanager.make_receiver_down, self._source, name, text, since=since, ended=ended)
        kind: Literal["firing", "resolved"] = "firing" if failing else "resolved"
        incident, others = f"{alertmanager.RECEIVER_PREFIX}{name}", [other for other in self.receivers if other != name]
        payloads = [Payload(incident, other, kind, json.dumps(body(receiver=other)), now) for other in others]
        with self._store.transaction() as connection:
            ledger.write_payloads(connection, payloads)
        if failing:
            self._reported[name] = now
        else:
            del self._reported[name]
        log.log(logging.ERROR if failing else logging.INFO, "receiver %s: %s", name, text or "accepts alerts again")

    def _forget_refused(self, name: str, now: int) -> None:
        """Forgets what is no longer refused: sent again in another message, expired, or dead for DEAD_REPORT_S."""
        refused = self._refused[name]
        states = load_states(self._store, list(refused)) if refused else {}
        for message, (_, until) in list(refused.items()):
            kept = ("pending",) if until is None else ("pending", "dead")
            if states.get(message) not in kept or (until is not None and until <= now):
                del refused[message]

    def _clean_outbox(self) -> bool:
        """Marks payloads of removed receivers as dead and deletes old payloads. Returns True."""
        if not self._restored:  # tried until the store answers
            self.load_state()
            self.write_missed()
            self._restored = True
        with self._store.transaction() as connection:
            retention.clean(connection, list(self.receivers), self._old_rows.now())
        return True
