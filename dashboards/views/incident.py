"""`/incident?id=`: is it real, who is hurt, what do I do?"""

from __future__ import annotations

import streamlit as st

from dashboards import evidence, markup, routes, snapshot
from dashboards import evidence as comparison
from dashboards.answers import Detail
from dashboards.charts import peers_chart
from dashboards.client import Act, ApiError
from dashboards.theme import PALETTES
from dashboards.views import muting, parts
from dashboards.words import STATE, advice, age, clock, joined, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND, Incident

_SAID = "fleetpulse.said"
_DONE: dict[Act, str] = {
    "acknowledge": "Acknowledged. Everybody who looks sees it.",
    "comment": "Comment written.",
    "resolve": "Resolved. It stays quiet until its cause was gone once and came back.",
    "not_a_fault": "Resolved as no fault. Detectors that learn take it for normal; others rest until it was gone.",
}
_WANTS_TEXT: dict[Act, str] = {"comment": "Write the comment first.", "not_a_fault": "Write why it is normal first."}
TAUGHT = 3
"""Detectors and entities that the verdict names; more are counted. Chosen."""


def page() -> None:
    """Draws the page of the incident that the address names."""
    identity = st.query_params.get("id", "").strip()
    if not identity:
        _none("No incident was named.", "The address wants one: /incident?id=...")
        return
    parts.refreshing(lambda: _body(identity))


def _none(heading: str, text: str) -> None:
    st.html(markup.title("Incident"))
    st.html(markup.notice(text, "degraded", heading))
    if st.button("To all incidents", type="primary"):
        routes.open_incidents()


def _body(identity: str) -> None:
    answer = snapshot.incident(identity)
    detail = answer.value
    if detail is None:
        if answer.status == 404:
            _none(f"There is no incident {identity}.", "It may belong to another site, or be older than what is kept.")
        else:
            parts.head(f"Incident {identity}", [], "", answer)
            parts.trouble(answer)
        return
    now = snapshot.now()
    _head(detail.incident, answer, now)
    parts.trouble(answer)
    muting.covered(detail, now)
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        _why(detail, now)
    with right:
        _who(detail)
        _notes(detail)
    _more(detail, now)


def _head(incident: Incident, answer: snapshot.Answer[Detail], now: int) -> None:
    badges = [
        markup.severity_badge(incident.severity),
        markup.state_badge(incident.state),
        markup.simulated_badge(incident.simulated),
    ]
    parts.head(plain(incident.summary), badges, below(incident, now), answer)


def below(incident: Incident, now: int) -> str:
    """Id, time, sureness and source of an incident in one line."""
    until = now if incident.resolved is None else incident.resolved
    late = (incident.opened - incident.onset) / SECOND
    texts = [
        incident.id,
        f"began {clock(incident.onset, now)}, {'lasts' if incident.resolved is None else 'lasted'} "
        f"{age((until - incident.onset) / SECOND)}",
        "seen at once" if late < 1 else f"seen {age(late)} after it began",
        f"by {incident.detector}" if incident.detector else "",
        "" if incident.confidence is None else f"{incident.confidence:.0%} sure",
    ]
    return " · ".join(filter(None, texts))


def _why(detail: Detail, now: int) -> None:
    finding = evidence.leading(detail)
    if finding is None:
        st.html(markup.section("Why we think so"))
        st.html(markup.notice("No finding is attached yet."))
        return
    ballot = evidence.vote_of(finding)
    if ballot is not None:
        st.html(markup.section("Why we think so", f"vote over one computation, {entity_name(finding.entity)}"))
        st.html(markup.vote(ballot))
    else:
        _chart(detail, now)
    st.html(markup.section("Evidence", plain(finding.summary)))
    if text := comparison.held_back(finding):
        st.html(markup.notice(text, "degraded"))
    st.html(markup.story(comparison.story(finding, detail, now)))
    if rows := evidence.rows(finding):
        st.html(markup.section("Further figures", f"of {finding.detector}"))
        st.html(markup.facts(rows))


def _chart(detail: Detail, now: int) -> None:
    start, end = evidence.span(detail.incident, now)
    for entity, signal in evidence.candidates(detail):
        answer = snapshot.series(entity, signal, start, end)
        if answer.value is not None and any(p.value is not None for p in answer.value.points):
            st.html(markup.section("Why we think so", f"{answer.value.help}, {entity_name(entity)} against its peers"))
            palette = PALETTES["dark" if st.context.theme.type == "dark" else "light"]
            st.altair_chart(peers_chart(answer.value, detail.incident.onset, palette), key="peers")
            return
    st.html(markup.section("Why we think so"))
    st.html(markup.notice("There is no curve to show for this kind of finding; its figures are below."))


def _who(detail: Detail) -> None:
    st.html(markup.section("Who is hurt"))
    st.html(f'<div class="fp-narrow">{markup.chips(evidence.blast(detail))}</div>')
    st.html(markup.section("What to do"))
    st.html(markup.notice(advice(detail.incident.detector, detail.incident.cause), "advice"))


def _notes(detail: Detail) -> None:
    """Acknowledge, comment, resolve, teach, mute. None of them touches a machine."""
    incident = detail.incident
    st.html(markup.section("Your note"))
    st.text_area("Comment", key="note", height=68, placeholder="What you know or did", label_visibility="collapsed")
    row = st.container(horizontal=True)
    row.button(
        "Acknowledge",
        key="acknowledge",
        type="primary",
        shortcut="A",
        disabled=incident.state not in ("open", "silenced"),
        on_click=_act,
        args=(incident.id, "acknowledge"),
    )
    row.button("Comment", key="comment", on_click=_act, args=(incident.id, "comment"))
    resolved = incident.state == "resolved"
    row.button("Resolve", key="resolve", disabled=resolved, on_click=_act, args=(incident.id, "resolve"))
    with row.popover("Not a fault", disabled=resolved):
        st.html(markup.notice(verdict(detail)))
        st.text_input("Why", key="why", placeholder="Why this is normal here")
        st.button("Not a fault", key="not_a_fault", on_click=_act, args=(incident.id, "not_a_fault", "why"))
        _said(incident.id)
    with row.popover("Mute"):
        muting.form(detail)
    _said(incident.id)


def _said(identity: str) -> None:
    """What became of the last note on this incident."""
    said = st.session_state.get(_SAID)
    if said and said[0] == identity:
        st.html(markup.notice(said[2], said[1]))


def verdict(detail: Detail) -> str:
    """What it does to say that an incident is no fault."""
    pairs = dict.fromkeys((f.detector, f.entity) for f in detail.findings)
    shown = [f"{detector} on {entity_name(entity)}" for detector, entity in list(pairs)[:TAUGHT]]
    more = [f"{len(pairs) - TAUGHT:,} more"] if len(pairs) > TAUGHT else []
    who = joined([*shown, *more]) or detail.incident.detector
    return (
        f"Resolves this incident. Detectors that learn what is usual take what was seen ({who}) for normal and find it "
        "again only when it grows; those that go by rules, such as errors of links and memory, XIDs and wrong digests, "
        "stay quiet until it was gone once. Choose it when nothing is wrong. To hush a fault, mute it."
    )


def _act(identity: str, kind: Act, field: str = "note") -> None:
    """Writes the note and keeps what to say about it until the page is left."""
    text = str(st.session_state.get(field) or "").strip()
    if not text and kind in _WANTS_TEXT:
        st.session_state[_SAID] = (identity, "degraded", _WANTS_TEXT[kind])
        return
    try:
        snapshot.act(identity, kind, text)
    except ApiError as error:
        st.session_state[_SAID] = (identity, "critical", f"Nothing was written. {error}")
        return
    st.session_state[_SAID] = (identity, "quiet", _DONE[kind])
    st.session_state[field] = ""


def _more(detail: Detail, now: int) -> None:
    left, right = st.columns([2.1, 1], gap="medium")
    with left:
        st.html(markup.section("Timeline", "UTC, newest first"))
        st.html(markup.table(("Time", "Kind", "Where", "What"), _timeline(detail, now), "Nothing happened around it."))
        st.html(markup.section("Members", f"{len(detail.incident.members):,} with findings of this cause"))
        st.html(markup.chips([entity_name(member) for member in detail.incident.members]))
    with right:
        st.html(markup.section("Notifications sent"))
        empty = "None: no receiver is configured, or this severity is not sent."
        st.html(markup.table(("Time", "Receiver", "What", "Fate"), evidence.sent(detail, now), empty))
        st.html(markup.section("History", STATE[detail.incident.state]))
        rows = [(clock(c.time, now), c.actor, c.kind.replace("_", " "), c.comment) for c in reversed(detail.history)]
        st.html(markup.table(("Time", "Who", "What", "Comment"), rows, "No change since it was opened."))


def _timeline(detail: Detail, now: int) -> list[tuple[str, str, str, str]]:
    start, end = evidence.span(detail.incident, now)
    answer = snapshot.timeline(detail.incident.entity, start, end)
    return evidence.timeline(detail, answer.value or (), now)
