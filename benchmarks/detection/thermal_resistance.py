"""Measures how surely and how soon `thermal` finds a GPU whose thermal resistance rises suddenly.

    python -m benchmarks.detection.thermal_resistance --rise 0.15 --seeds 0 --nodes 64 --events 60

A simulated hall at work with all harmless events on; every fault is a step of a cold plate's resistance, on a GPU drawn
among those with work, and lasts an hour. Printed per level: found in all, within ten minutes, and the delay from onset.
A GPU that idles for its whole hour cannot be judged, and counts as missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from agents.sim.faults.slow import ColdPlate
from agents.sim.scenario import Fleet, Jobs, Line, Rates, Scenario
from benchmarks.detection.judge import Judged, Trial
from benchmarks.detection.scenarios import GPUS, INTERVAL
from detectors import configured
from detectors.scoring.figures import wilson_interval
from pipeline.model.records import LEVELS, SECOND, from_iso

_LASTS, _QUIET = 3600.0, 1800.0  # s of a fault, and before the first one: a stream learns in 200 s
_AT_ONCE = 1e-4  # days in which the plate wears: within one tick
_SOON = 600.0  # s


def scenario(nodes: int, hours: float, events: int, rise: float) -> Scenario:
    """Returns a hall in which `faults` plates fail, evenly over its time."""
    duration = hours * 3600.0
    onsets = np.linspace(_QUIET, duration - _LASTS, events).tolist()
    lines = tuple(Line(ColdPlate(rise=rise, days=_AT_ONCE), onset, onset + _LASTS) for onset in onsets)
    fleet = Fleet(nodes, GPUS, missing=0.01, jitter=5.0)
    return Scenario(duration, INTERVAL, None, fleet, lines, jobs=Jobs(12.0), rates=Rates(0.0, 1.0, apart=False))


def delays(judged: Judged, level: str) -> tuple[list[float | None], int]:
    """(seconds from each onset to the first finding of at least `level` on the GPU or its node, others' findings)."""
    topology, least = judged.simulator.layout.parents, LEVELS.index(level)
    named = [f for f in judged.findings if f.detector == "thermal" and LEVELS.index(f.level) >= least]
    faults = [line for line in judged.truth if line["kind"] == ColdPlate.name]
    used, found = set[int](), list[float | None]()
    for fault in faults:
        onset, end, gpu = from_iso(fault["onset"]), from_iso(fault["end"]), fault["entity"]
        mine = [
            (f.time, k)
            for k, f in enumerate(named)
            if f.entity in (gpu, *topology[gpu]) and onset <= f.time <= end + _SOON * SECOND
        ]
        used |= {k for _, k in mine}
        first = min((at for at, _ in mine), default=None)
        found.append(None if first is None else (first - onset) / SECOND)
    return found, len(named) - len(used)


def measured(options: argparse.Namespace) -> Iterator[str]:
    """Returns the lines of the report."""
    found: dict[str, list[float | None]] = {level: [] for level in LEVELS}
    others, days = dict.fromkeys(LEVELS, 0), 0.0
    for seed in options.seeds:
        made = scenario(options.nodes, options.hours, options.events, options.rise)
        trial = Trial(made, seed, [d for d in configured() if d.name == "thermal"])
        for _ in trial.run():
            pass
        judged = trial.judged()
        days += judged.node_days
        for level in LEVELS:
            mine, wrong = delays(judged, level)
            found[level] += mine
            others[level] += wrong
    yield f"resistance +{options.rise:.0%} on single GPUs; simulated; seeds {options.seeds}; {days:.0f} node-days"
    for level in LEVELS:
        yield f"  {level:8} {_row(found[level])}; on others {others[level]}"


def figure(seeds: Sequence[int], events: int) -> str:
    """Suspect, ticket and page in one line, for the table of goals."""
    found: dict[str, list[float | None]] = {level: [] for level in LEVELS}
    for seed in seeds:
        trial = Trial(scenario(48, 9.0, events, 0.15), seed, [d for d in configured() if d.name == "thermal"])
        for _ in trial.run():
            pass
        judged = trial.judged()
        for level in LEVELS:
            found[level] += delays(judged, level)[0]
    return "; ".join(f"{level} {_row(mine)}" for level, mine in found.items())


def _row(found: list[float | None]) -> str:
    times = sorted(t for t in found if t is not None)
    soon, low = sum(t <= _SOON for t in times), wilson_interval(len(times), len(found))
    spread: Any = "no delay"
    if times:
        spread = f"delay median {np.median(times):.0f} s, p90 {np.percentile(times, 90):.0f} s"
    interval = f" ({low[0]:.2f} to {low[1]:.2f})" if low else ""
    return f"{len(times)} of {len(found)}{interval}, within 10 min {soon}; {spread}"


def main() -> int:
    parser = argparse.ArgumentParser(description="recall and delay of a step in thermal resistance")
    parser.add_argument("--rise", type=float, default=0.15)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--hours", type=float, default=12.0)
    print("\n".join(measured(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
