"""Measures the root cause of correlated faults: right roots, compression, calibration of the confidence, solve time.

    python -m benchmarks.rootcause [--seeds FIRST END] [--nodes 128] [--bare] [--wrong] [--json FILE] [--plot FILE]
    python -m benchmarks.rootcause --solve

One run is one fleet with independent findings and one shared fault after an hour. Seeds 0-9 are for tuning, figures are
of seeds from 100 on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.rootcause.faults import KINDS, Line, Shared, independent
from benchmarks.rootcause.fleet import make_fleet
from benchmarks.rootcause.plot import reliability_svg
from benchmarks.rootcause.solve_time import measure
from pipeline.incidents.cases import Case
from pipeline.incidents.desk import Desk
from pipeline.model.records import SECOND
from pipeline.model.topology import Topology

START = 1_790_000_000 * SECOND
WARM, LASTS, AFTER = 3600.0, 1500.0, 300.0
"""s: only independent findings, then the fault, then its end."""
RATE = 3.0
"""Independent findings per node-day: 500 times the faults of a real fleet, so that many stand beside each fault."""


@dataclass
class Result:
    """One run. alerts: conditions of the fault; right: those in an incident of the true cause; incidents: how many
    incidents hold them; strangers: independent conditions in the incident of the cause; said: (confidence, right).
    page_s: from the first page finding to a page."""

    kind: str
    seed: int
    root: str
    blamed: str
    alerts: int
    right: int
    incidents: int
    strangers: int
    cpu_ms: float
    said: list[tuple[float | None, bool, str]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)


def run(kind: str, seed: int, nodes: int, bare: bool = False) -> Result:
    """Runs the Desk over one fault. bare: without topology, so that only names say what belongs together."""
    dice = random.Random(f"{kind} {seed}")
    fleet = make_fleet(nodes, seed)
    shared = Shared(fleet, kind, WARM, LASTS, dice)
    lines = [*shared.lines, *independent(fleet, WARM + LASTS, RATE, dice)]
    desk = Desk(Topology() if bare else fleet.topology())
    roots = {}
    for line in sorted(lines, key=lambda k: k.found):
        roots[line.detector, line.entity] = line.root
    cpu = _drive(desk, lines)
    return _measure(desk, shared, roots, cpu, kind, seed)


def _drive(desk: Desk, lines: Sequence[Line]) -> float:
    """Passes the findings to the Desk, in instants of ten seconds and more; returns the longest in CPU ms."""
    waiting = sorted(lines, key=lambda k: k.found, reverse=True)
    running: list[tuple[float, Line]] = []
    worst, at = 0.0, 0.0
    while at < WARM + LASTS:
        at += 10.0 if WARM - 10 <= at < WARM + 1000 else 60.0
        while waiting and waiting[-1].found <= at:
            running.append((at, waiting.pop()))
        due = [line for next_, line in running if next_ <= at]
        running = [(at + 60 if next_ <= at else next_, k) for next_, k in running if k.end > at]
        now = START + int(at * SECOND)
        began = time.process_time()
        desk.observe(now, [line.finding(now, START) for line in due])
        worst = max(worst, (time.process_time() - began) * 1000)
    return worst


def _measure(desk: Desk, shared: Shared, roots: dict[tuple[str, str], str], cpu: float, kind: str, seed: int) -> Result:
    open_ = [case for case in desk._cases.values() if case.is_open]
    mine = {(line.detector, line.entity) for line in shared.lines}
    homes: Counter[str] = Counter()
    right = strangers = 0
    said, found = [], []
    for case in open_:
        held = [key for key in case.conditions if key in mine and roots.get(key) == shared.cause]
        homes[case.incident.cause] += len(held)
        if held:
            found.append(f"{case.incident.cause}:{len(held)}")
        if case.incident.cause == shared.cause:
            right += len(held)
            strangers += len(case.conditions) - len(held)
        true = Counter(roots[key] for key in case.conditions).most_common(1)[0][0]
        said.append((case.incident.confidence, true == case.incident.cause, *_basis_of(case)))
    alerts = sum(homes.values())
    number = sum(1 for case in open_ if any(k in mine and roots.get(k) == shared.cause for k in case.conditions))
    blamed = max(homes, key=lambda c: (homes[c], c), default="")
    return Result(kind, seed, shared.cause, blamed, alerts, right, number, strangers, cpu, said, sorted(found)[:8])


def _basis_of(case: Case) -> tuple[str, float]:
    """Returns the row of the confidence table that an incident belongs to, and its margin."""
    why = case.incident.explanation
    basis = str(why["basis"])
    return (f"{basis} {case.incident.severity}" if basis == "alone" else basis), float(why["margin"])


def summarize(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Returns a row for each kind of fault and one for all."""
    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
        by_kind["all"].append(result)
    rows = []
    for kind, mine in by_kind.items():
        alerts, large = sum(r.alerts for r in mine), [r for r in mine if r.alerts >= 50]
        folded = sum(r.alerts for r in large) / max(1, sum(r.incidents for r in large))
        top = sum(r.blamed == r.root for r in mine)
        rows.append(
            (
                *(kind, str(len(mine)), str(alerts), f"{sum(r.right for r in mine) / max(1, alerts):.3f}"),
                *(f"{top / len(mine):.3f}", f"{folded:.0f}:1" if large else "-"),
                f"{sum(r.strangers for r in mine) / len(mine):.2f}",
            )
        )
    return rows


HEAD = (
    "fault",
    "runs",
    "alerts",
    "under the right root",
    "root top-1",
    "alerts an incident (50 and more)",
    "strangers",
)


def calibration(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Returns a row for each range of confidence: how many incidents, and how many of them were right."""
    bins: dict[float, list[tuple[float, bool]]] = defaultdict(list)
    for confidence, right, *_ in (s for r in results for s in r.said if s[0] is not None):
        assert confidence is not None
        low = next(b for b in (0.95, 0.9, 0.8, 0.7, 0.5, 0.0) if confidence >= b)
        bins[low].append((confidence, right))
    return [
        (
            f"{low:.2f} and more",
            str(len(s)),
            f"{sum(c for c, _ in s) / len(s):.3f}",
            f"{sum(r for _, r in s) / len(s):.3f}",
        )
        for low, s in sorted(bins.items())
    ]


def main(arguments: Sequence[str]) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=(100, 110))
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--solve", action="store_true")
    given = parser.parse_args(arguments)
    if given.solve:
        print("\n".join(f"{name}: {value:,.0f}" for name, value in measure().items()))
        return 0
    results = [run(kind, seed, given.nodes, given.bare) for kind in given.kinds for seed in range(*given.seeds)]
    for head, rows in (
        (HEAD, summarize(results)),
        (("confidence", "incidents", "mean said", "right"), calibration(results)),
    ):
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
        print()
    print(f"slowest instant: {max(r.cpu_ms for r in results):.0f} ms of CPU")
    for r in results:
        if given.wrong and (r.incidents > 2 or r.blamed != r.root or r.right < 0.95 * r.alerts):
            print(r.kind, r.seed, r.root, r.alerts, r.right, r.found)
    if given.plot:
        rows = [(float(said), float(right), int(count)) for _, count, said, right in calibration(results)]
        given.plot.write_text(reliability_svg(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
