"""How soon a replica with other parameters is found, and how often a healthy one is reported.

    python -m benchmarks.detection.sdc_replica --trials 200

Simulated digests of a job of 4 stages of 16 replicas, one of every 100 steps, of which some get lost; the detector is
the real one. `lasting` is what stays in the parameters (optimizer, HBM, desync); `passing` is repaired by the next
step's gathering of parameters and shows only in a step that reports a digest; `gradient` went wrong before the
all-reduce, which hands the same wrong bits to all: no digest can show it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from detectors.sdc.sdc_replica import SdcReplica
from pipeline.model.records import SECOND, Event, Frame
from pipeline.model.topology import Topology

STAGES, REPLICAS, BUCKETS = 4, 16, 4
EVERY, STEP_S = 100, 5.0  # steps between two digests; s of a step
LOST = 0.01  # of all digests
STEPS, AFTER = 3000, 1000  # steps of a trial; the goal is within so many steps of the injection
GOAL = 0.90
KINDS = ("lasting", "passing", "gradient", "none")
START = 1_790_000_000 * SECOND


@dataclass(frozen=True)
class Outcome:
    """Result of one injection: steps until the suspect and until the page (None: never); others that paged."""

    suspect: int | None
    page: int | None
    wrongly: int


def trial(kind: str, seed: int, number: int) -> Outcome:
    """One job, one injection."""
    rng = np.random.default_rng([seed, number, KINDS.index(kind)])
    guilty = int(rng.integers(STAGES * REPLICAS))
    begin, bucket = int(rng.integers(500, STEPS - AFTER - EVERY)), int(rng.integers(BUCKETS))
    ranks = tuple(f"rank:9.{i}" for i in range(STAGES * REPLICAS))
    where = {r: [f"stage:9.{i // REPLICAS}", "job:9", f"gpu:n{i // 8}.{i % 8}"] for i, r in enumerate(ranks)}
    detector, topology = SdcReplica(), Topology(where)
    culprit = where[ranks[guilty]][2]
    first: dict[str, int] = {}
    wrongly = set()
    for step in range(EVERY, STEPS + 1, EVERY):
        time = START + int(step * STEP_S * SECOND)
        off = {"lasting": step >= begin, "passing": step == begin}.get(kind, False)
        events = []
        for i, rank in enumerate(ranks):
            lost = rng.random(BUCKETS) < LOST
            for b in np.flatnonzero(~lost).tolist():
                digest = f"{kind == 'gradient' and step >= begin} {i // REPLICAS} {b} {step}"
                digest += " other" if off and i == guilty and b == bucket else ""
                data = {"step": step, "bucket": f"b{b}", "digest": digest, "group": f"stage:9.{i // REPLICAS}"}
                events.append(Event(time, rank, "replica_digest", data))
        for now, mine in ((time, tuple(events)), (time + 130 * SECOND, ())):
            for finding in detector.observe({"rank": Frame(now, "rank", ranks, {}, topology, mine)}):
                if finding.entity != culprit:
                    wrongly.add(finding.entity)
                elif not finding.evidence.get("cleared"):
                    first.setdefault(finding.level, step)
                    first.setdefault("suspect", step)
    late = {level: step - begin for level, step in first.items() if step - begin <= AFTER}
    return Outcome(late.get("suspect"), late.get("page"), len(wrongly))


def measured(kind: str, trials: int, seed: int) -> dict[str, float]:
    """Returns the shares found within AFTER steps, median steps, and others reported."""
    found = [trial(kind, seed, number) for number in range(trials)]
    pages = [o.page for o in found if o.page is not None]
    return {
        "suspected": sum(o.suspect is not None for o in found) / trials,
        "paged": len(pages) / trials,
        "median_steps": float(np.median(pages)) if pages else float("nan"),
        "wrongly": float(sum(o.wrongly for o in found)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="replica digests: found within 1,000 steps, simulated")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = {kind: measured(kind, options.trials, options.seed) for kind in KINDS}
    print(f"{'injected':10} suspected  paged  median steps to the page  others reported")
    for kind, row in rows.items():
        line = f"{row['suspected']:9.3f}  {row['paged']:5.3f}  {row['median_steps']:24.0f}  {row['wrongly']:14.0f}"
        print(f"{kind:10} {line}")
    print(f"goal: {GOAL} of what lasts within {AFTER} steps; what went wrong before the all-reduce cannot be seen")
    return int(rows["lasting"]["paged"] < GOAL or any(row["wrongly"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
