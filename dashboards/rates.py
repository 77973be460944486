"""Rates per hour: titles and evidence of faults count errors so, and charts beside them have the same form."""

from __future__ import annotations

from dataclasses import replace

from dashboards.answers import Point, Series
from pipeline.model.signals import CATALOGUE

_FAULTS = ("{error}", "{change}", "{event}")
"""Units of what a healthy device has a few of. Packets, bits, blocks and ticks come with traffic, by the second."""


def unit_per_hour(unit: str) -> str:
    """Returns the unit of a rate of events per hour, `{error}/h` for `{error}/s`; empty for any other unit."""
    return f"{unit[:-1]}h" if unit.startswith("{") and unit.endswith("}/s") else ""


def is_judged_per_hour(signal: str, unit: str) -> bool:
    """Returns whether detectors name the rate of a signal per hour: counters of errors, changes and events."""
    known = CATALOGUE.get(signal)
    return known is not None and known.kind == "counter" and known.unit in _FAULTS and bool(unit_per_hour(unit))


def convert_series(series: Series) -> Series:
    """Returns a series whose detectors count per hour as a rate per hour; any other one unchanged."""
    if not is_judged_per_hour(series.signal, series.unit):
        return series
    points = tuple(_per_hour(point) for point in series.points)
    return replace(series, unit=unit_per_hour(series.unit), points=points)


def _per_hour(point: Point) -> Point:
    value, median, low, high = (
        None if one is None else one * 3600 for one in (point.value, point.median, point.low, point.high)
    )
    return Point(point.time, value, median, low, high)
