"""`fleetpulse up` and `fleetpulse demo`: agent, pipeline and dashboard as children of one process.

The demo adds a simulated fleet and a receiver that prints the alerts it gets. Its state lies in a temporary folder;
only [api], [dashboard] and [agent] are taken from the user's configuration: it pages nobody and fills no real store.
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
from pipeline.runtime.heartbeat import STANDS_STILL
from pipeline.runtime.supervise import Child, Stopped, Supervisor, report_death, say

POLL_S = 1.0
"""How often the pipeline is asked whether it is ready. Chosen."""
LOOK_S = 10.0
"""How often the children are looked at while all is well. Chosen: a third of what makes the pipeline unready."""
PROGRESS_S = 5.0
"""How often the waiting is talked about. Chosen."""
LOG_BYTES = 64 << 20
"""Size at which the demo's log takes no more lines. Chosen."""
SEED = 1
"""Any number: the same seed gives the same fleet and the same faults. Chosen."""
BACKFILL_S = 6 * 3600
"""History that the demo starts with: long enough that detectors have learnt and faults are in progress."""
BACKFILLED = "back-fill sent"
"""What `fleetpulse simulate --backfill` says when the history is in the spool and real time begins."""


def up(config: Config, command: Sequence[str], source: str | None) -> int:
    """Runs agent, pipeline and dashboard until somebody ends it. `command` is how to call fleetpulse."""
    supervisor = Supervisor()
    more = ["--config", source] if source else []
    services = {name: [*command, name, *more] for name in ("agent", "pipeline", "dashboard")}
    say(f"fleetpulse: dashboard {_address(config)}, API {client.base_url(config)}; Ctrl-C ends all of it")
    return run(supervisor, lambda: watch_all(supervisor, services, config))


def demo(config: Config, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the whole system over a simulated fleet and this host's own telemetry, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fleetpulse-demo-") as folder, receiver() as port:
        path = Path(folder) / "fleetpulse.toml"
        path.write_text(settings(config, Path(folder), port))
        log = Log(Path(folder) / "fleetpulse.log")
        supervisor = Supervisor(log, own_state(environ))
        return run(supervisor, lambda: _demo(supervisor, command, path, config, log))


def settings(config: Config, folder: Path, receiver: int) -> str:
    """The demo's configuration file: what is the user's, and what is the demo's own."""
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


def alert_line(alert: Mapping[str, Any]) -> str:
    """One line for one alert of a webhook body; alerts of the simulated fleet say so."""
    labels, notes = alert.get("labels", {}), alert.get("annotations", {})
    simulated = " SIMULATED" if labels.get("simulated") == "true" or ":sim-" in labels.get("entity", "") else ""
    words = [str(labels.get(key, "-")) for key in ("severity", "alertname", "entity")]
    line = f"ALERT{simulated} {str(alert.get('status', '?')).upper()} {' '.join(words)}: {notes.get('summary', '')}"
    return "".join(c if c.isprintable() else " " for c in line)


def run(supervisor: Supervisor, body: Callable[[], Child]) -> int:
    """0 when somebody ended it, 1 when a child died; either way nothing is left running."""
    with supervisor.signals():
        try:
            dead = body()
        except Stopped:
            say("fleetpulse: stopping")
            return 0
        finally:
            supervisor.end()
    report_death(dead)
    return 1


def watch_all(supervisor: Supervisor, services: Mapping[str, Sequence[str]], config: Config) -> Child:
    """Starts all; returns the one that died."""
    for name, argv in services.items():
        supervisor.start(name, argv)
    return _watch(supervisor, config)


def _demo(supervisor: Supervisor, command: Sequence[str], path: Path, config: Config, log: Log) -> Child:
    """Starts the parts in the order in which they need each other; returns the one that died.

    The history is written before anybody reads: a reader that has come to the end of one node's spool while another's
    is yet to be filled would take the latter's rows for late ones.
    """
    more = ["--config", str(path)]
    say(f"fleetpulse demo: state and logs in {path.parent}, removed at the end")
    say(f"fleetpulse demo: everything named sim-* is SIMULATED; {config.agent.node} is this host, for real")
    simulate = [*command, "simulate", *more, "--scenario", "demo", "--seed", str(SEED), "--to", "spool"]
    supervisor.start("simulator", [*simulate, "--backfill", str(BACKFILL_S), "--speed", "1"])
    dead = _until(supervisor, lambda: None if log.backfilled else "6 h of history are being simulated")
    for name in () if dead else ("pipeline", "agent"):
        supervisor.start(name, [*command, name, *more])
    dead = dead or _until(supervisor, lambda: _missing(config))
    if dead:
        return dead
    supervisor.start("dashboard", [*command, "dashboard", *more])
    say(f"fleetpulse demo: dashboard {_address(config)}, API {client.base_url(config)}; Ctrl-C ends all of it")
    return _watch(supervisor, config)


def _until(supervisor: Supervisor, missing: Callable[[], str | None]) -> Child | None:
    """Waits until nothing is missing and tells what is: None, or the child that died meanwhile."""
    began = told = time.monotonic()
    while True:
        dead = supervisor.wait(POLL_S)
        what = None if dead else missing()
        if what is None:
            return dead
        if time.monotonic() - told >= PROGRESS_S:
            told = time.monotonic()
            say(f"fleetpulse demo: {told - began:.0f} s: {what}")


def _missing(config: Config) -> str | None:
    """What the dashboard still waits for; None when there is nothing."""
    try:
        status, answer = client.get(config, "/readyz")
        if status != 200:
            return f"pipeline is not ready: {'; '.join(map(str, answer.get('reasons', []))) or status}"
        status, fleet = client.get(config, "/api/v1/fleet")
    except Unreachable:
        return "pipeline starts"
    if status != 200 or not fleet.get("nodes", True):
        return "no telemetry yet"
    return "6 h of simulated history are being stored and judged" if fleet["backlog"] else None


def _watch(supervisor: Supervisor, config: Config) -> Child:
    """The child that died. One that hangs or was stopped is named as long as it does."""
    told = ""
    while True:
        dead = supervisor.wait(LOOK_S)
        if dead is not None:
            return dead
        found = "; ".join([*supervisor.stopped(), *hangs(config)])
        if found and found != told:
            say(f"fleetpulse: {found}")
        told = found


def hangs(config: Config) -> list[str]:
    """Why the pipeline does not go on although its process lives, in words."""
    try:
        _, answer = client.get(config, "/readyz")
    except NoAnswer as error:
        return [str(error)]
    except Unreachable:
        return []
    reasons = answer.get("reasons", []) if isinstance(answer, dict) else []
    return [reason for reason in map(str, reasons) if reason.startswith(STANDS_STILL)]


def _address(config: Config) -> str:
    return f"http://{config.dashboard.host}:{config.dashboard.port}"


def own_state(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without overrides that would lead the demo out of its folder."""
    kept = ("FLEETPULSE__API__", "FLEETPULSE__DASHBOARD__", "FLEETPULSE__AGENT__")
    return {k: v for k, v in environ.items() if not k.startswith("FLEETPULSE") or k.startswith(kept)}


class Log:
    """Takes the children's lines into one file, so that alerts are not lost among them. Holds at most LOG_BYTES."""

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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            lines = [alert_line(alert) for alert in json.loads(body)["alerts"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.send_error(400, f"no webhook body of version 4: {type(error).__name__}")
            return
        for line in lines:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Alerts are the talk here, not requests."""


@contextlib.contextmanager
def receiver() -> Iterator[int]:
    """Serves the printing receiver on a free loopback port within the block."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Printer)
    thread = threading.Thread(target=server.serve_forever, name="receiver", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
