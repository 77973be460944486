"""A button that opens a form in a popover, which closes when the form is done.

A script can close a popover by its state, but a refresh that the browser asked for just before carries the old state
back and opens it again. So a popover whose form is done is another widget from then on, which begins closed.
"""

from __future__ import annotations

from typing import Any, Literal

import streamlit as st

from dashboards import identity, markup, snapshot
from dashboards.acting import Outcome
from dashboards.snapshot import CachedAnswer

_CLOSED = "fleetpulse.popovers_closed"
_DRAWN = "fleetpulse.popovers_drawn"
_FAILED = "fleetpulse.popover_failed"


def draw_popover(row: Any, label: str, name: str, primary: bool = False, path: str = "") -> Any:
    """Draws the button in a container. Returns the popover for `with` while it is open, else None.

    path: where the form writes; for a person who may not write there the button is disabled, with the reason.
    """
    kind: Literal["primary", "secondary"] = "primary" if primary else "secondary"
    if path and (why := identity.find_barrier(path)):
        row.button(label, key=f"disabled-{name}", disabled=True, help=why, type=kind)
        return None
    st.session_state.setdefault(_DRAWN, set()).add(name)
    box = row.popover(label, key=widget_key(name), on_change="rerun", type=kind)
    return box if box.open else None


def close_popover(name: str) -> None:
    """Closes the popover from the next run on."""
    closed = st.session_state.setdefault(_CLOSED, {})
    closed[name] = closed.get(name, 0) + 1


def keep_failure(name: str, outcome: Outcome) -> None:
    """Keeps why the form of a popover changed nothing: `draw_failure` shows it in the form while it is open. What is
    below an open popover is not seen on a phone."""
    st.session_state[_FAILED] = (widget_key(name), outcome)


def draw_failure(name: str) -> None:
    """Draws why the last use of this form changed nothing."""
    key, outcome = st.session_state.get(_FAILED, ("", None))
    if outcome is not None and key == widget_key(name):
        draw_outcome(outcome)


def draw_outcome(outcome: Outcome, answer: CachedAnswer[Any] | None = None) -> None:
    """Draws what became of a write; nothing once an answer shows what became of one whose response was lost.

    answer: what the page shows of the object; without it the state of the pipeline, which every page reads.
    """
    place = st.empty()
    if not outcome.is_settled(snapshot.fetch_fleet_of() if answer is None else answer):
        place.html(markup.notice(outcome.text, outcome.tone))


def is_open(name: str) -> bool:
    """Returns whether the popover is open."""
    return bool(st.session_state.get(widget_key(name)))


def is_any_open() -> bool:
    """Returns whether a popover of the page is open: then the page's keys are not for what lies below it."""
    return any(is_open(name) for name in st.session_state.get(_DRAWN, ()))


def widget_key(name: str) -> str:
    """Returns the key of the widget that shows the popover now."""
    return f"{name}-{st.session_state.get(_CLOSED, {}).get(name, 0)}"
