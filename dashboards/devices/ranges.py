"""The time range of charts: `?range=6h` up to now, or `?from=&to=` as chosen by zooming; both in the address.

A range that ended before now is shown with its date, its age and a way back to now: such an address is pasted into
chats, and must not read as the present.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from dashboards import markup, routes
from dashboards.devices.requests import POINTS, recent_span
from dashboards.words import age, are_today, clock, dated
from pipeline.model.records import SECOND, from_iso, iso

HOUR = 3600 * SECOND
RANGES: Mapping[str, int] = {"1h": HOUR, "6h": 6 * HOUR, "24h": 24 * HOUR, "7d": 168 * HOUR, "30d": 720 * HOUR}
"""Ranges up to now (us): an incident, a shift, a day, a week, a month. Chosen."""
NAMES: Mapping[str, str] = {"1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d", "30d": "30 d"}
DEFAULT = "6h"
SHORTEST, LONGEST = 60 * SECOND, 366 * 24 * HOUR


@dataclass(frozen=True, slots=True)
class TimeRange:
    """[start, end) in UTC us. name: of RANGES; empty for a fixed range.

    wrong: why the range in the address is not shown.
    """

    start: int
    end: int
    name: str
    wrong: str = ""

    @property
    def length(self) -> int:
        """Returns the length (us)."""
        return self.end - self.start


def read_range(now: int, points: int = POINTS) -> TimeRange:
    """Returns the range in the address; without one, or with a wrong one, the default."""
    asked = st.query_params
    if "from" in asked or "to" in asked:
        found = _read_fixed(asked.get("from", ""), asked.get("to", ""), now)
        if isinstance(found, TimeRange):
            return found
        return TimeRange(*recent_span(RANGES[DEFAULT], now, points), DEFAULT, found)
    name, wrong = asked.get("range", DEFAULT), ""
    if name not in RANGES:
        name, wrong = DEFAULT, f"range={name[:40]!r} in the address: expected {', '.join(RANGES)}."
    return TimeRange(*recent_span(RANGES[name], now, points), name, wrong)


def _read_fixed(first: str, last: str, now: int) -> TimeRange | str:
    """Returns the range from `from` and `to`, or why it is none."""
    times = []
    for name, text in (("from", first), ("to", last)):
        try:
            times.append(from_iso(text))
        except (ValueError, OverflowError):
            return f"{name}={text[:40]!r} in the address: expected a time such as 2026-01-31T08:00:00Z."
    start, end = times
    if end <= start:
        return f"to={last!r} in the address is not after from={first!r}."
    if not SHORTEST <= end - start <= LONGEST:
        return f"from={first!r} to={last!r} in the address: expected 60 s to 366 days."
    if start >= now:
        return f"from={first!r} in the address is in the future."
    return TimeRange(start, end, "")


def write_range(start: int, end: int) -> None:
    """Writes a fixed range into the address: whole seconds, at least SHORTEST."""
    middle, half = (start + end) // 2, max(end - start, SHORTEST) // 2
    first, last = (iso((middle + sign * half) // SECOND * SECOND) for sign in (-1, 1))
    routes.change_query(**{"from": first, "to": last, "range": ""})


def write_name(name: str) -> None:
    """Writes a range up to now into the address."""
    routes.change_query(**{"range": name, "from": "", "to": ""})


def draw_range(chosen: TimeRange, now: int, key: str, names: Sequence[str] = tuple(RANGES)) -> None:
    """Draws the choice of ranges, and earlier, later, in and out."""
    row = st.container(horizontal=True, vertical_alignment="center", gap="small")
    st.session_state[key] = chosen.name or None
    row.segmented_control(
        "Time range", names, format_func=NAMES.__getitem__, key=key, label_visibility="collapsed",
        on_change=lambda: write_name(st.session_state[key] or DEFAULT), width="content",
    )  # fmt: skip
    quarter, half = chosen.length // 4, chosen.length // 2
    for label, help_, start, end in (
        (":material/chevron_left:", "Earlier by half", chosen.start - half, chosen.end - half),
        (":material/chevron_right:", "Later by half", chosen.start + half, chosen.end + half),
        (":material/zoom_in:", "Zoom in", chosen.start + quarter, chosen.end - quarter),
        (":material/zoom_out:", "Zoom out", chosen.start - half, chosen.end + half),
    ):
        future = start >= now
        row.button(
            label, key=f"{key}-{help_}", help=help_, on_click=write_range, args=(start, end), disabled=future
        )  # fmt: skip
    row.html(f'<span class="fp-below">{describe(chosen, now)}</span>')
    _draw_notice(chosen, now, key)


def _draw_notice(chosen: TimeRange, now: int, key: str) -> None:
    """Draws that the charts show the past or not the range that was asked for; an empty place otherwise."""
    place = st.empty()
    if chosen.wrong:
        place.html(markup.notice(f"{chosen.wrong} Shown: the last {NAMES[chosen.name]}.", "degraded", "Wrong range."))
    elif chosen.end < now:
        with place.container(horizontal=True, vertical_alignment="center", gap="small"):
            ended = f"The charts end at {dated(chosen.end)}, {age((now - chosen.end) / SECOND)} ago."
            st.html(markup.notice(ended, "degraded", "Past, not now."))
            st.button("Show now", key=f"{key}-now", on_click=write_name, args=(DEFAULT,))


def describe(chosen: TimeRange, now: int) -> str:
    """Returns the range in words: `16:20:00Z to now, 22:20:00Z (6 h 00 min)`; with dates unless both ends are today.

    A range up to now is the chosen length before now: a chart's first point, which is on a whole step, is up to one
    point later.
    """
    end = min(chosen.end, now)
    start = now - RANGES[chosen.name] if chosen.name else chosen.start
    today = are_today((start, end), now)
    first, last = (clock(time, now) if today else dated(time) for time in (start, end))
    return f"{first} to {'now, ' * (chosen.end >= now)}{last} ({age((end - start) / SECOND)})"
