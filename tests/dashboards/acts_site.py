"""A whole site for acts: a simulated fleet whose nodes are those of a real Slurm, pipeline, executor, login, receiver.

Every part is a separate process, as an operator would start it. One GPU of the fleet computes wrong results, which
becomes a page; the receiver gets its alert, with the link from which a person begins.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.api import tokens
from tests import slurm_cluster
from tests.daemons import free_ports
from tests.dashboards.login_site import COOKIE_SECRET, running_dashboard
from tests.oidc_provider import ROLES, SECRET, running_provider
from tests.parts import do_without
from tests.until import until

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(ROOT / "fleetpulse.py"))
NODES = tuple(f"sim-n{number:03d}" for number in range(1, 5))
FAULTY = "sim-n002"
# a GPU that was repaired before the walk: a wrong canary after the hold refuses the release, as it should
SCENARIO = """\
version = 1
duration = 3600
interval = 10
[fleet]
nodes = 4
gpus_per_node = 8
[[fault]]
kind = "sdc"
entity = "gpu:sim-n002.3"
onset = 600
end = 3600
probability = 0.7
[live]
every = 86400
hours = 24
"""
CONFIG = """\
[site]
name = "lab"
[spool]
directory = "{at}/spool"
[store]
path = "{at}/store.duckdb"
[api]
port = {api}
[pipeline]
transport = "spool"
[notify]
external_url = "http://127.0.0.1:{dashboard}"
[[notify.webhooks]]
name = "on-call"
url = "http://127.0.0.1:{receiver}/"
[acts]
hold = "on"
release = "on"
diagnose = "on"
adapter = "slurm"
[acts.adapters]
diagnose = "exec"
[acts.exec]
diagnose = ["echo", "diagnostic of level {{level}} of {{node}}: pass"]
[acts.limits]
two_people_gpus = 2
acts_per_10_minutes = 1000
[executor]
token_file = "{at}/executor.token"
poll_seconds = 1
[dashboard]
port = {dashboard}
api_url = "http://127.0.0.1:{api}"
token_file = "{at}/dashboard.token"
roles = {{ {roles} }}
[dashboard.oidc]
issuer = "{issuer}"
client_id = "fleetpulse"
client_secret_file = "{at}/secret"
cookie_secret_file = "{at}/cookie"
"""
START_S = 240.0
"""Longest start (s): an hour of simulated history, and its alert. Chosen: ten times that of a quiet machine."""


@dataclass
class ActsSite:
    """The running site. link: the address in the alert of the faulty GPU."""

    url: str
    api: str
    at: Path
    slurm: slurm_cluster.Cluster
    alerts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def link(self) -> str:
        """The link of the first alert about the faulty GPU, "" before it came."""
        found = [a for a in self.alerts if a["status"] == "firing" and FAULTY in str(a["labels"].get("entity"))]
        return str(found[0]["annotations"]["dashboard_url"]) if found else ""

    def is_out(self) -> bool:
        """Whether Slurm gives the faulty node no new work."""
        return "drain" in self.slurm.run("sinfo", "-h", "-N", "-n", FAULTY, "-o", "%T")


class _Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps the alerts of each message."""

    alerts: list[dict[str, Any]]

    def do_POST(self) -> None:
        """Keeps the alerts."""
        self.alerts.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextmanager
def _receiving(alerts: list[dict[str, Any]]) -> Iterator[int]:
    handler = type("Receiver", (_Receiver,), {"alerts": alerts})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _running(at: Path, name: str, *words: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a part of Fleetpulse until the block ends."""
    command = [*COMMAND, name, "--config", f"{at}/fleetpulse.toml", *words]
    with (
        open(at / f"{name}.log", "ab") as log,
        subprocess.Popen(command, env={**os.environ, **environ}, stdout=log, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _write_tokens(at: Path) -> None:
    file, now = tokens.find_role_file(at / "store.duckdb"), time.time_ns() // 1000
    board = tokens.create_role_token(file, "dashboard", "admin", 0, "test", now, on_behalf_of=True)[1]
    executor = tokens.create_role_token(file, "executor", "operator", 0, "test", now, executor=True)[1]
    for name, owner, text in (("dashboard.token", "dashboard", board), ("executor.token", "executor", executor)):
        (at / name).write_text(f"{owner}:{text}\n")
        (at / name).chmod(0o600)
    (at / "secret").write_text(SECRET)
    (at / "cookie").write_text(COOKIE_SECRET)
    (at / "scenario.toml").write_text(SCENARIO)


def _read(at: Path) -> str:
    return (at / "simulate.log").read_text()


@contextmanager
def running_acts_site(at: Path) -> Iterator[ActsSite]:
    """Runs all parts until the block ends; gives the site when the alert has arrived."""
    if reason := slurm_cluster.missing():
        do_without("slurm", reason)
    at.mkdir(parents=True, exist_ok=True)
    api, dashboard, provider = free_ports(3)
    with ExitStack() as stack:
        slurm = stack.enter_context(slurm_cluster.Cluster(at / "slurm", names=NODES))
        site = ActsSite(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{api}", at, slurm)
        receiver = stack.enter_context(_receiving(site.alerts))
        issuer = stack.enter_context(running_provider(at / "oidc", provider, [f"{site.url}/oauth2callback"])).url
        roles = ", ".join(f'"{group}" = "{role}"' for group, role in ROLES.items())
        values = {"api": api, "dashboard": dashboard, "receiver": receiver, "issuer": issuer}
        (at / "fleetpulse.toml").write_text(CONFIG.format(at=at, roles=roles, **values))
        _write_tokens(at)
        more = ("--scenario", f"{at}/scenario.toml", "--to", "spool", "--backfill", "3600", "--speed", "1")
        parts = [stack.enter_context(_running(at, "simulate", *more))]
        until(lambda: "back-fill sent" in _read(at) or parts[0].poll() is not None, START_S)
        assert parts[0].poll() is None, _read(at)
        parts.append(stack.enter_context(_running(at, "pipeline")))
        parts.append(stack.enter_context(_running(at, "executor", SLURM_CONF=f"{at}/slurm/slurm.conf")))
        until(lambda: site.link or any(part.poll() is not None for part in parts), START_S)
        assert site.link, [(file.name, file.read_text()[-1500:]) for file in at.glob("*.log")]
        stack.enter_context(running_dashboard(at / "fleetpulse.toml", dashboard))
        yield site
