"""Trends of a unit over time against the other units of its kind."""

from __future__ import annotations

from typing import Any

import altair as alt

from dashboards.answers import Series
from dashboards.evidence import chart_rows, time_tooltip
from dashboards.theme import Palette
from dashboards.words import axis_label, is_share, unit_name

HEIGHT = 130
"""Height of one chart (px). Chosen: four are visible at 1440 x 900."""
TRENDS = (
    "coolant.flow",
    "coolant.supply_temperature",
    "coolant.return_temperature",
    "coolant.pressure",
    "coolant.valve_position",
    "pump.speed",
    "reservoir.level",
    "filter.pressure_drop",
    "power.draw",
    "power.voltage",
    "power.temperature",
)
"""Signals with a chart, where the unit reports them."""
_DAY_S = 6 * 3600 * 1_000_000


def trend(series: Series, palette: Palette) -> alt.LayerChart:
    """Returns the unit's line over the median and the middle 80 % of the others of its kind."""
    span = series.points[-1].time - series.points[0].time if series.points else 0
    axis = alt.Axis(format="%d %b %H:%M" if span > _DAY_S else "%H:%M", grid=False, tickCount=5, labelExpr=axis_label())
    x = alt.X("time:T", title=None, scale=alt.Scale(type="utc", nice=False), axis=axis)
    share = is_share(series.signal)
    # without a format the axis has 3e+2 for 300
    unit, ticks = "%" if share else unit_name(series.unit) or None, alt.Axis(format=".3~%" if share else ",~f")
    y = alt.Scale(zero=False, nice=True)
    layers: list[Any] = []
    if series.peers:
        band = alt.Chart(alt.InlineData(values=chart_rows(series, "low")))
        layers.append(
            band.mark_area(color=palette.band, opacity=0.35).encode(x=x, y=alt.Y("low:Q", scale=y), y2="high:Q")
        )
        middle = alt.Chart(alt.InlineData(values=chart_rows(series, "median")))
        layers.append(
            middle.mark_line(color=palette.median, strokeDash=[4, 3], strokeWidth=1.5).encode(x=x, y=alt.Y("median:Q"))
        )
    own = alt.Chart(alt.InlineData(values=chart_rows(series, "value")))
    tooltip = [
        time_tooltip(series.points[-1].time if series.points else 0),
        alt.Tooltip("value_text:N", title="measured"),
        alt.Tooltip("median_text:N", title="median of its kind"),
    ]
    line = own.mark_line(color=palette.device, strokeWidth=2)
    layers.append(line.encode(x=x, y=alt.Y("value:Q", title=unit, scale=y, axis=ticks), tooltip=tooltip))
    return alt.LayerChart(layer=layers).properties(height=HEIGHT)
