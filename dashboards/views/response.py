"""What a person does about an incident: buttons under its title. None of them acts on a machine.

Only Acknowledge has a key, because it can be undone. Resolve asks first; Reopen undoes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from dashboards import identity, markup, snapshot
from dashboards.acting import Outcome, act_on_incident
from dashboards.answers import IncidentDetail
from dashboards.views import muting, silencing
from dashboards.views.form_popover import close_popover, draw_outcome, draw_popover, is_any_open, is_open
from dashboards.words import clock, joined, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.records import Incident

_RESULT = "fleetpulse.result"
MAX_NAMED = 3
"""Detectors and entities that an explanation names; more are counted. Chosen."""
ACKNOWLEDGE_HOURS = {"1 h": 1.0, "4 h": 4.0, "8 h": 8.0, "24 h": 24.0, "no end": 0.0}
"""Ends of an acknowledgement other than the configured one (h); 0: never. Chosen."""
VERDICTS = {"useful": "Useful", "wrong": "Wrong", "known": "Known"}
MAX_OFFERED = 200
"""Incidents offered for a merge, and members for a split. Chosen: a list that can be searched by typing."""


def draw_actions(detail: IncidentDetail) -> None:
    """Draws the row of buttons, and the result of the last one."""
    incident = detail.incident
    row = st.container(horizontal=True, key="actions")
    if not identity.may_write(f"incidents/{snapshot.quoted(incident.id)}/acknowledge"):
        _draw_disabled(row, incident)
        return
    if incident.state == "resolved":
        if not incident.life.merged_into:  # else its findings are in the other incident, which the page names
            _popover(row, "Reopen", "reopen", detail, _reopen_form, primary=True)
    else:
        row.button(
            "Acknowledge",
            key="acknowledge",
            type="primary",
            shortcut=None if is_any_open() else "A",  # it would act behind an open form
            disabled=incident.state not in ("open", "silenced") or is_acknowledged(incident, snapshot.now()),
            on_click=_acknowledge,
            args=(_about(detail),),
        )
    _popover(row, "Assign", "assign", detail, _assign_form)
    _popover(row, "Comment", "comment", detail, _comment_form)
    if incident.state != "resolved":
        _popover(row, "Silence", "silence", detail, _silence_form, path="silences")
        _popover(row, "Resolve", "resolve", detail, _resolve_form)
    _popover(row, "Feedback", "feedback", detail, _feedback_form)
    _popover(row, "More", "more", detail, _more_forms)
    draw_result(incident.id)
    if not is_open(f"silence-{incident.id}"):
        silencing.draw_result(f"silence-{incident.id}")


def is_acknowledged(incident: Incident, now: int) -> bool:
    """Returns whether an acknowledgement is in force, also if a silence holds the incident back since then."""
    life = incident.life
    return bool(life.acknowledged_by) and (life.acknowledged_until is None or life.acknowledged_until > now)


def _draw_disabled(row: Any, incident: Incident) -> None:
    """Draws the buttons for a person who may only read, with the missing right."""
    names: tuple[str, ...] = ("Acknowledge", "Assign", "Comment", "Silence", "Resolve")
    if incident.state == "resolved":
        names = ("Assign", "Comment") if incident.life.merged_into else ("Reopen", "Assign", "Comment")
    for name in (*names, "Feedback"):
        row.button(name, key=f"disabled-{name}", disabled=True, help="Needs the role operator")
    row.html('<span class="fp-below">You may read only: writing needs the role operator.</span>')


About = tuple[str, int | None]
"""Id and version of the incident that a form is about."""


def _about(detail: IncidentDetail) -> About:
    return detail.incident.id, detail.version


def _popover(
    row: Any, label: str, name: str, detail: IncidentDetail, form: Any, primary: bool = False, path: str = ""
) -> None:
    """Draws a button that opens a form; the form is drawn only while it is open. path: as in `draw_popover`."""
    key = f"{name}-{detail.incident.id}"
    if box := draw_popover(row, label, key, primary, path):
        with box:
            form(detail, key)


@dataclass(frozen=True, slots=True)
class _Result:
    """What came of the last request about an incident. popover, form: where it was asked for; empty at the buttons."""

    incident: str
    outcome: Outcome
    popover: str = ""
    form: str = ""

    @property
    def is_in_form(self) -> bool:
        """Whether the open form draws it: what is below an open popover is not seen."""
        return bool(self.form) and not self.outcome.done and is_open(self.popover)


def draw_result(incident: str) -> None:
    """Draws the result of the last request about this incident, unless an open form draws it."""
    result: _Result | None = st.session_state.get(_RESULT)
    if result and result.incident == incident and not result.is_in_form:
        draw_outcome(result.outcome, snapshot.fetch_incident(incident))


def _draw_form_result(incident: str, form: str) -> None:
    """Draws why the last use of a form changed nothing."""
    result: _Result | None = st.session_state.get(_RESULT)
    if result and result.incident == incident and result.form == form and result.is_in_form:
        draw_outcome(result.outcome, snapshot.fetch_incident(incident))


def _do(about: About, verb: str, body: Mapping[str, Any], done: str, popover: str = "", form: str = "") -> Outcome:
    """Sends an act, keeps its result until the page is left, and closes its popover if it is done."""
    outcome = act_on_incident(*about, verb, body, done)
    st.session_state[_RESULT] = _Result(about[0], outcome, popover, form)
    if outcome.done and popover:
        close_popover(popover)
    return outcome


def _acknowledge(about: About) -> None:
    _do(about, "acknowledge", {"comment": ""}, "Acknowledged.")


def _refuse(about: About, need: str, popover: str, form: str) -> None:
    """Keeps what a form still needs; nothing is sent."""
    st.session_state[_RESULT] = _Result(about[0], Outcome("degraded", need, False), popover, form)


def _do_with(about: About, verb: str, body: Mapping[str, Any], done: str, popover: str, text: str, need: str) -> None:
    """As `_do`, with the text of a widget as comment, which names the form. need: what to say if it is empty; empty: it
    may be."""
    comment = str(st.session_state.get(text) or "").strip()
    if need and not comment:
        _refuse(about, need, popover, text)
        return
    if _do(about, verb, {**body, "comment": comment}, done, popover, text).done:
        st.session_state[text] = ""


def _assign_form(detail: IncidentDetail, key: str) -> None:
    life = detail.incident.life
    st.text_input("Assign to", key=f"{key}-to", value=life.assignee, placeholder="name; empty: no one")
    st.text_input("Comment", key=f"{key}-text")
    row = st.container(horizontal=True)
    row.button("Assign", key=f"{key}-do", type="primary", on_click=_assign, args=(_about(detail), key))
    row.button("Assign to me", key=f"{key}-me", on_click=_assign_to_me, args=(_about(detail), key))
    _draw_form_result(detail.incident.id, f"{key}-text")


def _assign_to_me(about: About, key: str) -> None:
    who = identity.current()
    st.session_state[f"{key}-to"] = "" if isinstance(who, identity.Stranger) else who.name
    _assign(about, key)


def _assign(about: About, key: str) -> None:
    to = str(st.session_state.get(f"{key}-to") or "").strip()
    done = f"Assigned to {to}." if to else "Assignee removed."
    _do_with(about, "assign", {"to": to}, done, key, f"{key}-text", "")


def _comment_form(detail: IncidentDetail, key: str) -> None:
    st.text_area("Comment", key=f"{key}-text", height=100, placeholder="What you know or did")
    need = "Enter a comment first."
    st.button(
        "Add comment",
        key=f"{key}-do",
        type="primary",
        on_click=_do_with,
        args=(_about(detail), "comment", {}, "Comment added.", key, f"{key}-text", need),
    )
    _draw_form_result(detail.incident.id, f"{key}-text")


def _silence_form(detail: IncidentDetail, key: str) -> None:
    silencing.draw_form(key, [detail.incident], {detail.incident.id: detail.labels}, key)


def _resolve_form(detail: IncidentDetail, key: str) -> None:
    text = "Resolve this incident? It alerts again only after its condition clears and recurs. Reopen undoes it."
    st.html(markup.notice(text))
    st.text_input("Comment", key=f"{key}-text", placeholder="What the cause was")
    done = "Resolved. It alerts again only after the condition clears and recurs. Reopen undoes this."
    st.button(
        "Resolve incident",
        key=f"{key}-do",
        type="primary",
        on_click=_do_with,
        args=(_about(detail), "resolve", {}, done, key, f"{key}-text", ""),
    )
    _draw_form_result(detail.incident.id, f"{key}-text")


def _reopen_form(detail: IncidentDetail, key: str) -> None:
    st.html(markup.notice("Opens the incident again. Then only a person resolves it."))
    st.text_input("Reason", key=f"{key}-text")
    st.button(
        "Reopen incident",
        key=f"{key}-do",
        type="primary",
        on_click=_do_with,
        args=(_about(detail), "reopen", {}, "Reopened.", key, f"{key}-text", "Enter a reason first."),
    )
    _draw_form_result(detail.incident.id, f"{key}-text")


def _feedback_form(detail: IncidentDetail, key: str) -> None:
    st.html(markup.notice("Was this right? A wrong page counts in the page budget of its detector."))
    st.text_input("Comment", key=f"{key}-text")
    row = st.container(horizontal=True)
    for verdict, label in VERDICTS.items():
        args = (_about(detail), "feedback", {"verdict": verdict}, f"Feedback: {label}.", key, f"{key}-text", "")
        row.button(label, key=f"{key}-{verdict}", on_click=_do_with, args=args)
    _draw_form_result(detail.incident.id, f"{key}-text")


def _more_forms(detail: IncidentDetail, key: str) -> None:
    """Draws the acts that are needed less often, each in an expander."""
    if detail.incident.state != "resolved":
        with st.expander("Acknowledge for another time"):
            _acknowledge_form(detail, key)
        with st.expander("Mark as normal"):
            _normal_form(detail, key)
        with st.expander("Mute a detector"):
            muting.draw_form(detail)
        with st.expander("Merge other incidents into this one"):
            _merge_form(detail, key)
    if len(detail.incident.members) > 1:
        with st.expander("Split members off"):
            _split_form(detail, key)


def _acknowledge_form(detail: IncidentDetail, key: str) -> None:
    st.segmented_control("Until", list(ACKNOWLEDGE_HOURS), default="4 h", required=True, key=f"{key}-hours")
    args = (_about(detail), key)
    st.button("Acknowledge for that time", key=f"{key}-ack", on_click=_acknowledge_for, args=args)
    _draw_form_result(detail.incident.id, f"{key}-hours")


def _normal_form(detail: IncidentDetail, key: str) -> None:
    st.html(markup.notice(explain_not_a_fault(detail)))
    st.text_input("Reason", key=f"{key}-why", placeholder="Why this is normal here")
    done = "Resolved as normal. Learning detectors accept this state; others alert again after it clears once."
    need = "Enter a reason first."
    args = (_about(detail), "resolve", {"not_a_fault": True}, done, key, f"{key}-why", need)
    st.button("Mark as normal", key=f"{key}-normal", on_click=_do_with, args=args)
    _draw_form_result(detail.incident.id, f"{key}-why")


def _acknowledge_for(about: About, key: str) -> None:
    chosen = str(st.session_state.get(f"{key}-hours"))
    until = "without end" if chosen == "no end" else f"for {chosen}"
    body = {"comment": "", "hours": ACKNOWLEDGE_HOURS.get(chosen, 4.0)}
    _do(about, "acknowledge", body, f"Acknowledged {until}.", key, f"{key}-hours")


def _merge_form(detail: IncidentDetail, key: str) -> None:
    answer = snapshot.fetch_unresolved()
    if answer.value is None:
        st.html(markup.notice(answer.error, "critical", "The other incidents cannot be read."))
        return
    others = {i.id: i for i in answer.value if i.id != detail.incident.id}
    if answer.error:
        when = clock(answer.fetched, snapshot.now())
        st.html(markup.notice(f"The list is as of {when}: {answer.error}", "degraded"))
    if not others:
        st.html(markup.notice("There is no other unresolved incident."))
        return
    offered = list(others)[:MAX_OFFERED]
    names = {i: f"{i} {plain(others[i].summary)}" for i in offered}
    st.multiselect("Incidents", offered, format_func=lambda i: names[i], key=f"{key}-merge", select_all=False)
    st.text_input("Reason", key=f"{key}-merge-why", placeholder="Why they have one cause")
    args = (_about(detail), "merge", "incidents", f"{key}-merge", key)
    st.button("Merge", key=f"{key}-merge-do", on_click=_join_or_part, args=args)
    _draw_form_result(detail.incident.id, f"{key}-merge-why")


def _split_form(detail: IncidentDetail, key: str) -> None:
    offered = list(detail.incident.members)[:MAX_OFFERED]
    st.multiselect("Members", offered, format_func=entity_name, key=f"{key}-split", select_all=False)
    st.text_input("Reason", key=f"{key}-split-why", placeholder="Why they have another cause")
    args = (_about(detail), "split", "entities", f"{key}-split", key)
    st.button("Split off", key=f"{key}-split-do", on_click=_join_or_part, args=args)
    _draw_form_result(detail.incident.id, f"{key}-split-why")


def _join_or_part(about: About, verb: str, name: str, field: str, popover: str) -> None:
    chosen = list(st.session_state.get(field) or [])
    if not chosen:
        _refuse(about, f"Choose at least one of the {name} first.", popover, f"{field}-why")
        return
    done = f"{len(chosen)} merged into this incident." if verb == "merge" else f"{len(chosen)} split off."
    _do_with(about, verb, {name: chosen}, done, popover, f"{field}-why", "Enter a reason first.")


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
