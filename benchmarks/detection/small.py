"""The small suite that every change is tested with: three of each kind of fault, and harmless events, in a few hours.

Too little for a rate, enough to see that a change has lost a kind, moved a delay or begun to page. Its figures and how
far they may move are in tests/detectors/scenario_suite.toml; `python -m benchmarks.detection.renew` writes them again.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from agents.sim.faults.kind import Kind
from agents.sim.scenario import Fleet, Line, Rates, Scenario
from benchmarks.detection.fingerprint import ROOT
from benchmarks.detection.judge import judge
from benchmarks.detection.results import result_of, scored
from benchmarks.detection.scenarios import INTERVAL, NAMES, kinds_of
from detectors.scoring.score import merge_scores

TABLE = ROOT / "tests" / "detectors" / "scenario_suite.toml"
SEED = 7  # one of those to tune on
EACH = 3  # events of a kind
_CLEAN_S, _FIRST_S = 10_800.0, 1800.0  # length without faults; when the first fault begins: all detectors have learnt
_STEP_S = {"job": 1200.0, "facility": 1200.0}
"""From fault to fault; elsewhere 360. A job that hung is back 10 min after its end. Faults of one coolant loop must not
overlap, as they show in the same temperatures and are one incident: two loops in turns have 40 min for each."""
_LONGEST_S, _SHORTEST_S = 1800.0, 300.0  # shortest and longest duration. Chosen: found by then
_AFTER_S = 900.0  # behind the last one: a late answer counts for 10 minutes
_NODES = {"facility": 64, "power": 64, "clean": 64}  # two coolant loops, four PDUs; elsewhere 32
_CONFOUNDERS = 15.0  # times their rate, so that each of them comes in 3 h of 64 nodes; chosen
VISIBLE: Mapping[str, Mapping[str, Any]] = {
    "cold_plate": {"rise": 0.5, "days": 0.01},
    "facility_water": {"rise": 8.0, "course": "step"},
    "gpu_engine_fault": {"origin": "hardware"},
    "hbm_ce_burst": {"decades": 5.0},
    "link_flap": {"flaps": 4},
    "node_restriction": {"lost": 0.6, "course": "step"},
    "optic_degradation": {"start": -4.0, "slope": 1.0},
    "recirculation": {"rise": 8.0, "ramp": 600.0},
    "sdc": {"probability": 0.6},
}
"""Parameters of kinds that otherwise take days to show, or often are no device's fault or too small.

Chosen: strong enough to be seen within the hour."""
_JOBS = ("job:sim-81", "job:sim-82")  # that run from the beginning; in turns
_NODES_OF = {"node_restriction": ("node:sim-n020", "node:sim-n005", "node:sim-n003")}
"""Nodes that have a job again when the fault comes: others of its run stop jobs."""
_LOOPS = (("cdu:sim-c1", "rack:sim-r3"), ("cdu:sim-c2", "rack:sim-r7"))
"""The unit and a rack of each coolant loop, for the faults of the run `facility` in turns."""
TOLERANCE: Mapping[str, float] = {"precision": 0.1, "recall": 0.1, "delay": 0.25}
"""How far a figure may move unnoticed: shares, and delays as a share of the stored one but at least 20 s. Chosen:
another NumPy or processor rounds otherwise and moves a few ticks. Of the events of a kind one may be lost or won, but
never the last that is found; pages that are false are to the last one those of the table, by suite and detector."""
_LEAST_DELAY_S = 20.0
_FOUND = 1  # events of a kind
Table = dict[str, Any]


def scenarios() -> dict[str, Scenario]:
    """Returns scenarios by name: one for each family of faults that has kinds, and one without faults."""
    found = {name: _struck(name) for name in NAMES if kinds_of(name)}
    return {"clean": _scenario("clean", _CLEAN_S, (), Rates(0.0, _CONFOUNDERS)), **found}


def _scenario(name: str, seconds: float, lines: tuple[Line, ...], rates: Rates) -> Scenario:
    fleet = Fleet(_NODES.get(name, 32), 8, missing=0.01, jitter=5.0)
    return Scenario(seconds, INTERVAL, None, fleet, lines, rates=rates, source=f"small/{name}")


def _struck(name: str) -> Scenario:
    """Returns EACH faults of each kind of a family, in sequence."""
    kinds, step = [kind for kind in kinds_of(name) if not kind.world_only] * EACH, _STEP_S.get(name, 360.0)
    seconds = _FIRST_S + len(kinds) * step + _LONGEST_S + _AFTER_S
    lines = []
    for place, kind in enumerate(kinds):
        onset = _FIRST_S + place * step
        end = seconds if name == "slow" else onset + _length(kind)
        lines.append(Line(kind(**VISIBLE.get(kind.name, {})), onset, end, _entity(name, kind, place, len(kinds))))
    return _scenario(name, seconds, tuple(lines), Rates())


def _entity(name: str, kind: type[Kind], place: int, count: int) -> str | None:
    """Returns the device of a fault where it must be a certain one. place: in the order of `count` faults."""
    if kind.name in _NODES_OF:
        return _NODES_OF[kind.name][place * EACH // count]
    if kind.target == "job":
        return _JOBS[place % len(_JOBS)]
    return _LOOPS[place % len(_LOOPS)][kind.target == "rack"] if name == "facility" else None


def _length(kind: type[Kind]) -> float:
    """Returns a usual fault of the kind, limited to the run."""
    span = kind.lasts
    usual = (span.low + span.high) / 2 if span.mean is None else span.low + span.mean
    return min(max(usual, _SHORTEST_S), _LONGEST_S)


def measured() -> Table:
    """Returns the figures of the current code."""
    results = {}
    for name, scenario in scenarios().items():
        judged = judge(scenario, SEED)
        assert judged is not None, "it was not stopped"
        results[name] = scored(result_of(judged, ""))
    whole = merge_scores(list(results.values()))
    return {
        "tolerance": dict(TOLERANCE),
        "all": {key: None if whole[key] is None else round(whole[key], 3) for key in ("precision", "recall")},
        "false_pages": {name: result["false_by_detector"] for name, result in results.items()},
        "kinds": {name: _figures(block) for name, block in sorted(whole["kinds"].items())},
    }


def _figures(block: Mapping[str, Any]) -> Table:
    """Returns the figures of a kind; faults too small to count for recall are included."""
    events, found = block["events"] + block["small"], block["found"] + block["small_found"]
    delay = block["delay_median_s"]
    return {
        "events": events,
        "found": found,
        "at_least": max(min(found, 1), found - _FOUND),
        "at_most": min(events, found + _FOUND),
        "delay_s": None if delay is None else round(delay, 1),
    }


def text(table: Table) -> str:
    """Returns the table as TOML; missing values are left out."""
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
            part = key if key.isidentifier() else json.dumps(key)  # a row of soft events: "sdc (soft)"
            yield from _sections(f"{name}.{part}" if name else part, value)


def stored() -> Table:
    """Returns the stored table."""
    return tomllib.loads(TABLE.read_text())


def differences(wanted: Table, found: Table) -> list[str]:
    """Returns figures outside their tolerance: name, found, expected."""
    room = wanted["tolerance"]
    out = [_moved("all", key, wanted["all"], found["all"], room[key]) for key in ("precision", "recall")]
    out += _paged(wanted["false_pages"], found["false_pages"])
    for kind in sorted({*wanted["kinds"], *found["kinds"]}):
        before, now = wanted["kinds"].get(kind), found["kinds"].get(kind)
        if before is None or now is None:
            there = "are no events of it, expected some" if now is None else "are events of it, expected none"
            out.append(f"kinds.{kind}: there {there}")
        else:
            out += _of_kind(f"kinds.{kind}", before, now, room["delay"])
    return [line for line in out if line is not None]


def _of_kind(where: str, before: Table, now: Table, delay: float) -> Iterator[str | None]:
    yield _moved(where, "events", before, now, 0)
    low, high = before["at_least"], before["at_most"]
    if not low <= now["found"] <= high:
        yield f"{where}.found: found {now['found']}, expected {low} to {high}"
    if "delay_s" in before and now.get("delay_s") is not None:
        yield _moved(where, "delay_s", before, now, max(delay * (before["delay_s"] or 0.0), _LEAST_DELAY_S))


def _paged(before: Table, now: Table) -> Iterator[str]:
    """Returns every suite and detector with more or fewer false pages."""
    for suite in [*before, *(s for s in now if s not in before)]:
        was, there = before.get(suite, {}), now.get(suite, {})
        for detector in sorted({*was, *there}):
            if was.get(detector, 0) != there.get(detector, 0):
                moved = f"found {there.get(detector, 0)}, expected {was.get(detector, 0)}"
                yield f"false_pages.{suite}.{detector}: {moved}"


def _moved(where: str, key: str, wanted: Table, found: Table, allowed: float) -> str | None:
    before, now = wanted.get(key), found.get(key)
    if before is None or now is None:
        return None if before is now else f"{where}.{key}: found {now}, expected {before}"
    return None if abs(now - before) <= allowed else f"{where}.{key}: found {now}, expected {before} +- {allowed:g}"
