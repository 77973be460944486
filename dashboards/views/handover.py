"""`/handover?since=`: what the next shift needs: pending, open and silenced incidents, and what changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.incident_list.component import sort_incidents
from dashboards.links import Link, Text, entity_link, incident_link
from dashboards.people_answers import Changed, Handover, Pending, parse_handover
from dashboards.snapshot import CachedAnswer
from dashboards.views import parts
from dashboards.words import SEVERITY, STATE, age, amount, clock, plain
from pipeline.model.records import SECOND, Incident, from_iso, iso

SHIFTS = {"8 h": 8, "12 h": 12, "24 h": 24, "3 d": 72, "7 d": 168}
"""Lengths of a shift (h), and of a weekend. Chosen."""
DEFAULT = "8 h"
MAX_ROWS = 200
"""Rows of one list; more are counted. Chosen."""


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def parse_since(text: str, now: int) -> int:
    """Returns the begin of the shift (UTC us), to the minute: a time, or a length such as `12 h`; 8 h ago otherwise."""
    minute = 60 * SECOND
    if text in SHIFTS:
        return (now - SHIFTS[text] * 3600 * SECOND) // minute * minute
    try:
        return from_iso(text)
    except (ValueError, OverflowError):
        return (now - SHIFTS[DEFAULT] * 3600 * SECOND) // minute * minute


def _body() -> None:
    now = snapshot.now()
    asked = st.query_params.get("since", DEFAULT)
    fresh = snapshot.fetch(parse_handover, "handover", since=iso(parse_since(asked, now)))
    answer = snapshot.keep_last(("handover", asked), fresh)
    found = answer.value
    text = "Handover" if found is None else headline(found)
    below = "" if found is None else f"shift since {clock(found.since, now)}"
    parts.draw_head(text, [], below, answer, of_now=found is not None)
    parts.draw_error(answer)
    tabs = [Link(name, routes.href("handover", since=name)) for name in SHIFTS]
    st.html(markup.tabs("Since", tabs, asked))
    if found is not None:
        _draw(found, answer, now)


def headline(found: Handover) -> str:
    """Returns how many incidents are open, how many are silenced, and how many things wait."""
    return (
        f"{amount(len(found.open), 'open incident', 'open incidents')}, {len(found.muted):,} silenced, "
        f"{len(found.pending):,} pending, {len(found.changed):,} changed"
    )


def _draw(found: Handover, answer: CachedAnswer[Handover], now: int) -> None:
    none = partial(parts.last_known, answer=answer)
    names = {i.id for i in (*found.open, *found.muted)} | {c.id for c in found.changed}
    st.html(
        markup.section("Pending", "pages that nobody acknowledged; acknowledgements and silences that end within 8 h")
    )
    pending = pending_rows(found.pending, names, now)
    st.html(markup.table(("Time", "What", "About"), pending, none("Nothing pending.")))
    head = ("Severity", "Incident", "Cause", "Owner", "State", "Duration")
    more = f"; {found.in_storms:,} more in storms" if found.in_storms else ""
    st.html(markup.section("Open", f"{len(found.open):,}{more}"))
    st.html(_limited(head, incident_rows(found.open, now), none("No open incidents.")))
    st.html(markup.section("Silenced", f"{amount(len(found.muted), 'incident', 'incidents')}"))
    st.html(_limited(head, incident_rows(found.muted, now), none("No silenced incidents.")))
    rows: list[tuple[Text, ...]] = [
        (clock(s.until, now), Link(s.text or "everything", routes.href("silences", id=s.id)), s.author, s.reason)
        for s in found.silences
    ]
    st.html(markup.section("Silences and maintenance", f"{len(rows):,}"))
    st.html(_limited(("Until", "Matchers", "User", "Reason"), rows, none("Nothing is silenced.")))
    st.html(markup.section("Changed", f"{len(found.changed):,} since {clock(found.since, now)}"))
    st.html(
        _limited(("Time", "Incident", "State", "Changes"), changed_rows(found.changed, now), none("Nothing changed."))
    )


def _limited(head: tuple[str, ...], rows: Sequence[tuple[Text, ...]], empty: str) -> str:
    more = len(rows) - MAX_ROWS
    rest = markup.empty(f"and {more:,} more: see Incidents") if more > 0 else ""
    return markup.table(head, rows[:MAX_ROWS], empty) + rest


def pending_rows(found: Sequence[Pending], incidents: set[str], now: int) -> list[tuple[Text, ...]]:
    """Returns (time, what waits, the incident or silence) as links."""
    return [
        (
            clock(p.time, now),
            p.what,
            incident_link(p.id, plain(p.about) or p.id)
            if p.id in incidents
            else Link(p.about or p.id, routes.href("silences", id=p.id)),
        )
        for p in found
    ]


def incident_rows(found: Sequence[Incident], now: int) -> list[tuple[Text, ...]]:
    """Returns (severity, title, cause, owner, state, duration), the worst first."""
    return [
        (
            SEVERITY[i.severity],
            incident_link(i.id, plain(i.summary), i.simulated),
            entity_link(i.cause),
            i.life.assignee or i.life.acknowledged_by or "no owner",
            STATE[i.state],
            age((now - i.onset) / SECOND),
        )
        for i in sort_incidents(found)
    ]


def changed_rows(found: Sequence[Changed], now: int) -> list[tuple[Text, ...]]:
    """Returns (time, title, state, changes in their order)."""
    states = {str(name): word for name, word in STATE.items()}
    return [
        (
            clock(c.time, now),
            incident_link(c.id, plain(c.summary)),
            states.get(c.state, c.state),
            ", ".join(dict.fromkeys(kind.replace("_", " ") for kind in c.changes)),
        )
        for c in found
    ]
