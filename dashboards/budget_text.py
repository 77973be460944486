"""The false alarm budget of a detector in units of time: the API counts the mean run between two false alarms in
ticks."""

from __future__ import annotations

import re

_STEP = re.compile(r"\bat (\d+(?:\.\d+)?) s\b")
_RUN = re.compile(r"(\d[\d.]*(?:e[+-]?\d+)?) ticks(?: and (\w+))?(?: \([\d,]+ years\))?")
_DAY = 86_400
_YEAR = 365.25 * _DAY
LONGEST = 1e6
"""Years from which only "over" is said. Chosen: beyond what a model of noise supports."""


def plain_budget(line: str) -> str:
    """Returns a line of a budget with times in place of ticks; unchanged if it does not say how long a tick is."""
    step = _STEP.search(line)
    if step is None:
        return line
    seconds = float(step[1])

    def as_time(found: re.Match[str]) -> str:
        return run_text(float(found[1]) * seconds) + (f" and {found[2]}" if found[2] else "")

    return _RUN.sub(as_time, line)


def run_text(seconds: float) -> str:
    """Returns a mean time between two false alarms, in one unit."""
    years = seconds / _YEAR
    if years > LONGEST:
        return "over a million years"
    if years >= 2:
        return f"{years:,.0f} years"
    return f"{seconds / _DAY:,.0f} days" if seconds >= 2 * _DAY else f"{seconds / 3600:,.1f} h"
