"""The HTTP client of the pipeline: how a command handles each response."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.api.tokens import write_initial_tokens
from pipeline.config.sections import Api, Config
from pipeline.http import client
from pipeline.model.errors import (
    FleetpulseError,
    InvalidQuery,
    OverLimit,
    Refused,
    Unavailable,
    Unreachable,
    UsageError,
)


@contextmanager
def run_server(status: int, body: bytes) -> Iterator[tuple[int, list[tuple[str, str, str | None]]]]:
    """Runs a real HTTP server with one response: (its port, the requests as (method, path, authorization))."""
    requests: list[tuple[str, str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.command, self.path, self.headers.get("Authorization")))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def config_for(port: int, token_file: Path | None = None) -> Config:
    return Config(api=Api(port=port, token_file=token_file))


def test_a_query_returns_columns_and_rows() -> None:
    body = json.dumps({"columns": ["n"], "rows": [[1]], "truncated": False}).encode()
    with run_server(200, body) as (port, requests):
        assert client.query(config_for(port), "SELECT 1 AS n") == (["n"], [[1]], False)
    assert requests == [("POST", "/api/v1/sql", None)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [(400, UsageError, 2), (401, Refused, 4), (404, UsageError, 2), (500, FleetpulseError, 1), (503, Unavailable, 3)],
)
def test_a_problem_becomes_the_matching_error(status: int, kind: type[FleetpulseError], code: int) -> None:
    with run_server(status, b'{"detail": "only SELECT is served"}') as (port, _):
        with pytest.raises(kind, match="only SELECT is served") as refused:
            client.query(config_for(port), "DROP TABLE gpu")
        assert refused.value.exit_code == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "kind", "code"),
    [(client.WRONG_QUERY, InvalidQuery, 2), (client.REFUSED, Refused, 4), (client.OVER_LIMIT, OverLimit, 4)],
)
def test_invalid_and_refused_sql_have_separate_exit_codes(problem: str, kind: type[FleetpulseError], code: int) -> None:
    body = json.dumps({"type": problem, "detail": "no"}).encode()
    with run_server(400, body) as (port, _):
        with pytest.raises(kind) as refused:
            client.query(config_for(port), "SELEC")
        assert refused.value.exit_code == code


def test_an_error_that_is_not_json_is_shown_as_it_is() -> None:
    with run_server(502, b"<html>proxy</html>") as (port, _):
        assert client.get(config_for(port), "/readyz") == (502, {"detail": "<html>proxy</html>"})


@pytest.mark.parametrize("body", [b"no json", b""])
def test_a_response_that_is_not_json_means_that_no_pipeline_is_there(body: bytes) -> None:
    with run_server(200, body) as (port, _), pytest.raises(Unreachable, match="fleetpulse doctor"):
        client.get(config_for(port), "/readyz")


def test_a_closed_port_is_unreachable_and_the_address_is_named() -> None:
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:1 does not answer"):
        client.get(config_for(1), "/readyz")


def test_people_at_the_command_line_are_not_recorded_as_the_dashboard(tmp_path: Path) -> None:
    """`fleetpulse setup` writes the dashboard's token first; `node decommission` of root was one of its acts."""
    path = tmp_path / "tokens"
    path.write_text(write_initial_tokens())
    names = dict(reversed(line.split(":")) for line in path.read_text().split())
    assert names[client.read_token(path)] == "operator"


def test_the_first_token_of_the_file_is_sent(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("# who: what\n\nops: 0123456789abcdef\nother:x\n")
    with run_server(200, b"{}") as (port, requests):
        client.get(config_for(port, tmp_path / "tokens"), "/readyz")
    assert requests == [("GET", "/readyz", "Bearer 0123456789abcdef")]


def test_a_token_file_without_a_token_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("# nothing\n")
    for path in (tmp_path / "tokens", tmp_path / "gone"):
        with pytest.raises(UsageError, match="name:token"):
            client.get(config_for(1, path), "/readyz")


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:5"), ("0.0.0.0", "http://127.0.0.1:5"), ("::", "http://[::1]:5")],
)
def test_a_listen_address_becomes_an_address_to_connect_to(host: str, url: str) -> None:
    assert client.base_url(Config(api=Api(host=host, port=5))) == url
