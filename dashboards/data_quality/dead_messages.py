"""Dead messages to receivers of alerts: a form that says what is sent again, and the result.

A message is dead if its receiver refused it for good, or in every retry while it accepted others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import streamlit as st

from dashboards import snapshot
from dashboards.acting import Outcome, describe_failure
from dashboards.client import ApiError
from dashboards.data_quality.answers import Destination
from dashboards.views.form_popover import close_popover, draw_failure, draw_outcome, draw_popover, keep_failure
from dashboards.words import amount

PATH = "notifications/replay"
_POPOVER = "dead-messages"
_RESULT = "fleetpulse.dead_messages.result"


def draw_dead_messages(found: Sequence[Destination]) -> None:
    """Draws the button while messages are dead, and the result of the last request."""
    row, place = st.container(key="dead-messages"), st.empty()
    dead = [one for one in found if one.dead]
    if dead:
        with row:
            _draw_button(dead)
    if outcome := st.session_state.get(_RESULT):
        with place:
            draw_outcome(outcome)


def _draw_button(dead: Sequence[Destination]) -> None:
    if box := draw_popover(st, "Send dead messages again", _POPOVER, path=PATH):
        with box:
            for number, one in enumerate(dead):
                st.html(_explain(one))
                label = f"Send {amount(one.dead, 'message', 'messages')} again"
                st.button(label, key=f"dead-{number}", type="primary", on_click=send_again, args=(one.receiver,))
            draw_failure(_POPOVER)


def _explain(one: Destination) -> str:
    """Returns what a click does to the messages of one receiver."""
    many = amount(one.dead, "dead message", "dead messages")
    state = (
        "" if one.state in ("ok", "unknown") else f" It does not accept messages now ({escape(one.answer)}): they wait."
    )
    return (
        f"<p><b>{escape(one.receiver)}</b>: {many} will be sent again now, also for incidents that are over; "
        f"for those, the end follows.{state}</p>"
    )


def send_again(receiver: str) -> None:
    """Asks the API to send all dead messages of a receiver again, and keeps how many those are."""
    try:
        sent = snapshot.send(_parse_count, PATH, {"receiver": receiver})
    except ApiError as error:
        st.session_state.pop(_RESULT, None)
        keep_failure(_POPOVER, describe_failure(error, "Nothing was sent again."))
        return
    verb = "is" if sent == 1 else "are"
    text = f"{amount(sent, 'message', 'messages')} to {receiver} {verb} sent again."
    st.session_state[_RESULT] = Outcome("quiet", text, True)
    close_popover(_POPOVER)


def _parse_count(table: Mapping[str, Any]) -> int:
    """Parses POST /api/v1/notifications/replay."""
    return int(table["replayed"])
