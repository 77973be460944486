"""The benefit of each part of the method: the same fleets evaluated with one part removed at a time.

    python -m benchmarks.detection.ablations [--worlds 0 1 2] [--processes 2] [--scale 1.0] [--results DIR]

Some 200 node-days of each world for each variant: harmless events alone, and faults of devices, of halls and of days
among them. A part whose removal changes nothing is not needed. Simulated; only training structures.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.fingerprint import fingerprint
from benchmarks.detection.judge import Trial
from benchmarks.detection.results import result_of, scored
from benchmarks.detection.scenarios import TRAIN, Run, numbers
from benchmarks.detection.tables import number, share
from detectors import configured
from detectors.base.cohorts import Peers
from detectors.base.detector import Detector
from detectors.base.streams import Streams
from detectors.heat.coolant import Coolant
from detectors.scoring.score import merge_scores
from detectors.straggler.straggler import Straggler
from pipeline.model.records import Frame

FILE = "ablations.json"
WORLDS = 4
"""Training structures by default: air and liquid, both fabrics, jobs with and without the hook. Chosen."""


def runs(world: int, scale: float) -> tuple[Run, ...]:
    """Returns the runs in one world: what statistics judge, and faults of days. Logged facts need no part of the
    kernel. scale: share of the days."""
    return (
        Run("clean", "all", 256, 0.25 * scale, world),
        Run("raised", "device", 64, 0.5 * scale, world),
        Run("raised", "facility", 128, 0.5 * scale, world),
        Run("raised", "slow", 64, 1.0 * scale, world),
    )


LONG_S = 4 * 3600.0
"""Duration of faults whose incident must not resolve before they do; chosen."""
Change = Callable[[list[Detector]], None]
_NO_HOLD = frozenset({"sdc_gradient"})  # its `hold` is the duration of a condition, not a wait
_HOLDS = frozenset({("thermal", "patience"), ("power", "brake_seconds"), ("memory", "wait")})
"""Holds by other names. None are times that say what a fault is (a port that is down for `link.drop`, a job without a
step for `straggler_job.hang` or `stall`, a node that is silent for `telemetry.seconds`), nor for how long a round of
digests is collected (`sdc_replica.patience`)."""
_Piece = TypeVar("_Piece")


def channels(**changed: Any) -> Change:
    """Removes a part from the kernel of every detector."""

    def change(detectors: list[Detector]) -> None:
        for streams in pieces(detectors, Streams):
            streams.channel = replace(streams.channel, **changed)

    return change


def pieces(root: object, kind: type[_Piece]) -> list[_Piece]:
    """Returns all pieces of a kind that detectors hold, at any depth."""
    found: dict[int, _Piece] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, kind):
            found[id(here)] = here
        if isinstance(here, dict):
            waiting += here.values()
        elif isinstance(here, (list, tuple)):
            waiting += here
        elif type(here).__module__.startswith("detectors.") and hasattr(here, "__dict__"):
            waiting += vars(here).values()
    return list(found.values())


def no_cohort(detectors: list[Detector]) -> None:
    """Compares every stream only with its own past, at the threshold that peers would have."""
    for streams in pieces(detectors, Streams):
        vars(streams)["step"] = _without_peers(streams.step)  # an experiment on this one object
    for peers in pieces(detectors, Peers):
        vars(peers)["groups"] = _no_peers  # likewise


def _without_peers(step: Callable[..., Any]) -> Callable[..., Any]:
    def alone(values: Any, groups: Any, *rest: Any, **more: Any) -> Any:
        result = step(values, np.full(len(values), -1, np.int32), *rest, **more)
        result.alone = np.zeros(len(values), bool)  # so that no detector holds its pages back because of missing peers
        return result

    return alone


def _no_peers(frame: Frame) -> NDArray[np.int32]:
    return np.full(len(frame.entities), -1, np.int32)


def no_corroboration(detectors: list[Detector]) -> None:
    """Removes second signals that waive a hold: throttle bit, lanes or clock of a rank, pump or pressure of a loop."""
    for straggler in pieces(detectors, Straggler):
        vars(straggler)["_find_causes"] = _no_causes  # an experiment on this one object
    for coolant in pieces(detectors, Coolant):
        for witness in (coolant.pressure, coolant.speed):
            vars(witness)["step"] = _unmeasured(witness.step)  # likewise


def _no_causes(*_: object) -> list[object]:
    return []


def _unmeasured(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values, *rest, **more: step(np.full(len(values), np.nan), *rest, **more)


def no_hold() -> list[Detector]:
    """Pages on the first suspicion: settings by which detectors wait are 0, in their parts too."""
    waits = {}
    for detector in configured():
        names = [f.name for f in fields(detector) if f.init and _waits(detector.name, f.name)]
        if names:
            waits[detector.name] = dict.fromkeys(names, 0.0)
    return configured(waits, "no hold")


def _waits(detector: str, setting: str) -> bool:
    hold = setting.endswith("hold") and setting != "threshold" and detector not in _NO_HOLD
    return hold or (detector, setting) in _HOLDS


def _whole(change: Change) -> Callable[[], list[Detector]]:
    """Returns detectors with default settings, with one part removed."""

    def detectors() -> list[Detector]:
        made = configured()
        change(made)
        return made

    return detectors


VARIANTS: Mapping[str, Callable[[], list[Detector]]] = {
    "whole": configured,
    "no clip": _whole(channels(clip=False)),
    "no freeze": _whole(channels(frozen=False)),
    "no cohort": _whole(no_cohort),
    "no hold": no_hold,
    "no corroboration": _whole(no_corroboration),
}


def tried(variant: str, run: Run) -> dict[str, Any]:
    """Evaluates and scores one run with one variant."""
    trial = Trial(run.scenario(), run.world, VARIANTS[variant]())
    for _ in trial.run():
        pass
    result = result_of(trial.judged(), "")
    score = scored(result)
    return {**score, "kept": kept(result, score)}


def kept(result: Mapping[str, Any], score: Mapping[str, Any]) -> tuple[int, int]:
    """Returns, for found faults longer than LONG_S: those whose incident was still open at their end, and all."""
    ends = {line["id"]: line["end"] for line in result["truth"]}
    resolved = {line["id"]: line["resolved"] for line in result["incidents"]}
    long = [e for e in score["records"]["events"] if e["incident"] is not None and e["length_s"] >= LONG_S]
    there = [e for e in long if resolved[e["incident"]] is None or resolved[e["incident"]] >= ends[e["id"]]]
    return len(there), len(long)


def row(variant: str, clean: Sequence[Mapping[str, Any]], raised: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line of the table."""
    quiet, faulty = merge_scores(clean), merge_scores(raised)
    kinds = faulty["page_kinds"]
    days = quiet["node_days"] + faulty["node_days"]
    figures = (
        f"{sum(quiet['false_by_detector'].values())}",
        f"{sum(faulty['false_by_detector'].values())}",
        share(faulty["precision"]),
        share(kinds["recall"]),
        share(faulty["recall"]),
        number(faulty["delay_median_s"]),
        number(faulty["delay_p90_s"]),
        " of ".join(str(sum(counts)) for counts in zip(*(score["kept"] for score in raised), strict=True)),
    )
    return f"| {variant} | {days:.0f} | {' | '.join(figures)} |"


def table(results: Mapping[tuple[str, Run], Mapping[str, Any]]) -> str:
    """Returns one line for each variant."""
    lines = [
        "| variant | node-days | false pages, clean | false pages, raised | precision, raised "
        "| recall of kinds that page | recall of all | median delay, s | p90, s | kept to the end |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant in VARIANTS:
        clean = [r for (v, run), r in results.items() if v == variant and run.suite == "clean"]
        raised = [r for (v, run), r in results.items() if v == variant and run.suite != "clean"]
        if clean and raised:
            lines.append(row(variant, clean, raised))
    return "\n".join(lines) + "\n"


def read(folder: Path, code: str) -> str:
    """Returns the stored table and its basis for the page; nothing if there is none, or a small one."""
    path = folder / FILE
    kept = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("scale") != 1.0:
        return ""
    old = "" if kept["code"] == code else f", judged by `{kept['code']}`"
    return f"Training structures: {', '.join(map(str, kept['worlds']))}{old}.\n\n{kept['table']}"


def main() -> int:
    parser = argparse.ArgumentParser(description="benefit of each part of the method")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="number of training structures")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the days, to try it out")
    parser.add_argument("--results", type=Path, help="folder to keep the table in for the page; else only printed")
    options = parser.parse_args()
    worlds = numbers(TRAIN, options.worlds)
    todo = [(v, run) for world in worlds for v in options.variants for run in runs(world, options.scale)]
    results: dict[tuple[str, Run], dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context) as pool:
        waiting = [(job, pool.submit(tried, *job)) for job in todo]
        for (variant, run), future in waiting:
            results[variant, run] = future.result()
            print(f"{variant}: {run.suite}/{run.name} in world {run.world}", file=sys.stderr, flush=True)
    found = table(results)
    print(found)
    if options.results is not None:
        kept = {"table": found, "code": fingerprint(), "worlds": worlds, "scale": options.scale}
        (options.results / FILE).write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
