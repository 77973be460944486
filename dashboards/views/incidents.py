"""`/incidents?state=`: the list of incidents, filtered by state."""

from __future__ import annotations

from collections import Counter

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.incident_list.component import MAX_LISTED, incident_list
from dashboards.views import fleet, parts
from dashboards.views.parts import statement, unknown_since
from dashboards.words import STATE, amount
from pipeline.model.records import Incident

ALL = "all"
UNRESOLVED = "unresolved"
_CHOICES = {UNRESOLVED: "Unresolved", **{str(k): v for k, v in STATE.items()}, ALL: "All"}


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    answer = snapshot.fetch_incidents()
    found = answer.value or ()
    text = "Incidents" if answer.value is None else headline(found)
    parts.draw_head(text, [], "", answer, of_now=answer.value is not None)
    parts.draw_error(answer)
    if answer.value is None:
        return
    counts: Counter[str] = Counter(i.state for i in found)
    shown = filter_by_state(found, _choose_state(counts, len(found)))
    if len(shown) > MAX_LISTED:
        st.html(markup.notice(f"Showing {MAX_LISTED} of {len(shown):,}; choose a state to see fewer."))
    if not shown:
        since = unknown_since(answer, snapshot.fetch_fleet(), snapshot.now())
        last = _empty_text() if since is None else statement("no incidents in this state.", since, snapshot.now())
        st.html(markup.notice(last, "quiet" if since is None else "degraded", of_now=since is None))
        return
    picked = incident_list(shown, answer.fetched, key="incidents")
    if picked:
        routes.open_incident(picked)


def _choose_state(counts: Counter[str], total: int) -> str:
    """Draws the filter and returns the state in the address, which the buttons write; an unknown one is ignored."""
    requested = st.query_params.get("state", UNRESOLVED)
    many = {**counts, ALL: total, UNRESOLVED: total - counts["resolved"]}
    st.session_state["state"] = requested if requested in _CHOICES else UNRESOLVED
    st.segmented_control(
        "State",
        list(_CHOICES),
        format_func=lambda key: f"{_CHOICES[key]} {many.get(key, 0):,}",
        key="state",
        label_visibility="collapsed",
        on_change=_write_state,
    )
    return str(st.session_state["state"] or UNRESOLVED)


def _write_state() -> None:
    """Writes the state into the address; a second click on a state selects the default."""
    st.query_params["state"] = st.session_state["state"] or UNRESOLVED


def filter_by_state(incidents: tuple[Incident, ...], state: str) -> list[Incident]:
    """Returns the incidents in a state; `unresolved` is every state but resolved."""
    if state == ALL:
        return list(incidents)
    if state == UNRESOLVED:
        return [i for i in incidents if i.state != "resolved"]
    return [i for i in incidents if i.state == state]


def headline(incidents: tuple[Incident, ...]) -> str:
    """Returns the number of unresolved incidents, and how many of them are not acknowledged."""
    unresolved = [i for i in incidents if i.state != "resolved"]
    if not unresolved:
        return "No unresolved incidents"
    not_acknowledged = sum(i.state == "open" for i in unresolved)
    text = amount(len(unresolved), "unresolved incident", "unresolved incidents")
    return f"{text}, {not_acknowledged:,} not acknowledged" if not_acknowledged else f"{text}, all acknowledged"


def _empty_text() -> str:
    """Returns the text of an empty list, with the number of reporting agents if known."""
    answer = snapshot.fetch_fleet()
    return "No incidents in this state." + (f" {fleet.reporting(answer.value)}." if answer.value else "")
