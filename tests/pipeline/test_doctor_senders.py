"""The doctor names other senders that are rejected, with the reason and the fix."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agents.gateway import intake as intakes
from agents.gateway.gateway import RunningGateway
from agents.gateway.receiver import REASONS
from pipeline.commands.doctor_senders import FIXES, RECENT, check_gateway, check_rejected
from pipeline.config import sections
from pipeline.config.sections import Config
from tests.agents.test_gateway import TYPE, send
from tests.pipeline.otlp_requests import Request, gpu_request
from tests.pipeline.test_doctor import free_port
from tests.pipeline.test_otlp_ingest import Harness

TOKEN = {"Authorization": "Bearer 0123456789abcdef"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tokens = tmp_path / "tokens"
    tokens.write_text("collector:0123456789abcdef\n")
    gateway = sections.Gateway(port=free_port(), node="gw", token_file=tokens)
    spool = sections.Spool(tmp_path / "spool", free_bytes=0)
    return Config(gateway=gateway, spool=spool, api=sections.Api(port=free_port()))


@contextmanager
def gateway_of(config: Config) -> Iterator[int]:
    running = RunningGateway(config, lambda text: None)
    try:
        yield running.port
    finally:
        running.close()


def test_every_reason_has_a_fix() -> None:
    assert set(FIXES) == set(REASONS.values())


def test_without_a_gateway_nothing_is_wrong(config: Config) -> None:
    assert check_gateway(config).state == "info"


def test_a_gateway_that_refused_nothing_is_ok(config: Config) -> None:
    with gateway_of(config) as port:
        send(port, "POST", "/v1/metrics", gpu_request(), {**TYPE, **TOKEN})
        assert check_gateway(config).state == "ok"


def test_a_refused_sender_is_named_with_the_reason_and_the_fix(config: Config) -> None:
    with gateway_of(config) as port:
        for _ in range(3):
            send(port, "POST", "/v1/metrics", gpu_request(), TYPE)
        send(port, "POST", "/v1/traces", gpu_request(), {**TYPE, **TOKEN})
        check = check_gateway(config)
    assert check.state == "warn"
    assert "collector (127.0.0.1): 1 refused, last " in check.found
    assert "127.0.0.1: 3 refused, last " in check.found
    assert "expected a bearer token" in check.found
    assert FIXES["token"] in check.fix
    assert FIXES["path"] in check.fix


def test_a_gateway_that_cannot_store_is_a_fail(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway_of(config):
        monkeypatch.setattr(intakes.disk, "free_bytes", lambda path: 1)
        check = check_gateway(config)
    assert check.state == "fail"
    assert "nearly full" in check.found


def test_a_gateway_with_tls_is_asked_over_tls(config: Config, certificate: Path) -> None:
    secure = dataclasses.replace(config.gateway, certificate_file=certificate)
    config = dataclasses.replace(config, gateway=secure)
    with gateway_of(config):
        assert check_gateway(config).state == "ok"


@contextmanager
def api_with(rows: list[tuple[object, ...]], config: Config) -> Iterator[None]:
    """An API that answers every query with these rows."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if asked == {"query": RECENT} else 400)
            self.end_headers()
            self.wfile.write(
                json.dumps({"columns": ["rule", "newest", "number"], "rows": rows, "truncated": False}).encode()
            )

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", config.api.port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
def test_what_the_pipeline_rejects_of_other_senders_is_named(config: Config, tmp_path: Path) -> None:
    assert check_rejected(config).state == "info"
    with api_with([], config):
        assert check_rejected(config).state == "ok"
    store = Harness(tmp_path)
    store.send(Request("").gauge("m", 1.0).encode(), b"\xff" * 40, b"\xff" * 41)
    store.drain()
    assert store.database is not None
    store.database.connection.execute("UPDATE dead_letter SET time = now()")
    rows = store.rows(RECENT)
    store.close()
    assert [(rule, number) for rule, _, number in rows] == [("wire", 2), ("otlp", 1)]
    with api_with(rows, config):
        check = check_rejected(config)
    assert check.state == "warn"
    assert "2 dead letters, newest: " in check.found
    assert "values without a node" in check.found
