"""The list of incidents: real links that a middle click opens in a new tab, and a plain click within the session."""

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

MOST = 200
"""Incidents listed at once; more are counted. Chosen."""
_HERE = Path(__file__).parent
_RANK = {"page": 0, "ticket": 1, "watch": 2}
_LIVES = {"open": 0, "acknowledged": 1, "silenced": 2, "resolved": 3}
_list = st.components.v2.component(
    "fleetpulse.incident_list",
    html='<div class="list"></div>',
    css=theme.css_variables(":host") + (_HERE / "incident_list.css").read_text(),
    js=(_HERE / "incident_list.js").read_text(),
)


def incident_list(incidents: Sequence[Incident], now: int, key: str) -> str | None:
    """Draws the list; the id of the incident that was clicked just now, else None."""
    picked = _list(key=key, data=rows(incidents, now), on_picked_change=lambda: None).picked
    return str(picked) if picked else None


def in_order(incidents: Sequence[Incident]) -> list[Incident]:
    """What needs somebody first: unresolved before resolved, then by severity, open first, newest first."""
    return sorted(
        incidents, key=lambda i: (i.resolved is not None, _RANK[i.severity], _LIVES[i.state], -i.opened, i.id)
    )


def rows(incidents: Sequence[Incident], now: int) -> list[dict[str, Any]]:
    """What the script gets; every field but `tone` is a text to be shown as it is."""
    return [_row(incident, now) for incident in in_order(incidents)[:MOST]]


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
