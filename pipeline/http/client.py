"""Client of the HTTP API of a running pipeline. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.sections import Config
from pipeline.http.addresses import make_opener
from pipeline.http.token_lines import read_token_lines
from pipeline.model.errors import (
    FleetpulseError,
    InvalidQuery,
    NoAnswer,
    OverLimit,
    Refused,
    Unavailable,
    Unreachable,
    UsageError,
)

WRONG_QUERY = "urn:fleetpulse:wrong-query"
OVER_LIMIT = "urn:fleetpulse:over-limit"
REFUSED = "urn:fleetpulse:refused"
NO_RIGHT = "urn:fleetpulse:no-right"
"""`type` of problems (RFC 9457) with a meaning beyond the status. NO_RIGHT: another token might do."""
TOKEN_VARIABLE = "FLEETPULSE_TOKEN"
"""Environment variable with the token of a person; without it, the first one of [api] token_file is used."""
QUERY_MARGIN = 45.0
"""Extra time of a response beyond the limit of the query (s). Chosen: 30 to send it, the rest to start it."""
_KINDS: Mapping[str, type[FleetpulseError]] = {WRONG_QUERY: InvalidQuery, OVER_LIMIT: OverLimit, REFUSED: Refused}
_OPENER = make_opener()


def base_url(config: Config) -> str:
    """Returns the address of the pipeline of this configuration."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.api.host, config.api.host)
    return f"http://[{host}]:{config.api.port}" if ":" in host else f"http://{host}:{config.api.port}"


def get(config: Config, path: str, timeout: float = 5.0, token: str = "") -> tuple[int, Any]:
    """Returns (status, JSON) of a GET, also for an error status. Raises Unreachable, NoAnswer after the timeout.

    token: instead of that of this configuration.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return _send(config, urllib.request.Request(base_url(config) + path, headers=headers), timeout)


def query(config: Config, text: str) -> tuple[list[str], list[list[Any]], bool]:
    """Returns (columns, rows, truncated) of a read-only query. Raises Unreachable, Refused, WrongQuery, UsageError."""
    body = json.dumps({"query": text}).encode()
    url = f"{base_url(config)}/api/v1/sql"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "Accept": "application/json"})
    status, answer = _send(config, request, config.api.sql_seconds + QUERY_MARGIN)
    if status != 200:
        raise make_error(status, answer, url)
    return answer["columns"], answer["rows"], answer["truncated"]


def post(config: Config, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> Any:
    """Returns the JSON response of a POST. Raises Unreachable, Refused (no right), UsageError (bad or unknown)."""
    return send(config, "POST", path, body, timeout=timeout)


def send(
    config: Config,
    method: str,
    path: str,
    body: Mapping[str, Any],
    version: int | None = None,
    timeout: float = 10.0,
) -> Any:
    """Returns the JSON response of a write. version: only if the object still has it. Raises as `post`."""
    url, headers = base_url(config) + path, {"Content-Type": "application/json"}
    if version is not None:
        headers["If-Match"] = f'"{version}"'
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
    status, answer = _send(config, request, timeout)
    if status != 200:
        raise make_error(status, answer, url)
    return answer


def download(config: Config, path: str, timeout: float = 60.0) -> tuple[bytes, str]:
    """Returns the body of a GET that answers with a file, and the name that it is given. Raises as `get` and `post`."""
    url = base_url(config) + path
    status, answer = _send(config, urllib.request.Request(url), timeout, is_file=True)
    if status != 200:
        raise make_error(status, answer, url)
    body: bytes = answer[0]
    return body, str(answer[1]).partition('filename="')[2].strip('"')


def _send(config: Config, request: urllib.request.Request, timeout: float, is_file: bool = False) -> tuple[int, Any]:
    """Returns (status, JSON); of a file (bytes, Content-Disposition)."""
    token = os.environ.get(TOKEN_VARIABLE) or (config.api.token_file and read_token(config.api.token_file))
    if token and not request.has_header("Authorization"):
        request.add_header("Authorization", f"Bearer {token.strip()}")
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            if is_file:
                return answer.status, (answer.read(), answer.headers.get("Content-Disposition") or "")
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                raise Unreachable(
                    f"{request.full_url} redirects to {error.headers.get('Location')}, which is not followed; "
                    "expected the pipeline itself: check [api] host and port"
                ) from error
            return error.code, _name_token(config, error.code, _json_or_text(error.read()))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error or type(error).__name__
        if isinstance(reason, TimeoutError):
            raise NoAnswer(
                f"API {base_url(config)} does not answer within {timeout:g} s: it hangs or is suspended"
            ) from error
        raise Unreachable(
            f"API {base_url(config)} does not answer ({reason}); fleetpulse doctor says how to start the pipeline"
        ) from error


def _name_token(config: Config, status: int, answer: Any) -> Any:
    """Returns the answer to a refused token; it says which one was sent, or how to send one."""
    if not isinstance(answer, dict) or answer.get("type") != NO_RIGHT:
        return answer
    detail = answer.get("detail") or answer.get("title")
    if not os.environ.get(TOKEN_VARIABLE):
        if config.api.token_file is not None or status == 403:
            return answer
        how = f"export {TOKEN_VARIABLE}=..., or set [api] token_file"
        return {**answer, "detail": f"{detail}; no token was sent; {how}"}
    if config.api.token_file is None:
        return answer
    return {**answer, "detail": f"{detail}; the token is that of {TOKEN_VARIABLE}, not of {config.api.token_file}"}


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return {"detail": raw.decode(errors="replace")[:500]}


def make_error(status: int, answer: Any, url: str, bad: type[FleetpulseError] = UsageError) -> FleetpulseError:
    """Returns the error of a problem document (RFC 9457). `bad`: class of a 400 without a specific type."""
    detail = answer.get("detail") or answer.get("title") if isinstance(answer, dict) else answer
    text = f"{url}: {detail} (HTTP {status})"
    kind = answer.get("type") if isinstance(answer, dict) else None
    if status == 400:
        return _KINDS.get(str(kind), bad)(text)
    if status == 503:
        return Unavailable(text)
    return Refused(text) if status in (401, 403, 412) else UsageError(text) if status < 500 else FleetpulseError(text)


PERSON = "operator"
"""Name of the token of `fleetpulse setup` and `init` for people at the command line; the first is the dashboard's."""


def read_token(path: Path) -> str:
    """Returns the token of PERSON of a file with one `name:token` per line, else the first one. Raises UsageError."""
    try:
        lines = read_token_lines(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; expected one name:token per line") from error
    if not lines or ":" not in lines[0]:
        raise UsageError(f"{path}: contains no token; expected one name:token per line")
    chosen = next((line for line in lines if line.partition(":")[0].strip() == PERSON), lines[0])
    return chosen.partition(":")[2].strip()
