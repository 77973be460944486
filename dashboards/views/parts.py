"""Parts of all pages: refreshing body, headline with the age of the data, error box, and statements of unknown
state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import streamlit as st

from dashboards import markup, snapshot, times
from dashboards.answers import Fleet
from dashboards.freshness.component import INTERVALS, freshness
from dashboards.links import Text, breadcrumbs
from dashboards.routes import live_value, set_live
from dashboards.snapshot import INTERVAL_S, CachedAnswer
from dashboards.words import clock
from pipeline.model.records import SECOND

T = TypeVar("T")
MAX_MISSED = 3
"""Missed refreshes after which a response is out of date; same as in freshness.js."""


def unknown_since(answer: CachedAnswer[Any], fleet: CachedAnswer[Fleet], now: int) -> int | None:
    """Returns the time (UTC us) up to which the page is right, None if it is up to date.

    It is the time of the last good response, or the event time at which the pipeline stalled; of several faults the
    earliest: a pipeline that stalled stays stalled while the API does not answer.
    """
    found = []
    oldest = min(answer.fetched, fleet.fetched)
    if answer.error or fleet.error:
        found.append(min(a.fetched for a in (answer, fleet) if a.value is not None or a.error))
    elif now - oldest > MAX_MISSED * INTERVAL_S * SECOND:
        found.append(oldest)
    known = fleet.value
    if known is not None and known.stalled:
        found.append(min(known.as_of, known.watermark or known.newest or known.as_of))
    return min(found, default=None)


def statement(last_known: str, since: int | None, now: int) -> str:
    """Returns `last_known`, or since when it is unknown whether it still holds."""
    if since is None:
        return last_known
    return f"Unknown since {clock(since, now)}. Last known: {last_known[:1].lower()}{last_known[1:]}"


def merge_age(answer: CachedAnswer[T], *others: CachedAnswer[Any]) -> CachedAnswer[T]:
    """Returns `answer` with the age of the oldest of all answers and the error of the first that failed: for a
    statement that needs all of them."""
    every = (answer, *others)
    failed = next((one for one in every if one.error), answer)
    return replace(answer, fetched=min(one.fetched for one in every), error=failed.error, status=failed.status)


def last_known(text: str, answer: CachedAnswer[Any]) -> str:
    """Returns `text`, which `answer` says, or since when it is unknown whether it still holds."""
    now = snapshot.now()
    return statement(text, unknown_since(answer, snapshot.fetch_fleet_of(), now), now)


def draw_last_known(text: str, answer: CachedAnswer[Any]) -> None:
    """Draws a message that `answer` says as `last_known` has it."""
    shown = last_known(text, answer)
    known = shown == text
    st.html(markup.notice(shown, "quiet" if known else "degraded", of_now=known))


def draw_refreshing(body: Callable[[], None]) -> None:
    """Runs `body` now and at every interval that the address chooses, unless it turns refreshing off."""

    def run() -> None:
        times.apply_zone()
        body()

    st.fragment(run, run_every=INTERVALS[live_value()])()


def draw_head(
    text: str,
    badges: list[str],
    below: str,
    answer: CachedAnswer[Any],
    of_now: bool = False,
    now: int | None = None,
    crumbs: Sequence[Text] = (),
    simulated: bool | None = None,
) -> None:
    """Draws headline, label of simulated data and data age, and above them the reasons if the pipeline is not ready.

    of_now: the headline is a statement about the present.  now: when `answer`, then the fleet, was fetched for the
    headline; a later response may differ.  crumbs: the way to this page.  simulated: of the one thing that the page
    shows; None: the page shows the fleet, and the label has its part that is simulated.
    """
    fleet = snapshot.fetch_fleet_of() if now is None else answer
    now = snapshot.now() if now is None else now
    above = st.empty()
    if answer.value is not None and fleet.value is not None and not fleet.error and fleet.value.unready:
        above.html(markup.unready(fleet.value))
    left, right = st.columns([2.1, 1], vertical_alignment="top")
    since = unknown_since(answer, fleet, now) if of_now else None
    headline = text if since is None else statement(text, since, now)
    way = breadcrumbs(crumbs) if crumbs else ""
    label = markup.simulated_badge(bool(simulated)) if simulated is not None else simulated_label(fleet)
    left.html(way + markup.title(headline, [*badges, label], below, of_now and since is None))
    with right:
        chosen = freshness(answer, fleet, snapshot.now(), live_value())
    if chosen is not None:
        set_live(chosen)
        st.rerun()  # the whole page: the interval belongs to the part that refreshes


def simulated_label(fleet: CachedAnswer[Fleet]) -> str:
    """Returns the label of a page about the fleet, as markup; empty for a real fleet and for one not known yet."""
    return "" if fleet.value is None else markup.simulated_part(fleet.value)


def draw_error(answer: CachedAnswer[Any]) -> None:
    """Draws the error of a failed request and says that older data is shown; an empty place without an error.

    The place is kept, here as in the other notices: what follows a notice that comes or goes would otherwise move to
    another place in the page, and be seen twice until the run ends.
    """
    place = st.empty()
    if not answer.error:
        return
    heading = "No data." if answer.value is None else "Showing the last known state."
    place.html(markup.notice(answer.error, "critical", heading))


def draw_problem(answer: CachedAnswer[Any], heading: str) -> None:
    """Draws the error of one of several requests of a page, with what it leaves unknown; an empty place without one.

    A 404 is an answer.
    """
    place = st.empty()
    if answer.error and answer.status != 404:
        known = answer.value is not None
        last = f"Shown as of {clock(answer.fetched, snapshot.now())}: " if known else ""
        place.html(markup.notice(f"{last}{answer.error}", "degraded" if known else "critical", heading))


EMPTY_FLEET = (
    "No node has sent data yet. Install the agent on a GPU node and start it with `fleetpulse agent`, with the brokers "
    "of this pipeline in its configuration. `fleetpulse doctor` on the node finds the missing part. To try Fleetpulse "
    "without GPUs: `fleetpulse demo`."
)


def draw_empty_fleet(nodes: int) -> None:
    """Draws what to do next while the whole fleet has no `nodes`, none ever sent data; an empty place otherwise."""
    place = st.empty()
    if not nodes:
        place.html(markup.notice(EMPTY_FLEET, "advice", "Nothing to show yet."))
