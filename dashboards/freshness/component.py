"""The stamp `data as of ...`: amber after three missed rounds, red when the API does not answer, never green."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streamlit as st

from dashboards import theme
from dashboards.snapshot import INTERVAL, Answer
from pipeline.records import SECOND, iso

_HERE = Path(__file__).parent
_stamp = st.components.v2.component(
    "fleetpulse.freshness",
    html='<div class="stamp" aria-live="off"><i></i><span class="what"></span></div>',
    css=theme.css_variables(":host") + (_HERE / "freshness.css").read_text(),
    js=(_HERE / "freshness.js").read_text(),
)


def freshness(answer: Answer[Any], as_of: int | None, now: int, live: bool, behind_s: float | None = None) -> None:
    """Draws the stamp for an answer that describes the moment `as_of`, None if there is none yet."""
    _stamp(key="freshness", data=stamp_data(answer, as_of, now, live, behind_s))


def stamp_data(answer: Answer[Any], as_of: int | None, now: int, live: bool, behind_s: float | None) -> dict[str, Any]:
    """What the script gets: the age (s) by the server's clock, and by how much (s) judgement lags behind the data."""
    return {
        "clock": "" if as_of is None else iso(as_of)[11:19] + "Z",
        "age": 0.0 if as_of is None else max(0.0, (now - as_of) / SECOND),
        "interval": INTERVAL,
        "unreachable": bool(answer.error),
        "live": live,
        "behind": behind_s,
    }
