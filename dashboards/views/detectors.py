"""`/detectors`: active mutes, modes, and for each detector its blind spots and false alarm budget."""

from __future__ import annotations

import streamlit as st

from dashboards import markup, snapshot
from dashboards.answers import DetectorList, Mute
from dashboards.views import muting, parts
from dashboards.words import amount, detector_name, scope_name

MAX_EXPIRED = 10
"""Expired mutes shown, the newest. Chosen."""
_MODES = {
    "record": "stores findings; no incidents, no alerts",
    "notify": "opens incidents and sends alerts",
    "act": "as notify; actions may be proposed",
}


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    detectors, mutes, now = snapshot.fetch_detectors(), snapshot.fetch_mutes(), snapshot.now()
    found = mutes.value or ()
    active = tuple(m for m in found if m.is_active(now))
    text = "Detectors" if detectors.value is None or mutes.value is None else headline(detectors.value, active)
    parts.draw_head(text, [], "", detectors)
    parts.draw_error(detectors)
    if mutes.value is None:
        if detectors.value is not None:
            parts.draw_error(mutes)
    else:
        st.html(markup.section("Active mutes", f"{len(active):,}"))
        muting.draw_result(muting.LIST)
        muting.draw_active(active, now)
    if detectors.value is not None:
        _modes(detectors.value)
        st.html(markup.section("Detectors", "required signals, blind spots, false alarm budget"))
        st.html("".join(map(markup.detector, detectors.value.detectors)))
    st.html(markup.section("Expired mutes", f"the newest {MAX_EXPIRED}"))
    expired = tuple(m for m in found if not m.is_active(now))[:MAX_EXPIRED]
    st.html(markup.table(("Ended", "Detector", "Scope", "User", "Reason"), muting.expired_rows(expired, now), "None."))


def headline(detectors: DetectorList, active: tuple[Mute, ...]) -> str:
    """Returns the number of active, disabled and failing detectors and of active mutes."""
    disabled, failing = sum(bool(d.off) for d in detectors.detectors), sum(bool(d.errors) for d in detectors.detectors)
    texts = [f"{amount(len(detectors.detectors) - disabled, 'detector', 'detectors')} active"]
    if disabled:
        texts.append(f"{disabled:,} disabled: missing signals")
    if failing:
        texts.append(f"{failing:,} with errors")
    texts.append(amount(len(active), "active mute", "active mutes") if active else "no active mutes")
    return ", ".join(texts)


def _modes(detectors: DetectorList) -> None:
    st.html(markup.section("Modes", "[[modes]] of the configuration; the nearest scope applies"))
    rows = [(detector_name(m.detector), scope_name(m.scope), m.mode, _MODES.get(m.mode, "")) for m in detectors.modes]
    empty = "No rules: every detector opens incidents and sends alerts everywhere (notify)."
    st.html(markup.table(("Detector", "Scope", "Mode", "Meaning"), rows, empty))
