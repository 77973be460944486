"""The form of a silence, with a preview of what its matchers match now: on an incident, in a list, and on its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboards import identity, markup, snapshot
from dashboards.acting import Outcome, describe_failure
from dashboards.client import ApiError
from dashboards.links import incident_link
from dashboards.people_answers import Silence, parse_silence
from dashboards.snapshot import CachedAnswer
from dashboards.views.form_popover import close_popover, draw_outcome
from dashboards.words import amount, clock, plain
from pipeline.model.entity_names import entity_name
from pipeline.model.matcher_text import quote_value
from pipeline.model.records import SECOND, Incident

HOURS = {"1 h": 1.0, "2 h": 2.0, "8 h": 8.0, "24 h": 24.0, "7 d": 168.0}
"""Durations in hours: a check, a repair, a shift, a day, delivery of a spare part. Chosen."""
DEFAULT_DURATION = "2 h"
MOST_PREVIEWED = 3
"""Matching incidents that are named; more are counted. Chosen."""
ONLY_THIS = "this incident only"
_RESULT = "fleetpulse.silence.result"
Labels = Mapping[str, tuple[str, ...]]


def scope_choices(incidents: Sequence[Incident], labels: Mapping[str, Labels]) -> list[str]:
    """Returns what a silence can be about, the narrowest first: the incidents themselves, then entities `kind:name`
    of which all members of all of them are a part."""
    scopes = [labels.get(i.id, {}).get("scope", ()) for i in incidents]
    shared = [s for s in (scopes[0] if scopes else ()) if all(s in other for other in scopes)]
    return [ONLY_THIS, *shared]


def write_matchers(incidents: Sequence[Incident], scope: str) -> list[str]:
    """Returns the matchers of a scope: the incidents by id, or the entity with the detectors of the incidents."""
    if scope == ONLY_THIS:
        return [one_of("incident", [i.id for i in incidents])]
    detectors = sorted({i.detector for i in incidents if i.detector})
    about = [one_of("detector", detectors)] if detectors else []
    return [f"scope={quote_value(scope)}", *about]


def one_of(name: str, values: Sequence[str]) -> str:
    """Returns the matcher of a label with one of some values."""
    if len(values) == 1:
        return f"{name}={quote_value(values[0])}"
    return f"{name}=~{quote_value('|'.join(map(_escape, values)))}"


def _escape(value: str) -> str:
    """Returns a value in which no character has a meaning in RE2."""
    return "".join(c if c.isalnum() or c in "_-:/@ " or ord(c) > 127 else f"\\{c}" for c in value)


def split_matchers(text: str) -> list[str]:
    """Returns one matcher per line that is not empty."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def draw_form(key: str, incidents: Sequence[Incident], labels: Mapping[str, Labels], popover: str = "") -> None:
    """Draws the form for a new silence. key: of its widgets. popover: name of the popover that closes when it is done.

    incidents: those that the matchers are prefilled for; none: an empty form.
    """
    if not draw_right("silences"):
        return
    prefilled: list[str] = []
    if incidents:
        choices = scope_choices(incidents, labels)
        shown = "these incidents only" if len(incidents) > 1 else ONLY_THIS
        scope = st.selectbox(
            "Silence", choices, format_func=lambda s: shown if s == ONLY_THIS else scope_text(s), key=f"{key}-scope"
        )
        prefilled = write_matchers(incidents, scope or ONLY_THIS)
    field = f"{key}-matchers-{hash(tuple(prefilled))}"
    text = st.text_area(
        "Matchers, one a line",
        "\n".join(prefilled),
        key=field,
        height=90,
        placeholder='rack="r12"\ndetector=~"link.*"',
        help="As in Alertmanager: = != =~ !~. Labels: detector, severity, incident, node, rack, job, ..., and scope.",
    )
    draw_preview(split_matchers(text))
    st.segmented_control("Duration", list(HOURS), default=DEFAULT_DURATION, required=True, key=f"{key}-for")
    st.text_input("Reason", key=f"{key}-reason", placeholder="Why, for the next person on call")
    st.button("Silence", key=f"{key}-add", type="primary", on_click=_add, args=(key, field, popover))
    draw_result(key)


def draw_right(path: str) -> bool:
    """Returns whether the person at the page may write there; draws why not."""
    why = identity.find_barrier(path)
    if why:
        st.html(markup.notice(why, "degraded", "Not allowed."))
    return not why


def scope_text(scope: str) -> str:
    """Returns a scope in words: `rack r12 and all below it`."""
    kind = scope.partition(":")[0]
    return entity_name(scope) if kind in ("gpu", "port", "rank") else f"{entity_name(scope)} and all below it"


def draw_preview(matchers: Sequence[str]) -> None:
    """Draws how many unresolved incidents the matchers match now, and names some; or the error in them."""
    if not matchers:
        st.html(markup.notice("No matchers: enter at least one."))
        return
    try:
        found = snapshot.preview_matchers(matchers)
    except ApiError as error:
        st.html(markup.notice(str(error), "critical", "Matchers not valid."))
        return
    heading = f"Matches {amount(len(found), 'unresolved incident', 'unresolved incidents')} now."
    more = f"and {len(found) - MOST_PREVIEWED:,} more" if len(found) > MOST_PREVIEWED else ""
    rows = [(incident_link(i.id, plain(i.summary)),) for i in found[:MOST_PREVIEWED]]
    st.html(markup.notice(more, "quiet", heading) + (markup.table(("",), rows, "") if rows else ""))


def draw_result(key: str, answer: CachedAnswer[Any] | None = None) -> None:
    """Draws the result of the last request of a form. answer: as for `draw_outcome`."""
    result = st.session_state.get(_RESULT)
    if result and result[0] == key:
        draw_outcome(result[1], answer)


def drop_result() -> None:
    """Forgets the result of the last request."""
    st.session_state.pop(_RESULT, None)


def keep_result(key: str, outcome: Outcome) -> None:
    """Keeps a result for display until the next one."""
    st.session_state[_RESULT] = (key, outcome)


def _add(key: str, field: str, popover: str) -> None:
    state = st.session_state
    seconds = HOURS.get(str(state[f"{key}-for"]), HOURS[DEFAULT_DURATION]) * 3600
    matchers, reason = split_matchers(str(state.get(field) or "")), str(state[f"{key}-reason"]).strip()
    outcome = add_silence(matchers, seconds, reason)
    keep_result(key, outcome)
    if outcome.done:
        state[f"{key}-reason"] = ""
        if popover:
            close_popover(popover)


def add_silence(matchers: Sequence[str], seconds: float, reason: str) -> Outcome:
    """Adds a silence from now on."""
    if not matchers:
        return Outcome("degraded", "Enter at least one matcher.", False)
    if not reason:
        return Outcome("degraded", "Enter a reason first: the next person on call reads it.", False)
    body = {"matchers": list(matchers), "seconds": seconds, "reason": reason}
    try:
        made = snapshot.send(parse_silence, "silences", body)
    except ApiError as error:
        return describe_failure(error, "Not silenced.")
    return Outcome("quiet", f"Silenced until {clock(made.until, snapshot.now())}: {made.text}", True)


def time_left(silence: Silence, now: int) -> float:
    """Returns the seconds until a silence ends, 0 after it."""
    return max(0.0, (silence.until - now) / SECOND)
