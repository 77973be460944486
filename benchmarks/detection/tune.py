"""Judges a few runs with a few detectors and prints found and missed events and the reasons of false pages.

    python -m benchmarks.detection.tune raised/network --detectors link,link_optic --worlds 0 1 --nodes 64 --hours 12

    python -m benchmarks.detection.tune raised/device --detectors straggler_inferred --without rank.compute_time

For work on a detector; worlds are counted among the training structures, so no reported one can be read. Runs are
SUITE/RUN as in the suites: clean/all, raised/device, raised/slow ...; --without: signals that are not reported. Figures
are simulated and not published.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from benchmarks.detection.judge import PARTS, STEP, Trial
from benchmarks.detection.results import result_of, scored
from benchmarks.detection.scenarios import NAMES, TRAIN, Run, numbers
from detectors import configured
from detectors.base.detector import Detector
from pipeline.judging.frames import Framer

_SHOWN = 25  # false pages and missed events that are printed, each


RUNS = ("clean/all", *(f"raised/{name}" for name in NAMES))


def run_of(name: str, world: int, nodes: int | None, hours: float | None) -> Run:
    """Returns a run in the training world with that position among them."""
    suite, _, what = name.partition("/")
    usual = (64, 72.0) if what == "slow" else (128, 12.0)
    return Run(suite, what, nodes or usual[0], (hours or usual[1]) / 24, numbers(TRAIN, 1, world)[0])


def chosen(names: str, settings: Sequence[str]) -> list[Detector]:
    """Returns new detectors by comma-separated names; all without names. settings: NAME.KEY=VALUE."""
    tables: dict[str, dict[str, Any]] = {}
    for line in settings:
        key, _, value = line.partition("=")
        name, _, field = key.partition(".")
        tables.setdefault(name, {})[field] = float(value)
    every = configured(tables, "--set")
    return [d for d in every if d.name in names.split(",")] if names else every


def describe_result(result: dict[str, Any]) -> Iterator[str]:
    """Prints the figures of one result for tuning."""
    for kind, block in sorted(result["kinds"].items()):
        delay = block["delay_median_s"]
        late = "" if delay is None else f", median {delay:.0f} s"
        small = f"; small {block['small_found']} of {block['small']}" if block["small"] else ""
        yield f"  {kind:20} {block['found']:3} of {block['events']:3}{late}{small}"
    days = result["node_days"]
    wrong = result["false_by_detector"]
    yield f"  false pages {sum(wrong.values())} in {days:.0f} node-days: {wrong}; tickets {result['tickets']}"
    yield f"  false by reason {result['false_by_reason']}, by harmless event {result['false_by_benign']}"


def wrong(result: dict[str, Any], truth: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Prints the false pages and tickets, and the counted events that were missed."""
    records, line_of = result["records"], {line["id"]: line for line in truth}
    for f in records["false"][:_SHOWN]:
        beside = f"{f['beside']} {f['beside_id']}" if f["beside"] else ""
        yield f"  false {f['level']} {f['time']} {f['detector']} {f['cause']}: {f['why']} {beside}"
    missed = [e for e in records["events"] if e["delay_s"] is None and e["detectability"] in ("hard", "soft")]
    for e in [e for e in missed if e["large"]][:_SHOWN]:
        line = line_of[e["id"]]
        yield f"  missed {e['kind']} {line['entity']} {line['onset']} to {line['end']} {line['parameters']}"


def tried(run: Run, seed: int, detectors: Sequence[Detector], without: Collection[str] = ()) -> Iterator[str]:
    """Yields one run and its result, without the signals of `without`."""
    trial = Trial(run.scenario(), seed, detectors)
    if without:
        kept = trial.runner.signals - set(without)
        trial.framer = Framer(STEP, trial.topology, trial.numbers.names, signals=kept)
    for _ in trial.run():
        pass
    judged = trial.judged()
    spent = ", ".join(f"{part} {judged.node_days / max(judged.seconds[part], 1e-9):.1f}" for part in PARTS)
    size = f"{run.nodes} nodes, {run.days * 24:g} h"
    world = ", ".join(run.structure().structure)
    yield f"{run.suite}/{run.name}, world {run.world} ({world}), seed {seed}: {size}; node-days a core-second: {spent}"
    result = scored(result_of(judged, ""))
    yield from describe_result(result)
    yield from wrong(result, judged.truth)


def main() -> int:
    parser = argparse.ArgumentParser(description="judge a few runs with a few detectors")
    parser.add_argument("runs", nargs="+", choices=RUNS)
    parser.add_argument("--detectors", default="", help="comma-separated names; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[0], help="positions among the training structures")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--set", action="append", default=[], help="NAME.KEY=VALUE: a detector's setting")
    parser.add_argument("--without", default="", help="comma-separated signals that are not reported")
    options = parser.parse_args()
    without = [name for name in options.without.split(",") if name]
    for name, world, seed in itertools.product(options.runs, options.worlds, options.seeds):
        run = run_of(name, world, options.nodes, options.hours)
        print("\n".join(tried(run, seed, chosen(options.detectors, options.set), without)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
