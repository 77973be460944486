"""The form of a new act, its answer, and the way from it to the act's own page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from dashboards import markup, routes, snapshot
from dashboards.act_answers import Act, parse_act
from dashboards.acting import Outcome, describe_failure
from dashboards.client import ApiError
from dashboards.views import place
from dashboards.views.form_popover import close_popover, draw_outcome
from dashboards.views.silencing import draw_right

_RESULT, _OPEN = "fleetpulse.acts.result", "fleetpulse.acts.open"
LEVELS = ("1", "2", "3", "4", "link-soak")
"""Diagnostics that the form offers: the levels of `dcgmi diag`, and the soak of links. Those above 1 need a node that
is held and idle."""


WHEN = {"now": "Now", "when_idle": "When idle", "after_checkpoint": "After a checkpoint"}
OF_GPUS = ("reset", "diagnose")
"""Verbs whose program may be for one GPU (`{gpu}` of [acts.exec])."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a form begins with. key: of its fields.   nodes: names, one a line.   verb: the one that is chosen."""

    key: str
    incident: str = ""
    nodes: str = ""
    verb: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a change. source: the act that it is about, or the key of the form that it came from.   state,
    version: of the act just after it; empty until the act is read again, as after an error."""

    source: str
    outcome: Outcome
    state: str = ""
    version: int = 0


def draw_form(draft: Draft, modes: Mapping[str, str]) -> None:
    """Draws the form of a new act, in a popover of its key, and its result; verbs that are off are not offered."""
    key, verbs = draft.key, [verb for verb, mode in modes.items() if mode != "off"]
    if not verbs:
        st.html(markup.notice("All verbs are off: see [acts] in the configuration."))
        return
    if not draw_right("acts"):
        return
    first = verbs.index(draft.verb) if draft.verb in verbs else 0
    verb = st.selectbox("Act", verbs, first, key=f"{key}-verb", format_func=lambda verb: f"{verb} ({modes[verb]})")
    if verb == "diagnose":
        st.segmented_control("Level", LEVELS, default="3", key=f"{key}-level")
    if verb in OF_GPUS:
        st.text_input("GPU, if the program needs one", key=f"{key}-gpu", placeholder="5")
    st.text_area("Nodes, one a line", draft.nodes, key=f"{key}-nodes", placeholder="n042", height=70)
    st.segmented_control("When", list(WHEN), format_func=WHEN.__getitem__, default="now", key=f"{key}-when")
    st.text_input("Reason", draft.reason, key=f"{key}-reason", placeholder="Why, for the approver")
    st.button("Plan it", key=f"{key}-send", type="primary", on_click=_propose, args=(draft,))
    _draw_form_result(key)


def _propose(draft: Draft) -> None:
    state, key = st.session_state, draft.key
    names = str(state.get(f"{key}-nodes") or "").split()
    verb = state.get(f"{key}-verb")
    params = {"level": str(state.get(f"{key}-level") or "1")} if verb == "diagnose" else {}
    if verb in OF_GPUS and (gpu := str(state.get(f"{key}-gpu") or "").strip()):
        params["gpu"] = gpu
    body: dict[str, Any] = {
        "verb": verb,
        "targets": [name if ":" in name else f"node:{name}" for name in names],
        "reason": str(state.get(f"{key}-reason") or "").strip(),
        "incident": draft.incident,
        "when": state.get(f"{key}-when") or "now",
        "params": params,
    }
    if not names or not body["reason"]:
        state[_RESULT] = Result(key, Outcome("degraded", "Enter at least one node, and a reason.", False))
        return
    propose(body, key)
    if state[_OPEN]:
        close_popover(key)


def propose(body: Mapping[str, Any], source: str) -> None:
    """Proposes an act, and opens its page at the next run. source: see `send`."""
    st.session_state[_OPEN] = send("acts", body, "Proposed. The executor plans it within seconds.", source)


def send(path: str, body: Mapping[str, Any], done: str | Callable[[Act], str], source: str) -> str:
    """Sends a change; returns the id of the act, "" if nothing changed. `draw_result` shows what came of it.

    done: the text if it succeeds, or what returns it.   source: the act or form that asks, which shows an error.
    """
    try:
        made = snapshot.send(parse_act, path, body)
    except ApiError as error:
        st.session_state[_RESULT] = Result(source, describe_failure(error, "Nothing changed."))
        return ""
    text = f"{made.id}: {done if isinstance(done, str) else done(made)}"
    st.session_state[_RESULT] = Result(made.id, Outcome("quiet", text, True), made.state, made.version)
    return made.id


def open_proposed() -> None:
    """Opens the page of the act that was just proposed, where its plan appears."""
    if made := st.session_state.pop(_OPEN, ""):
        place.expect("acts", made)
        routes.open_page("acts", id=made)


def draw_result(act: Act) -> None:
    """Draws what came of the last change of an act on its page, until the act has another state than just after it."""
    result = _find_result(act.id)
    if result is None:
        return
    if not result.state:
        result = st.session_state[_RESULT] = replace(result, state=act.state, version=act.version)
    if act.state != result.state and act.version > result.version:
        drop_result(act.id)
        return
    draw_outcome(result.outcome)


def _draw_form_result(key: str) -> None:
    """Draws what came of the last use of a form."""
    if (result := _find_result(key)) is not None:
        draw_outcome(result.outcome)


def drop_result(source: str) -> None:
    """Forgets what came of the last change of an act, or use of a form: the form is closed."""
    if _find_result(source) is not None:
        del st.session_state[_RESULT]


def _find_result(source: str) -> Result | None:
    result: Result | None = st.session_state.get(_RESULT)
    return result if result is not None and result.source == source else None
