"""Charts (altair) from a series. Times are UTC on every axis."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import altair as alt

from dashboards.answers import Point, Series
from dashboards.theme import Palette
from dashboards.words import amount, clock, quantity, unit_name
from pipeline.model.entity_names import entity_name
from pipeline.model.records import SECOND

HEIGHT = 250
"""Height (px): evidence and buttons stay visible at 1440 x 900. Chosen."""
MIN_BAND_PEERS = 5
"""Fewest peers for which a band of 80 % is drawn; with fewer, the median is enough. Chosen."""
GAP_STEPS = 3
"""A line breaks where points are further apart than this many usual steps. Chosen."""
_DAY = 86_400 * SECOND


def peers_chart(series: Series, onset: int, palette: Palette, height: int = HEIGHT) -> alt.LayerChart:
    """Returns a chart: the device's line, the median and 80 % band of its peers, and the onset."""
    names = legend_names(series)
    drawn = 3 if series.peers >= MIN_BAND_PEERS else 2 if series.peers else 1
    scale = alt.Scale(domain=list(names)[:drawn], range=[palette.device, palette.median, palette.band][:drawn])
    legend = alt.Legend(
        orient="top",
        title=None,
        symbolType="square",
        symbolOpacity=1,
        symbolStrokeWidth=5,
        symbolSize=50,
        labelLimit=400,
    )
    colour = alt.Color("mark:N", scale=scale, legend=legend)
    x = alt.X("time:T", title=None, scale=alt.Scale(type="utc", nice=False), axis=_time_axis(series))
    unit, fitted = unit_name(series.unit) or None, alt.Scale(zero=False, nice=True)

    def chart(part: str, name: str) -> alt.Chart:
        data = alt.InlineData(values=chart_rows(series, part))
        return alt.Chart(data).transform_calculate(mark=json.dumps(name)).encode(x=x, color=colour)

    band = (
        chart("median", names[2])
        .mark_area(opacity=0.38)
        .encode(y=alt.Y("low:Q", title=unit, scale=fitted), y2="high:Q")
    )
    median = chart("median", names[1]).mark_line(strokeDash=[5, 3], strokeWidth=1.5)
    median = median.encode(y=alt.Y("median:Q", title=unit))
    device = (
        chart("value", names[0])
        .mark_line(strokeWidth=2.4)
        .encode(y=alt.Y("value:Q", title=unit, scale=fitted), tooltip=_tooltip(series))
    )
    layers = [band] * (series.peers >= MIN_BAND_PEERS) + [median] * (series.peers > 0) + [device]
    return alt.LayerChart(layer=[*layers, *_onset(onset, palette)]).properties(height=height)


def legend_names(series: Series) -> tuple[str, str, str]:
    """Returns the legend: the device, the median of its peers, the middle 80 % of them."""
    where = {"": "", "class": " of its kind"}.get(series.peer_kind, f" in the same {series.peer_kind}")
    several = f"median of {amount(series.peers, 'peer', 'peers')}{where}"
    return entity_name(series.entity), several if series.peers != 1 else f"its one peer{where}", "middle 80 % of peers"


def chart_rows(series: Series, part: str) -> list[dict[str, Any]]:
    """Returns the rows of the points that have `part`, times in ms for Vega, with an empty row in each gap."""
    points = [p for p in series.points if getattr(p, part) is not None]
    steps = sorted(b.time - a.time for a, b in pairwise(points))
    usual = steps[(len(steps) - 1) // 2] if steps else 0
    rows: list[dict[str, Any]] = []
    for i, point in enumerate(points):
        if i and point.time - points[i - 1].time > GAP_STEPS * usual:
            rows.append({"time": (points[i - 1].time + usual) // 1000, part: None})
        rows.append(_row(point, series.unit))
    return rows


def _row(point: Point, unit: str) -> dict[str, Any]:
    return {
        "time": point.time // 1000,
        "value": point.value,
        "median": point.median,
        "low": point.low,
        "high": point.high,
        "value_text": "not measured" if point.value is None else quantity(point.value, unit),
        "median_text": "not measured" if point.median is None else quantity(point.median, unit),
    }


def _time_axis(series: Series) -> alt.Axis:
    span = series.points[-1].time - series.points[0].time if series.points else 0
    return alt.Axis(
        format="%d %b %H:%M" if span > _DAY else "%H:%M", grid=False, tickCount=8, labelExpr="datum.label + 'Z'"
    )


def _tooltip(series: Series) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("time:T", title="UTC", format="%H:%M:%S", timeUnit="utcyearmonthdatehoursminutesseconds"),
        alt.Tooltip("value_text:N", title=entity_name(series.entity)),
        alt.Tooltip("median_text:N", title="median of peers"),
    ]


def _onset(onset: int, palette: Palette) -> list[alt.Chart]:
    base = alt.Chart(alt.InlineData(values=[{"time": onset // 1000, "label": f"onset {clock(onset, onset)}"}]))
    x = alt.X("time:T", scale=alt.Scale(type="utc"))
    rule = base.mark_rule(color=palette.ink, strokeWidth=1.5).encode(x=x)
    label = base.mark_text(
        align="center", baseline="bottom", dy=-3, fontSize=12, fontWeight=600, color=palette.ink
    ).encode(x=x, y=alt.value(0), text="label:N")
    return [rule, label]
