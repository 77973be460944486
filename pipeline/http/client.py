"""Asks a running pipeline over its HTTP API, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.sections import Config
from pipeline.http.addresses import opener
from pipeline.model.errors import FleetpulseError, InvalidQuery, NoAnswer, OverLimit, Refused, Unreachable, UsageError

WRONG_QUERY = "urn:fleetpulse:wrong-query"
OVER_LIMIT = "urn:fleetpulse:over-limit"
REFUSED = "urn:fleetpulse:refused"
"""The `type` of a problem that is more than its status says."""
QUERY_MARGIN = 45.0
"""Seconds beyond the query's own limit that its answer may take. Chosen: 30 to send it, the rest to start it."""
_KINDS: Mapping[str, type[FleetpulseError]] = {WRONG_QUERY: InvalidQuery, OVER_LIMIT: OverLimit, REFUSED: Refused}
_OPENER = opener()


def base_url(config: Config) -> str:
    """Where the pipeline of this configuration serves."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.api.host, config.api.host)
    return f"http://[{host}]:{config.api.port}" if ":" in host else f"http://{host}:{config.api.port}"


def get(config: Config, path: str, timeout: float = 5.0) -> tuple[int, Any]:
    """(status, JSON) of a GET; an error status is an answer too. Raises Unreachable, NoAnswer where it is too late."""
    return _ask(config, urllib.request.Request(base_url(config) + path), timeout)


def query(config: Config, text: str) -> tuple[list[str], list[list[Any]], bool]:
    """(columns, rows, truncated) of one read-only query. Raises Unreachable, Refused, InvalidQuery or UsageError."""
    body = json.dumps({"query": text}).encode()
    url = f"{base_url(config)}/api/v1/sql"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "Accept": "application/json"})
    status, answer = _ask(config, request, config.api.sql_seconds + QUERY_MARGIN)
    if status != 200:
        raise error_of(status, answer, url)
    return answer["columns"], answer["rows"], answer["truncated"]


def post(config: Config, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> Any:
    """The JSON that a POST is answered with. Raises Unreachable, Refused (no right) or UsageError (bad or unknown)."""
    url = base_url(config) + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    status, answer = _ask(config, request, timeout)
    if status != 200:
        raise error_of(status, answer, url)
    return answer


def _ask(config: Config, request: urllib.request.Request, timeout: float) -> tuple[int, Any]:
    if config.api.token_file is not None:
        request.add_header("Authorization", f"Bearer {_token(config.api.token_file)}")
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                raise Unreachable(
                    f"{request.full_url} redirects to {error.headers.get('Location')}, which is not followed; "
                    "expected the pipeline itself: check [api] host and port"
                ) from error
            return error.code, _json_or_text(error.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        if isinstance(reason, TimeoutError):
            raise NoAnswer(
                f"API {base_url(config)} gives no answer within {timeout:g} s: it hangs or is stopped"
            ) from error
        raise Unreachable(
            f"API {base_url(config)} does not answer ({reason}); wanted a running pipeline: fleetpulse pipeline"
        ) from error


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return {"detail": raw.decode(errors="replace")[:500]}


def error_of(status: int, answer: Any, url: str, bad: type[FleetpulseError] = UsageError) -> FleetpulseError:
    """The error that a problem document (RFC 9457) stands for; `bad` is that of a 400 whose type says no more."""
    detail = answer.get("detail") or answer.get("title") if isinstance(answer, dict) else answer
    text = f"{url}: {detail} (HTTP {status})"
    kind = answer.get("type") if isinstance(answer, dict) else None
    if status == 400:
        return _KINDS.get(str(kind), bad)(text)
    return Refused(text) if status in (401, 403) else UsageError(text) if status < 500 else FleetpulseError(text)


def _token(path: Path) -> str:
    """The first token of a file with one `name:token` per line."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; wanted one name:token per line") from error
    if not lines or ":" not in lines[0]:
        raise UsageError(f"{path}: holds no token; wanted one name:token per line")
    return lines[0].partition(":")[2].strip()
