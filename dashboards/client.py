"""HTTP client of the API. Every failure is an ApiError whose text says what to do."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

from dashboards import answers
from dashboards.answers import DetectorList, Fleet, IncidentDetail, Mute, Series, TimelineItem
from pipeline.http.addresses import make_opener
from pipeline.http.client import NO_RIGHT
from pipeline.http.token_lines import read_token_lines
from pipeline.model.errors import FleetpulseError, UsageError
from pipeline.model.records import Incident, State, iso

T = TypeVar("T")
NoteKind = Literal["acknowledge", "comment", "resolve", "not_a_fault"]
API_URL = "FLEETPULSE_API_URL"
API_TOKEN_FILE = "FLEETPULSE_API_TOKEN_FILE"
TIMEOUT_S = 2.5
"""Limit of one request (s): the dashboard must stop within 3 s. Chosen."""
MAX_RESPONSE_BYTES = 65 << 20
"""Longest response: about 300,000 nodes, or the largest result of a query with its envelope. Chosen."""
FAULTS = frozenset({500, 502, 504})
"""Statuses of a fault in the API or of a proxy before it, which say nothing about the cause. Source: RFC 9110, 15.6."""
ARROW = "application/vnd.apache.arrow.stream"


class ApiError(FleetpulseError):
    """A request to the API failed. status: of HTTP, None without a response. kind: `type` of the problem.

    unsure: the API may have done what was asked, as only its response is missing.
    """

    exit_code = 3

    def __init__(self, message: str, status: int | None = None, kind: str = "", unsure: bool = False) -> None:
        super().__init__(message)
        self.status, self.kind, self.unsure = status, kind, unsure

    def describe(self, not_done: str) -> str:
        """Returns the error of a write for the person who made it. not_done: `Not silenced.`"""
        if not self.unsure:
            return f"{not_done} {self}"
        return f"It is not known whether this was written: look before you repeat it. {self}"


_OPENER = make_opener()


@dataclass(frozen=True)
class Client:
    """The API at `url`, with the bearer token if it requires one. headers: name the person who writes."""

    url: str
    token: str = ""
    timeout: float = TIMEOUT_S
    headers: tuple[tuple[str, str], ...] = ()

    def fetch_fleet(self) -> Fleet:
        """Returns all nodes with their states."""
        return self._get(answers.parse_fleet, "fleet")

    def fetch_fleet_of(self, nodes: tuple[str, ...]) -> Fleet:
        """Returns the state of the pipeline, and of some nodes only. nodes: entities; may be empty."""
        asked = [("entity", node) for node in nodes] if nodes else [("nodes", "false")]
        return self._get(answers.parse_fleet, "fleet", asked)

    def fetch_incidents(self, state: State | None = None) -> tuple[Incident, ...]:
        """Returns the incidents in one state, or all."""
        return self._get(answers.parse_incidents, "incidents", {"state": state} if state else {})

    def fetch_unresolved(self) -> tuple[Incident, ...]:
        """Returns the unresolved incidents."""
        return self._get(answers.parse_incidents, "incidents", {"show": "unresolved"})

    def fetch_incident(self, identity: str) -> IncidentDetail:
        """Returns one incident with findings, history and notifications. Raises ApiError (404 if it does not exist)."""
        return self._get(answers.parse_detail, f"incidents/{quote(identity, safe='')}")

    def fetch_series(self, entity: str, signal: str, start: int, end: int) -> Series:
        """Returns one signal of a device and of its peers. Raises ApiError (404 if there is none)."""
        span = {"entity": entity, "signal": signal, "from": iso(start), "to": iso(end)}
        return self._get(answers.parse_series, "series", {**span, "peers": "auto", "points": "300"})

    def fetch_timeline(self, entity: str, start: int, end: int, limit: int = 50) -> tuple[TimelineItem, ...]:
        """Returns events, findings and gaps of an entity, its node and its parents."""
        span = {"entity": entity, "from": iso(start), "to": iso(end), "limit": str(limit)}
        return self._get(answers.parse_timeline, "timeline", span)

    def write_note(self, identity: str, kind: NoteKind, comment: str) -> Incident:
        """Writes a note and returns the changed incident. `not_a_fault` resolves it and teaches its detectors."""
        verdict = kind == "not_a_fault"
        path = f"incidents/{quote(identity, safe='')}/{'resolve' if verdict else kind}"
        return self._post(
            answers.parse_incident, path, {"comment": comment, **({"not_a_fault": True} if verdict else {})}
        )

    def fetch_detectors(self) -> DetectorList:
        """Returns all detectors and the rules of [[modes]]."""
        return self._get(answers.parse_detector_list, "detectors")

    def fetch_mutes(self) -> tuple[Mute, ...]:
        """Returns all mutes, also expired ones; newest first."""
        return self._get(answers.parse_mutes, "mutes")

    def add_mute(self, detector: str, scope: str, seconds: float, reason: str) -> Mute:
        """Mutes a detector on a scope. Raises ApiError with the reason if the API refuses."""
        body = {"detector": detector, "scope": scope, "seconds": seconds, "reason": reason}
        return self._post(answers.parse_mute, "mutes", body)

    def end_mute(self, identity: str) -> Mute:
        """Ends a mute now. Raises ApiError (404 if it has already ended)."""
        return self._post(answers.parse_mute, f"mutes/{quote(identity, safe='')}/end", {})

    def fetch(self, parse: Callable[[Mapping[str, Any]], T], path: str, query: Iterable[tuple[str, str]] = ()) -> T:
        """Returns the parsed response of `GET /api/v1/{path}?{query}`; a name may be repeated. Raises ApiError."""
        return self._get(parse, path, list(query))

    def send(
        self,
        parse: Callable[[Mapping[str, Any]], T],
        path: str,
        body: Mapping[str, Any],
        version: int | None = None,
        method: Literal["POST", "PUT"] = "POST",
    ) -> T:
        """Sends a change to `/api/v1/{path}` and returns the parsed response. Raises ApiError.

        version: of the object that changes, as shown to the person; if it has another one now, the status is 412.
        """
        headers = {"Content-Type": "application/json", **dict(self.headers)}
        if version is not None:
            headers["If-Match"] = f'"{version}"'
        request = urllib.request.Request(self._address(path), json.dumps(body).encode(), headers, method=method)
        return self._request(parse, request)

    def ask(self, parse: Callable[[Mapping[str, Any]], T], path: str, body: str) -> T:
        """Returns the parsed response to a question in JSON that `POST /api/v1/{path}` answers. Raises ApiError."""
        return self._post(parse, path, json.loads(body))

    def run_query(self, query: str) -> tuple[bytes, bool]:
        """Runs one SELECT; returns an Arrow IPC stream, and whether it was cut. Raises ApiError."""
        headers = {"Content-Type": "application/json", "Accept": ARROW}
        request = urllib.request.Request(self._address("sql"), json.dumps({"query": query}).encode(), headers)
        raw, answered = self._exchange(request)
        return raw, answered.get("X-Truncated") == "true"

    def download(self, path: str, query: Mapping[str, str]) -> bytes:
        """Returns the file that `GET /api/v1/{path}` answers. Raises ApiError."""
        return self._read(urllib.request.Request(f"{self._address(path)}?{urlencode(query)}"))

    def _post(self, parse: Callable[[Mapping[str, Any]], T], path: str, body: Mapping[str, Any]) -> T:
        return self.send(parse, path, body)

    def _get(
        self,
        parse: Callable[[Mapping[str, Any]], T],
        path: str,
        query: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> T:
        address = self._address(path) + (f"?{urlencode(query)}" if query else "")
        return self._request(parse, urllib.request.Request(address))

    def _address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/api/v1/{path}"

    def _request(self, parse: Callable[[Mapping[str, Any]], T], request: urllib.request.Request) -> T:
        raw = self._read(request)
        try:
            return parse(json.loads(raw))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ApiError(
                f"{request.full_url}: unexpected response ({_reason(error)}); "
                "expected the API of the same Fleetpulse version: check [dashboard] api_url"
            ) from error

    def _read(self, request: urllib.request.Request) -> bytes:
        return self._exchange(request)[0]

    def _exchange(self, request: urllib.request.Request) -> tuple[bytes, Mapping[str, str]]:
        """Returns body and headers of a response."""
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                raw: bytes = answer.read(MAX_RESPONSE_BYTES + 1)
                headers: Mapping[str, str] = answer.headers
        except urllib.error.HTTPError as error:
            with error:
                raise self._error_of(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._no_answer(getattr(error, "reason", error), error) from error
        if len(raw) > MAX_RESPONSE_BYTES:
            raise ApiError(f"{request.full_url}: response is longer than {MAX_RESPONSE_BYTES >> 20} MiB")
        return raw, headers

    def _no_answer(self, reason: object, error: BaseException) -> ApiError:
        """Returns the error of a request without a response. reason: what stopped it."""
        start = f"The API at {self.url} does not answer"
        if isinstance(reason, TimeoutError):
            text = (
                f"{start} within {self.timeout:g} s: the pipeline is busy or hangs. Find the reason: fleetpulse doctor"
            )
            return ApiError(text, unsure=True)
        text = f"{start} ({_reason(error)}). Is the pipeline running? fleetpulse doctor says how to start it"
        return ApiError(text, unsure=not isinstance(reason, ConnectionRefusedError))

    def _error_of(self, error: urllib.error.HTTPError) -> ApiError:
        text, kind = _problem(error)
        if kind == NO_RIGHT:
            fix = "Give the dashboard a token with this right: [dashboard] token_file"
            return ApiError(f"The API at {self.url} refused ({text}). {fix}", error.code, kind)
        if error.code in FAULTS:
            advice = f"The API at {self.url} has a fault: see the log of the pipeline, or run: fleetpulse doctor"
            return ApiError(f"{text} (HTTP {error.code}). {advice}", error.code, kind, unsure=True)
        return ApiError(f"{text} (HTTP {error.code})", error.code, kind)


def read_token(path: Path) -> str:
    """Returns the token of the first line, `TOKEN` or `NAME:TOKEN`. Raises UsageError."""
    try:
        lines = read_token_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"[dashboard] token_file {path} cannot be read: {_reason(error)}") from error
    if not lines:
        raise UsageError(f"[dashboard] token_file {path} is empty; expected one line with a token")
    return lines[0].rpartition(":")[2]


def record_reload(url: str, token_file: Path | None, body: Mapping[str, str]) -> None:
    """Writes the row of the audit about a reload of this process's configuration: no person asks for it. Raises
    ApiError, and UsageError if the token cannot be read."""
    Client(url, read_token(token_file) if token_file else "").send(lambda answer: answer, "audit/reloads", body)


def _problem(error: urllib.error.HTTPError) -> tuple[str, str]:
    """Returns detail and type of a problem document (RFC 9457), else the status in words."""
    try:
        table = json.loads(error.read(1 << 16))
    except (OSError, http.client.HTTPException, ValueError):
        return str(error.reason), ""
    detail = (table.get("detail") or table.get("title")) if isinstance(table, dict) else None
    text = detail if isinstance(detail, str) and detail else str(error.reason)
    kind = table.get("type") if isinstance(table, dict) else None
    return text[:1].upper() + text[1:], kind if isinstance(kind, str) else ""


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason or type(error).__name__)
