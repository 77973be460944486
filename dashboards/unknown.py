"""Since when a page does not show the present: unknown is a state with a time, never an empty list."""

from __future__ import annotations

from typing import Any

from dashboards.answers import Fleet
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
