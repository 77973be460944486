"""The pipeline's open page incidents that concern this node, asked over its API with the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.sections import Check
from pipeline.http.addresses import opener

MOST_BYTES = 8 << 20
"""Longest answer that is read; chosen: 4,000 open incidents. With more of them the fleet has other troubles."""
PATH = "/api/v1/incidents?state=open"


class NoAnswer(Exception):  # noqa: N818 - it is an answer: nobody knows
    """The pipeline did not say which incidents are open. The message says what was found."""


def of_node(check: Check, node: str, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Open incidents of severity page whose cause or one of whose members is on `node`, and why that is not all that
    there is: since when the pipeline finds nothing new; empty while it does. Raises NoAnswer."""
    found, unknown = _open(check, timeout)
    return [one for one in found if one.get("severity") == "page" and concerns(one, node)], unknown


def concerns(incident: Mapping[str, Any], node: str) -> bool:
    """Whether it names the node or something in it; what is simulated concerns nobody."""
    members = incident.get("members")
    named = [incident.get("cause"), *(members if isinstance(members, list) else ())]
    return not incident.get("simulated") and any(_on(str(entity), node) for entity in named)


def _on(entity: str, node: str) -> bool:
    name = entity.partition(":")[2]
    return name == node or name.startswith(f"{node}.")


def _unknown(answer: Mapping[str, Any]) -> str:
    """Since when the pipeline finds nothing new, and why; empty while it does, and of a version that does not say."""
    if answer.get("stalled") is not True:
        return ""
    reasons = answer.get("unready")
    why = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
    return f"unknown since {str(answer.get('judged') or 'the start')[:19]}: {why or 'the pipeline judges nothing'}"


def _open(check: Check, timeout: float) -> tuple[list[dict[str, Any]], str]:
    request = urllib.request.Request(check.api_url.rstrip("/") + PATH, headers={"Accept": "application/json"})
    if check.token_file is not None:
        request.add_header("Authorization", f"Bearer {_token(check.token_file)}")
    try:
        with opener().open(request, timeout=timeout) as answer:
            raw = answer.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise NoAnswer(f"API {check.api_url}: its answer is longer than {MOST_BYTES} bytes")
        answer = json.loads(raw)
        return [one for one in answer["incidents"] if isinstance(one, dict)], _unknown(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise NoAnswer(f"API {check.api_url}: HTTP {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"API {check.api_url} does not answer: {getattr(error, 'reason', None) or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NoAnswer(f"API {check.api_url}: its answer is no list of incidents") from error


def _token(path: Path) -> str:
    """The first token of a file with one `name:token` per line."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, ValueError) as error:
        raise NoAnswer(f"{path}: cannot be read: {error}; wanted one name:token per line") from error
    if not lines or ":" not in lines[0]:
        raise NoAnswer(f"{path}: holds no token; wanted one name:token per line")
    return lines[0].partition(":")[2].strip()
