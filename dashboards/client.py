"""The only file that talks to the API. Every failure is an ApiError whose text an operator can act on."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

from dashboards import answers
from dashboards import answers as voices
from dashboards.answers import Detail, Fleet, Happening, Mute, Panel, Series
from pipeline.http.addresses import opener
from pipeline.model.errors import FleetpulseError, UsageError
from pipeline.model.records import Incident, State, iso

T = TypeVar("T")
Act = Literal["acknowledge", "comment", "resolve", "not_a_fault"]
API_URL = "FLEETPULSE_API_URL"
API_TOKEN_FILE = "FLEETPULSE_API_TOKEN_FILE"
TIMEOUT = 2.5
"""Seconds that one answer may take: less than the 3 s in which the dashboard has to end. Chosen."""
MOST_BYTES = 64 << 20
"""Longest answer read: about 300,000 nodes. Chosen."""


class ApiError(FleetpulseError):
    """The API did not give what was asked for; `status` is that of HTTP, None where there was no answer."""

    exit_code = 3

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


_OPENER = opener()


@dataclass(frozen=True)
class Client:
    """One API at `url`, with the bearer token where one is needed."""

    url: str
    token: str = ""
    timeout: float = TIMEOUT

    def fleet(self) -> Fleet:
        """All nodes with their states."""
        return self._get(answers.fleet_of, "fleet")

    def incidents(self, state: State | None = None) -> tuple[Incident, ...]:
        """Incidents in one state, or all."""
        return self._get(answers.incidents_of, "incidents", {"state": state} if state else {})

    def incident(self, identity: str) -> Detail:
        """One incident with findings, history and notifications. Raises ApiError with status 404 if there is none."""
        return self._get(answers.detail_of, f"incidents/{quote(identity, safe='')}")

    def series(self, entity: str, signal: str, start: int, end: int) -> Series:
        """One signal of a device beside its peers. Raises ApiError with status 404 if it is not served."""
        span = {"entity": entity, "signal": signal, "from": iso(start), "to": iso(end)}
        return self._get(answers.series_of, "series", {**span, "peers": "auto", "points": "300"})

    def timeline(self, entity: str, start: int, end: int, limit: int = 50) -> tuple[Happening, ...]:
        """What happened to an entity and around it."""
        span = {"entity": entity, "from": iso(start), "to": iso(end), "limit": str(limit)}
        return self._get(answers.timeline_of, "timeline", span)

    def act(self, identity: str, act: Act, comment: str) -> Incident:
        """Writes a note: the incident as it is then. `not_a_fault` resolves it, and its detectors learn from it."""
        verdict = act == "not_a_fault"
        path = f"incidents/{quote(identity, safe='')}/{'resolve' if verdict else act}"
        return self._post(answers.incident_of, path, {"comment": comment, **({"not_a_fault": True} if verdict else {})})

    def detectors(self) -> Panel:
        """All detectors, and the modes in force."""
        return self._get(voices.panel_of, "detectors")

    def mutes(self) -> tuple[Mute, ...]:
        """All mutes, those that are over too; newest first."""
        return self._get(voices.mutes_of, "mutes")

    def mute(self, detector: str, scope: str, seconds: float, reason: str) -> Mute:
        """Silences a detector on a scope. Raises ApiError with what the API says against it."""
        body = {"detector": detector, "scope": scope, "seconds": seconds, "reason": reason}
        return self._post(voices.mute_of, "mutes", body)

    def unmute(self, identity: str) -> Mute:
        """Ends a mute now. Raises ApiError with status 404 if it is over."""
        return self._post(voices.mute_of, f"mutes/{quote(identity, safe='')}/end", {})

    def _post(self, parse: Callable[[Mapping[str, Any]], T], path: str, body: Mapping[str, Any]) -> T:
        headers = {"Content-Type": "application/json"}
        return self._ask(parse, urllib.request.Request(self._address(path), json.dumps(body).encode(), headers))

    def _get(self, parse: Callable[[Mapping[str, Any]], T], path: str, query: Mapping[str, str] | None = None) -> T:
        address = self._address(path) + (f"?{urlencode(query)}" if query else "")
        return self._ask(parse, urllib.request.Request(address))

    def _address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/api/v1/{path}"

    def _ask(self, parse: Callable[[Mapping[str, Any]], T], request: urllib.request.Request) -> T:
        raw = self._raw(request)
        try:
            return parse(json.loads(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ApiError(
                f"{request.full_url} answered what this dashboard does not understand ({_reason(error)}); "
                "wanted the API of a Fleetpulse of the same version: check [dashboard] api_url"
            ) from error

    def _raw(self, request: urllib.request.Request) -> bytes:
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                raw: bytes = answer.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(
                f"The API at {self.url} does not answer ({_reason(error)}). "
                "Is the pipeline running? Start it with: fleetpulse pipeline"
            ) from error
        if len(raw) > MOST_BYTES:
            raise ApiError(f"{request.full_url} answered more than {MOST_BYTES >> 20} MiB; wanted less")
        return raw

    def _refused(self, error: urllib.error.HTTPError) -> ApiError:
        if error.code in (401, 403):
            mend = "Give the dashboard a token that may do this: [dashboard] token_file"
            return ApiError(f"The API at {self.url} refused ({_problem(error)}). {mend}", error.code)
        return ApiError(f"{_problem(error)} (HTTP {error.code})", error.code)


def token_of(path: Path) -> str:
    """The token of the first line, which is `TOKEN` or `NAME:TOKEN`. Raises UsageError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] != "#"]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"[dashboard] token_file {path} cannot be read: {_reason(error)}") from error
    if not lines:
        raise UsageError(f"[dashboard] token_file {path} is empty; wanted one line with a token")
    return lines[0].rpartition(":")[2]


def _problem(error: urllib.error.HTTPError) -> str:
    """What a problem document (RFC 9457) says, else the status in words."""
    try:
        table = json.loads(error.read(1 << 16))
    except (OSError, http.client.HTTPException, ValueError):
        return str(error.reason)
    said = (table.get("detail") or table.get("title")) if isinstance(table, dict) else None
    text = said if isinstance(said, str) and said else str(error.reason)
    return text[:1].upper() + text[1:]


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason or type(error).__name__)
