"""`/explore`: any signals of any devices over one time axis, and SQL over the store. The address has all of it."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape

import numpy as np
import streamlit as st

from dashboards import links, markup, routes, snapshot
from dashboards.devices import happened, html, incident_rows, ranges, requests
from dashboards.devices.answers import Compared, Comparison
from dashboards.devices.html import entity_link
from dashboards.devices.ranges import TimeRange
from dashboards.explore import choose, export, sql_view
from dashboards.explore.choose import Choice
from dashboards.time_chart.component import Look, Mark, signal_title, time_charts
from dashboards.views import parts
from dashboards.words import amount, percent, plain, reading, unit_name
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND
from pipeline.runtime.guides import guide

POINTS = 500
"""Points of a chart: one per 2 pixels at 1440. Chosen."""
MAX_MARKED = 3
"""Devices whose incidents and events are marked; each costs two requests. Chosen."""
VIEWS = {"chart": "Charts", "sql": "SQL"}


def page() -> None:
    """Draws the page."""
    st.html(links.breadcrumbs([links.Link("Fleet", routes.href("fleet")), "Explore"]))
    view = st.query_params.get("view", "chart")
    st.session_state["explore-view"] = view if view in VIEWS else "chart"
    st.segmented_control(
        "View", list(VIEWS), key="explore-view", format_func=VIEWS.__getitem__, label_visibility="collapsed",
        on_change=_write_view, required=True,
    )  # fmt: skip
    if st.session_state["explore-view"] == "sql":
        sql_view.draw()
        return
    chosen = choose.read_choice()
    choose.draw_choice(chosen)
    parts.draw_refreshing(lambda: _body(chosen))


def _write_view() -> None:
    st.query_params["view"] = st.session_state["explore-view"] or "chart"


def _body(chosen: Choice) -> None:
    now = snapshot.now()
    span = ranges.read_range(now, POINTS)
    ranges.draw_range(span, now, "explore-range")
    if chosen.unknown:
        text = f"{', '.join(chosen.unknown)}: not in the catalogue. {guide('signals.md')} lists all."
        st.html(markup.notice(text, "degraded", "Unknown signals are left out."))
    if not chosen.entities or not chosen.signals:
        _draw_start(chosen)
        return
    answer = requests.fetch_comparison(
        chosen.entities, chosen.signals, span.start, span.end, chosen.peers, _count_points(span)
    )
    simulated = None if answer.value is None else answer.value.simulated
    parts.draw_head(plain(title(chosen)), [], _about(chosen, answer.value), answer, simulated=simulated)
    parts.draw_error(answer)
    if answer.value is None:
        return
    marks = _marks(chosen, span, now)
    _draw_charts(answer.value, marks, bool(answer.error))
    _draw_table(answer.value)
    _draw_export(answer.value)


def _count_points(span: TimeRange) -> int:
    """Returns the number of points: of a fixed range as many as of one up to now."""
    return max(1, min(POINTS, span.length // SECOND))


def title(chosen: Choice) -> str:
    """Returns the headline: the devices and how many signals."""
    names = [entity_name(e) for e in chosen.entities[:3]]
    more = f" and {len(chosen.entities) - 3} more" if len(chosen.entities) > 3 else ""
    return f"{', '.join(names)}{more}: {amount(len(chosen.signals), 'signal', 'signals')}"


def _about(chosen: Choice, found: Comparison | None) -> str:
    """Returns which peers the charts have."""
    if chosen.peers == "none":
        return ""
    if found and not any(signal.peers for signal in found.signals):
        return "Peers: none, these devices have no others to be compared with."
    sample = "over a long range an even sample of them"
    return f"Peers: {choose.PEERS[chosen.peers].lower()}, those of the first device of a chart; {sample}."


def _draw_start(chosen: Choice) -> None:
    """Draws what to do next while devices or signals are missing."""
    answer = snapshot.fetch_fleet()
    fleet = answer.value
    parts.draw_head("Explore" if fleet else "Explore: fleet state unknown", [], "", answer)
    parts.draw_error(answer)
    missing = [name for name, values in (("a device", chosen.entities), ("a signal", chosen.signals)) if not values]
    st.html(markup.notice(f"Choose {' and '.join(missing)} above. Up to 16 devices and 8 signals share one time axis."))
    worst = [n for n in fleet.nodes if n.state in ("critical", "degraded")][:4] if fleet else []
    nodes = worst or (list(fleet.nodes[:1]) if fleet else [])
    rows = [
        html.link(html.explore_href([n.entity], choose.PRESETS["GPU heat"]), f"GPU heat of {entity_name(n.entity)}")
        for n in nodes
    ]
    rows.append(html.link(routes.href("explore", view="sql"), "Query the store with SQL"))
    st.html(" · ".join(rows))


def _marks(chosen: Choice, span: TimeRange, now: int) -> list[Mark]:
    """Returns incidents and events of the first devices."""
    found: list[Mark] = []
    for entity in chosen.entities[:MAX_MARKED]:
        detail = requests.fetch_entity(entity).value
        events = requests.fetch_events(entity, span.start, span.end, 60).value
        found += incident_rows.marks(detail.incidents if detail else (), now)
        found += happened.marks(events.items if events else ())
    return list({(mark.time, mark.text): mark for mark in found}.values())


def _draw_charts(found: Comparison, marks: list[Mark], stale: bool) -> None:
    entities = list(dict.fromkeys(line.entity for signal in found.signals for line in signal.lines))
    own = frozenset(entities) if len(entities) == 1 else frozenset()
    height = 210 if len(found.signals) <= 3 else 150
    picked = time_charts(found, marks, Look(height, own, stale), "explore")
    if picked:
        ranges.write_range(*picked)
        st.rerun(scope="fragment")


# --- table and export -----------------------------------------------------------------------------------------------


def _draw_table(found: Comparison) -> None:
    st.html(markup.section("Values in the time range"))
    rows = [_row(signal, i) for signal in found.signals for i in range(len(signal.lines))]
    head = ("Signal", "Device", "Last", "Lowest", "Mean", "Highest", "Peers' median", "Without data")
    st.html(html.table(head, rows, "None of these devices has these signals.", "fp-devices"))


def _row(signal: Compared, i: int) -> list[str]:
    line, unit = signal.lines[i], signal.unit
    known = line.values[np.isfinite(line.values)]
    texts = ["no data"] * 4
    if len(known):
        low = known.min() if line.low is None else np.nanmin(line.low)
        high = known.max() if line.high is None else np.nanmax(line.high)
        texts = [reading(float(v), signal.name, unit) for v in (known[-1], low, known.mean(), high)]
    band = None if signal.band is None else signal.band[0][np.isfinite(signal.band[0])]
    peers = reading(float(np.median(band)), signal.name, unit) if band is not None and len(band) else "none"
    missing = percent(1 - len(known) / max(1, len(line.values)))
    cells = [escape(text) for text in (*texts, peers, missing)]
    return [escape(signal_title(signal.name, signal.help)), entity_link(line.entity), *cells]


def _draw_export(found: Comparison) -> None:
    """Draws the buttons; the file is written when one is pressed."""
    name = f"fleetpulse-{datetime.fromtimestamp(found.start / SECOND, UTC):%Y%m%dT%H%M%SZ}"
    row = st.container(horizontal=True, vertical_alignment="center", gap="small")
    row.download_button(
        "CSV", lambda: export.write_csv(export.chart_table(found)), f"{name}.csv", "text/csv",
        key="chart-csv", on_click="ignore", icon=":material/download:",
    )  # fmt: skip
    row.download_button(
        "Parquet", lambda: export.write_parquet(export.chart_table(found)), f"{name}.parquet",
        "application/vnd.apache.parquet", key="chart-parquet", on_click="ignore", icon=":material/download:",
    )  # fmt: skip
    shown = ", ".join(sorted({f"{unit_name(s.unit) or 'no unit'}" for s in found.signals}))
    row.html(f'<span class="fp-below">What the charts show, with the band of the peers. Units: {escape(shown)}.</span>')
