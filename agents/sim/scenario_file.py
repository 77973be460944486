"""Reads scenarios from TOML: keys, types and bounds are checked before anything is planned.

Every error names the file, the key, the value found and the values expected.
"""

from __future__ import annotations

import datetime
import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.sim.kinds import KINDS
from agents.sim.scenario import Fleet, Jobs, Line, Live, Rates, Scenario, demo
from agents.sim.world import draw_world
from pipeline.config.settings import build_section
from pipeline.model.errors import UsageError
from pipeline.model.records import from_iso, iso
from pipeline.model.toml_text import parse_toml

YEARS = 10
LONGEST = YEARS * 365.25 * 86_400.0  # s; twice the life of a training cluster; chosen
MOST_EVENTS = 1_000_000  # random events in total, and as many live ones: chosen: planning takes minutes
_MAX_GPUS = 200_000  # twice the largest site the design names
_MAX_WIDTH = 32  # GPUs of a node
FIRST, END_OF_STARTS = "1970-01-01T00:00:00Z", "2200-01-01T00:00:00Z"
"""Range of second 0: ten years later is still a valid time."""


def check(scenario: Scenario) -> None:
    """Raises UsageError that names file, key, the value found and the values expected."""
    for key, found, holds, wanted in (*_sizes(scenario), *_times(scenario)):
        if not holds:
            raise UsageError(f"{scenario.source}: {key} = {found}: out of range; expected {wanted}")


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
        (
            "[live] every",
            live.every,
            rare,
            f"an interval that gives at most {MOST_EVENTS:,} faults in {live.hours:g} h",
        ),
        ("start", _shown(scenario.start), _dated(scenario.start), f"a time from {FIRST} to before {END_OF_STARTS}"),
    ]


def _finite(value: float) -> bool:
    return value >= 0 and math.isfinite(value)


def _dated(start: int | None) -> bool:
    return start is None or from_iso(FIRST) <= start < from_iso(END_OF_STARTS)


def _shown(start: int | None) -> str:
    return "none" if start is None else iso(start)


_FINITE = sys.float_info.max
_FAULT_KEYS = {"kind", "entity", "onset", "end"}


@dataclass(frozen=True)
class _WorldNumber:
    """[world]: number of a drawn world; -1: the default one."""

    number: int = -1


@dataclass(frozen=True)
class _File:
    """Top of a scenario file, without version, start and [[fault]]."""

    duration: float
    interval: float | None = None
    fleet: Fleet = field(default_factory=Fleet)
    live: Live = field(default_factory=Live)
    jobs: Jobs = field(default_factory=Jobs)
    rates: Rates = field(default_factory=Rates)
    world: _WorldNumber = field(default_factory=_WorldNumber)


def load(source: str | Path) -> Scenario:
    """Scenario `demo`, or that of a TOML file. Raises UsageError naming file, key and hint."""
    if str(source) == "demo":
        return demo()
    try:
        table = parse_toml(Path(source).read_text())
    except OSError as error:
        raise UsageError(
            f"{source}: cannot be read: {error.strerror}; expected a scenario in TOML, or 'demo'"
        ) from error
    except ValueError as error:
        raise UsageError(f"{source}: is not TOML: {error}") from error
    return parse(table, str(source))


def parse(table: Mapping[str, Any], source: str) -> Scenario:
    """Returns the scenario of a TOML table. Raises UsageError."""
    rest = dict(table)
    version = rest.pop("version", None)
    if version != 1:
        raise UsageError(f"{source}: version = {version!r}; expected version = 1")
    lines = rest.pop("fault", [])
    if "faults" in rest:
        raise UsageError(f"{source}: faults: no such section; did you mean '[[fault]]'?")
    if not isinstance(lines, list):
        raise UsageError(f"{source}: [fault] is one table; expected [[fault]], once per fault")
    start = _start(rest.pop("start", None), source)
    own = _kinds(rest, source)
    file = build_section(_File, rest, source)
    scenario = _in_world(file, table, Scenario(file.duration, file.interval or 0.0, start, source=source))
    scenario = replace(scenario, live=file.live, rates=replace(file.rates, kinds=own))
    check(scenario)
    found = (_line(line, f"{source}: [[fault]] {i + 1}", file.duration) for i, line in enumerate(lines))
    return replace(scenario, faults=tuple(found))


def _in_world(file: _File, table: Mapping[str, Any], scenario: Scenario) -> Scenario:
    """Returns the scenario in its world, which gives what the file leaves out. Raises UsageError."""
    number, source = file.world.number, scenario.source
    if number < 0 and "world" in table:
        raise UsageError(f"{source}: [world] number = {number}: out of range; expected a whole number from 0")
    if number < 0 and file.interval is None:
        raise UsageError(f"{source}: interval: missing; expected seconds, or [world], which has one")
    if number < 0:
        return replace(scenario, fleet=file.fleet, jobs=file.jobs)
    drawn = scenario.in_world(draw_world(number))
    fleet = replace(file.fleet, missing=drawn.fleet.missing, jitter=drawn.fleet.jitter)
    fleet = replace(fleet, **{key: getattr(file.fleet, key) for key in table.get("fleet", {})})
    return replace(
        drawn,
        interval=file.interval or drawn.interval,
        fleet=fleet,
        jobs=file.jobs if "jobs" in table else drawn.jobs,
    )


def _kinds(rest: dict[str, Any], source: str) -> dict[str, float]:
    """Removes [rates.kinds] from the table and returns it. Raises UsageError for an unknown kind."""
    rates = rest.get("rates")
    if not isinstance(rates, dict) or "kinds" not in rates:
        return {}
    rest["rates"] = {k: v for k, v in rates.items() if k != "kinds"}
    given = rates["kinds"]
    for name, value in given.items() if isinstance(given, dict) else [("kinds", given)]:
        if name not in KINDS:
            raise UsageError(f"{source}: [rates.kinds] {name}: {_nearest(name, KINDS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UsageError(f"{source}: [rates.kinds] {name} = {value!r}; expected a rate per {KINDS[name].rate.per}")
    return {name: float(value) for name, value in given.items()}


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"no such name; did you mean '{close[0]}'?" if close else f"no such name; known: {', '.join(sorted(known))}"


def _start(value: Any, source: str) -> int | None:
    if value is None:
        return None
    try:
        return from_iso(value.isoformat() if isinstance(value, datetime.datetime) else value)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{source}: start = {value!r}; expected a time like 2026-01-01T00:00:00Z") from error


def _line(table: Any, where: str, duration: float) -> Line:
    """Returns one [[fault]] table as a Line."""
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise UsageError(f"{where}: kind: missing; expected one of {', '.join(KINDS)}")
    name = table["kind"]
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(KINDS)}"
        raise UsageError(f"{where}: kind = {name!r}: no such fault kind; {hint}")
    known = {*_FAULT_KEYS, *KINDS[name].__dataclass_fields__}
    for key in (k for k in table if k not in known):
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"
        raise UsageError(f"{where}: {key}: no such key of {name}; {hint}")
    onset, end = (_seconds(table, key, where, default) for key, default in (("onset", None), ("end", duration)))
    entity = table.get("entity")
    if onset >= duration:
        raise UsageError(f"{where}: onset = {onset:g}; expected it before the end of the scenario at {duration:g} s")
    if end <= onset or not (entity is None or isinstance(entity, str)):
        raise UsageError(
            f"{where}: onset = {onset}, end = {end}, entity = {entity!r}; expected end after onset, entity a text"
        )
    kind = build_section(KINDS[name], {k: v for k, v in table.items() if k not in _FAULT_KEYS}, where)
    for key, (low, high) in kind.limits.items():
        value = getattr(kind, key)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{where}: {key} = {value}; expected {low:g} to {high:g}")
    for key, words in kind.choices.items():
        if getattr(kind, key) not in (None, *words):
            raise UsageError(
                f"{where}: {key} = {getattr(kind, key)!r}; expected one of {', '.join(dict.fromkeys(words))}"
            )
    return Line(kind, onset, end, entity)


def _seconds(table: Mapping[str, Any], key: str, where: str, default: float | None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _FINITE:
        raise UsageError(f"{where}: {key} = {value!r}; expected seconds after the start, a finite number from 0")
    return float(value)
