"""`/audit?actor=&target=`: who wrote what through the API, from where and why, and refused attempts."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.links import Link, Text, entity_link, incident_link
from dashboards.people_answers import Audit, AuditRow, parse_audit
from dashboards.views import parts
from dashboards.words import amount, clock

MAX_ROWS = 300
"""Rows shown, the newest. Chosen; `fleetpulse audit` and SQL have all."""
_OF_INCIDENTS = ("acknowledge", "assign", "comment", "resolve", "not a fault", "reopen", "merge", "split", "feedback")


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    asked = {name: st.query_params.get(name, "").strip() for name in ("actor", "target")}
    query = {name: value for name, value in asked.items() if value}
    answer = snapshot.fetch(parse_audit, "audit", limit=str(MAX_ROWS), **query)
    parts.draw_head("Audit", [], "every write through the API, and every refused attempt; newest first", answer)
    parts.draw_error(answer)
    row = st.container(horizontal=True)
    for name, label in (("actor", "User"), ("target", "Incident, silence or entity")):
        key = f"audit-{name}-{asked[name]}"
        row.text_input(label, asked[name], key=key, on_change=_write, args=(name, key), width=300)
    if answer.value is not None:
        _draw(answer.value, snapshot.now())


def _write(name: str, key: str) -> None:
    routes.change_query(**{name: str(st.session_state.get(key) or "").strip()})


def _draw(found: Audit, now: int) -> None:
    if found.broken is not None:
        text = f"Row {found.broken:,} was changed or removed after it was written: see `fleetpulse audit`."
        st.html(markup.notice(text, "critical", "The chain of hashes is broken."))
    head = ("Time", "User", "Role", "From", "Action", "Target", "Reason")
    st.html(markup.section("Writes", amount(len(found.rows), "entry", "entries")))
    st.html(markup.table(head, audit_rows(found.rows, now), "No entries."))


def audit_rows(rows: Sequence[AuditRow], now: int) -> list[tuple[Text, ...]]:
    """Returns (time, user, role, address, action, target, reason); a refused action says so."""
    return [
        (
            clock(row.time, now),
            Link(row.actor, routes.href("audit", actor=row.actor)),
            row.role,
            row.origin,
            row.action if row.outcome == "done" else f"{row.action} ({row.outcome})",
            _target(row),
            row.reason,
        )
        for row in rows
    ]


def _target(row: AuditRow) -> Text:
    if row.action in _OF_INCIDENTS:
        return incident_link(row.target)
    if "silence" in row.action or "maintenance" in row.action:
        return Link(row.target, routes.href("silences", id=row.target))
    kind, colon, name = row.target.partition(":")
    return entity_link(row.target) if colon and name and kind.isidentifier() else row.target
