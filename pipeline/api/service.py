"""The context of all routes: backend, clock, topology copy and query runner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import duckdb
from starlette.requests import Request
from starlette.responses import Response

from pipeline.api.backend import Backend
from pipeline.api.fleet import TopologyCopy
from pipeline.api.fleet_groups import FleetGroups
from pipeline.api.fleet_map import NodePlaces
from pipeline.api.heatmap import FleetNames
from pipeline.api.history import Span
from pipeline.api.query import QueryRunner
from pipeline.api.result_formats import encode_json
from pipeline.api.store_reads import StoreReads
from pipeline.config.sections import Config
from pipeline.incidents.advice import AdviceBook
from pipeline.model.errors import UsageError
from pipeline.model.records import SECOND, from_iso

T = TypeVar("T")
HOUR = 3600 * SECOND
LONGEST = 366 * 24 * HOUR
"""Longest time range of a request (chosen: longer than any retention)."""


class ApiContext:
    """The context of one application."""

    def __init__(self, backend: Backend, config: Config, now: Callable[[], int]) -> None:
        self.backend, self.config, self.now = backend, config, now
        self.topology_copy = TopologyCopy(backend.topology)
        self.queries = QueryRunner(backend.cursor, config.api, backend.read_current)
        self.reads = StoreReads(backend.cursor, config.api.sql_seconds)
        self.names = FleetNames()
        self.groups, self.places = FleetGroups(), NodePlaces(self.names)
        self._kept: dict[str, tuple[object, Any]] = {}
        pages = config.notify.external_url or f"http://{config.dashboard.host}:{config.dashboard.port}"
        self.advice = AdviceBook(config.incidents.advice_file, f"{pages.rstrip('/')}/detectors")

    @contextlib.contextmanager
    def cursor(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Opens a cursor in a read-only transaction, so that an answer is consistent."""
        cursor = self.backend.cursor()
        try:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            yield cursor
        finally:
            cursor.close()

    def remember(self, what: str, state: object, find: Callable[[], T]) -> T:
        """Returns what `find` returned for the same state; the newest of each kind is kept."""
        known = self._kept.get(what)
        if known is None or known[0] != state:
            known = self._kept[what] = state, find()
        found: T = known[1]
        return found

    def parse_span(self, start: str | None, end: str | None, points: int = 300) -> Span:
        """Parses the time range of a request; by default the last hour. Raises UsageError."""
        until = self.now() if end is None else parse_time("to", end)
        since = until - HOUR if start is None else parse_time("from", start)
        if not 0 < until - since <= LONGEST:
            raise UsageError("from and to: expected from before to, at most 366 days apart")
        return Span(since, until, points)


def get_context(request: Request) -> ApiContext:
    """Returns the context of the application that serves this request."""
    found = request.app.state.service
    assert isinstance(found, ApiContext)
    return found


def json_response(body: Any) -> Response:
    """Returns a JSON answer without FastAPI's validation of every value: a fleet has 100,000."""
    return Response(encode_json(body), media_type="application/json")


def parse_time(name: str, text: str) -> int:
    """Parses a time of a request (UTC us), from 1970 on: a span before it may begin before there are dates. Raises
    UsageError."""
    try:
        found = from_iso(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{name} = {text!r}: expected a time such as 2026-01-31T08:00:00.000000Z") from error
    if found < 0:
        raise UsageError(f"{name} = {text!r}: expected a time from 1970 on")
    return found
