"""Mutes on the pages: the form on an incident, the list of active mutes, and the result of the last request."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboards import evidence, markup, snapshot
from dashboards.acting import Outcome, describe_failure
from dashboards.answers import IncidentDetail, Mute
from dashboards.client import ApiError
from dashboards.snapshot import CachedAnswer
from dashboards.views import parts, silencing
from dashboards.views.form_popover import draw_outcome
from dashboards.words import age, clock, detector_name, scope_name
from pipeline.model.records import SECOND

_RESULT = "fleetpulse.mute.result"
HOURS = {"1 h": 1.0, "8 h": 8.0, "24 h": 24.0, "7 d": 168.0}
"""Durations in hours: a check, a shift, a day, delivery of a spare part. Chosen."""
DEFAULT_DURATION = "8 h"
LIST = ""
"""Key of results on the list of mutes; on an incident's page it is the incident's id."""
EXPLANATION = (
    "Findings are still stored, but open no incidents and send no alerts. This incident stays open while its "
    "condition lasts; its severity cannot rise."
)


def draw_form(detail: IncidentDetail) -> None:
    """Draws the form for a mute: detector, scope, duration and reason."""
    if not silencing.draw_right("mutes"):
        return
    about = detail.incident.id
    st.html(markup.notice(EXPLANATION))
    st.selectbox("Detector", evidence.mute_detectors(detail), format_func=detector_name, key=f"mute-detector-{about}")
    st.selectbox("Scope", evidence.mute_scopes(detail), format_func=scope_name, key=f"mute-scope-{about}")
    st.segmented_control("Duration", list(HOURS), default=DEFAULT_DURATION, required=True, key=f"mute-for-{about}")
    st.text_input("Reason", key=f"mute-reason-{about}", placeholder="Why, for the next person on call")
    st.button("Mute", key="mute", type="primary", on_click=_add, args=(about,))
    draw_result(about)


def draw_result(about: str) -> None:
    """Draws the result of the last request on this page."""
    result = st.session_state.get(_RESULT)
    if result and result[0] == about:
        draw_outcome(result[1])


def _add(about: str) -> None:
    state = st.session_state
    detector, scope, duration, reason = (
        str(state[f"mute-{name}-{about}"]) for name in ("detector", "scope", "for", "reason")
    )
    try:
        made = snapshot.add_mute(detector, scope, HOURS.get(duration, HOURS[DEFAULT_DURATION]) * 3600, reason)
    except ApiError as error:
        state[_RESULT] = (about, describe_failure(error, "Not muted."))
        return
    state[_RESULT] = about, Outcome("quiet", f"Muted: {subject(made)} until {clock(made.until, snapshot.now())}.", True)
    state[f"mute-reason-{about}"] = ""


def _end(identity: str) -> None:
    try:
        ended = snapshot.end_mute(identity)
    except ApiError as error:
        st.session_state[_RESULT] = (LIST, describe_failure(error, "Mute not ended."))
        return
    st.session_state[_RESULT] = LIST, Outcome("quiet", f"Mute ended: {subject(ended)}.", True)


def subject(mute: Mute) -> str:
    """Returns detector and scope: `straggler on rack r1`."""
    where = scope_name(mute.scope)
    return f"{detector_name(mute.detector)} {where if mute.scope == '*' else f'on {where}'}"


def describe(mute: Mute, now: int) -> str:
    """Returns user, end and reason of a mute."""
    left = age((mute.until - now) / SECOND)
    return f"by {mute.user} until {clock(mute.until, now)} ({left} left): {mute.reason}"


def draw_applying(detail: IncidentDetail, now: int) -> None:
    """Draws the active mutes that apply to an incident."""
    mutes = snapshot.fetch_mutes()
    parts.draw_problem(mutes, "Mutes unknown.")
    for mute in evidence.active_mutes(detail, mutes.value or (), now):
        st.html(markup.notice(f"{subject(mute)}, {describe(mute, now)}", "degraded", "Muted:"))


def draw_active(mutes: tuple[Mute, ...], answer: CachedAnswer[Any], now: int) -> None:
    """Draws each active mute, which `answer` lists, with a button that ends it."""
    if not mutes:
        parts.draw_last_known("No active mutes.", answer)
    for mute in mutes:
        left, right = st.columns([6, 1], vertical_alignment="center")
        left.html(markup.notice(describe(mute, now), "degraded", f"{subject(mute)},"))
        right.button("End mute", key=f"end-{mute.id}", on_click=_end, args=(mute.id,), width="stretch")


def expired_rows(mutes: tuple[Mute, ...], now: int) -> list[tuple[str, str, str, str, str]]:
    """Returns (end, detector, scope, user, reason) of expired mutes."""
    return [
        (
            clock(min(m.until, m.ended or m.until), now),
            detector_name(m.detector),
            scope_name(m.scope),
            m.user,
            f"{m.reason} ({f'ended by {m.ended_by}' if m.ended else 'expired'})",
        )
        for m in mutes
    ]
