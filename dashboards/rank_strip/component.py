"""The rank strip: one row per rank (or several), one column per interval, colour by lateness. One byte per cell."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import routes, theme
from dashboards.frame.component import OPEN_ADDRESS_JS
from dashboards.jobs.answers import Strip
from dashboards.words import clock, zone_offset_s
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND

MAX_LABELS = 8
"""Times under the strip. Chosen: they do not touch at 390 px if every second is left out."""
_HERE = Path(__file__).parent
_strip = st.components.v2.component(
    "fleetpulse.rank_strip",
    html=(_HERE / "rank_strip.html").read_text(),
    css=theme.css_variables(":host") + (_HERE / "rank_strip.css").read_text(),
    js=OPEN_ADDRESS_JS + (_HERE / "rank_strip.js").read_text(),
)


def rank_strip(strip: Strip, stale: bool, group_href: str, highlight: str = "") -> None:
    """Draws the strip; a click opens the GPU of a rank.

    group_href: the page of a row of several ranks, without its first one.  highlight: a rank that is marked.
    """
    _strip(key="rank_strip", data=strip_data(strip, stale, group_href, highlight))


def strip_data(strip: Strip, stale: bool, group_href: str, highlight: str = "") -> dict[str, object]:
    """Returns the data of the script. Names are texts to show; levels are base64 of one byte per cell."""
    width = int(strip.width_s * SECOND)
    step = max(1, strip.columns // MAX_LABELS)
    return {
        "rows": strip.rows,
        "columns": strip.columns,
        "levels": strip.levels,
        "labels": [entity_name(name).partition(" of ")[0] for name in strip.labels],
        "perRow": strip.per_row,
        "open": group_href if strip.per_row > 1 else routes.href("node"),
        "firstRank": strip.first_rank,
        "gpus": list(strip.gpus),
        "low": strip.low,
        "step": strip.step,
        "late": strip.late,
        "lateRows": list(dict.fromkeys(rank.row for rank in strip.slow)),
        "times": [[i, clock(strip.start + i * width, strip.end)] for i in range(0, strip.columns, step)],
        "start": strip.start // 1000,
        "ahead": zone_offset_s(strip.end) * 1000,
        "widthMs": width // 1000,
        "highlight": strip.labels.index(highlight) if highlight in strip.labels else -1,
        "stale": stale,
    }
