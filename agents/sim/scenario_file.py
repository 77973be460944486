"""Scenarios are read from TOML: every key known, every number in bounds, each error naming file, key and mend."""

from __future__ import annotations

import datetime
import difflib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agents.sim.bounds import check
from agents.sim.kinds import KINDS
from agents.sim.scenario import Fleet, Jobs, Line, Live, Rates, Scenario, demo
from pipeline.errors import UsageError
from pipeline.records import from_iso
from pipeline.settings import build

_FINITE = sys.float_info.max
_FAULT_KEYS = {"kind", "entity", "onset", "end"}


@dataclass(frozen=True)
class _File:
    """Top of a scenario file, but for version, start and [[fault]]."""

    duration: float
    interval: float
    fleet: Fleet = field(default_factory=Fleet)
    live: Live = field(default_factory=Live)
    jobs: Jobs = field(default_factory=Jobs)
    rates: Rates = field(default_factory=Rates)


def load(source: str | Path) -> Scenario:
    """Scenario `demo`, or that of a TOML file. Raises UsageError naming file, key and mend."""
    if str(source) == "demo":
        return demo()
    try:
        table = tomllib.loads(Path(source).read_text())
    except OSError as error:
        raise UsageError(f"{source}: cannot be read: {error.strerror}; wanted a scenario in TOML, or 'demo'") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: is not TOML: {error}") from error
    return parse(table, str(source))


def parse(table: Mapping[str, Any], source: str) -> Scenario:
    """Scenario of a TOML table. Raises UsageError."""
    rest = dict(table)
    version = rest.pop("version", None)
    if version != 1:
        raise UsageError(f"{source}: version = {version!r}; wanted version = 1")
    lines = rest.pop("fault", [])
    if "faults" in rest:
        raise UsageError(f"{source}: faults: no such section; did you mean '[[fault]]'?")
    if not isinstance(lines, list):
        raise UsageError(f"{source}: [fault] is one table; wanted [[fault]], once per fault")
    start = _start(rest.pop("start", None), source)
    own = _kinds(rest, source)
    file = build(_File, rest, source)
    scenario = Scenario(file.duration, file.interval, start, file.fleet, (), file.live, source, file.jobs)
    scenario = replace(scenario, rates=replace(file.rates, kinds=own))
    check(scenario)
    found = (_line(line, f"{source}: [[fault]] {i + 1}", file.duration) for i, line in enumerate(lines))
    return replace(scenario, faults=tuple(found))


def _kinds(rest: dict[str, Any], source: str) -> dict[str, float]:
    """Takes [rates.kinds] out of the table. Raises UsageError for a kind that there is not."""
    rates = rest.get("rates")
    if not isinstance(rates, dict) or "kinds" not in rates:
        return {}
    rest["rates"] = {k: v for k, v in rates.items() if k != "kinds"}
    given = rates["kinds"]
    for name, value in given.items() if isinstance(given, dict) else [("kinds", given)]:
        if name not in KINDS:
            raise UsageError(f"{source}: [rates.kinds] {name}: {_nearest(name, KINDS)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UsageError(f"{source}: [rates.kinds] {name} = {value!r}; wanted a rate per {KINDS[name].rate.per}")
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
        raise UsageError(f"{source}: start = {value!r}; wanted a time like 2026-01-01T00:00:00Z") from error


def _line(table: Any, where: str, duration: float) -> Line:
    """One [[fault]] table as a Line."""
    if not isinstance(table, dict) or not isinstance(table.get("kind"), str):
        raise UsageError(f"{where}: kind: missing; wanted one of {', '.join(KINDS)}")
    name = table["kind"]
    if name not in KINDS:
        close = difflib.get_close_matches(name, KINDS, 1)
        mend = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(KINDS)}"
        raise UsageError(f"{where}: kind = {name!r}: no such fault kind; {mend}")
    known = {*_FAULT_KEYS, *KINDS[name].__dataclass_fields__}
    for key in (k for k in table if k not in known):
        close = difflib.get_close_matches(key, known, 1)
        mend = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"
        raise UsageError(f"{where}: {key}: no such key of {name}; {mend}")
    onset, end = (_seconds(table, key, where, default) for key, default in (("onset", None), ("end", duration)))
    entity = table.get("entity")
    if onset >= duration:
        raise UsageError(f"{where}: onset = {onset:g}; wanted it before the end of the scenario at {duration:g} s")
    if end <= onset or not (entity is None or isinstance(entity, str)):
        raise UsageError(
            f"{where}: onset = {onset}, end = {end}, entity = {entity!r}; wanted end after onset, entity a text"
        )
    kind = build(KINDS[name], {k: v for k, v in table.items() if k not in _FAULT_KEYS}, where)
    for key, (low, high) in kind.limits.items():
        value = getattr(kind, key)
        if value is not None and not low <= value <= high:
            raise UsageError(f"{where}: {key} = {value}; wanted {low:g} to {high:g}")
    for key, words in kind.choices.items():
        if getattr(kind, key) not in (None, *words):
            raise UsageError(
                f"{where}: {key} = {getattr(kind, key)!r}; wanted one of {', '.join(dict.fromkeys(words))}"
            )
    return Line(kind, onset, end, entity)


def _seconds(table: Mapping[str, Any], key: str, where: str, default: float | None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _FINITE:
        raise UsageError(f"{where}: {key} = {value!r}; wanted seconds after the start, a finite number from 0")
    return float(value)
