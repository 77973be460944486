"""Servers that enforce the documented limits and shapes of PagerDuty, Slack and Teams, and that fail on request.

Limits: PagerDuty Events API v2, Slack's Block Kit and Web API, Teams' workflows, as in their public documentation.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from typing import Any

BEHAVIOURS = ("400", "401", "404", "410", "422", "429", "500", "503", "302", "close", "half", "trickle", "hang", "text")


class Service(http.server.ThreadingHTTPServer):
    """A service that refuses what its documentation refuses. behave: how the next requests fail; empty: none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ServiceHandler)
        self.behave: list[str] = []
        self.retry_after = "7"
        self.received: list[tuple[str, dict[str, str], bytes, Any]] = []  # path, headers, body, answer
        self.refused: list[str] = []
        self.released = threading.Event()
        self._stamp = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Ignores a closed connection: the client closes it on purpose."""

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        """Returns (status, JSON or text) as the service of this path does."""
        for start, judge in SERVICES.items():
            if path.startswith(start):
                return judge(self, path, headers, body)
        return 404, "no such service"

    def bodies(self, path: str) -> list[Any]:
        """Returns the accepted bodies of a path."""
        return [json.loads(body) for at, _, body, _ in self.received if at.startswith(path)]

    def next_stamp(self) -> str:
        self._stamp += 1
        return f"1700000000.{self._stamp:06d}"


class ServiceHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.behave:
            self.fail(self.server.behave.pop(0))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, answer = self.server.answer(self.path, headers, body)
        if 200 <= status < 300 and not (isinstance(answer, dict) and answer.get("ok") is False):
            self.server.received.append((self.path, headers, body, answer))
        else:
            self.server.refused.append(str(answer))
        self.reply(status, json.dumps(answer) if not isinstance(answer, str) else answer)

    def reply(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def fail(self, how: str) -> None:
        """Fails in one of the ways of BEHAVIOURS."""
        self.close_connection = True
        if how.isdecimal():
            self.reply(int(how), "SECRET", Retry_After=self.server.retry_after, Location=f"{self.server.url}/elsewhere")
        elif how == "half":
            self.wfile.write(b"HTTP/1.1 20")
        elif how == "text":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
        elif how == "hang":
            self.server.released.wait(10)
        elif how == "trickle":
            for byte in b"HTTP/1.1 200 OK and on and on and on":
                self.wfile.write(bytes([byte]))
                if self.server.released.wait(0.05):
                    return

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def judge_pagerduty(service: Service, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    """Returns what Events API v2 answers: 202, or 400 with the reasons, 413 for a body that is too long."""
    if len(body) > 512_000:
        return 413, "too large"
    event = json.loads(body)
    errors = []
    if not re.fullmatch(r"[A-Za-z0-9]{32}", event.get("routing_key", "")):
        errors.append("'routing_key' is invalid")
    if event.get("event_action") not in ("trigger", "acknowledge", "resolve"):
        errors.append("'event_action' is invalid")
    if not 0 < len(event.get("dedup_key", "")) <= 255:
        errors.append("'dedup_key' is invalid")
    if event.get("event_action") == "trigger":
        payload = event.get("payload", {})
        if not 0 < len(payload.get("summary", "")) <= 1024:
            errors.append("'payload.summary' is missing or longer than 1024")
        if not payload.get("source"):
            errors.append("'payload.source' is missing or blank")
        if payload.get("severity") not in ("critical", "error", "warning", "info"):
            errors.append("'payload.severity' is invalid")
        errors += [f"link {link}" for link in event.get("links", []) if not link.get("href", "").startswith("http")]
    if errors:
        return 400, {"status": "invalid event", "message": "Event object is invalid", "errors": errors}
    return 202, {"status": "success", "message": "Event processed", "dedup_key": event["dedup_key"]}


def judge_slack(service: Service, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    """Returns what the Web API answers: 200 with `ok`, also for errors."""
    if not headers.get("authorization", "").startswith("Bearer xoxb-"):
        return 200, {"ok": False, "error": "invalid_auth"}
    method, message = path.rpartition("/")[2], json.loads(body)
    if method == "auth.test":
        return 200, {"ok": True, "team": "T", "user": "fleetpulse"}
    if not message.get("channel"):
        return 200, {"ok": False, "error": "channel_not_found"}
    if error := find_slack_error(message):
        return 200, {"ok": False, "error": error}
    if method == "chat.update":
        known = {answer["ts"] for _, _, _, answer in service.received if isinstance(answer, dict) and "ts" in answer}
        if message["ts"] not in known:
            return 200, {"ok": False, "error": "message_not_found"}
        return 200, {"ok": True, "channel": message["channel"], "ts": message["ts"]}
    return 200, {"ok": True, "channel": "C0123456789", "ts": service.next_stamp()}


def judge_slack_webhook(service: Service, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    """Returns what an incoming webhook answers: a word of text."""
    message = json.loads(body)
    if not message.get("text") and not message.get("blocks"):
        return 400, "no_text"
    error = find_slack_error(message)
    return (400, error) if error else (200, "ok")


def find_slack_error(message: dict[str, Any]) -> str:
    """Returns the error of a message that breaks a limit; empty if none."""
    blocks = [*message.get("blocks", []), *(b for a in message.get("attachments", []) for b in a.get("blocks", []))]
    texts = [b["text"]["text"] for b in blocks if b["type"] == "section"]
    context = [e["text"] for b in blocks if b["type"] == "context" for e in b["elements"]]
    if not message.get("text"):
        return "no_text"
    if len(blocks) > 50 or any(not 0 < len(text) <= 3000 for text in (*texts, *context)):
        return "invalid_blocks"
    if sum(map(len, (*texts, *context))) > 8000:
        return "msg_blocks_too_long"
    if any(re.search(r"<[!@#]", text) for text in (*texts, *context, message["text"])):
        return "mentions_somebody"  # ours: names of the fleet must never do that
    return ""


def judge_teams(service: Service, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    """Returns what a workflow answers: 202, or 400 for all but a card of at most 28 kB."""
    if len(body) > 28 * 1024:
        return 413, "too large"
    envelope = json.loads(body)
    try:
        (attachment,) = envelope["attachments"]
        card = attachment["content"]
        whole = envelope["type"] == "message" and attachment["contentUrl"] is None
        whole = whole and attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
        whole = whole and (card["type"], card["version"]) == ("AdaptiveCard", "1.4") and bool(card["body"])
        facts = [fact for part in card["body"] if part["type"] == "FactSet" for fact in part["facts"]]
        whole = whole and all(isinstance(fact["value"], str) for fact in facts)
    except (KeyError, ValueError, TypeError):
        whole = False
    return (202, "") if whole else (400, "not a card")


def judge_alertmanager(service: Service, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
    """Returns what an Alertmanager answers: nothing to alerts, JSON else."""
    if path == "/api/v2/status":
        return 200, {
            "cluster": {"status": "disabled"},
            "versionInfo": {"version": "0.34.2"},
            "config": {},
            "uptime": "",
        }
    if body and path == "/api/v2/silences":
        return 200, {"silenceID": service.next_stamp()}
    return (200, "") if body else (200, [])


SERVICES = {
    "/api/v2/": judge_alertmanager,
    "/v2/enqueue": judge_pagerduty,
    "/slack/": judge_slack,
    "/services/": judge_slack_webhook,
    "/workflows/": judge_teams,
    "/hook": lambda service, path, headers, body: (200, "ok"),
    "/health": lambda service, path, headers, body: (200, "ok"),
}


def serve() -> tuple[Service, threading.Thread]:
    """Returns a running service and its thread."""
    service = Service()
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    return service, thread


def stop(service: Service, thread: threading.Thread) -> None:
    """Stops a service."""
    service.released.set()
    service.shutdown()
    service.server_close()
    thread.join()


def measure(act: Any) -> float:
    """Returns the seconds that a call takes."""
    began = time.monotonic()
    act()
    return time.monotonic() - began
