"""The list of incidents: links that open in the session, or with a middle click in a new tab."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import theme
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
    js=(_HERE / "incident_list.js").read_text(),
)


def incident_list(incidents: Sequence[Incident], now: int, key: str) -> str | None:
    """Draws the list and returns the id of the clicked incident, None without a click."""
    picked = _list(key=key, data=list_rows(incidents, now), on_picked_change=lambda: None).picked
    return str(picked) if picked else None


def sort_incidents(incidents: Sequence[Incident]) -> list[Incident]:
    """Sorts unresolved before resolved, then by severity, open first, newest first."""
    return sorted(
        incidents,
        key=lambda i: (i.resolved is not None, _SEVERITY_ORDER[i.severity], _STATE_ORDER[i.state], -i.opened, i.id),
    )


def list_rows(incidents: Sequence[Incident], now: int) -> list[dict[str, Any]]:
    """Returns the data of the script; every field but `tone` is text to show."""
    return [_row(incident, now) for incident in sort_incidents(incidents)[:MAX_LISTED]]


def _row(incident: Incident, now: int) -> dict[str, Any]:
    until = now if incident.resolved is None else incident.resolved
    return {
        "id": incident.id,
        "tone": TONES[incident.severity],
        "severity": SEVERITY[incident.severity],
        "summary": plain(incident.summary),
        "cause": entity_name(incident.cause),
        "detector": incident.detector,
        "age": age((until - incident.onset) / SECOND),
        "members": amount(len(incident.members), "member", "members"),
        "confidence": "" if incident.confidence is None else f"{incident.confidence:.0%}",
        "state": STATE[incident.state],
        "simulated": "SIMULATED" if incident.simulated else "",
    }
