"""What all three pages have: a refreshing body, the stamp, and the message when the API does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboards import markup, snapshot
from dashboards.freshness.component import freshness
from dashboards.routes import live
from dashboards.snapshot import INTERVAL, Answer


def refreshing(body: Callable[[], None]) -> None:
    """Runs `body` now and every interval, unless the page is frozen."""
    st.fragment(body, run_every=INTERVAL if live() else None)()


def head(
    text: str, badges: list[str], below: str, answer: Answer[Any], as_of: int | None, behind: float | None
) -> None:
    """Headline on the left, stamp on the right."""
    left, right = st.columns([2.1, 1], vertical_alignment="top")
    left.html(markup.title(text, badges, below))
    with right:
        freshness(answer, as_of, snapshot.now(), live(), behind)


def trouble(answer: Answer[Any]) -> None:
    """Says that the API failed, and that what follows is old. Silent when all is well."""
    if not answer.error:
        return
    heading = "No data." if answer.value is None else "What you see is the last known state, not the present."
    st.html(markup.notice(answer.error, "critical", heading))
