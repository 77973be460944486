"""Requests of the pages about nodes, links and signals, cached for all viewers of the process.

A chart's time range begins and ends on whole steps of the chart, so that its points stay where they are, and viewers
share one response. The last step contains now; the chart ends when its values were read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import streamlit as st

from dashboards import snapshot
from dashboards.client import ApiError
from dashboards.devices import answers
from dashboards.devices.answers import Comparison, EntityDetail, EventItems, Values
from dashboards.snapshot import AnswerCache, CachedAnswer, fetch, query_pairs
from pipeline.model.records import SECOND, iso

T = TypeVar("T")
POINTS = 300
"""Points of a chart: one per 3 pixels at 1440. Chosen."""
MIN_STEP = 10 * SECOND
"""Shortest step by which a chart moves on (us): a frame. Chosen."""
HISTORY_TTL_S = 60.0
"""Lifetime of cached history (s): late rows change it for a minute. Chosen."""
ERROR_TTL_S = 5.0
"""Lifetime of a failed request for history (s), so that viewers do not all wait for the same limit. Chosen."""
LAST_KNOWN_S = 86_400
"""Age until which last known values are shown, with their age (s). Chosen: a day; charts have older ones."""
_LAST = AnswerCache(64)


def fetch_entity(entity: str) -> CachedAnswer[EntityDetail]:
    """Returns one entity with parents, parts, jobs and incidents."""
    return fetch(answers.parse_entity, "entity", entity=entity)


def fetch_values(entity: str, signals: Sequence[str]) -> CachedAnswer[Values]:
    """Returns the newest values of an entity and its parts."""
    return fetch(answers.parse_values, "values", entity=entity, signal=tuple(signals), max_age=str(LAST_KNOWN_S))


def fetch_events(entity: str, start: int, end: int, limit: int = 200) -> CachedAnswer[EventItems]:
    """Returns what happened to an entity and its parts."""
    span = {"from": iso(start), "to": iso(end), "limit": str(limit)}
    return fetch_history(answers.parse_events, "events", ("from", "to"), entity=entity, **span)


def fetch_comparison(
    entities: Sequence[str], signals: Sequence[str], start: int, end: int, peers: str = "auto", points: int = POINTS
) -> CachedAnswer[Comparison]:
    """Returns several signals of several entities over one time range."""
    span = {"from": iso(start), "to": iso(end), "peers": peers, "points": str(points)}
    asked = {"entity": tuple(entities), "signal": tuple(signals), **span}
    answer = fetch_history(answers.parse_comparison, "compare", ("from", "to"), **asked)
    found = answer.value
    if found is None or not found.start < answer.fetched < found.end:
        return answer
    return replace(answer, value=replace(found, end=answer.fetched))


def fetch_history(
    parse: Callable[[Mapping[str, Any]], T], path: str, moving: Sequence[str], /, **query: str | Sequence[str]
) -> CachedAnswer[T]:
    """Returns cached history. On an error, the last response that differs at most in the parameters `moving`."""
    pairs, url = query_pairs(query), snapshot.api_url()
    try:
        answer: CachedAnswer[T] = _read_history(url, parse, path, pairs)
    except ApiError as error:
        answer = CachedAnswer(None, snapshot.now(), str(error), error.status)
    about = (url, path, tuple(pair for pair in pairs if pair[0] not in moving))
    return cast(CachedAnswer[T], _LAST.update(about, answer))


@st.cache_data(ttl=HISTORY_TTL_S, max_entries=128, show_spinner="Reading history")
def _read_history(url: str, _parse: Callable[[Any], Any], path: str, query: tuple[tuple[str, str], ...]) -> Any:
    """Returns a response. Raises ApiError, which is not kept here. `url` is a part of the cache key, `_parse` not."""
    answer = _try_history(url, _parse, path, query)
    if answer.error:
        raise ApiError(answer.error, answer.status)
    return answer


@st.cache_data(ttl=ERROR_TTL_S, max_entries=128, show_spinner=False)
def _try_history(
    url: str, _parse: Callable[[Any], Any], path: str, query: tuple[tuple[str, str], ...]
) -> CachedAnswer[Any]:
    client = replace(snapshot.make_client(), timeout=snapshot.HISTORY_S)
    try:
        return CachedAnswer(client.fetch(_parse, path, query), snapshot.now())
    except ApiError as error:
        return CachedAnswer(None, snapshot.now(), str(error), error.status)


def recent_span(length: int, now: int, points: int = POINTS) -> tuple[int, int]:
    """Returns start and end of the newest `length` us, on whole steps of a chart of so many points.

    The last step contains `now`, so the end is up to one step later.
    """
    step = max(MIN_STEP, -(-length // points // SECOND) * SECOND)
    end = (now // step + 1) * step
    return end - length, end
