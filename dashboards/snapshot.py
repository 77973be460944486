"""Responses of the API shared by all viewers of one dashboard process: one request per TTL, not per session.

If the API is unreachable, the pages keep the last good response and show the error and its age.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast
from urllib.parse import quote

import streamlit as st

from dashboards import identity
from dashboards.answers import DetectorList, Fleet, IncidentDetail, Mute, Series, TimelineItem, parse_incidents
from dashboards.client import API_TOKEN_FILE, API_URL, ApiError, Client, NoteKind, read_token
from dashboards.people_answers import IncidentPage
from pipeline.model.records import SECOND, Incident, State

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8600"
INTERVAL_S = 5
"""Time between two refreshes of a page (s): measured with 100 viewers. Chosen."""
TTL_S = INTERVAL_S - 1
"""Lifetime of a cached response (s): shorter than the interval, so that each refresh sends a request. Chosen."""
HISTORY_S = 16.0
"""Limit of a request for history (s): the API waits 5 s for a free place and reads for 10 s. Chosen."""
HISTORY = frozenset({"fetch_series", "fetch_timeline", "series", "timeline", "rank-strip"})
"""Requests that read history from the store: methods of the client, and paths."""
MAX_CACHED = 256
"""Responses kept for an API outage, over all requests. Chosen."""


@dataclass(frozen=True, slots=True)
class CachedAnswer(Generic[T]):
    """A response or an error. With both, `value` is the last good response and `fetched` its time."""

    value: T | None
    fetched: int
    error: str = ""
    status: int | None = None


class AnswerCache:
    """The last good response per request, at most MAX_CACHED; thread-safe."""

    def __init__(self, most: int = MAX_CACHED) -> None:
        self._most = most
        self._answers: OrderedDict[Any, CachedAnswer[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def update(self, request: Any, answer: CachedAnswer[Any]) -> CachedAnswer[Any]:
        """Returns `answer`, or on an error the last good response with that error. A 404 is a valid response."""
        with self._lock:
            if answer.error and answer.status != 404:
                last = self._answers.get(request)
                return answer if last is None else replace(last, error=answer.error, status=answer.status)
            self._answers[request] = answer
            self._answers.move_to_end(request)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
            return answer

    def find_incident(self, url: str, identity: str) -> CachedAnswer[Incident] | None:
        """Returns the newest row of an incident in the lists that an API gave."""
        with self._lock:
            kept = [answer for (source, *_), answer in self._answers.items() if source == url]
        found: CachedAnswer[Incident] | None = None
        for answer in kept:
            if found is not None and answer.fetched <= found.fetched:
                continue
            row = next((one for one in _rows_of(answer.value) if one.id == identity), None)
            found = found if row is None else CachedAnswer(row, answer.fetched)
        return found


def _rows_of(value: Any) -> Sequence[Incident]:
    """Returns the incidents of a response that lists some."""
    rows = value.incidents if isinstance(value, IncidentPage) else value
    return [row for row in rows if isinstance(row, Incident)] if isinstance(rows, tuple) else []


_CACHE = AnswerCache()
_MOVING = AnswerCache()
"""The last good responses to requests whose time range moves on, by what they are about."""
_writes = 0
"""Writes of this process so far, a part of the key of cached responses: a request that was on its way during a write
may have read the state before it, and its response must not be shown after it."""


def _drop_answers() -> None:
    """Lets every page ask again, after a write."""
    global _writes
    _writes += 1


def now() -> int:
    """UTC microseconds of this machine's clock."""
    return time.time_ns() // 1000


def make_client(headers: tuple[tuple[str, str], ...] = ()) -> Client:
    """Returns a client with the address and token file of the environment. headers: name the person who writes."""
    token_file = os.environ.get(API_TOKEN_FILE)
    token = read_token(Path(token_file)) if token_file else ""
    return Client(os.environ.get(API_URL) or DEFAULT_URL, token, headers=headers)


def api_url() -> str:
    """Returns the address of the API, for a person with access: every read of a page begins here.

    A person whose login ended sees no more data: the page then starts again, at the login.
    """
    if isinstance(identity.current(), identity.Stranger):
        st.rerun(scope="app")
    return make_client().url


def _writer(path: str, body: Mapping[str, Any]) -> Client:
    """Returns a client that writes for the person at the page. Raises ApiError (401, 403) if that person may not.

    Every write passes here; what a page offers or hides is no control.
    """
    return make_client(identity.require_write(path, body).headers())


def fetch(parse: Callable[[Mapping[str, Any]], T], path: str, /, **query: str | Sequence[str]) -> CachedAnswer[T]:
    """Returns the cached response of `GET /api/v1/{path}`. `parse` is a function of a module; a list repeats its
    parameter."""
    name = f"{parse.__module__}.{parse.__qualname__}"
    return cast(CachedAnswer[T], _fetch("fetch", name, path, query_pairs(query), parse=parse))


def query_pairs(query: Mapping[str, str | Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """Returns (name, value) sorted by name; a name with several values is repeated."""
    pairs = ((name, [value] if isinstance(value, str) else value) for name, value in sorted(query.items()))
    return tuple((name, one) for name, values in pairs for one in values)


def ask(parse: Callable[[Mapping[str, Any]], T], path: str, body: Mapping[str, Any]) -> CachedAnswer[T]:
    """Returns the cached response of `POST /api/v1/{path}`, which reads and changes nothing."""
    name = f"{parse.__module__}.{parse.__qualname__}"
    return cast(CachedAnswer[T], _fetch("ask", name, path, json.dumps(body, sort_keys=True), parse=parse))


def send(
    parse: Callable[[Mapping[str, Any]], T],
    path: str,
    body: Mapping[str, Any],
    version: int | None = None,
    method: Literal["POST", "PUT"] = "POST",
) -> T:
    """Sends a change to `/api/v1/{path}` and clears the cache for all viewers. Raises ApiError, also if it failed
    because the object no longer has that version (412)."""
    try:
        return _writer(path, body).send(parse, path, body, version, method)
    finally:
        _drop_answers()


@st.cache_data(ttl=TTL_S, refresh_mode="background", max_entries=MAX_CACHED, show_spinner="Waiting for the API")
def _fetch_cached(
    url: str,
    what: str,
    arguments: tuple[Any, ...],
    writes: int,
    _parse: Callable[[Mapping[str, Any]], Any] | None = None,
) -> CachedAnswer[Any]:
    """Sends one request to the API. `url` and `writes` are parts of the cache key; `_parse` is not, the first argument
    names it."""
    given = arguments if _parse is None else (_parse, *arguments[1:])
    client = make_client()
    if what in HISTORY or (_parse is not None and arguments[1] in HISTORY):
        client = replace(client, timeout=HISTORY_S)
    try:
        answer = CachedAnswer(getattr(client, what)(*given), now())
    except ApiError as error:
        answer = CachedAnswer(None, now(), str(error), error.status)
    return _CACHE.update((url, what, arguments), answer)


def _fetch(what: str, *arguments: Any, parse: Callable[[Mapping[str, Any]], Any] | None = None) -> CachedAnswer[Any]:
    """Returns a cached response. One older than three intervals (no viewer since) is replaced first."""
    url, writes = api_url(), _writes
    answer = _fetch_cached(url, what, arguments, writes, parse)
    if now() - answer.fetched > 3 * INTERVAL_S * SECOND and not answer.error:
        _fetch_cached.clear(url, what, arguments, writes, parse)
        answer = _fetch_cached(url, what, arguments, writes, parse)
    return answer


def keep_last(about: tuple[str, ...], answer: CachedAnswer[T]) -> CachedAnswer[T]:
    """Returns the answer, or on an error the last good one about the same: for requests whose time range moves on, so
    that the request before it had another address."""
    return cast(CachedAnswer[T], _MOVING.update((os.environ.get(API_URL) or DEFAULT_URL, *about), answer))


def fetch_fleet() -> CachedAnswer[Fleet]:
    """Returns all nodes."""
    return cast(CachedAnswer[Fleet], _fetch("fetch_fleet"))


def fetch_fleet_of(*nodes: str) -> CachedAnswer[Fleet]:
    """Returns the state of the pipeline, and the nodes that are named: what a page needs that shows no fleet."""
    return cast(CachedAnswer[Fleet], _fetch("fetch_fleet_of", nodes))


def fetch_incidents(state: State | None = None) -> CachedAnswer[tuple[Incident, ...]]:
    """Returns the incidents in one state, or all."""
    return cast(CachedAnswer[tuple[Incident, ...]], _fetch("fetch_incidents", state))


def fetch_unresolved() -> CachedAnswer[tuple[Incident, ...]]:
    """Returns the unresolved incidents; those of the past may be thousands."""
    return cast(CachedAnswer[tuple[Incident, ...]], _fetch("fetch_unresolved"))


def fetch_incident(identity: str) -> CachedAnswer[IncidentDetail]:
    """Returns one incident."""
    return cast(CachedAnswer[IncidentDetail], _fetch("fetch_incident", identity))


def find_listed_incident(identity: str) -> CachedAnswer[Incident] | None:
    """Returns what the lists of this process last said about an incident, None if none had it: for a page of it while
    the API is away."""
    return _CACHE.find_incident(api_url(), identity)


def fetch_series(entity: str, signal: str, start: int, end: int, span: str = "") -> CachedAnswer[Series]:
    """Returns one signal of a device and of its peers. span: name of the time range, which moves on."""
    answer = cast(CachedAnswer[Series], _fetch("fetch_series", entity, signal, start, end))
    return keep_last(("series", entity, signal, span), answer)


def fetch_timeline(entity: str, start: int, end: int) -> CachedAnswer[tuple[TimelineItem, ...]]:
    """Returns the timeline of an entity."""
    answer = cast(CachedAnswer[tuple[TimelineItem, ...]], _fetch("fetch_timeline", entity, start, end))
    return keep_last(("timeline", entity), answer)


def fetch_detectors() -> CachedAnswer[DetectorList]:
    """Returns all detectors and the rules of [[modes]]."""
    return cast(CachedAnswer[DetectorList], _fetch("fetch_detectors"))


def fetch_mutes() -> CachedAnswer[tuple[Mute, ...]]:
    """Returns all mutes, newest first."""
    return cast(CachedAnswer[tuple[Mute, ...]], _fetch("fetch_mutes"))


def add_mute(detector: str, scope: str, seconds: float, reason: str) -> Mute:
    """Mutes a detector on a scope and clears the cache for all viewers. Raises ApiError."""
    made = _writer("mutes", {}).add_mute(detector, scope, seconds, reason)
    _drop_answers()
    return made


def end_mute(mute: str) -> Mute:
    """Ends a mute now and clears the cache for all viewers. Raises ApiError."""
    ended = _writer(f"mutes/{mute}/end", {}).end_mute(mute)
    _drop_answers()
    return ended


def write_note(incident: str, kind: NoteKind, comment: str) -> Incident:
    """Writes a note and clears the cache for all viewers. Raises ApiError."""
    path = f"incidents/{quote(incident, safe='')}/{'resolve' if kind == 'not_a_fault' else kind}"
    changed = _writer(path, {"not_a_fault": kind == "not_a_fault"}).write_note(incident, kind, comment)
    _drop_answers()
    return changed


def quoted(identity: str) -> str:
    """Returns an id as one part of a path."""
    return quote(identity, safe="")


def preview_matchers(matchers: Sequence[str]) -> tuple[Incident, ...]:
    """Returns the unresolved incidents that matchers match now. Raises ApiError, for a wrong matcher with its fault."""
    identity.require("viewer")
    return make_client().send(parse_incidents, "silences/preview", {"matchers": list(matchers)})
