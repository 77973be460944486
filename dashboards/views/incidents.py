"""`/incidents?state=`: what needs me?"""

from __future__ import annotations

from collections import Counter

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.incident_list.component import MOST, incident_list
from dashboards.views import fleet, parts
from dashboards.views.parts import statement, unknown_since
from dashboards.words import STATE, amount
from pipeline.model.records import Incident

ALL = "all"
UNRESOLVED = "unresolved"
_CHOICES = {UNRESOLVED: "Unresolved", **{str(k): v for k, v in STATE.items()}, ALL: "All"}


def page() -> None:
    """Draws the page."""
    parts.refreshing(_body)


def _body() -> None:
    answer = snapshot.incidents()
    found = answer.value or ()
    needing = sum(i.state == "open" for i in found)
    text = "Incidents" if answer.value is None else headline(needing, len(found))
    parts.head(text, [], "", answer, of_now=answer.value is not None)
    parts.trouble(answer)
    if answer.value is None:
        return
    counts: Counter[str] = Counter(i.state for i in found)
    shown = chosen(found, _filter(counts, len(found)))
    if len(shown) > MOST:
        st.html(markup.notice(f"{MOST} of {len(shown):,} are listed; choose a state to see fewer."))
    if not shown:
        since = unknown_since(answer, snapshot.fleet(), snapshot.now())
        last = empty() if since is None else statement("no incidents in this state.", since, snapshot.now())
        st.html(markup.notice(last, "quiet" if since is None else "degraded", of_now=since is None))
        return
    picked = incident_list(shown, answer.fetched, key="incidents")
    if picked:
        routes.open_incident(picked)


def _filter(counts: Counter[str], total: int) -> str:
    """The state chosen in the address, which the buttons write. An unknown one is as if there were none."""
    asked = st.query_params.get("state", UNRESOLVED)
    many = {**counts, ALL: total, UNRESOLVED: total - counts["resolved"]}
    st.session_state["state"] = asked if asked in _CHOICES else UNRESOLVED
    st.segmented_control(
        "State",
        list(_CHOICES),
        format_func=lambda key: f"{_CHOICES[key]} {many.get(key, 0):,}",
        key="state",
        label_visibility="collapsed",
        on_change=_choose,
    )
    return str(st.session_state["state"] or UNRESOLVED)


def _choose() -> None:
    """A click on the chosen state leaves nothing chosen, which stands for the default."""
    st.query_params["state"] = st.session_state["state"] or UNRESOLVED


def chosen(incidents: tuple[Incident, ...], state: str) -> list[Incident]:
    """Incidents in the chosen state; `unresolved` is every state but resolved."""
    if state == ALL:
        return list(incidents)
    if state == UNRESOLVED:
        return [i for i in incidents if i.state != "resolved"]
    return [i for i in incidents if i.state == state]


def headline(needing: int, total: int) -> str:
    """How many incidents nobody has taken yet."""
    if needing:
        return f"{amount(needing, 'incident needs', 'incidents need')} somebody"
    return "Every incident is taken care of" if total else "No incidents"


def empty() -> str:
    """What an empty list means: the fleet's own words where it can be asked."""
    answer = snapshot.fleet()
    return "No incidents in this state." + (f" {fleet.reporting(answer.value)}." if answer.value else "")
