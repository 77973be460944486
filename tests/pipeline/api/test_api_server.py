"""The HTTP server: problems, identities, foreign pages, readiness, metrics, and /openapi.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.api import models
from pipeline.api.server import create_app
from pipeline.config.sections import Api, Config
from pipeline.model.errors import ConfigError

ADA = {"Authorization": "Bearer ada-has-a-long-token"}


def _problem(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert set(body) == {"type", "title", "status", "detail"}
    return str(body["detail"])


def test_healthz_answers_while_the_process_serves_and_readyz_lists_the_reasons(
    client: httpx.Client, backend: Any
) -> None:
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json() == {"ready": True, "reasons": []}
    backend.reasons.append("disk below its floor")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reasons": ["disk below its floor"]}
    assert client.get("/healthz").status_code == 200


def test_metrics_are_prometheus_text_with_help_and_type(client: httpx.Client, backend: Any) -> None:
    backend.counts.update(
        {
            'fleetpulse_rows_total{class="gpu"}': 12.0,
            'fleetpulse_rows_total{class="nic"}': 3.0,
            "fleetpulse_lag_seconds": 0.25,
            "fleetpulse_never": float("nan"),
        }
    )
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text.splitlines() == [
        "# HELP fleetpulse_lag_seconds Lag seconds, now.",
        "# TYPE fleetpulse_lag_seconds gauge",
        "fleetpulse_lag_seconds 0.25",
        "# HELP fleetpulse_never Never, now.",
        "# TYPE fleetpulse_never gauge",
        "fleetpulse_never NaN",
        "# HELP fleetpulse_rows_total Rows, since the start.",
        "# TYPE fleetpulse_rows_total counter",
        'fleetpulse_rows_total{class="gpu"} 12',
        'fleetpulse_rows_total{class="nic"} 3',
    ]


def test_unknown_routes_and_methods_are_problems(client: httpx.Client) -> None:
    assert "/api/v1/nope" in _problem(client.get("/api/v1/nope"), 404)
    assert "DELETE" in _problem(client.delete("/api/v1/incidents", headers={"content-type": "application/json"}), 405)
    assert "/docs" in _problem(client.get("/docs"), 404)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "JSON"),
        (b"[]", "body"),
        (b"{}", "query"),
        (b'{"query": 1}', "query"),
        (b'{"query": "SELECT 1", "more": 1}', "more"),
    ],
)
def test_a_body_with_the_wrong_shape_is_a_400_that_names_the_field(
    client: httpx.Client, body: bytes, named: str
) -> None:
    answer = client.post("/api/v1/sql", content=body, headers={"content-type": "application/json"})
    assert named in _problem(answer, 400)


def test_a_body_over_the_limit_is_not_read(client: httpx.Client) -> None:
    answer = client.post("/api/v1/sql", content=b" " * 300_000, headers={"content-type": "application/json"})
    assert "bytes" in _problem(answer, 413)


def test_an_internal_error_is_logged_and_not_shown_to_the_client(
    client: httpx.Client, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    del backend.standing
    detail = _problem(client.get("/api/v1/fleet"), 500)
    assert "standing" not in detail
    assert "standing" in caplog.text


def test_a_foreign_host_name_for_loopback_is_refused(client: httpx.Client) -> None:
    for host in ("evil.example.org", "127.0.0.1.evil.example.org", "10.0.0.1", "[", ""):
        _problem(client.get("/api/v1/fleet", headers={"host": host}), 421)
    for host in ("localhost:8600", "127.0.0.1", "[::1]:9"):
        assert client.get("/api/v1/fleet", headers={"host": host}).status_code == 200


@pytest.mark.slow
def test_a_page_of_another_site_cannot_write(client: httpx.Client) -> None:
    body = {"query": "SELECT 1"}
    _problem(client.post("/api/v1/sql", json=body, headers={"origin": "https://evil.example.org"}), 403)
    _problem(client.post("/api/v1/sql", json=body, headers={"origin": "null"}), 403)
    _problem(client.post("/api/v1/sql", content=b'{"query": "SELECT 1"}', headers={"content-type": "text/plain"}), 415)
    assert client.post("/api/v1/sql", json=body, headers={"origin": "http://127.0.0.1:8600"}).status_code == 200


def test_responses_forbid_sniffing_framing_and_storing(client: httpx.Client) -> None:
    for path in ("/healthz", "/api/v1/fleet", "/nope"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "fleet.example.org"])
def test_without_tokens_the_server_listens_on_loopback_alone(backend: Any, host: str) -> None:
    with pytest.raises(ConfigError, match="token_file"):
        create_app(backend, Config(api=Api(host=host)))


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "ada\n", "ada:short\n", ":a-token-without-a-name\n", "a b:long-enough-a-token\n",
             "ada:long-enough-a-token\nada:long-enough-another\n"],
)  # fmt: skip
def test_an_invalid_token_file_is_a_configuration_error(backend: Any, tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong"
    file.write_text(text)
    with pytest.raises(ConfigError, match="wrong"):
        create_app(backend, Config(api=Api(token_file=file)))
    with pytest.raises(ConfigError, match="cannot be read"):
        create_app(backend, Config(api=Api(token_file=tmp_path / "absent")))


def test_with_tokens_every_request_but_healthz_needs_one(with_tokens: httpx.Client) -> None:
    assert with_tokens.get("/healthz").status_code == 200
    for wrong in ("", "Bearer wrong", "Basic ada-has-a-long-token", "ada-has-a-long-token", "Bearer"):
        headers = {"Authorization": wrong} if wrong else {}
        for path in ("/readyz", "/metrics", "/openapi.json", "/api/v1/fleet", "/api/v1/incidents", "/nope"):
            answer = with_tokens.get(path, headers=headers)
            _problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert with_tokens.get("/api/v1/fleet", headers=ADA).status_code == 200
    assert with_tokens.get("/api/v1/fleet", headers={"Authorization": "bearer bob-has-a-long-token"}).status_code == 200


@pytest.mark.slow
def test_openapi_lists_every_route_and_version_contains_the_schema(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/healthz", "/readyz", "/metrics", "/api/v1/sql", "/api/v1/incidents/{incident}/acknowledge"} <= set(paths)
    version = models.Version.model_validate(client.get("/api/v1/version").json())
    assert version.schema_version >= 1
    assert version.site == "local"


@pytest.mark.slow
def test_docs_list_every_route(client: httpx.Client) -> None:
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in text
