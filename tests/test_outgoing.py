"""None of our clients sends a credential to another host: redirects are not followed, loopback has no proxy."""

from __future__ import annotations

import ast
import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.collectors.jobs.kubernetes import PodListRefused, PodPoller
from agents.node.health import incidents
from agents.otlp.delivery import HttpDelivery
from dashboards.client import ApiError, Client
from pipeline.config.sections import Api, Check, Config, Opentelemetry
from pipeline.http import addresses, client
from pipeline.model.errors import Permanent, Unreachable

TOKEN = "a-token-of-some-length"
ROOT = Path(__file__).parents[1]


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with a redirect to `elsewhere`, or with an empty object; records received credentials."""

    def __init__(self, elsewhere: str = "") -> None:
        self.elsewhere, self.credentials = elsewhere, list[str | None]()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.credentials.append(self.headers.get("Authorization"))
        self.send_response(302 if self.server.elsewhere else 200)
        if self.server.elsewhere:
            self.send_header("Location", self.server.elsewhere + self.path)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def command(server: Server, token_file: Path) -> None:
    client.get(Config(api=Api(port=server.server_port, token_file=token_file)), "/readyz")


def check(server: Server, token_file: Path) -> None:
    incidents.read_incidents(Check(api_url=server.url, token_file=token_file), "n1", 5.0)


def kubelet(server: Server, token_file: Path) -> None:
    (token_file.parent / "token").write_text(TOKEN)
    PodPoller(token_file.parent / "none.sock", token_file.parent, server.url, "n1", 1.0)._read_pod_list()


def dashboard(server: Server, token_file: Path) -> None:
    Client(server.url, TOKEN).fetch_detectors()


def opentelemetry(server: Server, token_file: Path) -> None:
    headers = token_file.parent / "headers"
    headers.write_text(f"Authorization: Bearer {TOKEN}\n")
    HttpDelivery(Opentelemetry(endpoint=server.url, headers_file=headers), "test")(b"")


Call = Callable[[Server, Path], None]
CLIENTS: tuple[Call, ...] = (command, check, kubelet, dashboard, opentelemetry)
FAILS = (Unreachable, incidents.NoAnswer, PodListRefused, ApiError, Permanent)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"ada:{TOKEN}\n")
    return file


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("call", CLIENTS, ids=lambda call: call.__name__)
def test_a_redirect_carries_no_credential_to_another_host(call: Call, token_file: Path) -> None:
    with running(Server()) as other, running(Server(other.url)) as first:
        with pytest.raises(FAILS):
            call(first, token_file)
        assert first.credentials == [f"Bearer {TOKEN}"]
        assert other.credentials == []


@pytest.mark.slow
@pytest.mark.parametrize("call", CLIENTS, ids=lambda call: call.__name__)
def test_a_proxy_of_the_environment_is_not_used_for_loopback(
    call: Call, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Server()) as proxy, running(Server()) as server:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with contextlib.suppress(*FAILS):  # an empty object is not what each of them expects
            call(server, token_file)
        assert server.credentials == [f"Bearer {TOKEN}"]
        assert proxy.credentials == []


def test_a_proxy_of_the_environment_is_used_beyond_loopback_when_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with running(Server()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        url = "http://collector.example.org:4318/v1/metrics"
        with addresses.make_opener(environment_proxies_to=url).open(url, timeout=5.0) as answer:
            assert answer.status == 200
        assert len(proxy.credentials) == 1


@pytest.mark.parametrize("url", ["http://localhost", "http://LOCALHOST:1", "http://127.3.2.1", "https://[::1]:4"])
def test_every_name_of_this_machine_is_loopback(url: str) -> None:
    assert addresses.is_loopback_url(url)
    assert not addresses.is_loopback_url("http://127.0.0.1.example.org")


def test_all_urllib_calls_use_the_one_opener() -> None:
    own = ROOT / "pipeline" / "http" / "addresses.py"
    forbidden = {"urlopen", "build_opener", "HTTPRedirectHandler"}
    for package in ("agents", "pipeline", "detectors", "dashboards"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            if path == own or not any(name in text for name in forbidden):
                continue
            names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
            assert not names & forbidden, path
