"""The guard of the dashboard: Host names, origins, frames."""

from __future__ import annotations

import asyncio
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from dashboards.guard import Guard
from dashboards.serve import allowed_hosts
from pipeline.config.receivers import Notify
from pipeline.config.sections import Config, Dashboard
from pipeline.runtime.logs import MAX_LINES
from tests.dashboards.test_dashboard_serve import free_port, is_healthy

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from dashboards import serve
from pipeline.config.receivers import Notify
from pipeline.config.sections import Config, Dashboard
board = Dashboard(port=int(sys.argv[1]), api_url="http://127.0.0.1:9", names=("Fleet.example.org",))
sys.exit(serve.run(Config(dashboard=board)))
"""
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dashboard's stderr."""
    return tmp_path_factory.mktemp("dashboard") / "log"


@pytest.fixture(scope="module")
def port(log: Path) -> Iterator[int]:
    """Port of a real dashboard, without an API."""
    chosen = free_port()
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        log.open("w") as stderr,
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(chosen)], env=environ, stderr=stderr) as process,
    ):
        deadline = time.monotonic() + 60
        while not is_healthy(chosen):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polls a real process; it has no event for this
        yield chosen
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def get_head(port: int, host: str, more: str = "", path: str = "/") -> tuple[int, str]:
    """Returns (status, head in lower case) of a GET over a plain socket."""
    with socket.create_connection(("127.0.0.1", port), 10.0) as caller:
        caller.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
        answer = b""
        while b"\r\n\r\n" not in answer:
            part = caller.recv(4096)
            assert part, answer
            answer += part
    head = answer.partition(b"\r\n\r\n")[0].decode().lower()
    return int(head.split()[1]), head


def test_probes_that_do_not_know_the_base_path_get_the_health_of_the_pages() -> None:
    asked: list[tuple[str, bytes]] = []

    async def pages(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append((scope["path"], scope["raw_path"]))

    async def nothing(*_: Any) -> Any: ...

    for base in ("", "/ops"):
        for path in ("/_stcore/health", "/ops/_stcore/health", "/ops/"):
            scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
            guard = Guard(pages, frozenset(), base=base)
            asyncio.run(guard({**scope, "headers": [(b"host", b"localhost")]}, nothing, nothing))
    paths = ["/_stcore/health", "/ops/_stcore/health", "/ops/", "/ops/_stcore/health", "/ops/_stcore/health", "/ops/"]
    assert asked == [(path, path.encode()) for path in paths]


PATHS = ["/", "/_stcore/health", "/_stcore/host-config", "/static/index.html", "/nothing"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_host_name_is_refused(port: int, path: str) -> None:
    for host in ("evil.example.org", f"evil.example.org:{port}", "127.0.0.1.evil.example.org", "", "10.0.0.1"):
        assert get_head(port, host, path=path)[0] == 421
    for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "fleet.example.org"):
        assert get_head(port, host, path=path)[0] in (200, 404)


def test_another_origin_is_refused(port: int) -> None:
    own = f"127.0.0.1:{port}"
    for origin in ("https://evil.example.org", "null", "http://127.0.0.1:1", f"http://{own}.evil.example.org"):
        assert get_head(port, own, f"Origin: {origin}\r\n")[0] == 403
    assert get_head(port, own, f"Origin: http://{own}\r\n")[0] == 200
    assert get_head(port, own, "Origin: https://fleet.example.org\r\n")[0] == 200


def test_a_websocket_is_checked_too(port: int) -> None:
    own = f"127.0.0.1:{port}"
    stream = "/_stcore/stream"
    assert get_head(port, own, f"Origin: http://{own}\r\n{UPGRADE}", stream)[0] == 101
    assert get_head(port, own, f"Origin: https://evil.example.org\r\n{UPGRADE}", stream)[0] == 403
    assert get_head(port, "evil.example.org", f"Origin: http://evil.example.org\r\n{UPGRADE}", stream)[0] == 403


@pytest.mark.parametrize("path", PATHS)
def test_responses_forbid_frames(port: int, path: str) -> None:
    for host in (f"127.0.0.1:{port}", "evil.example.org"):
        head = get_head(port, host, path=path)[1]
        policy = next(line for line in head.splitlines() if line.startswith("content-security-policy: "))
        assert "frame-ancestors 'none'" in policy
        assert "default-src 'self'" in policy
        assert "http" not in policy
        assert "x-frame-options: deny" in head


def test_the_address_of_the_first_page_by_its_name_leads_to_it(port: int) -> None:
    status, head = get_head(port, f"127.0.0.1:{port}", path="/fleet?within=rack%3Ar1")
    assert status == 302
    assert "location: ./?within=rack%3ar1" in head
    assert get_head(port, f"127.0.0.1:{port}", path="/fleet?//evil.example.org")[1].count("location: ./?") == 1


def test_allowed_hosts_come_from_the_configuration() -> None:
    board = Dashboard(host="0.0.0.0", behind_proxy=True, names=("B.example.org",))
    config = Config(dashboard=board, notify=Notify(external_url="https://A.example.org:8443/fleet"))
    assert allowed_hosts(config) == {"a.example.org", "b.example.org"}
    assert allowed_hosts(Config()) == frozenset()  # loopback is always served


@pytest.mark.chromium
def test_a_browser_shows_the_page_but_not_in_a_frame(port: int, chromium: str) -> None:
    from playwright.sync_api import sync_playwright

    class Frame(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<iframe src='http://127.0.0.1:{port}/'></iframe>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Frame)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.wait_for_load_state("networkidle")
            assert any("frame-ancestors" in text or "X-Frame-Options" in text for text in said), said
            page.goto(f"http://127.0.0.1:{port}/")
            page.get_by_text("does not answer").first.wait_for(timeout=60_000)
            browser.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_requests_cannot_flood_the_log(port: int, log: Path) -> None:
    before = len(log.read_text().splitlines())
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), 10.0) as caller:
            caller.sendall(b"no request\r\n\r\n")
            assert caller.recv(100).startswith(b"HTTP/1.1 400")
    assert len(log.read_text().splitlines()) - before <= MAX_LINES
