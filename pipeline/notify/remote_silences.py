"""Which of our alerts are silenced at a receiver, read back so that people see it beside the incident.

What an acknowledgement silenced there is silenced again if the receiver lost it, as alerts are sent again.

Each receiver of this kind has a thread for it: a slow answer delays no alert.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from pipeline.model.records import SECOND
from pipeline.notify.delivery import Call
from pipeline.notify.held_messages import Store
from pipeline.notify.newest_texts import Renew
from pipeline.notify.receivers import Endpoint, Message

RESEND_RESOLVED_S = 300
"""Time for which a resolved alert is sent again (s), as Alertmanager asks its clients to."""
_RESENT = """
SELECT arg_max(payload, number) FROM (
    SELECT incident, number, kind, state, payload, next_attempt,
        max(number) FILTER (kind = 'resolved' AND state <> 'delivered' AND attempts > 0)
            OVER (PARTITION BY incident) AS tried
    FROM outbox WHERE receiver = $1 AND state IN ('delivered', 'pending', 'dead') AND kind <> 'update')
WHERE state = 'delivered' OR number = tried OR (number > tried AND state = 'pending')
GROUP BY incident HAVING arg_max(kind, number) = 'firing' OR epoch_us(max(next_attempt)) >= $2
"""
"""A resolve that was tried counts, and what waits behind it: it was pushed, and only its silence could not be ended.
Else the alert would fire again with each resend, for ever once the resolve is dead."""
MOST_RENEWED = 500
"""Silences that are looked for after one reading. Chosen: 5 s of requests of 10 ms."""
_ACKNOWLEDGED = """
SELECT arg_max(o.id, o.number), o.incident, arg_max(o.kind, o.number), arg_max(o.payload, o.number),
    epoch_us(arg_max(o.next_attempt, o.number))
FROM outbox o JOIN incidents i ON i.id = o.incident
WHERE o.receiver = $1 AND o.state = 'delivered' AND i.state = 'acknowledged'
AND NOT list_contains($2::VARCHAR[], o.incident) AND (o.kind = 'update'
     OR (o.kind = 'firing' AND o.payload ->> '$.fleetpulse.incident.state' = 'acknowledged'))
GROUP BY o.incident ORDER BY max(o.number) DESC LIMIT $3
"""
"""The newest message that made a silence, of incidents that are acknowledged; the time is that of its delivery."""
_GONE = "DELETE FROM notify_silences WHERE receiver = $1 AND NOT list_contains($2::VARCHAR[], incident)"
_SILENCED = "INSERT OR REPLACE INTO notify_silences VALUES ($1, $2, $3, make_timestamptz($4::BIGINT))"


def load_resent(store: Store, name: str, now: int, renew: Renew | None = None) -> list[Mapping[str, Any]]:
    """Returns the delivered alerts that fire, and those that ended within RESEND_RESOLVED_S. renew: if they are sent
    again, for the texts of now."""
    with closing(store.cursor()) as cursor:
        rows = cursor.execute(_RESENT, [name, now - RESEND_RESOLVED_S * SECOND]).fetchall()
        alerts = [alert for (body,) in rows for alert in json.loads(body)["alerts"]]
        return alerts if renew is None else renew(cursor, alerts)


class RemoteSilences:
    """The silences at one receiver. count: alerts that are silenced, as stored."""

    def __init__(self, store: Store, endpoint: Endpoint, clock: Callable[[], int], call: Call) -> None:
        self._store, self._endpoint, self._clock, self._call = store, endpoint, clock, call
        self._stored: dict[str, str] | None = None  # incident -> text
        self._wanted = threading.Event()

    @property
    def count(self) -> int:
        """Alerts that are silenced at the receiver."""
        return len(self._stored or ())

    def request(self) -> None:
        """Makes the thread read, once more if it is reading."""
        self._wanted.set()

    def run(self, stop: threading.Event, attempt: Callable[[str, Callable[[], None], threading.Event], object]) -> None:
        """Reads at each request until `stop` is set, which needs a request to be seen."""
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if stop.is_set():
                return
            attempt(f"receiver {self._endpoint.name}: silences", self.read, stop)

    def read(self) -> None:
        """Stores which alerts are silenced. Without an answer the stored ones stay."""
        now, name = self._clock(), self._endpoint.name
        alerts: Sequence[Mapping[str, Any]] = load_resent(self._store, name, now)
        found = self._endpoint.read_silences(alerts, now, self._call) if alerts else {}
        if found is not None and self._endpoint.reports("acknowledged"):
            self._endpoint.renew_silences(self._load_acknowledged(list(found)), now, self._call)
        if found is None or found == self._stored:
            return
        with self._store.transaction() as connection:
            connection.execute(_GONE, [name, list(found)])
            for incident, text in found.items():
                connection.execute(_SILENCED, [name, incident, text, now])
        self._stored = found

    def _load_acknowledged(self, silenced: Sequence[str]) -> list[Message]:
        """Returns the messages of acknowledgements that silence nothing at the receiver now."""
        with closing(self._store.cursor()) as cursor:
            rows = cursor.execute(_ACKNOWLEDGED, [self._endpoint.name, silenced, MOST_RENEWED]).fetchall()
        return [Message(id_, thread, kind, json.loads(body), "", time) for id_, thread, kind, body, time in rows]


def build_remote_silences(
    store: Store, endpoints: Mapping[str, Endpoint], clock: Callable[[], int], call: Call
) -> dict[str, RemoteSilences]:
    """Returns those of the receivers that are sent all alerts again."""
    return {name: RemoteSilences(store, one, clock, call) for name, one in endpoints.items() if one.resend_s}
