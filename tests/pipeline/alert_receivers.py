"""Receivers of alert worlds: a webhook and PagerDuty's Events API v2 over HTTP, and what each of them holds.

They know nothing of the pipeline but the bodies that it posts.
"""

from __future__ import annotations

import http.server
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from pipeline.notify.receivers.pagerduty import HEALTH_KEY
from tests.pipeline.receiver_servers import judge_pagerduty

MODES = ("up", "error", "closed", "lost")
"""Answers 2xx; 500; closes the connection unread; takes the message, and closes the connection without an answer."""


class Inbox(http.server.ThreadingHTTPServer):
    """Keeps the bodies that it took, with their idempotency keys, until `read` returns them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode, self.refused = "up", list[str]()
        self._taken: list[tuple[str, dict[str, Any]]] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, path: str, key: str, raw: bytes) -> tuple[int, Any]:
        """Returns status and body of the answer; 0: the connection is closed without one."""
        answer: Any = ""
        if self.mode == "error":
            return 500, answer
        if self.mode == "closed":
            return 0, answer
        if path.startswith("/v2/enqueue"):
            status, answer = judge_pagerduty(None, path, {}, raw)  # type: ignore[arg-type]
            if status != 202:
                self.refused.append(str(answer))
                return status, answer
        self._taken.append((key, json.loads(raw)))
        return 0 if self.mode == "lost" else 202, answer

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Returns what was taken since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def handle_error(self, *_: Any) -> None:
        """Ignores a connection that was closed on purpose."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, answer = self.server.take(self.path, self.headers.get("Idempotency-Key", ""), raw)
        if status:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@dataclass
class Shown:
    """An alert as a receiver shows it. group: groupKey or dedup_key."""

    incident: str
    labels: dict[str, str]
    group: str
    is_acknowledged: bool = False


@dataclass
class Received:
    """What one message says. key: idempotency key; of PagerDuty, empty.   repeats: whether its key was seen before.

    firing, resolved: labels of its alerts.   group: groupKey or dedup_key.   ended: keys that it resolves (PagerDuty).
    """

    action: str
    group: str
    key: str = ""
    firing: list[dict[str, str]] = field(default_factory=list)
    resolved: list[dict[str, str]] = field(default_factory=list)
    repeats: bool = False


def freeze(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


class WebhookView:
    """What a reader of Alertmanager's webhook holds: of each alert its newest status, in all and in each group."""

    kind = "webhook"

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self.newest: dict[Any, Shown] = {}  # labels -> the alert, while it fires
        self.fired: set[Any] = set()
        self.groups: dict[str, dict[Any, Shown]] = {}  # groupKey -> the same

    def receive(self, key: str, body: dict[str, Any]) -> Received:
        """Takes a message over; returns what it says."""
        received = Received(body["status"], body["groupKey"], key, repeats=key in self._keys)
        self._keys.add(key)
        for alert in body["alerts"]:
            (received.firing if alert["status"] == "firing" else received.resolved).append(alert["labels"])
        return received

    def apply(self, received: Received) -> None:
        """Shows what the message says."""
        group = self.groups.setdefault(received.group, {})
        for labels in received.resolved:
            self.newest.pop(freeze(labels), None)
            group.pop(freeze(labels), None)
        for labels in received.firing:
            print_ = freeze(labels)
            self.newest[print_] = group[print_] = Shown(labels["incident"], labels, received.group)
            self.fired.add(print_)

    def list_shown(self) -> list[Shown]:
        """Returns the alerts that fire there, also those that fire only in the newest message of one group."""
        return [*self.newest.values(), *(s for group in self.groups.values() for s in group.values())]

    def has_fired(self, labels: dict[str, str], group: str) -> bool:
        return freeze(labels) in self.fired


class PagerDutyView:
    """What PagerDuty holds: open alerts by dedup_key, with the incidents that the newest trigger of each lists."""

    kind = "pagerduty"

    def __init__(self) -> None:
        self.open: dict[str, dict[str, Any]] = {}  # dedup_key -> {"acknowledged": bool, "firing": [labels]}
        self.triggered: set[str] = set()
        self.fired: set[Any] = set()

    def receive(self, key: str, body: dict[str, Any]) -> Received | None:
        """Returns what an event says; None for a health check."""
        if body["dedup_key"] == HEALTH_KEY:
            return None
        received = Received(body["event_action"], body["dedup_key"])
        if received.action == "trigger":
            for one in body["payload"]["custom_details"]["alerts"]:
                labels = {name: text for name, text in one.items() if name not in ("status", "summary")}
                (received.firing if one["status"] == "firing" else received.resolved).append(labels)
        return received

    def apply(self, received: Received) -> None:
        """Shows what the event says; a trigger of an acknowledged incident leaves it acknowledged."""
        if received.action == "trigger":
            known = self.open.setdefault(received.group, {"acknowledged": False, "firing": []})
            known["firing"] = received.firing
            self.triggered.add(received.group)
            self.fired |= {freeze(labels) for labels in received.firing}
        elif received.action == "acknowledge" and received.group in self.open:
            self.open[received.group]["acknowledged"] = True
        elif received.action == "resolve":
            self.open.pop(received.group, None)

    def list_shown(self) -> list[Shown]:
        return [
            Shown(labels["incident"], labels, key, one["acknowledged"])
            for key, one in self.open.items()
            for labels in one["firing"]
        ]

    def has_fired(self, labels: dict[str, str], group: str) -> bool:
        return group in self.triggered
