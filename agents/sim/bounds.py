"""Bounds of a scenario: sizes and times that no fleet has are refused before anything is planned."""

from __future__ import annotations

import math
from typing import Any

from agents.sim.scenario import Scenario
from pipeline.errors import UsageError
from pipeline.records import from_iso, iso

YEARS = 10
LONGEST = YEARS * 365.25 * 86_400.0  # s; twice the life of a training cluster; chosen
MOST_EVENTS = 1_000_000  # in all that strike by themselves, and as many live ones: minutes of planning; chosen
_MAX_GPUS = 200_000  # twice the largest site the design names
_MAX_WIDTH = 32  # GPUs of a node
FIRST, BEHIND = "1970-01-01T00:00:00Z", "2200-01-01T00:00:00Z"
"""Where second 0 may lie: what follows it by ten years and more is still a time that can be written."""


def check(scenario: Scenario) -> None:
    """Raises UsageError that names file, key, what was found and what was wanted."""
    for key, found, holds, wanted in (*_sizes(scenario), *_times(scenario)):
        if not holds:
            raise UsageError(f"{scenario.source}: {key} = {found}: out of range; wanted {wanted}")


def _sizes(scenario: Scenario) -> list[tuple[str, Any, bool, str]]:
    fleet, rates = scenario.fleet, scenario.rates
    gpus, factor = fleet.nodes * fleet.gpus_per_node, "a factor from 0 that is finite"
    return [
        ("[fleet] nodes", fleet.nodes, fleet.nodes >= 1, "at least 1"),
        ("[fleet] gpus_per_node", fleet.gpus_per_node, 1 <= fleet.gpus_per_node <= _MAX_WIDTH, f"1 to {_MAX_WIDTH}"),
        ("[fleet] nodes x gpus_per_node", gpus, gpus <= _MAX_GPUS, f"at most {_MAX_GPUS} GPUs"),
        ("[fleet] missing", fleet.missing, 0 <= fleet.missing < 1, "a share from 0 to below 1"),
        ("[rates] faults", rates.faults, _finite(rates.faults), factor),
        ("[rates] confounders", rates.confounders, _finite(rates.confounders), factor),
    ]


def _times(scenario: Scenario) -> list[tuple[str, Any, bool, str]]:
    live, duration, interval, jitter = scenario.live, scenario.duration, scenario.interval, scenario.fleet.jitter
    years, hours = f"at most {YEARS} years ({LONGEST:.0f} s)", scenario.jobs.mean_hours
    rare = live.every == 0 or live.hours * 3600 <= MOST_EVENTS * live.every
    return [
        ("duration", duration, 0 < duration <= LONGEST, f"seconds above 0, {years}"),
        ("interval", interval, 0.1 <= interval <= 3600, "0.1 to 3600 s"),
        ("[fleet] jitter", jitter, 0 <= jitter <= 0.5 * interval, "seconds from 0 to half the interval"),
        ("[jobs] mean_hours", hours, _finite(hours), "hours above 0, or 0: jobs that never end"),
        ("[live] every", live.every, _finite(live.every), "seconds above 0, or 0: nothing"),
        ("[live] hours", live.hours, 0 <= live.hours * 3600 <= LONGEST, f"hours from 0, {years}"),
        ("[live] every", live.every, rare, f"a time that makes at most {MOST_EVENTS:,} faults in {live.hours:g} h"),
        ("start", _shown(scenario.start), _dated(scenario.start), f"a time from {FIRST} to before {BEHIND}"),
    ]


def _finite(value: float) -> bool:
    return value >= 0 and math.isfinite(value)


def _dated(start: int | None) -> bool:
    return start is None or from_iso(FIRST) <= start < from_iso(BEHIND)


def _shown(start: int | None) -> str:
    return "none" if start is None else iso(start)
