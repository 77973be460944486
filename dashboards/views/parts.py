"""What all three pages have: a refreshing body, the stamp, and what is said when data cannot be trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboards import markup, snapshot
from dashboards.freshness.component import freshness
from dashboards.routes import live
from dashboards.snapshot import INTERVAL, Answer
from dashboards.unknown import statement, unknown_since


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
