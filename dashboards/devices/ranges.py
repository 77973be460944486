"""The time range of charts: `?range=6h` up to now, or `?from=&to=` as chosen by zooming; both in the address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import streamlit as st

from dashboards import routes
from dashboards.devices.requests import POINTS, recent_span
from dashboards.words import age, clock
from pipeline.model.records import SECOND, from_iso, iso

HOUR = 3600 * SECOND
RANGES: Mapping[str, int] = {"1h": HOUR, "6h": 6 * HOUR, "24h": 24 * HOUR, "7d": 168 * HOUR, "30d": 720 * HOUR}
"""Ranges up to now (us): an incident, a shift, a day, a week, a month. Chosen."""
NAMES: Mapping[str, str] = {"1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d", "30d": "30 d"}
DEFAULT = "6h"
SHORTEST, LONGEST = 60 * SECOND, 366 * 24 * HOUR


@dataclass(frozen=True, slots=True)
class TimeRange:
    """[start, end) in UTC us. name: of RANGES; empty for a fixed range."""

    start: int
    end: int
    name: str

    @property
    def length(self) -> int:
        """Returns the length (us)."""
        return self.end - self.start


def read_range(now: int, points: int = POINTS) -> TimeRange:
    """Returns the range in the address; a wrong or missing one is the default."""
    asked = st.query_params
    try:
        start, end = from_iso(asked["from"]), from_iso(asked["to"])
    except (KeyError, ValueError, OverflowError):
        name = asked.get("range", DEFAULT)
        name = name if name in RANGES else DEFAULT
        return TimeRange(*recent_span(RANGES[name], now, points), name)
    if not SHORTEST <= end - start <= LONGEST:
        return TimeRange(*recent_span(RANGES[DEFAULT], now, points), DEFAULT)
    return TimeRange(start, end, "")


def write_range(start: int, end: int) -> None:
    """Writes a fixed range into the address: whole seconds, at least SHORTEST."""
    middle, half = (start + end) // 2, max(end - start, SHORTEST) // 2
    first, last = (iso((middle + sign * half) // SECOND * SECOND) for sign in (-1, 1))
    routes.change_query(**{"from": first, "to": last, "range": ""})


def write_name(name: str) -> None:
    """Writes a range up to now into the address."""
    routes.change_query(**{"range": name, "from": "", "to": ""})


def draw_range(chosen: TimeRange, key: str, names: Sequence[str] = tuple(RANGES)) -> None:
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
        row.button(label, key=f"{key}-{help_}", help=help_, on_click=write_range, args=(start, end))
    row.html(f'<span class="fp-below">{describe(chosen)}</span>')


def describe(chosen: TimeRange) -> str:
    """Returns the range in words: `16:20:00Z to 22:20:00Z (6 h 00 min)`."""
    return f"{clock(chosen.start, chosen.end)} to {clock(chosen.end, chosen.end)} ({age(chosen.length / SECOND)})"
