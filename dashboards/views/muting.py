"""What an operator may silence: the form on an incident, the list of mutes, and what the API said to it."""

from __future__ import annotations

import streamlit as st

from dashboards import evidence, markup, snapshot
from dashboards.answers import Detail, Mute
from dashboards.client import ApiError
from dashboards.words import age, clock, detector_name, scope_name
from pipeline.model.records import SECOND

_SAID = "fleetpulse.mute.said"
HOURS = {"1 h": 1.0, "8 h": 8.0, "24 h": 24.0, "7 d": 168.0}
"""How long, as one says it: a look, a shift, a day, a spare part's way. Chosen."""
USUAL = "8 h"
LIST = ""
"""Whose page the list of mutes is, where an incident's has its id."""
WHAT_IT_DOES = (
    "What is found there is still stored, but opens no incident and tells nobody. This incident stays open as "
    "long as it is found, and becomes no louder."
)


def form(detail: Detail) -> None:
    """Detector, scope, time and reason, and the button that sends them."""
    about = detail.incident.id
    st.html(markup.notice(WHAT_IT_DOES))
    st.selectbox("Detector", evidence.speakers(detail), format_func=detector_name, key=f"mute-detector-{about}")
    st.selectbox("Where", evidence.scopes(detail), format_func=scope_name, key=f"mute-scope-{about}")
    st.segmented_control("For", list(HOURS), default=USUAL, required=True, key=f"mute-for-{about}")
    st.text_input("Reason", key=f"mute-reason-{about}", placeholder="Why, for whoever wonders later")
    st.button("Mute", key="mute", type="primary", on_click=_mute, args=(about,))
    said(about)


def said(about: str) -> None:
    """What became of the last wish on this page, until the next one."""
    found = st.session_state.get(_SAID)
    if found and found[0] == about:
        st.html(markup.notice(found[2], found[1]))


def _mute(about: str) -> None:
    state = st.session_state
    detector, scope, time, reason = (
        str(state[f"mute-{name}-{about}"]) for name in ("detector", "scope", "for", "reason")
    )
    try:
        made = snapshot.mute(detector, scope, HOURS.get(time, HOURS[USUAL]) * 3600, reason)
    except ApiError as error:
        state[_SAID] = (about, "critical", f"Nothing was muted. {error}")
        return
    state[_SAID] = (about, "quiet", f"Muted: {subject(made)} until {clock(made.until, snapshot.now())}.")
    state[f"mute-reason-{about}"] = ""


def _end(identity: str) -> None:
    try:
        over = snapshot.unmute(identity)
    except ApiError as error:
        st.session_state[_SAID] = (LIST, "critical", f"Nothing was ended. {error}")
        return
    st.session_state[_SAID] = (LIST, "quiet", f"Ended: {subject(over)} may speak again.")


def subject(mute: Mute) -> str:
    """`straggler on rack r1`."""
    where = scope_name(mute.scope)
    return f"{detector_name(mute.detector)} {where if mute.scope == '*' else f'on {where}'}"


def sentence(mute: Mute, now: int) -> str:
    """Who, why and until when."""
    left = age((mute.until - now) / SECOND)
    return f"by {mute.user} until {clock(mute.until, now)} ({left} left): {mute.reason}"


def covered(detail: Detail, now: int) -> None:
    """Says above an incident that something of it is muted."""
    for mute in evidence.covering(detail, snapshot.mutes().value or (), now):
        st.html(markup.notice(f"{subject(mute)}, {sentence(mute, now)}", "degraded", "Muted:"))


def standing(mutes: tuple[Mute, ...], now: int) -> None:
    """Each mute that stands with the button that ends it."""
    if not mutes:
        st.html(markup.notice("Nothing is muted: every detector may speak as its mode has it."))
    for mute in mutes:
        left, right = st.columns([6, 1], vertical_alignment="center")
        left.html(markup.notice(sentence(mute, now), "degraded", f"{subject(mute)},"))
        right.button("End now", key=f"end-{mute.id}", on_click=_end, args=(mute.id,), width="stretch")


def over(mutes: tuple[Mute, ...], now: int) -> list[tuple[str, str, str, str, str]]:
    """Lines of those that are over."""
    return [
        (
            clock(min(m.until, m.ended or m.until), now),
            detector_name(m.detector),
            scope_name(m.scope),
            m.user,
            f"{m.reason} ({f'ended by {m.ended_by}' if m.ended else 'ran out'})",
        )
        for m in mutes
    ]
