"""A leak and a lost flow at a BMC become events, an incident and a webhook, through the real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.agents.redfish_double import Double, Fault
from tests.agents.redfish_trees import LEAK, cdu

ROOT = Path(__file__).parents[2]
ROPE = "leak_detector:c1.cdu.C1.Tray"


class Receiver(ThreadingHTTPServer):
    """Receives webhooks."""

    daemon_threads = False

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _WebhookHandler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


class _WebhookHandler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.alerts += body["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses the server's log."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def wait_for(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first value that is found; OSError counts as not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if true := found():
                return true
        except OSError:  # it is not listening yet
            pass
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configuration(home: Path, double: Double, slow: Double, hook: int, port: int) -> Path:
    password = home / "password"
    password.touch(0o600)
    password.write_text(double.password)
    lines = ["[agent]", 'node = "row1"', "[spool]", f'directory = "{home / "spool"}"', "[store]"]
    lines += [f'path = "{home / "store.duckdb"}"', "[api]", f"port = {port}", "[pipeline]", "frame = 1.0"]
    lines += ["lateness = 3.0", "[[notify.webhooks]]", 'name = "pager"', f'url = "http://127.0.0.1:{hook}/"']
    lines += ["allow_http = true"]
    for name, bmc in (("c1", double), ("c2", slow)):
        lines += ["[[collector.redfish.bmcs]]", f'name = "{name}"', f'url = "{bmc.url}"', "allow_http = true"]
        lines += [f'user = "{bmc.user}"', f'password_file = "{password}"', 'parents = ["rack:r1"]']
    path = home / "fleetpulse.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_leak_is_an_event_an_incident_and_a_webhook_while_another_bmc_hangs(
    tmp_path: Path, receiver: Receiver
) -> None:
    with ExitStack() as stack:
        double, slow = (stack.enter_context(Double(cdu())) for _ in range(2))
        slow.fault("*", Fault(delay=180.0))
        port = free_port()
        config = configuration(tmp_path, double, slow, receiver.server_address[1], port)
        for command in ("agent", "pipeline"):
            log = stack.enter_context((tmp_path / f"{command}.log").open("w"))
            words = [sys.executable, str(ROOT / "fleetpulse.py"), command, "--config", str(config)]
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        api = f"http://127.0.0.1:{port}/api/v1"
        wait_for(lambda: get_json(f"{api}/entities?kind=leak_detector")["entities"], 60, "the leak detectors are known")
        changed = time.monotonic()
        double.set(LEAK, "/DetectorState", "Critical")
        opened = wait_for(
            lambda: [i for i in get_json(f"{api}/incidents")["incidents"] if i["cause"] == ROPE], 20, "the incident"
        )
        assert opened[0]["severity"] == "page"
        assert opened[0]["detector"] == "coolant_leak"
        mine = wait_for(lambda: [a for a in receiver.alerts if a["labels"].get("cause") == ROPE], 20, "the webhook")
        assert time.monotonic() - changed < 25
        assert mine[0]["status"] == "firing"
        assert mine[0]["labels"]["severity"] == "critical"
        parents = {e["entity"]: e["parents"] for e in get_json(f"{api}/entities?kind=leak_detector")["entities"]}
        assert parents[ROPE][0] == "cdu:c1.C1"
        assert slow.most_in_flight == double.most_in_flight == 1
