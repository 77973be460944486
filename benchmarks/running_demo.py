"""`fleetpulse demo` on free ports, for scripts that look at its pages: it is ready when its faults are incidents."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START_S = 900.0
"""Time limit for the demo's 6 h of history (s). Chosen: it takes 1 min, on a busy machine ten."""
INCIDENTS = 5
"""Incidents that the demo's faults become."""


@contextmanager
def running_demo(folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Runs the demo until the block ends; gives the addresses of its dashboard and its API. Raises SystemExit.

    folder: for its temporary files, among them its store.
    """
    api, dashboard = free_port(), free_port()
    environ = os.environ | {
        "FLEETPULSE__API__PORT": str(api),
        "FLEETPULSE__DASHBOARD__PORT": str(dashboard),
        "PYTHONPATH": str(ROOT),
        **({"TMPDIR": str(folder)} if folder else {}),
    }
    command = [sys.executable, str(ROOT / "fleetpulse.py"), "demo"]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        try:
            _wait_for_incidents(demo, api, dashboard)
            yield f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{api}"
        finally:
            demo.terminate()
            demo.wait(30)


def _wait_for_incidents(demo: subprocess.Popen[bytes], api: int, dashboard: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if demo.poll() is not None:
            raise SystemExit(f"fleetpulse demo ended with {demo.returncode}")
        try:
            ready = len(read_json(f"http://127.0.0.1:{api}/api/v1/incidents")["incidents"]) >= INCIDENTS
            with urllib.request.urlopen(f"http://127.0.0.1:{dashboard}/_stcore/health", timeout=5):
                pass
        except OSError:
            ready = False
        if ready:
            return
        time.sleep(2)  # polls another process
    raise SystemExit(f"fleetpulse demo has fewer than {INCIDENTS} incidents after {START_S:.0f} s")


def read_json(address: str) -> Any:
    """Returns the JSON at an address."""
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


def free_port() -> int:
    """Returns a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
