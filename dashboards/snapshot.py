"""What all viewers of one dashboard process share: each question is put to the API once per TTL, not per session.

An unreachable API does not empty the pages: the last good answer stays, with the error beside it and its true age.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import streamlit as st

from dashboards.answers import Detail, Fleet, Happening, Mute, Panel, Series
from dashboards.client import API_TOKEN_FILE, API_URL, Act, ApiError, Client, token_of
from pipeline.model.records import SECOND, Incident, State

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:8600"
INTERVAL = 5
"""Seconds between two refreshes of a page: 100 viewers at this rate were measured. Chosen."""
TTL = INTERVAL - 1
"""Seconds for which an answer is fresh: less than a round, so that each round asks anew. Chosen."""
KEPT = 256
"""Answers kept for when the API falls silent, over all questions. Chosen."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A value, or why there is none. With both, the value is the last good one, `fetched` when it was good."""

    value: T | None
    fetched: int
    error: str = ""
    status: int | None = None


class LastGood:
    """The last good answer per question, at most `KEPT` of them; safe to call from many threads."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._answers: OrderedDict[Any, Answer[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, question: Any, answer: Answer[Any]) -> Answer[Any]:
        """`answer`, or the last good value with its error. That something does not exist (404) is an answer."""
        with self._lock:
            if answer.error and answer.status != 404:
                last = self._answers.get(question)
                return answer if last is None else replace(last, error=answer.error, status=answer.status)
            self._answers[question] = answer
            self._answers.move_to_end(question)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
            return answer


_LAST = LastGood()


def now() -> int:
    """UTC microseconds of this machine's clock."""
    return time.time_ns() // 1000


def client() -> Client:
    """The client that the environment describes."""
    token_file = os.environ.get(API_TOKEN_FILE)
    return Client(os.environ.get(API_URL) or DEFAULT_URL, token_of(Path(token_file)) if token_file else "")


@st.cache_data(ttl=TTL, refresh_mode="background", max_entries=KEPT, show_spinner=False)
def _asked(url: str, what: str, arguments: tuple[Any, ...]) -> Answer[Any]:
    """One question to the API at `url`, which is here as part of the cache's key."""
    try:
        answer = Answer(getattr(client(), what)(*arguments), now())
    except ApiError as error:
        answer = Answer(None, now(), str(error), error.status)
    return _LAST.keep((url, what, arguments), answer)


def _ask(what: str, *arguments: Any) -> Answer[Any]:
    """A fresh answer: one that waited longer than three rounds, since nobody looked, is not shown first."""
    url = client().url
    answer = _asked(url, what, arguments)
    if now() - answer.fetched > 3 * INTERVAL * SECOND and not answer.error:
        _asked.clear(url, what, arguments)
        answer = _asked(url, what, arguments)
    return answer


def fleet() -> Answer[Fleet]:
    """All nodes."""
    return cast(Answer[Fleet], _ask("fleet"))


def incidents(state: State | None = None) -> Answer[tuple[Incident, ...]]:
    """Incidents in one state, or all."""
    return cast(Answer[tuple[Incident, ...]], _ask("incidents", state))


def incident(identity: str) -> Answer[Detail]:
    """One incident."""
    return cast(Answer[Detail], _ask("incident", identity))


def series(entity: str, signal: str, start: int, end: int) -> Answer[Series]:
    """One signal beside its peers."""
    return cast(Answer[Series], _ask("series", entity, signal, start, end))


def timeline(entity: str, start: int, end: int) -> Answer[tuple[Happening, ...]]:
    """What happened around an entity."""
    return cast(Answer[tuple[Happening, ...]], _ask("timeline", entity, start, end))


def detectors() -> Answer[Panel]:
    """All detectors, and the modes in force."""
    return cast(Answer[Panel], _ask("detectors"))


def mutes() -> Answer[tuple[Mute, ...]]:
    """All mutes, newest first."""
    return cast(Answer[tuple[Mute, ...]], _ask("mutes"))


def mute(detector: str, scope: str, seconds: float, reason: str) -> Mute:
    """Silences a detector on a scope, which every viewer sees at once. Raises ApiError."""
    made = client().mute(detector, scope, seconds, reason)
    _asked.clear()
    return made


def unmute(identity: str) -> Mute:
    """Ends a mute now. Raises ApiError."""
    ended = client().unmute(identity)
    _asked.clear()
    return ended


def act(identity: str, kind: Act, comment: str) -> Incident:
    """Writes a note and forgets what was cached, so that every viewer sees it at once. Raises ApiError."""
    changed = client().act(identity, kind, comment)
    _asked.clear()
    return changed
