"""Incidents of an entity: open ones as notices with cause or affected, past ones as a table, all as marks in charts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dashboards import markup, routes
from dashboards.devices.answers import OwnIncident
from dashboards.devices.html import entity_link, incident_link
from dashboards.markup import TONES
from dashboards.time_chart.component import Mark
from dashboards.words import STATE, age, clock, plain
from pipeline.model.records import SECOND

WORDS = {"cause": "Suspected cause", "member": "Has findings of", "affected": "Affected by"}
_ORDER = ("page", "ticket", "watch")


def worst(incidents: Iterable[OwnIncident]) -> OwnIncident | None:
    """Returns the most severe unresolved incident, one of the device before one above it."""
    return next(iter(sort_open(incidents)), None)


def sort_open(incidents: Iterable[OwnIncident]) -> list[OwnIncident]:
    """Returns the unresolved incidents: those of the device before those above it, the most severe first."""
    unresolved = [one for one in incidents if one.incident.resolved is None]
    return sorted(unresolved, key=lambda one: (one.relation == "affected", _ORDER.index(one.incident.severity)))


def open_list(incidents: Iterable[OwnIncident], now: int) -> str:
    """Returns the unresolved incidents, one line each, as markup; empty without any."""
    lines = "".join(_open_line(one, now) for one in sort_open(incidents))
    return f'<ul class="fp-open">{lines}</ul>' if lines else ""


def _open_line(one: OwnIncident, now: int) -> str:
    incident = one.incident
    where = f" {entity_link(incident.cause)}" if one.relation == "affected" else ""
    small = f"{STATE[incident.state]}, since {clock(incident.onset, now)} ({age((now - incident.onset) / SECOND)})"
    return (
        f'<li class="fp-open-{TONES[incident.severity]}">{markup.severity_badge(incident.severity)} '
        f"<b>{WORDS[one.relation]}{where}:</b> {incident_link(incident.id, plain(incident.summary))} "
        f"<span>{escape(small)}</span></li>"
    )


def past_rows(incidents: Iterable[OwnIncident], now: int) -> list[tuple[str, str, str, str, str]]:
    """Returns cells (markup) of resolved incidents: onset, severity, title, duration, relation."""
    return [
        (
            escape(clock(one.incident.onset, now)),
            markup.severity_badge(one.incident.severity),
            incident_link(one.incident.id, plain(one.incident.summary)),
            escape(age(((one.incident.resolved or now) - one.incident.onset) / SECOND)),
            escape(WORDS[one.relation].lower()),
        )
        for one in incidents
        if one.incident.resolved is not None
    ]


def marks(incidents: Iterable[OwnIncident], now: int) -> list[Mark]:
    """Returns the spans of incidents for charts, each with a link."""
    return [
        Mark(
            one.incident.onset,
            f"{plain(one.incident.summary)}",
            TONES[one.incident.severity],
            routes.href("incident", id=one.incident.id),
            one.incident.resolved or now,
        )
        for one in incidents
    ]
