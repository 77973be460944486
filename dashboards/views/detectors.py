"""`/detectors`: who may speak? What is muted, the modes in force, and what each detector costs and cannot see."""

from __future__ import annotations

import streamlit as st

from dashboards import markup, snapshot
from dashboards.answers import Mute, Panel
from dashboards.views import muting, parts
from dashboards.words import amount, detector_name, scope_name

PAST = 10
"""Mutes that are over, of which the newest are shown. Chosen."""
_MODES = {
    "record": "what it finds is stored; nobody is told",
    "notify": "opens incidents and tells receivers",
    "act": "that, and acts may be proposed",
}


def page() -> None:
    """Draws the page."""
    parts.refreshing(_body)


def _body() -> None:
    panel, mutes, now = snapshot.detectors(), snapshot.mutes(), snapshot.now()
    found = mutes.value or ()
    standing = tuple(m for m in found if m.stands(now))
    text = "Detectors" if panel.value is None or mutes.value is None else headline(panel.value, standing)
    parts.head(text, [], "", panel)
    parts.trouble(panel)
    if mutes.value is None:
        if panel.value is not None:
            parts.trouble(mutes)
    else:
        st.html(markup.section("Muted now", f"{len(standing):,}"))
        muting.said(muting.LIST)
        muting.standing(standing, now)
    if panel.value is not None:
        _modes(panel.value)
        st.html(markup.section("Detectors", "needed signals, blind spots, and false alarms by arithmetic"))
        st.html("".join(map(markup.detector, panel.value.detectors)))
    st.html(markup.section("Mutes that are over", f"the newest {PAST}"))
    ended = tuple(m for m in found if not m.stands(now))[:PAST]
    st.html(markup.table(("Over", "Detector", "Where", "Who", "Why"), muting.over(ended, now), "None."))


def headline(panel: Panel, standing: tuple[Mute, ...]) -> str:
    """How many may speak, and how many may not."""
    off, failing = sum(bool(d.off) for d in panel.detectors), sum(bool(d.errors) for d in panel.detectors)
    parts_ = [f"{amount(len(panel.detectors) - off, 'detector judges', 'detectors judge')}"]
    if off:
        parts_.append(f"{off:,} off for want of signals")
    if failing:
        parts_.append(f"{failing:,} with errors")
    parts_.append(amount(len(standing), "mute", "mutes") if standing else "nothing muted")
    return ", ".join(parts_)


def _modes(panel: Panel) -> None:
    st.html(markup.section("Modes in force", "[[modes]] of the configuration; the nearest scope wins"))
    rows = [(detector_name(m.detector), scope_name(m.scope), m.mode, _MODES.get(m.mode, "")) for m in panel.modes]
    empty = "No rule: every detector opens incidents and tells receivers, everywhere (notify)."
    st.html(markup.table(("Detector", "Where", "Mode", "Means"), rows, empty))
