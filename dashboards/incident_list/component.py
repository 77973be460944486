"""The list of incidents: links that open in the session, or with a middle click in a new tab; with boxes to select."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import routes, theme
from dashboards.markup import TONES
from dashboards.words import SEVERITY, STATE, age, amount, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

MAX_LISTED = 200
"""Incidents listed; more are counted. Chosen."""
_HERE = Path(__file__).parent
_SEVERITY_ORDER = {"page": 0, "ticket": 1, "watch": 2}
_STATE_ORDER = {"open": 0, "acknowledged": 1, "silenced": 2, "resolved": 3}
_list = st.components.v2.component(
    "fleetpulse.incident_list",
    html='<div class="list"></div>',
    css=theme.css_variables(":host") + (_HERE / "incident_list.css").read_text(),
    js="\n".join((_HERE / name).read_text() for name in ("keys.js", "incident_list.js")),
)


def incident_list(incidents: Sequence[Incident], now: int, key: str) -> None:
    """Draws the list, worst first."""
    _list(key=key, data={"items": list_rows(incidents, now), "selectable": False})


def selectable_list(
    incidents: Sequence[Incident],
    now: int,
    key: str,
    groups: Mapping[str, str] | None = None,
    reach: Mapping[str, tuple[int | None, int]] | None = None,
    acknowledge: Callable[[str], None] | None = None,
    mine: Callable[[], None] = lambda: None,
) -> list[str]:
    """Draws the list in the given order, with boxes and keys; returns the selected incidents.

    groups: incident -> heading of its group; incidents of one group follow each other.  reach: incident -> jobs and
    nodes that it reaches, if that is known.  acknowledge: called with the incident whose key was pressed, before the
    page runs; None: the person may not.  mine: called when `M` was pressed, before the page runs.
    """
    rows = [{**_row(i, now, (reach or {}).get(i.id)), "group": (groups or {}).get(i.id, "")} for i in incidents]

    def on_acknowledge() -> None:
        pressed = (st.session_state.get(key) or {}).get("acknowledge")
        if acknowledge is not None and pressed:
            acknowledge(str(pressed))

    drawn = _list(
        key=key,
        data={"items": rows, "selectable": True, "may_write": acknowledge is not None},
        default={"selected": []},
        on_mine_change=mine,
        on_acknowledge_change=on_acknowledge,
        on_selected_change=lambda: None,
    )
    shown = {i.id for i in incidents}
    return [str(i) for i in drawn.selected or [] if i in shown]


def sort_incidents(incidents: Sequence[Incident]) -> list[Incident]:
    """Sorts unresolved before resolved, then by severity, open first, newest first."""
    return sorted(
        incidents,
        key=lambda i: (i.resolved is not None, _SEVERITY_ORDER[i.severity], _STATE_ORDER[i.state], -i.opened, i.id),
    )


def list_rows(incidents: Sequence[Incident], now: int) -> list[dict[str, Any]]:
    """Returns the data of the script; every field but `tone` and `waits` is text to show."""
    return [_row(incident, now) for incident in sort_incidents(incidents)[:MAX_LISTED]]


def _jobs(count: int | None) -> str:
    return "jobs not known" if count is None else amount(count, "job", "jobs")


def _row(incident: Incident, now: int, reach: tuple[int | None, int] | None = None) -> dict[str, Any]:
    until = now if incident.resolved is None else incident.resolved
    life = incident.life
    return {
        "id": incident.id,
        "href": routes.href("incident", id=incident.id),
        "tone": TONES[incident.severity],
        "severity": SEVERITY[incident.severity],
        "summary": plain(incident.summary),
        "cause": entity_name(incident.cause),
        "detector": incident.detector,
        "age": age((until - incident.onset) / SECOND),
        "jobs": "" if reach is None else _jobs(reach[0]),
        "nodes": "" if reach is None else amount(reach[1], "node", "nodes"),
        "members": amount(len(incident.members), "member", "members") if reach is None else "",
        "confidence": "" if incident.confidence is None else f"{incident.confidence * 100:.0f} %",
        "state": STATE[incident.state],
        "waits": incident.state in ("open", "silenced"),
        "owner": life.assignee or (life.acknowledged_by if incident.resolved is None else ""),
        "simulated": "SIMULATED" if incident.simulated else "",
    }
