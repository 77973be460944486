"""The small suite that every change is tested with: three of each kind of fault, and harmless events, in a few hours.

Too little for a rate, enough to see that a change has lost a kind, moved a delay or begun to page. Its figures and how
far they may move lie in tests/detectors/scenario_suite.toml; `python -m benchmarks.detection.renew` writes them anew.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from agents.sim.faults.kind import Kind
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from benchmarks.detection.judge import judge
from benchmarks.detection.results import ROOT, result_of, scored
from benchmarks.detection.scenarios import INTERVAL, NAMES, kinds_of
from detectors.score import merge

TABLE = ROOT / "tests" / "detectors" / "scenario_suite.toml"
SEED = 7  # one of those to tune on
EACH = 3  # events of a kind
_CLEAN_S, _FIRST_S = 10_800.0, 1800.0  # length without faults; when the first fault begins: all detectors have learnt
_STEP_S, _LONGEST_S, _SHORTEST_S = (
    360.0,
    1800.0,
    300.0,
)  # from fault to fault; how long one lasts. Chosen: found by then
_AFTER_S = 900.0  # behind the last one: a late answer counts for 10 minutes
_NODES = {"facility": 64, "clean": 64}  # two coolant loops; elsewhere 32
_CONFOUNDERS = 15.0  # times their rate, so that each of them comes in 3 h of 64 nodes; chosen
TOLERANCE: Mapping[str, float] = {"found": 1, "false_pages": 1, "precision": 0.1, "recall": 0.1, "delay": 0.25}
"""How far a figure may move unnoticed: counts, shares, and delays as a share of the stored one but at least 20 s.
Chosen: another NumPy or processor rounds otherwise and moves a few ticks; losing a kind or a new false page shows."""
_LEAST_DELAY_S = 20.0
Table = dict[str, Any]


def scenarios() -> dict[str, Scenario]:
    """By name: one for each family of faults that has kinds, and one without faults."""
    found = {name: _struck(name) for name in NAMES if kinds_of(name)}
    return {"clean": _scenario("clean", _CLEAN_S, (), Rates(0.0, _CONFOUNDERS)), **found}


def _scenario(name: str, seconds: float, lines: tuple[Line, ...], rates: Rates) -> Scenario:
    fleet = Fleet(_NODES.get(name, 32), 8, missing=0.01, jitter=5.0)
    return Scenario(seconds, INTERVAL, None, fleet, lines, rates=rates, source=f"small/{name}")


def _struck(name: str) -> Scenario:
    """EACH of each kind of a family, one after the other."""
    kinds = kinds_of(name) * EACH
    seconds = _FIRST_S + len(kinds) * _STEP_S + _LONGEST_S + _AFTER_S
    onsets = [_FIRST_S + place * _STEP_S for place in range(len(kinds))]
    lines = [Line(k(), at, seconds if name == "slow" else at + _length(k)) for k, at in zip(kinds, onsets, strict=True)]
    return _scenario(name, seconds, tuple(lines), Rates())


def _length(kind: type[Kind]) -> float:
    """A usual one of the kind, cut to what fits."""
    span = kind.lasts
    usual = (span.low + span.high) / 2 if span.mean is None else span.low + span.mean
    return min(max(usual, _SHORTEST_S), _LONGEST_S)


def measured() -> Table:
    """The figures of today."""
    results = []
    for scenario in scenarios().values():
        judged = judge(scenario, SEED)
        assert judged is not None, "nobody stopped it"
        results.append(scored(result_of(judged, "")))
    whole = merge(results)
    kinds = {
        name: {
            **{key: block[key] + _small(block, key) for key in ("events", "found")},
            "delay_s": None if block["delay_median_s"] is None else round(block["delay_median_s"], 1),
        }
        for name, block in sorted(whole["kinds"].items())
    }
    return {
        "tolerance": dict(TOLERANCE),
        "all": {
            "false_pages": whole["false"],
            "false_pages_clean": results[0]["false"],
            "precision": None if whole["precision"] is None else round(whole["precision"], 3),
            "recall": None if whole["recall"] is None else round(whole["recall"], 3),
            "false_by_detector": whole["false_by_detector"],
        },
        "kinds": kinds,
    }


def _small(block: Mapping[str, Any], key: str) -> int:
    """Those that are too small to count for recall: here they are looked at as well."""
    return int(block["small" if key == "events" else "small_found"])


def text(table: Table) -> str:
    """The table as TOML; what is not there is left out."""
    lines = [
        "# What the detectors find of the small suite, and how far that may move. Written by:",
        "#     python -m benchmarks.detection.renew",
    ]
    for section, values in _sections("", table):
        lines += ["", f"[{section}]"] if section else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _sections(name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if plain or (name and not table):
        yield name, plain
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _sections(f"{name}.{key}" if name else key, value)


def stored() -> Table:
    """The table as it was written last."""
    return tomllib.loads(TABLE.read_text())


def differences(wanted: Table, found: Table) -> list[str]:
    """Figures that moved further than they may: which, what was found, what was wanted."""
    room = wanted["tolerance"]
    out = [_moved("all", key, wanted["all"], found["all"], room) for key in ("false_pages", "false_pages_clean")]
    out += [_moved("all", key, wanted["all"], found["all"], room) for key in ("precision", "recall")]
    for kind in sorted({*wanted["kinds"], *found["kinds"]}):
        before, now = wanted["kinds"].get(kind), found["kinds"].get(kind)
        if before is None or now is None:
            there = "are no events of it, wanted some" if now is None else "are events of it, wanted none"
            out.append(f"kinds.{kind}: there {there}")
        else:
            out += [_moved(f"kinds.{kind}", key, before, now, room) for key in ("events", "found", "delay_s")]
    return [line for line in out if line is not None]


def _moved(where: str, key: str, wanted: Mapping[str, Any], found: Mapping[str, Any], room: Table) -> str | None:
    before, now = wanted.get(key), found.get(key)
    if before is None or now is None:
        # a delay is there if and only if something was found, which has a tolerance of its own
        return None if key == "delay_s" or before is now else f"{where}.{key}: found {now}, wanted {before}"
    name = {"false_pages_clean": "false_pages", "delay_s": "delay"}.get(key, key)
    allowed = room.get(name, 0)
    if name == "delay":
        allowed = max(allowed * before, _LEAST_DELAY_S)
    return None if abs(now - before) <= allowed else f"{where}.{key}: found {now}, wanted {before} +- {allowed:g}"
