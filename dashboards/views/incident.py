"""`/incident?id=`: evidence, impact, recommended action, response, timeline and delivery status of one incident."""

from __future__ import annotations

import streamlit as st

from dashboards import evidence, markup, routes, snapshot
from dashboards.answers import IncidentDetail
from dashboards.client import ApiError, NoteKind
from dashboards.evidence import peers_chart
from dashboards.theme import PALETTES
from dashboards.views import muting, parts
from dashboards.words import STATE, age, clock, joined, plain, recommended_action
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

_RESULT = "fleetpulse.result"
_DONE: dict[NoteKind, str] = {
    "acknowledge": "Acknowledged.",
    "comment": "Comment added.",
    "resolve": "Resolved. It alerts again only after the condition clears and recurs.",
    "not_a_fault": "Resolved as normal. Learning detectors accept this state; others alert again after it clears once.",
}
_REQUIRED_TEXT: dict[NoteKind, str] = {"comment": "Enter a comment first.", "not_a_fault": "Enter a reason first."}
MAX_NAMED = 3
"""Detectors and entities that the explanation names; more are counted. Chosen."""


def page() -> None:
    """Draws the page of the incident in the address."""
    identity = st.query_params.get("id", "").strip()
    if not identity:
        _draw_missing("No incident selected.", "Expected an id in the address: /incident?id=...")
        return
    parts.draw_refreshing(lambda: _body(identity))


def _draw_missing(heading: str, text: str) -> None:
    st.html(markup.title("Incident"))
    st.html(markup.notice(text, "degraded", heading))
    if st.button("Show all incidents", type="primary"):
        routes.open_incidents()


def _body(identity: str) -> None:
    answer = snapshot.fetch_incident(identity)
    detail = answer.value
    if detail is None:
        if answer.status == 404:
            text = "It may belong to another site, or be older than the retention."
            _draw_missing(f"Incident {identity} not found.", text)
        else:
            parts.draw_head(f"Incident {identity}", [], "", answer)
            parts.draw_error(answer)
        return
    now = snapshot.now()
    _head(detail.incident, answer, now)
    parts.draw_error(answer)
    muting.draw_applying(detail, now)
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        _evidence(detail, now)
    with right:
        _impact(detail)
        _response(detail)
    _history(detail, now)


def _head(incident: Incident, answer: snapshot.CachedAnswer[IncidentDetail], now: int) -> None:
    badges = [
        markup.severity_badge(incident.severity),
        markup.state_badge(incident.state),
        markup.simulated_badge(incident.simulated),
    ]
    parts.draw_head(plain(incident.summary), badges, subtitle(incident, now), answer)


def subtitle(incident: Incident, now: int) -> str:
    """Returns id, suspected cause, onset, duration, detection delay, detector and confidence in one line."""
    until = now if incident.resolved is None else incident.resolved
    delay = (incident.opened - incident.onset) / SECOND
    texts = [
        incident.id,
        f"suspected cause {entity_name(incident.cause)}",
        f"onset {clock(incident.onset, now)}, duration {age((until - incident.onset) / SECOND)}",
        f"detected after {age(delay)}",
        f"detector {incident.detector}" if incident.detector else "",
        "" if incident.confidence is None else f"confidence {incident.confidence:.0%}",
    ]
    return " · ".join(filter(None, texts))


def _evidence(detail: IncidentDetail, now: int) -> None:
    finding = evidence.main_finding(detail)
    if finding is None:
        st.html(markup.section("Evidence"))
        st.html(markup.notice("No findings yet."))
        return
    vote = evidence.parse_vote(finding)
    if vote is not None:
        st.html(markup.section("Evidence", f"vote over one computation, {entity_name(finding.entity)}"))
        st.html(markup.vote_results(vote))
    else:
        _chart(detail, now)
    st.html(markup.section("Main finding", plain(finding.summary)))
    if text := evidence.suppression_notice(finding):
        st.html(markup.notice(text, "degraded"))
    st.html(markup.comparison(evidence.comparison_rows(finding, detail, now)))
    if rows := evidence.figure_rows(finding):
        st.html(markup.section("Measurements", f"from {finding.detector}"))
        st.html(markup.facts(rows))


def _chart(detail: IncidentDetail, now: int) -> None:
    start, end = evidence.chart_span(detail.incident, now)
    for entity, signal in evidence.chart_signals(detail):
        answer = snapshot.fetch_series(entity, signal, start, end)
        if answer.value is not None and any(p.value is not None for p in answer.value.points):
            st.html(markup.section("Evidence", f"{answer.value.help}, {entity_name(entity)} and its peers"))
            palette = PALETTES["dark" if st.context.theme.type == "dark" else "light"]
            st.altair_chart(peers_chart(answer.value, detail.incident.onset, palette), key="peers")
            return
    st.html(markup.section("Evidence"))
    st.html(markup.notice("No chart for this kind of finding; see the measurements below."))


def _impact(detail: IncidentDetail) -> None:
    st.html(markup.section("Impact"))
    st.html(f'<div class="fp-narrow">{markup.chips(evidence.impact(detail))}</div>')
    st.html(markup.section("Recommended action"))
    st.html(markup.notice(recommended_action(detail.incident.detector, detail.incident.cause), "advice"))


def _response(detail: IncidentDetail) -> None:
    """Draws comment and buttons: acknowledge, comment, resolve, mark as normal, mute. None of them acts on a
    machine."""
    incident = detail.incident
    st.html(markup.section("Response"))
    st.text_area("Comment", key="note", height=68, placeholder="What you know or did", label_visibility="collapsed")
    row = st.container(horizontal=True)
    row.button(
        "Acknowledge",
        key="acknowledge",
        type="primary",
        shortcut="A",
        disabled=incident.state not in ("open", "silenced"),
        on_click=_write,
        args=(incident.id, "acknowledge"),
    )
    row.button("Comment", key="comment", on_click=_write, args=(incident.id, "comment"))
    resolved = incident.state == "resolved"
    row.button("Resolve", key="resolve", disabled=resolved, on_click=_write, args=(incident.id, "resolve"))
    with row.popover("Mark as normal", disabled=resolved):
        st.html(markup.notice(explain_not_a_fault(detail)))
        st.text_input("Reason", key="why", placeholder="Why this is normal here")
        st.button("Mark as normal", key="not_a_fault", on_click=_write, args=(incident.id, "not_a_fault", "why"))
        _draw_result(incident.id)
    with row.popover("Mute"):
        muting.draw_form(detail)
    _draw_result(incident.id)


def _draw_result(identity: str) -> None:
    """Draws the result of the last request about this incident."""
    result = st.session_state.get(_RESULT)
    if result and result[0] == identity:
        st.html(markup.notice(result[2], result[1]))


def explain_not_a_fault(detail: IncidentDetail) -> str:
    """Returns what `Mark as normal` does."""
    pairs = dict.fromkeys((f.detector, f.entity) for f in detail.findings)
    shown = [f"{detector} on {entity_name(entity)}" for detector, entity in list(pairs)[:MAX_NAMED]]
    more = [f"{len(pairs) - MAX_NAMED:,} more"] if len(pairs) > MAX_NAMED else []
    names = joined([*shown, *more]) or detail.incident.detector
    return (
        f"Resolves the incident. Detectors that learn a baseline accept the current state as normal ({names}) and "
        "report it again only if it grows. Detectors with fixed rules (link and memory errors, XIDs, wrong results) "
        "report it again after it has cleared once. Use this if nothing is wrong. To suppress a known fault, mute it."
    )


def _write(identity: str, kind: NoteKind, field: str = "note") -> None:
    """Sends the note and keeps the result for display until the page is left."""
    text = str(st.session_state.get(field) or "").strip()
    if not text and kind in _REQUIRED_TEXT:
        st.session_state[_RESULT] = (identity, "degraded", _REQUIRED_TEXT[kind])
        return
    try:
        snapshot.write_note(identity, kind, text)
    except ApiError as error:
        st.session_state[_RESULT] = (identity, "critical", f"Nothing changed. {error}")
        return
    st.session_state[_RESULT] = (identity, "quiet", _DONE[kind])
    st.session_state[field] = ""


def _history(detail: IncidentDetail, now: int) -> None:
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        st.html(markup.section("Timeline", "UTC, newest first"))
        st.html(markup.table(("Time", "Type", "Entity", "Description"), _timeline(detail, now), "No events."))
        st.html(markup.section("Members", f"{len(detail.incident.members):,} with findings of this cause"))
        st.html(markup.chips([entity_name(member) for member in detail.incident.members]))
        if detail.co_occurring:
            st.html(markup.section("Co-occurring incidents", "began within 2 min; not known to have one cause"))
            rows = [(c.id, c.severity, entity_name(c.shared), plain(c.summary)) for c in detail.co_occurring]
            st.html(markup.table(("Incident", "Severity", "In common", "Title"), rows, ""))
    with right:
        st.html(markup.section("Delivery status"))
        empty = "No notifications: no receiver is configured, or this severity is not sent."
        rows = evidence.delivery_rows(detail, now)
        st.html(markup.table(("Time", "Receiver", "Type", "Status"), rows, empty))
        st.html(markup.section("History", STATE[detail.incident.state]))
        rows = [(clock(c.time, now), c.actor, c.kind.replace("_", " "), c.comment) for c in reversed(detail.history)]
        st.html(markup.table(("Time", "User", "Change", "Comment"), rows, "No changes since it opened."))


def _timeline(detail: IncidentDetail, now: int) -> list[tuple[str, str, str, str]]:
    start, end = evidence.chart_span(detail.incident, now)
    answer = snapshot.fetch_timeline(detail.incident.entity, start, end)
    return evidence.timeline_rows(detail, answer.value or (), now)
