"""`fleetpulse up` and `fleetpulse demo`: agent, pipeline and dashboard as children of one process.

The demo adds a simulated fleet and a receiver that prints its alerts. Its state is in a temporary directory; of the
user's configuration only [api], [dashboard] and [agent] apply, so that it sends no pages and uses no real store.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.sections import Config
from pipeline.http import client
from pipeline.model.errors import NoAnswer, Unreachable
from pipeline.runtime.heartbeat import STALLED
from pipeline.runtime.supervise import Child, StopRequested, Supervisor, print_line, report_death

POLL_S = 1.0
"""Interval of readiness checks at the start (s). Chosen."""
WATCH_S = 10.0
"""Interval of checks of the running children (s). Chosen: a third of the time after which the pipeline is not ready."""
PROGRESS_S = 5.0
"""Interval of progress messages (s). Chosen."""
LOG_BYTES = 64 << 20
"""Size limit of the demo's log. Chosen."""
SEED = 1
"""Seed of the simulated fleet and its faults. Chosen: any."""
BACKFILL_S = 6 * 3600
"""History at the start (s): long enough for detectors to learn and for faults in progress."""
BACKFILLED = "back-fill sent"
"""Message of `fleetpulse simulate --backfill` after the history is in the spool."""


def up(config: Config, command: Sequence[str], source: str | None) -> int:
    """Runs agent, pipeline and dashboard until a stop signal. command: argv prefix of fleetpulse."""
    supervisor = Supervisor()
    more = ["--config", source] if source else []
    services = {name: [*command, name, *more] for name in ("agent", "pipeline", "dashboard")}
    print_line(f"fleetpulse: dashboard {_address(config)}, API {client.base_url(config)}; Ctrl-C stops all")
    return run_supervised(supervisor, lambda: start_and_watch(supervisor, services, config))


def demo(config: Config, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the whole system with a simulated fleet and this host's telemetry, in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="fleetpulse-demo-") as folder, serve_receiver() as port:
        path = Path(folder) / "fleetpulse.toml"
        path.write_text(demo_configuration(config, Path(folder), port))
        log = LogFile(Path(folder) / "fleetpulse.log")
        supervisor = Supervisor(log, strip_overrides(environ))
        return run_supervised(supervisor, lambda: _demo(supervisor, command, path, config, log))


def demo_configuration(config: Config, folder: Path, receiver: int) -> str:
    """Returns the configuration file of the demo: its own settings and those of the user."""
    hook = f"http://127.0.0.1:{receiver}/"
    tables: dict[str, dict[str, Any]] = {
        "site": {"name": "demo"},
        "agent": {"node": config.agent.node, "interval": config.agent.interval},
        "spool": {"directory": str(folder / "spool")},
        "store": {"path": str(folder / "store.duckdb")},
        "api": {"host": config.api.host, "port": config.api.port},
        "dashboard": {"host": config.dashboard.host, "port": config.dashboard.port},
        "pipeline": {"transport": "spool"},
        "notify": {"external_url": f"http://{config.dashboard.host}:{config.dashboard.port}"},
    }
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in table.items())
    return "\n".join([*lines, "[[notify.webhooks]]", 'name = "demo"', f'url = "{hook}"', ""])


def format_alert(alert: Mapping[str, Any]) -> str:
    """Returns one line for an alert of a webhook body; alerts of the simulated fleet are marked."""
    labels, notes = alert.get("labels", {}), alert.get("annotations", {})
    simulated = " SIMULATED" if labels.get("simulated") == "true" or ":sim-" in labels.get("entity", "") else ""
    words = [str(labels.get(key, "-")) for key in ("severity", "alertname", "entity")]
    line = f"ALERT{simulated} {str(alert.get('status', '?')).upper()} {' '.join(words)}: {notes.get('summary', '')}"
    return "".join(c if c.isprintable() else " " for c in line)


def run_supervised(supervisor: Supervisor, body: Callable[[], Child]) -> int:
    """Runs `body` and stops all children. Returns 0 after a stop signal, 1 if a child died."""
    with supervisor.handle_signals():
        try:
            dead = body()
        except StopRequested:
            print_line("fleetpulse: stopping")
            return 0
        finally:
            supervisor.stop_all()
    report_death(dead)
    return 1


def start_and_watch(supervisor: Supervisor, services: Mapping[str, Sequence[str]], config: Config) -> Child:
    """Starts all services and returns the child that died."""
    for name, argv in services.items():
        supervisor.start(name, argv)
    return _watch(supervisor, config)


def _demo(supervisor: Supervisor, command: Sequence[str], path: Path, config: Config, log: LogFile) -> Child:
    """Starts the parts in order of dependency and returns the child that died.

    The history is written before the pipeline starts: if it read one node's spool to the end while another's is still
    empty, the rows of the latter would be late.
    """
    more = ["--config", str(path)]
    print_line(f"fleetpulse demo: state and logs in {path.parent}, removed at stop")
    print_line(f"fleetpulse demo: sim-* is SIMULATED; {config.agent.node} is this host")
    simulate = [*command, "simulate", *more, "--scenario", "demo", "--seed", str(SEED), "--to", "spool"]
    supervisor.start("simulator", [*simulate, "--backfill", str(BACKFILL_S), "--speed", "1"])
    dead = _wait_until_done(supervisor, lambda: None if log.backfilled else "simulating 6 h of history")
    for name in () if dead else ("pipeline", "agent"):
        supervisor.start(name, [*command, name, *more])
    dead = dead or _wait_until_done(supervisor, lambda: _pending_step(config))
    if dead:
        return dead
    supervisor.start("dashboard", [*command, "dashboard", *more])
    print_line(f"fleetpulse demo: dashboard {_address(config)}, API {client.base_url(config)}; Ctrl-C stops all")
    return _watch(supervisor, config)


def _wait_until_done(supervisor: Supervisor, pending: Callable[[], str | None]) -> Child | None:
    """Waits until no step is pending and prints the pending one. Returns a child that died, else None."""
    began = printed = time.monotonic()
    while True:
        dead = supervisor.wait(POLL_S)
        what = None if dead else pending()
        if what is None:
            return dead
        if time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            print_line(f"fleetpulse demo: {printed - began:.0f} s: {what}")


def _pending_step(config: Config) -> str | None:
    """Returns what the dashboard still waits for, None if it can start."""
    try:
        status, answer = client.get(config, "/readyz")
        if status != 200:
            return f"pipeline is not ready: {'; '.join(map(str, answer.get('reasons', []))) or status}"
        status, fleet = client.get(config, "/api/v1/fleet")
    except Unreachable:
        return "pipeline is starting"
    if status != 200 or not fleet.get("nodes", True):
        return "no telemetry yet"
    return "storing and evaluating 6 h of simulated history" if fleet["backlog"] else None


def _watch(supervisor: Supervisor, config: Config) -> Child:
    """Returns the child that died; prints children that hang or are suspended."""
    printed = ""
    while True:
        dead = supervisor.wait(WATCH_S)
        if dead is not None:
            return dead
        found = "; ".join([*supervisor.list_suspended(), *find_stalls(config)])
        if found and found != printed:
            print_line(f"fleetpulse: {found}")
        printed = found


def find_stalls(config: Config) -> list[str]:
    """Returns why the running pipeline does not advance, empty if it does."""
    try:
        _, answer = client.get(config, "/readyz")
    except NoAnswer as error:
        return [str(error)]
    except Unreachable:
        return []
    reasons = answer.get("reasons", []) if isinstance(answer, dict) else []
    return [reason for reason in map(str, reasons) if reason.startswith(STALLED)]


def _address(config: Config) -> str:
    return f"http://{config.dashboard.host}:{config.dashboard.port}"


def strip_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without overrides that would affect state outside the demo's directory."""
    kept = ("FLEETPULSE__API__", "FLEETPULSE__DASHBOARD__", "FLEETPULSE__AGENT__")
    return {k: v for k, v in environ.items() if not k.startswith("FLEETPULSE") or k.startswith(kept)}


class LogFile:
    """Writes the children's lines to one file of at most LOG_BYTES, so that alerts stay visible on the terminal."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.backfilled = False

    def __call__(self, line: str) -> None:
        with self._lock, self._path.open("a") as file:
            if file.tell() < LOG_BYTES:
                file.write(line + "\n")
            self.backfilled |= line.startswith("simulator:") and BACKFILLED in line


class _Printer(http.server.BaseHTTPRequestHandler):
    """Receives webhook bodies and prints one line per alert on stdout."""

    def do_POST(self) -> None:
        """Prints the alerts of one body."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            lines = [format_alert(alert) for alert in json.loads(body)["alerts"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.send_error(400, f"not a webhook body of version 4: {type(error).__name__}")
            return
        for line in lines:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing for requests."""


@contextlib.contextmanager
def serve_receiver() -> Iterator[int]:
    """Serves a receiver that prints alerts, on a free loopback port, within the block."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Printer)
    thread = threading.Thread(target=server.serve_forever, name="receiver", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
