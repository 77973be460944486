"""A notifier over a real store, with real receivers that fail on request and a clock that the test moves."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.config.receivers import Notify, Webhook
from pipeline.config.sections import Store
from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.model.records import SECOND, Incident
from pipeline.notify.outbox import Notifier
from pipeline.store.database import Database
from pipeline.store.retention import apply_bounds

START = 1_790_000_000 * SECOND


class Receiver(http.server.ThreadingHTTPServer):
    """Answers with the next status of `script`, then 200; keeps the posts it received."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.retry_after = ""
        self.refuses: dict[str, int] = {}  # cause -> status
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.arrived = threading.Event()

    def choose_status(self, cause: str) -> int:
        """Returns the status of the answer to a post."""
        status = self.statuses.pop(0) if self.statuses else 200
        return self.refuses.get(cause, status)

    @property
    def alerts(self) -> list[tuple[str, str]]:
        """(status of the body, cause) of each post received."""
        return [(body["status"], body["alerts"][-1]["labels"]["cause"]) for _, body in self.posts]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.choose_status(body["alerts"][-1]["labels"]["cause"])
        server.posts.append((self.headers["Idempotency-Key"], body))
        self.send_response(status)
        if status in (429, 502, 503) and (server.retry_after or status == 502):
            self.send_header("Retry-After", server.retry_after or "300")
        self.end_headers()
        server.arrived.set()

    def log_message(self, *_: Any) -> None:
        """Logs nothing: the tests check the posts."""


class NotifierHarness:
    """A store with an outbox, its notifier and a clock that the test moves."""

    def __init__(self, folder: Path, urls: list[str], notify: Notify | None = None, now: int = START) -> None:
        self.now, self.notify = now, notify
        self.folder, self.urls, self.alive = folder, urls, True
        self.broken, self.monotonic = "", 0.0
        self.hang, self.hung = threading.Event(), False
        self.hang.set()
        self.database: Database | None = None
        self.incidents: dict[str, Incident] = {}  # by cause, if `notify` is given: a change follows the one before
        self.actor, self.comment = "fleetpulse", ""
        self.restart()

    def restart(self) -> None:
        self.close()
        self.database = Database(self.folder / "store.duckdb")
        self.tidy()
        self.notifier = Notifier(
            self.database, self.build_config(), "here", lambda: self.now, self.is_alive, 5.0, self.read_clock
        )
        self.notifier._clean_outbox()  # as `run` does first

    def tidy(self) -> None:
        """Removes old rows, as the pipeline does at each start and every hour."""
        assert self.database is not None
        apply_bounds(self.database, Store(), self.now)

    def pass_time(self, seconds: float) -> None:
        """Moves both clocks; `now` alone is a step of the clock."""
        self.now += int(seconds * SECOND)
        self.monotonic += seconds

    def read_clock(self) -> float:
        return self.monotonic

    def is_alive(self) -> bool:
        self.hung = not self.hang.is_set()
        self.hang.wait()
        if self.broken:
            raise RuntimeError(self.broken)
        return self.alive

    def build_config(self) -> Notify:
        if self.notify is not None:
            return self.notify
        return Notify(tuple(Webhook(f"r{i}", url) for i, url in enumerate(self.urls)))

    def write_change(self, kind: Any, cause: str = "gpu:n1.0", **more: Any) -> None:
        opened = START if self.notify is None else self.now
        plain = Incident(f"inc-{cause}", cause, opened, opened, "page", "wrong", "sdc", cause, (cause,))
        plain = self.incidents.get(cause, plain)
        now = dataclasses.replace(plain, **more)
        made = Change(kind, now, self.now, self.actor, self.comment, before=None if kind == "opened" else plain)
        if self.notify is not None:
            self.incidents[cause] = now
        assert self.database is not None
        with self.database.transaction() as connection:
            ledger.write_changes(connection, [], [made], self.notifier.make_payloads([made], self.now), self.now)

    def resolve(self, cause: str = "gpu:n1.0") -> None:
        self.write_change("resolved", cause, resolved=self.now, state="resolved")

    def send_due(self, seconds: float = 0, name: str = "r0") -> int:
        self.now += int(seconds * SECOND)
        return self.notifier.send_due(name)

    def rows(self) -> list[tuple[str, str, int]]:
        assert self.database is not None
        query = "SELECT kind, state, attempts FROM outbox ORDER BY incident, number"
        return self.database.cursor().execute(query).fetchall()

    def read_answer(self) -> str:
        assert self.database is not None
        return str(ledger.list_notifications(self.database.cursor())[0]["answer"])

    def close(self) -> None:
        if self.database is not None:
            self.database.close()


class Killed(BaseException):
    """Simulates kill -9: nothing after it runs, and memory is lost."""


def cut_at(harness: NotifierHarness, step: int) -> None:
    """Raises Killed once, before (even) or after (odd) the transaction number step // 2 of the notifier."""
    assert harness.database is not None
    real, count = harness.database.transaction, [0]

    @contextlib.contextmanager
    def transaction() -> Iterator[Any]:
        count[0] += 1
        if count[0] - 1 == step // 2 and step % 2 == 0:
            raise Killed
        with real() as connection:
            yield connection
        if count[0] - 1 == step // 2:
            raise Killed

    harness.notifier._store = _Cut(harness.database, transaction)  # type: ignore[assignment]
    for held in harness.notifier._held.values():
        held._store = harness.notifier._store


class _Cut:
    def __init__(self, database: Any, transaction: Any) -> None:
        self.cursor, self.transaction = database.cursor, transaction
