"""`/silences?id=`: silences and maintenance windows: add, edit, extend, end; which incidents they hold back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import streamlit as st

from dashboards import identity, markup, routes, snapshot
from dashboards.acting import CONFLICT, Outcome, describe_failure
from dashboards.answers import parse_incident
from dashboards.client import ApiError
from dashboards.json_values import require_list
from dashboards.links import Link, Text, incident_link
from dashboards.people_answers import Silence, parse_silence, parse_silences
from dashboards.snapshot import CachedAnswer
from dashboards.views import parts, silencing
from dashboards.views.form_popover import close_popover, draw_failure, draw_popover, keep_failure
from dashboards.words import age, amount, clock, plain
from pipeline.model.records import SECOND, Incident, from_iso, iso

_PAGE = "silences-page"
"""Key of the result of a change: a single one is kept with that of the form for a new silence, the newest."""
_WINDOW = "silences-window"
MAX_EXPIRED = 50
"""Ended silences shown, the newest. Chosen."""
KINDS = {"silence": "Silence", "maintenance": "Maintenance", "mute": "Mute"}
MOST_EDITED = 20_000
"""Characters of matchers that a form has. Chosen: 200 entities of 100 characters, as many as can be entered."""
EXTENSIONS = {"1 h": 3600.0, "8 h": 8 * 3600.0, "24 h": 86_400.0}
"""Steps of an extension (s). Chosen."""


def page() -> None:
    """Draws the page."""
    parts.draw_refreshing(_body)


def _body() -> None:
    answer = snapshot.fetch(parse_silences, "silences")
    now, found = snapshot.now(), answer.value
    text = "Silences and maintenance" if found is None else headline(found)
    parts.draw_head(text, [], "", answer, of_now=found is not None)
    parts.draw_error(answer)
    _add_forms()
    silencing.draw_result(_PAGE, answer)
    if found is None:
        return
    held = snapshot.fetch(parse_held, "incidents", show="silenced")
    chosen = st.query_params.get("id", "")
    current = [s for s in found if s.state != "expired"]
    current.sort(key=lambda s: (s.id != chosen, s.until))
    st.html(markup.section("In force and planned", f"{len(current):,}; those that end first come first"))
    parts.draw_problem(held, "Incidents that are held back are unknown.")
    if not current:
        parts.draw_last_known("No silences, maintenance windows or mutes are in force or planned.", answer)
    for silence in current:
        _draw_one(silence, held, now, silence.id == chosen)
    ended = [s for s in found if s.state == "expired"][:MAX_EXPIRED]
    st.html(markup.section("Ended", f"the newest {MAX_EXPIRED}"))
    head, empty = ("Ended", "Kind", "Matchers", "User", "Reason"), parts.last_known("Nothing has ended.", answer)
    st.html(markup.table(head, ended_rows(ended, now), empty))


def parse_held(table: Any) -> tuple[Incident, ...]:
    """Parses the incidents that are held back."""
    return tuple(map(parse_incident, require_list(table["incidents"])))


def headline(found: Sequence[Silence]) -> str:
    """Returns how many of each kind are in force."""
    texts = []
    for kind, one, many in (
        ("silence", "silence", "silences"),
        ("maintenance", "maintenance window", "maintenance windows"),
        ("mute", "mute", "mutes"),
    ):
        if count := sum(s.kind == kind and s.state == "active" for s in found):
            texts.append(amount(count, one, many))
    return f"{', '.join(texts)} in force" if texts else "Nothing is silenced"


def ended_rows(found: Sequence[Silence], now: int) -> list[tuple[Text, ...]]:
    """Returns (end, kind, matchers, user, reason) of ended silences."""
    return [
        (clock(s.expired or s.until, now), KINDS.get(s.kind, s.kind), s.text or "everything", s.author, s.reason)
        for s in found
    ]


def _add_forms() -> None:
    row = st.container(horizontal=True)
    if new := draw_popover(row, "New silence", "silences-new", primary=True, path="silences"):
        with new:
            silencing.draw_form("silences-form", (), {}, "silences-new")
    else:
        with row:
            silencing.draw_result("silences-form")
    if window := draw_popover(row, "New maintenance window", _WINDOW, path="maintenance"):
        with window:
            _window_form()
            draw_failure(_WINDOW)


def _window_form() -> None:
    """Draws the form of a maintenance window: entities with all below them, a start and an end."""
    if not silencing.draw_right("maintenance"):
        return
    st.text_area("Entities, one a line", key="window-scopes", placeholder="rack:r12\nnode:n042", height=90)
    scopes = silencing.split_matchers(str(st.session_state.get("window-scopes") or ""))
    if scopes:
        silencing.draw_preview([silencing.one_of("scope", scopes)])
    now = snapshot.now()
    st.text_input("Start (UTC)", iso(now)[:16] + "Z", key="window-starts")
    st.text_input("End (UTC)", iso(now + 4 * 3600 * SECOND)[:16] + "Z", key="window-ends")
    st.text_input("Reason", key="window-reason", placeholder="Work that is planned, ticket")
    st.button("Add maintenance window", key="window-add", type="primary", on_click=_add_window)


def _add_window() -> None:
    state = st.session_state
    body = {
        "scopes": silencing.split_matchers(str(state.get("window-scopes") or "")),
        "starts": str(state.get("window-starts") or "").strip(),
        "ends": str(state.get("window-ends") or "").strip(),
        "reason": str(state.get("window-reason") or "").strip(),
    }
    if not body["scopes"]:
        keep_failure(_WINDOW, Outcome("degraded", "Enter at least one entity, such as rack:r12.", False))
        return
    if _send("maintenance", body, None, "Maintenance window added", _WINDOW).done:
        state["window-scopes"], state["window-reason"] = "", ""


def _send(
    path: str,
    body: dict[str, Any],
    version: int | None,
    done: str,
    popover: str,
    method: Literal["POST", "PUT"] = "POST",
) -> Outcome:
    """Sends a change of a silence, keeps the result, and closes the popover of the form if it is done."""
    try:
        made = snapshot.send(parse_silence, path, body, version, method)
        warning = f" {made.warning}." if made.warning else ""
        text = f"{done}: {made.text}, until {clock(made.until, snapshot.now())}.{warning}"
        outcome = Outcome("degraded" if warning else "quiet", text, True)
    except ApiError as error:
        why = "Another person changed it; it is shown as it is now. " if error.status == CONFLICT else ""
        refused = describe_failure(error, "Nothing changed.")
        outcome = Outcome("degraded", f"Nothing changed. {why}", False) if why else refused
        silencing.drop_result()
        keep_failure(popover, outcome)
        return outcome
    silencing.keep_result(_PAGE, outcome)
    close_popover(popover)
    return outcome


def _draw_one(silence: Silence, held: CachedAnswer[tuple[Incident, ...]], now: int, chosen: bool) -> None:
    with st.container(border=True, key=f"silence-{silence.id}"):
        left, right = st.columns([4, 1.6], vertical_alignment="center")
        badges = [markup.badge(KINDS.get(silence.kind, silence.kind).upper(), "open" if chosen else "quiet")]
        if silence.state == "pending":
            badges.append(markup.badge("PLANNED", "quiet"))
        text = silence.text or "everything"
        left.html(
            f'<div class="fp-badges">{"".join(badges)}</div><p class="fp-big"><code>{markup.quoted(text)}</code></p>'
            + markup.empty(describe(silence, now))
            + _held_line(silence, held)
        )
        with right.container(horizontal=True):
            _buttons(silence)


def _held_line(silence: Silence, held: CachedAnswer[tuple[Incident, ...]]) -> str:
    if silence.kind == "mute":
        return markup.chips([Link("Detectors and mutes", routes.href("detectors"))])
    if held.value is None:
        return markup.empty("What it holds back is unknown.")
    own = [i for i in held.value if silence.id in i.life.silenced_by]
    links: list[Text] = [incident_link(i.id, plain(i.summary), i.simulated) for i in own]
    return markup.chips(links, most=6) if links else markup.empty(parts.last_known("Holds back no incident now.", held))


def describe(silence: Silence, now: int) -> str:
    """Returns author, times and reason of a silence."""
    begin = f"from {clock(silence.starts, now)} " if silence.state == "pending" else ""
    left = age(silencing.time_left(silence, now))
    changed = f", changed by {silence.updated_by}" if silence.updated_by not in ("", silence.author) else ""
    source = f" ({silence.source})" if silence.source.startswith("slurm") else ""
    until = f"{begin}until {clock(silence.until, now)} ({left} left)"
    return f"by {silence.author}{source}{changed}, {until}: {silence.reason}"


def _buttons(silence: Silence) -> None:
    if silence.kind == "mute":
        why = identity.find_barrier(f"mutes/{silence.id}/end")
        args = (silence.id,)
        st.button("End", key=f"end-{silence.id}", on_click=_end_mute, args=args, disabled=bool(why), help=why or None)
        return
    path = f"silences/{silence.id}/expire"
    if edit := draw_popover(st, "Edit", f"edit-{silence.id}", path=path):
        with edit:
            _edit_form(silence)
            draw_failure(f"edit-{silence.id}")
    if extend := draw_popover(st, "Extend", f"extend-{silence.id}", path=path):
        with extend:
            for label, seconds in EXTENSIONS.items():
                ends = iso(silence.ends + int(seconds * SECOND))
                st.button(f"By {label}", key=f"by-{label}-{silence.id}", on_click=_extend, args=(silence, ends))
            draw_failure(f"extend-{silence.id}")
    if end := draw_popover(st, "End", f"end-{silence.id}", path=path):
        with end:
            late = " 15 minutes from now, so that devices settle" if silence.kind == "maintenance" else " now"
            st.html(markup.notice(f"Ends it{late}. Findings that still hold are then sent."))
            st.button("End it", key=f"end-now-{silence.id}", type="primary", on_click=_expire, args=(silence,))
            draw_failure(f"end-{silence.id}")


def is_long(silence: Silence) -> bool:
    """Returns whether the matchers are too long for a form, such as those of a window of all nodes."""
    return sum(map(len, silence.matchers)) > MOST_EDITED


def _edit_form(silence: Silence) -> None:
    key = f"edit-{silence.id}-{silence.version}"
    if is_long(silence):
        st.html(markup.notice(f"Matchers: {silence.text}. They are too long to be edited here."))
    else:
        text = st.text_area("Matchers, one a line", "\n".join(silence.matchers), key=f"{key}-matchers", height=90)
        silencing.draw_preview(silencing.split_matchers(text))
    st.text_input("Start (UTC)", iso(silence.starts)[:19] + "Z", key=f"{key}-starts")
    st.text_input("End (UTC)", iso(silence.ends)[:19] + "Z", key=f"{key}-ends")
    st.text_input("Reason", silence.reason, key=f"{key}-reason")
    st.button("Save", key=f"{key}-save", type="primary", on_click=_edit, args=(silence, key))


def _edit(silence: Silence, key: str) -> None:
    state = st.session_state
    body = {
        "matchers": None if is_long(silence) else silencing.split_matchers(str(state[f"{key}-matchers"])),
        "starts": str(state[f"{key}-starts"]).strip(),
        "ends": str(state[f"{key}-ends"]).strip(),
        "reason": str(state[f"{key}-reason"]).strip(),
    }
    for name in ("starts", "ends"):
        try:
            from_iso(str(body[name]))
        except ValueError:
            text = f"{name}: {body[name]!r} is no time; expected one such as 2026-01-31T08:00:00Z."
            keep_failure(f"edit-{silence.id}", Outcome("degraded", text, False))
            return
    path = f"silences/{snapshot.quoted(silence.id)}"
    _send(path, body, silence.version, "Changed", f"edit-{silence.id}", "PUT")


def _extend(silence: Silence, ends: str) -> None:
    body = {"ends": ends, "reason": silence.reason}
    path = f"silences/{snapshot.quoted(silence.id)}"
    _send(path, body, silence.version, "Extended", f"extend-{silence.id}", "PUT")


def _expire(silence: Silence) -> None:
    _send(f"silences/{snapshot.quoted(silence.id)}/expire", {}, silence.version, "Ended", f"end-{silence.id}")


def _end_mute(identity: str) -> None:
    try:
        snapshot.end_mute(identity)
        silencing.keep_result(_PAGE, Outcome("quiet", "Mute ended.", True))
    except ApiError as error:
        silencing.keep_result(_PAGE, describe_failure(error, "Mute not ended."))
