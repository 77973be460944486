"""What all three pages have: a refreshing body, the stamp, and what is said when data cannot be trusted.

Since when a page does not show the present: unknown is a state with a time, never an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboards import markup, snapshot
from dashboards.answers import Fleet
from dashboards.freshness.component import freshness
from dashboards.routes import live
from dashboards.snapshot import INTERVAL, Answer
from dashboards.words import clock
from pipeline.model.records import SECOND

ROUNDS = 3
"""Missed refreshes after which an answer is no longer the present; as the stamp has it (freshness.js)."""


def unknown_since(answer: Answer[Any], fleet: Answer[Fleet], now: int) -> int | None:
    """UTC us up to which the page is right: the last good answer, or as far as the pipeline had judged when it
    stopped. None while it shows the present."""
    if answer.error or fleet.error:
        return min(a.fetched for a in (answer, fleet) if a.value is not None or a.error)
    oldest = min(answer.fetched, fleet.fetched)
    if now - oldest > ROUNDS * INTERVAL * SECOND:
        return oldest
    known = fleet.value
    if known is None or not known.stalled:
        return None
    return min(known.as_of, known.watermark or known.newest or known.as_of)


def statement(last_known: str, since: int | None, now: int) -> str:
    """Since when it is not known whether `last_known` still holds; itself while it is."""
    if since is None:
        return last_known
    return f"Unknown since {clock(since, now)}. Last known: {last_known[:1].lower()}{last_known[1:]}"


def refreshing(body: Callable[[], None]) -> None:
    """Runs `body` now and every interval, unless the page is frozen."""
    st.fragment(body, run_every=INTERVAL if live() else None)()


def head(
    text: str, badges: list[str], below: str, answer: Answer[Any], of_now: bool = False, now: int | None = None
) -> None:
    """Headline on the left, stamp on the right; above both why the pipeline does not do its work, if it does not.

    of_now: whether the headline is about the present, which it may not be known to be.  now: when that was asked for
    the words of a headline about the fleet, whose `answer` it is; a later answer may say otherwise.
    """
    fleet = snapshot.fleet() if now is None else answer
    now = snapshot.now() if now is None else now
    if answer.value is not None and fleet.value is not None and not fleet.error and fleet.value.unready:
        st.html(markup.unready(fleet.value))
    left, right = st.columns([2.1, 1], vertical_alignment="top")
    since = unknown_since(answer, fleet, now) if of_now else None
    said = text if since is None else statement(text, since, now)
    left.html(markup.title(said, badges, below, of_now and since is None))
    with right:
        freshness(answer, fleet, snapshot.now(), live())


def trouble(answer: Answer[Any]) -> None:
    """Says that the API failed, and that what follows is old. Silent when all is well."""
    if not answer.error:
        return
    heading = "No data." if answer.value is None else "What you see is the last known state, not the present."
    st.html(markup.notice(answer.error, "critical", heading))
