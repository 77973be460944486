"""Roots of shared faults in simulated fleets, from telemetry through all detectors: a check of the drawn findings.

python -m benchmarks.rootcause.simulated [--seeds FIRST END]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agents.sim.kinds import KINDS
from agents.sim.scenario import Fleet, Line, Scenario
from benchmarks.detection.judge import judge
from pipeline.model.records import SECOND, Incident, from_iso

FAULTS = (("coolant", 3600.0, 5400.0), ("leaf_crash", 7200.0, 8400.0), ("pdu_trip", 10200.0, 11400.0))
"""Kind, onset and end (s) of the faults of a run, one after the other."""
DURATION, NODES = 12_600.0, 64


def run(seed: int) -> list[dict[str, Any]]:
    """Returns of each fault what was blamed, by the incident with the most members that began with it."""
    lines = tuple(Line(KINDS[kind](), onset, end) for kind, onset, end in FAULTS)
    judged = judge(Scenario(DURATION, 10.0, None, Fleet(NODES, 8), lines, source=f"root cause {seed}"), seed)
    assert judged is not None
    found = []
    wanted = {kind for kind, *_ in FAULTS}
    for fault in (line for line in judged.truth if line["kind"] in wanted):
        begin, end = from_iso(fault["onset"]), from_iso(fault["end"])
        near = [
            i
            for i in judged.incidents
            if begin - 60 * SECOND <= i.opened <= end + 120 * SECOND and i.severity != "watch" and i.members
        ]
        members: Counter[str] = Counter()
        for incident in near:
            members[incident.cause] += len(incident.members)
        largest = max(near, key=lambda i: (len(i.members), i.id), default=None)
        found.append({"seed": seed, "kind": fault["kind"], "root": fault["entity"], **_blame(largest, members)})
    return found


def _blame(largest: Incident | None, members: Counter[str]) -> dict[str, Any]:
    if largest is None:
        return {"blamed": "-", "confidence": None, "share": 0.0, "members": 0}
    share = members[largest.cause] / sum(members.values())
    return {
        "blamed": largest.cause,
        "confidence": largest.confidence,
        "share": round(share, 3),
        "members": len(largest.members),
    }


def main(arguments: Sequence[str]) -> int:
    """Prints a row for each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=(100, 103))
    given = parser.parse_args(arguments)
    for seed in range(*given.seeds):
        for row in run(seed):
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
