"""The stamp `Data as of ...`: age of the newest stored data, and lag of the analysis; below it the choice of how often
the page refreshes.

Amber after three missed refreshes, for old data, and while the pipeline is not ready; red if the API does not answer,
or refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import theme
from dashboards.answers import Fleet
from dashboards.routes import PAUSED, SLOW
from dashboards.snapshot import INTERVAL_S, CachedAnswer
from dashboards.words import clock
from pipeline.model.records import SECOND

INTERVALS: dict[str, int | None] = {"": INTERVAL_S, SLOW: 30, PAUSED: None}
"""Value of `live` in the address -> time between two refreshes (s). Chosen: 30 s for slow lines and wall screens."""
USUAL = "usual"
"""What the script calls the value without a word in the address: an empty trigger is none."""
_HERE = Path(__file__).parent
_stamp = st.components.v2.component(
    "fleetpulse.freshness",
    html=(_HERE / "freshness.html").read_text(),
    css=theme.css_variables(":host") + (_HERE / "freshness.css").read_text(),
    js=(_HERE / "freshness.js").read_text(),
)


def freshness(answer: CachedAnswer[Any], fleet: CachedAnswer[Fleet], now: int, live: str) -> str | None:
    """Draws the stamp of a page that shows `answer`; the age of the data comes from `fleet`. Returns how the page is
    to refresh from now on if a person chose it, in the words of `live` in the address, else None."""
    data = stamp_data(answer, fleet, now, live)
    chosen = _stamp(key="freshness", data=data, on_live_change=lambda: None).live
    return None if not chosen else "" if chosen == USUAL else str(chosen)


def stamp_data(answer: CachedAnswer[Any], fleet: CachedAnswer[Fleet], now: int, live: str) -> dict[str, Any]:
    """Returns the data of the script. Ages of the response and of the newest data are in s by this machine's clock.

    live: as in the address.
    """
    known = fleet.value
    newest = None if known is None or known.newest is None else min(known.newest, known.as_of)
    return {
        "clock": "" if newest is None else clock(newest, now),
        "age": 0.0 if newest is None else max(0.0, (now - newest) / SECOND),
        "answered": max(0.0, (now - min(answer.fetched, fleet.fetched)) / SECOND),
        "answered_at": clock(min(answer.fetched, fleet.fetched), now),
        "interval": INTERVALS[live] or INTERVAL_S,
        "unready": known is not None and bool(known.unready),
        "fault": next((describe_fault(one) for one in (answer, fleet) if one.error and one.status != 404), ""),
        "live": live or USUAL,
        "behind": None if known is None else analysis_lag(known),
    }


def describe_fault(answer: CachedAnswer[Any]) -> str:
    """Returns what the API did instead of an answer, in few words."""
    if answer.status is None:
        return "API unreachable"
    return "API refuses the dashboard" if answer.status in (401, 403) else f"API answers HTTP {answer.status}"


def analysis_lag(fleet: Fleet) -> float | None:
    """Returns the lag of the analysis behind the newest data (s), None before the first evaluated frame."""
    if fleet.watermark is None or fleet.newest is None:
        return None
    return max(0.0, (min(fleet.newest, fleet.as_of) - fleet.watermark) / SECOND)
