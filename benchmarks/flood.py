"""A flood of findings to receivers over HTTP, in real time: who got what, when, and what it cost.

    python -m benchmarks.flood            5,000 findings in 60 s to a webhook, PagerDuty, Slack and an Alertmanager

Three of five findings are pages of one kind, the others tickets; after 30 s a CDU fails, and after the flood all ends.
The receivers are another process; the store, the Desk, the outbox and the threads of the notifier are those of a
pipeline.
Slack accepts one message per second and answers 429 to others, as the real one does.
"""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from detectors.runner import Runner
from pipeline.commands.service import PipelineService
from pipeline.config.sections import Config
from pipeline.config.settings import build_section
from pipeline.incidents import ledger
from pipeline.model.records import SECOND, Finding, Level

FINDINGS, LENGTH_S = 5000, 60
STEP_S = 10
"""Time between evaluations (s): a frame of the pipeline."""
QUIET_S = 660
"""Time after which everything has ended (s): the quiet period of incidents is 10 minutes."""
LATEST_S = 240
"""Longest wait until all queues are empty (s)."""
KINDS = {"/hook": "webhook", "/v2/enqueue": "PagerDuty", "/api/v2/alerts": "Alertmanager"}
CDU = "cdu:c1"


class _Receivers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log: ClassVar[list[tuple[float, str, int, str]]] = []
    slack_free = 0.0

    def do_POST(self) -> None:
        now = time.monotonic()
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        kind = KINDS.get(self.path, "Slack")
        status, said = 200, {"ok": True, "channel": "C1", "ts": f"{now:.6f}"}
        if kind == "PagerDuty":
            said = {"status": "success", "message": "Event processed", "dedup_key": json.loads(text)["dedup_key"]}
            status = 202
        elif kind == "Alertmanager":
            said = {}
        elif kind == "Slack" and now < type(self).slack_free:
            status, said = 429, {"ok": False, "error": "ratelimited"}
        elif kind == "Slack":
            type(self).slack_free = now + 1
        answer = json.dumps(said).encode()
        self.log.append((now, kind, status, text))
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(answer)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def _serve(ours: Connection) -> None:
    """Serves until it is asked for what came."""
    http.server.ThreadingHTTPServer.request_queue_size = 128
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receivers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ours.send(server.server_port)
    ours.recv()
    ours.send(list(_Receivers.log))


def _configure(folder: Path, url: str) -> Config:
    (folder / "key").write_text("k" * 32)
    (folder / "token").write_text("xoxb-t")
    receivers = {
        "webhooks": [{"name": "hook", "url": f"{url}/hook"}],
        "pagerduty": [{"name": "pager", "routing_key_file": f"{folder}/key", "url": url}],
        "slack": [{"name": "slack", "channel": "C1", "token_file": f"{folder}/token", "url": url}],
        "alertmanagers": [{"name": "am", "urls": [url]}],
    }
    paths = {"store": {"path": f"{folder}/store.duckdb"}, "spool": {"directory": f"{folder}/spool"}}
    made: Config = build_section(Config, {**paths, "notify": receivers}, "flood")
    return made


class Flood:
    """A pipeline without telemetry, whose clock may be put forward."""

    def __init__(self, config: Config) -> None:
        self.ahead = 0
        self.pipeline = PipelineService(config, Runner([]), self.clock)
        self.pipeline.start_engine()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.pipeline.notifier.run, args=(self.stop,))
        self.thread.start()

    def clock(self) -> int:
        return time.time_ns() // 1000 + self.ahead

    def report(self, names: list[tuple[str, str, Level]]) -> None:
        """Detectors report these entities now."""
        assert self.pipeline.engine is not None
        now = self.clock()
        found = [
            Finding(now, now, name, detector, level, 9.0, f"{name}: {detector}") for name, detector, level in names
        ]
        self.pipeline.engine.apply(lambda desk: desk.observe(now, now + 1, found, lambda _: True, now), [], found)
        self.pipeline.engine.advance_life()

    def wait(self) -> float:
        """Waits until nothing waits for a receiver; returns for how long (s)."""
        began = time.monotonic()
        while self._count_waiting() and time.monotonic() - began < LATEST_S:
            time.sleep(0.5)
        return time.monotonic() - began

    def _count_waiting(self) -> int:
        with self.pipeline.database.cursor() as cursor:
            counts = ledger.count_payloads(cursor)
        return sum(number for (_, state), number in counts.items() if state in ("pending", "held"))

    def close(self) -> None:
        """Ends the threads and the pipeline."""
        self.stop.set()
        self.pipeline.notifier.wake()
        self.thread.join()
        self.pipeline.close()


def _draw(second: int) -> list[tuple[str, str, Level]]:
    wanted = range(second * FINDINGS // LENGTH_S, (second + STEP_S) * FINDINGS // LENGTH_S)
    found: list[tuple[str, str, Level]] = [
        (f"gpu:n{i}.0", "sdc", "page") if i % 5 < 3 else (f"gpu:n{i}.0", "pcie", "ticket") for i in wanted
    ]
    return [*found, (CDU, "coolant_flow", "page")] if second == LENGTH_S // 2 else found


def _describe(log: list[tuple[float, str, int, str]], began: float, cdu: float) -> None:
    for kind in sorted({kind for _, kind, _, _ in log}):
        own = [(at - began, status, text) for at, of, status, text in log if of == kind and "Watchdog" not in text]
        took = [(at, text) for at, status, text in own if status < 300]
        storms = sum("AlertStorm" in text or "Alert storm" in text for _, text in took)
        seen = next((at + began - cdu for at, text in took if CDU in text or "CDU c1" in text), None)
        statuses = dict(Counter(status for _, status, _ in own))
        told = "never" if seen is None else f"after {seen:.1f} s"
        print(
            f"{kind}: {len(own)} requests {statuses}, {storms} of the storms; first after {took[0][0]:.1f} s, "
            f"last after {took[-1][0]:.1f} s; the CDU {told}"
        )


def main() -> None:
    """Runs the flood."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as folder:
        flood = Flood(_configure(Path(folder), f"http://127.0.0.1:{ours.recv()}"))
        base, cpu, began, cdu = _read_memory(), time.process_time(), time.monotonic(), 0.0
        for second in range(0, LENGTH_S, STEP_S):
            time.sleep(max(0.0, began + second - time.monotonic()))
            cdu = time.monotonic() if second == LENGTH_S // 2 else cdu
            flood.report(_draw(second))
        wrote, used = time.monotonic() - began, time.process_time() - cpu
        after = flood.wait()
        print(
            f"flood: {FINDINGS} findings in {wrote:.1f} s, {used:.1f} s of CPU; queues empty {after:.1f} s later; "
            f"memory {base} MiB before, {_read_memory()} at the most; load {os.getloadavg()[0]:.0f}"
        )
        open_ = time.monotonic()
        flood.ahead += QUIET_S * SECOND
        flood.report([])
        ended = time.monotonic()
        flood.wait()
        print(f"the end of all in {ended - open_:.1f} s, told {time.monotonic() - ended:.1f} s later")
        flood.close()
    ours.send("over")
    log = ours.recv()
    _describe([one for one in log if one[0] < open_], began, cdu)
    print("the end:", dict(Counter(f"{kind} {status}" for at, kind, status, _ in log if at >= open_)))
    process.kill()


def _read_memory() -> int:
    """Returns the most memory that was resident so far (MiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    sys.exit(main())
