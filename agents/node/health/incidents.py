"""The pipeline's open page incidents of this node, read from its API with only the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.sections import Check
from pipeline.http.addresses import make_opener
from pipeline.http.token_lines import read_token_lines

MAX_BYTES = 8 << 20
"""Longest response that is read; chosen: 4,000 open incidents."""
PATH = "/api/v1/incidents?state=open"


class NoAnswer(Exception):  # noqa: N818 - it is a result: the incidents are unknown
    """The pipeline did not return its open incidents. The message names the API and the error."""


def read_incidents(check: Check, node: str, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Open page incidents whose cause or members are on `node`, and why the list may be incomplete.

    The reason says since when the pipeline evaluates nothing new; it is empty while it does. Raises NoAnswer.
    """
    found, unknown = _fetch_open(check, timeout)
    return [one for one in found if one.get("severity") == "page" and concerns_node(one, node)], unknown


def concerns_node(incident: Mapping[str, Any], node: str) -> bool:
    """Whether an incident that is not simulated names the node or something in it."""
    members = incident.get("members")
    named = [incident.get("cause"), *(members if isinstance(members, list) else ())]
    return not incident.get("simulated") and any(_is_on_node(str(entity), node) for entity in named)


def _is_on_node(entity: str, node: str) -> bool:
    name = entity.partition(":")[2]
    return name == node or name.startswith(f"{node}.")


def _stall_reason(answer: Mapping[str, Any]) -> str:
    """Since when the pipeline evaluates nothing new, and why; empty while it does, or if its version omits that."""
    if answer.get("stalled") is not True:
        return ""
    reasons = answer.get("unready")
    why = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return f"unknown since {str(answer.get('judged') or 'the start')[:19]}: {why or 'the pipeline evaluates nothing'}"


def _fetch_open(check: Check, timeout: float) -> tuple[list[dict[str, Any]], str]:
    request = urllib.request.Request(check.api_url.rstrip("/") + PATH, headers={"Accept": "application/json"})
    if check.token_file is not None:
        request.add_header("Authorization", f"Bearer {_read_token(check.token_file)}")
    try:
        with make_opener().open(request, timeout=timeout) as answer:
            raw = answer.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise NoAnswer(f"API {check.api_url}: response longer than {MAX_BYTES} bytes")
        answer = json.loads(raw)
        return [one for one in answer["incidents"] if isinstance(one, dict)], _stall_reason(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise NoAnswer(f"API {check.api_url}: HTTP {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"API {check.api_url} does not respond: {getattr(error, 'reason', None) or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NoAnswer(f"API {check.api_url}: response is not a list of incidents") from error


def _read_token(path: Path) -> str:
    """The first token of a file with one `name:token` per line."""
    try:
        lines = read_token_lines(path)
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{path}: cannot be read: {error}; expected one name:token per line") from error
    if not lines or ":" not in lines[0]:
        raise NoAnswer(f"{path}: has no token; expected one name:token per line")
    return lines[0].partition(":")[2].strip()
