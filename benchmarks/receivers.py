"""Alerts to receivers: what arrives, and when, after an outage of a receiver and in a storm of incidents.

    python -m benchmarks.receivers outage     receivers away for 3 min, 30 min and 3 h; time is injected
    python -m benchmarks.receivers storm      5,000 incidents in a minute: what people get, by receiver and route
    python -m benchmarks.receivers due        5,000 messages that wait when a receiver is back
    python -m benchmarks.receivers desk       5,000 findings in a minute through the whole engine, with its storm page
    python -m benchmarks.receivers groups     1,000 open alerts, each in a group of its own, before and after new routes

Receivers are HTTP servers of this program; the store, the outbox and the notifier are the real ones.
"""

from __future__ import annotations

import argparse
import http.server
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from detectors.runner import Runner
from pipeline.commands.service import PipelineService
from pipeline.config.receivers import Notify, PagerDuty, Route, Slack, Webhook
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.incidents import ledger
from pipeline.incidents.changes import Change
from pipeline.model.records import SECOND, Finding, Incident, Severity
from pipeline.notify.outbox import Notifier
from pipeline.store.database import Database

START = 1_790_000_000 * SECOND
OUTAGES_S = (180, 1800, 10_800)
STORM, GROUPS = 5000, 1000


class Service(http.server.ThreadingHTTPServer):
    """Answers as a webhook, PagerDuty and Slack do, or 503 while it is away; keeps (time, path, body)."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted, as in other servers; Python's 5 makes each further one wait a second."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.away = False
        self.clock: Callable[[], int] = lambda: 0
        self.posts: list[tuple[int, str, Any]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not server.away:
            server.posts.append((server.clock(), self.path, body))
        said = {"ok": True, "channel": "C1", "ts": str(len(server.posts))}
        if is_pagerduty := self.path == "/v2/enqueue":
            said = {"status": "success", "message": "Event processed", "dedup_key": body["dedup_key"]}
        answer = json.dumps(said).encode()
        self.send_response(503 if server.away else 202 if is_pagerduty else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Bench:
    """A store with a notifier, and a clock that the program moves."""

    def __init__(self, folder: Path, notify: Notify) -> None:
        self.now = START
        self.database = Database(folder / "store.duckdb")
        self.notifier = Notifier(self.database, notify, "bench", lambda: self.now)
        self.opened: dict[str, Incident] = {}

    def write(self, changes: list[Change]) -> None:
        """Writes changes as the engine does, in one transaction."""
        with self.database.transaction() as connection:
            payloads = self.notifier.make_payloads(changes, self.now)
            ledger.write_changes(connection, [], changes, payloads, self.now)

    def open(self, number: int, severity: Severity = "page") -> Change:
        """Returns the opening of one incident."""
        entity = f"gpu:n{number // 8}.{number % 8}"
        one = Incident(
            f"inc-{number:05d}", entity, self.now, self.now, severity, f"GPU {number}", "sdc", entity, (entity,)
        )
        self.opened[one.id] = one
        return Change("opened", one, self.now, "fleetpulse")


def outage(seconds: int) -> None:
    """Prints when the messages of an outage arrived: an incident every minute, every third a ticket."""
    service = Service()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), Notify((Webhook("hook", service.url),)))
        service.clock = lambda: bench.now
        count = 0
        service.away = True
        for second in range(seconds + 1):
            if second % 60 == 0 and second < seconds:
                bench.write([bench.open(count, "ticket" if count % 3 == 0 else "page")])
                count += 1
            bench.notifier.send_due("hook")
            bench.now += SECOND
        back = bench.now
        service.away = False
        while len(service.posts) < count:
            bench.notifier.send_due("hook")
            bench.now += SECOND // 2
            assert bench.now - back < 60 * SECOND
        after = [(at - back) / SECOND for at, _, _ in service.posts]
        order = [body["alerts"][0] for _, _, body in service.posts]
        pages = [a["startsAt"] for a in order[1:] if a["labels"]["severity"] == "critical"]
        print(
            f"away {seconds:6d} s: {count} messages; first {after[0]:.1f} s after it was back (a probe), last "
            f"{after[-1]:.1f} s, {after[-1] - after[0]:.1f} s after the first; "
            f"pages at most {count_places(pages)} places from oldest first"
        )


def count_places(found: list[str]) -> int:
    """Returns the most places by which one is away from its place in order; 0: all are in order. A receiver that is
    slow gets several messages at a time, which may overtake each other."""
    place = {value: number for number, value in enumerate(sorted(found))}
    return max((abs(number - place[value]) for number, value in enumerate(found)), default=0)


def due(protocol: str) -> None:
    """Prints how long STORM waiting messages take to a receiver in a separate process. protocol: HTTP/1.0 closes the
    connection after each message."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(theirs, protocol), daemon=True)
    process.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), Notify((Webhook("hook", f"http://127.0.0.1:{ours.recv()}"),)))
            for start in range(0, STORM, 250):
                bench.write([bench.open(i, "ticket" if i % 3 == 0 else "page") for i in range(start, start + 250)])
            began, cpu = time.monotonic(), time.process_time()
            while bench.notifier.send_due("hook"):
                pass
            print(
                f"due: {STORM} messages over {protocol} in {time.monotonic() - began:.1f} s elapsed, "
                f"{time.process_time() - cpu:.1f} s of CPU"
            )
            bench.database.close()
    finally:
        process.kill()


def _serve(port: Connection, protocol: str) -> None:
    _Handler.protocol_version = protocol
    service = Service()
    port.send(service.server_port)
    threading.Event().wait()


def storm(name: str, notify: Notify, service: Service) -> None:
    """Prints what one receiver got of STORM incidents in a minute, and what it cost."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), notify)
        service.clock = lambda: bench.now
        service.posts.clear()
        began, cpu = time.monotonic(), time.process_time()
        rows = 0.0
        for second in range(60):
            changes = [bench.open(i) for i in range(second * STORM // 60, (second + 1) * STORM // 60)]
            wrote = time.process_time()
            bench.write(changes)
            rows += time.process_time() - wrote
            bench.notifier.send_due(name)
            bench.now += SECOND
        for _ in range(20):
            while bench.notifier.send_due(name):
                pass
            bench.now += 15 * SECOND
        shown = Counter(path.rpartition("/")[2] or "post" for _, path, _ in service.posts)
        last = max((at for at, _, _ in service.posts), default=START)
        print(
            f"storm {name:9s}: {dict(shown)} requests, last {(last - START) / SECOND:.0f} s after the first incident; "
            f"{time.process_time() - cpu:.1f} s of CPU ({rows:.1f} for the rows of the outbox), "
            f"{time.monotonic() - began:.0f} s elapsed"
        )
        bench.database.close()


def storms() -> None:
    """Runs the storm for each receiver."""
    service = Service()
    with tempfile.TemporaryDirectory() as folder:
        key, token = Path(folder, "key"), Path(folder, "token")
        key.write_text("k" * 32)
        token.write_text("xoxb-t")
        by_name = Route("grouped", group_by=("alertname",))
        storm("single", Notify((Webhook("single", service.url),)), service)
        storm("grouped", Notify((Webhook("grouped", service.url),), route=by_name), service)
        pager = PagerDuty("pager", key, url=service.url)
        storm(
            "pager", Notify(pagerduty=(pager,), route=Route("pager", group_by=("alertname",), group_wait="5s")), service
        )
        slack = Slack("slack", "C1", token, url=service.url)
        storm("slack", Notify(slack=(slack,), route=Route("slack", group_by=("alertname",))), service)


def desk_storm() -> None:
    """Prints what a webhook got of STORM page findings in a minute that went through the Desk."""
    service = Service()
    with tempfile.TemporaryDirectory() as folder:
        now, cpu = [START], time.process_time()
        hook = {"webhooks": [{"name": "hook", "url": service.url}]}
        paths = {"store": {"path": f"{folder}/store.duckdb"}, "spool": {"directory": f"{folder}/spool"}}
        pipeline = PipelineService(
            build_section(Config, {**paths, "notify": hook}, "bench"), Runner([]), lambda: now[0]
        )
        pipeline.start_engine()
        assert pipeline.engine is not None
        for part in range(100):
            wanted = range(part * STORM // 6, (part + 1) * STORM // 6) if part < 6 else range(0)
            names = [f"gpu:n{i // 8}.{i % 8}" for i in wanted]
            found = [Finding(now[0], now[0], name, "sdc", "page", 9.0, f"{name}: wrong results") for name in names]
            if found:
                pipeline.engine.apply(lambda desk, found=found: desk.observe_own(now[0], found), [], found)
            pipeline.engine.advance_life()
            while pipeline.notifier.send_due("hook"):
                pass
            now[0] += 10 * SECOND
        sent = Counter((b["alerts"][-1]["labels"]["alertname"], b["status"]) for _, _, b in service.posts)
        print(f"storm through the Desk: {dict(sent)}; {time.process_time() - cpu:.1f} s of CPU")
        pipeline.close()


def groups() -> None:
    """Prints what GROUPS open alerts cost, each in a group of its own: at first, and after new routes."""
    service = Service()

    def route(matcher: str) -> Notify:
        each = {"receiver": "hook", "matchers": [matcher], "group_by": ["..."], "group_wait": "0s"}
        return Notify((Webhook("hook", service.url),), route=Route("hook", group_interval="30s", routes=(each,)))

    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), route('severity="critical"'))
        bench.write([bench.open(number) for number in range(GROUPS)])
        began = time.process_time()
        bench.notifier.send_due("hook")
        first, sent = time.process_time() - began, len(service.posts)
        while bench.notifier.send_due("hook"):
            pass
        print(f"groups: {time.process_time() - began:.2f} s of CPU for all, {first:.2f} s for the first {sent}")
        print(f"groups: rounds of a minute: {_measure_rounds(bench)}")
        bench.notifier = Notifier(bench.database, route('severity=~"critical"'), "bench", lambda: bench.now)
        print(f"groups: after the text of a matcher changed: {_measure_rounds(bench)}")
        bench.write([bench.open(GROUPS)])
        print(f"groups: with a new page: {_measure_rounds(bench)}; {len(service.posts)} messages in all")
        bench.database.close()


def _measure_rounds(bench: Bench) -> str:
    costs = []
    for _ in range(60):
        began = time.process_time()
        bench.notifier.send_due("hook")
        costs.append(time.process_time() - began)
        bench.now += SECOND
    return f"{sum(costs):.2f} s of CPU, the most in one {max(costs):.2f} s"


def main() -> None:
    """Runs what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", metavar="outage|due|storm|desk|groups")
    chosen = parser.parse_args().what or ["outage", "due", "storm", "desk", "groups"]
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "outage" in chosen:
        for seconds in OUTAGES_S:
            outage(seconds)
    if "due" in chosen:
        due("HTTP/1.1")
        due("HTTP/1.0")
    if "storm" in chosen:
        storms()
    if "desk" in chosen:
        desk_storm()
    if "groups" in chosen:
        groups()


if __name__ == "__main__":
    main()
