"""Roots of shared faults in simulated fleets, from telemetry through all detectors: a check of the drawn findings.

    python -m benchmarks.rootcause.simulated [--seeds FIRST END] [--groups plant work] [--nodes 64] [--bare]

An alert is a member of a ticket or page that began while a shared fault lasted, on what this fault reaches. Not
counted are members on what an independent fault of the same time reaches.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rootcause.worlds import GROUPS, Shared, SharedTrial, make_world, with_root
from pipeline.model.records import SECOND, Incident, from_iso, iso
from pipeline.model.topology import Topology, kind_of

BEFORE, AFTER = 60.0, 300.0
"""s before the onset and after the end of a shared fault in which incidents that open may be its own."""
LARGE = 50
"""Alerts from which the compression counts."""


@dataclass
class Row:
    """One shared fault. blamed: cause of the incident with most of its alerts; alerts: how many; right: those below the
    root; incidents: how many hold them; others: alerts of independent faults in the root's incident."""

    seed: int
    kind: str
    root: str
    blamed: str
    confidence: float | None
    alerts: int
    right: int
    incidents: int
    others: int
    homes: dict[str, int]


def run(group: str, seed: int, nodes: int, bare: bool) -> list[Row]:
    """Returns a row for each shared fault of a world."""
    world = make_world(group, seed, nodes)
    trial = SharedTrial(world, seed, bare)
    for _ in trial.run():
        pass
    judged, simulator = trial.judged(), trial.simulator
    place = Topology(simulator.parents)
    rows = []
    for shared in world.shared:
        begin = simulator.time_at(shared.begin)
        named = with_root(shared, judged.truth, iso(begin))
        reach = _reach(named.root, place, world.upgraded)
        noise = _noise(named, judged.truth, place, begin, simulator.time_at(shared.end))
        near = [i for i in judged.incidents if _is_near(i, named.root, begin, simulator.time_at(shared.end))]
        rows.append(_row(seed, named, near, reach, noise))
    return rows


def _is_near(incident: Incident, root: str, begin: int, end: int) -> bool:
    """Returns whether it began with the shared fault, or is one of its root, which may take in an older one."""
    if incident.severity == "watch" or incident.opened > end + AFTER * SECOND:
        return False
    last = end if incident.resolved is None else incident.resolved
    return incident.opened >= begin - BEFORE * SECOND or (incident.cause == root and last >= begin)


def _reach(root: str, place: Topology, upgraded: Iterable[str]) -> set[str]:
    """Returns the root and what its fault may show at: everything below it and on the nodes of it, and their jobs."""
    tops = [*upgraded] if kind_of(root) == "version" else [root]
    below = {*tops, *place.descendants(*tops)}
    nodes = {node for e in below if (node := _node_of(e, place))}
    found = below | nodes | {*place.descendants(*nodes)}
    work = {e for rank in found if kind_of(rank) == "rank" for e in place.ancestors(rank) if kind_of(e) != "gpu"}
    network = {e for port in below if kind_of(port) == "port" for e in place.parents[port]} | {"fabric:all"}
    beside = network if kind_of(root) in ("rail", "leaf") else set[str]()
    return {root} | found | {e for e in work if kind_of(e) in ("job", "stage")} | beside


def _node_of(entity: str, place: Topology) -> str | None:
    gpu = next((p for p in place.parents.get(entity, ()) if kind_of(p) == "gpu"), None)
    return place.ancestor_of_kind(gpu or entity, "node")


def _noise(shared: Shared, truth: Iterable[dict[str, Any]], place: Topology, begin: int, end: int) -> set[str]:
    """Returns what independent faults of the time of a shared one reach by themselves."""
    own = {(line.kind.name, line.entity) for line in shared.lines if line.entity}
    own |= {(line.kind.name, shared.root) for line in shared.lines if not line.entity}
    found: set[str] = set()
    for line in truth:
        lasts = from_iso(line["onset"]) <= end + AFTER * SECOND and from_iso(line["end"]) >= begin - 1800 * SECOND
        if lasts and (line["kind"], line["entity"]) not in own and line["class"] != "benign":
            named = {line["entity"], *line.get("entities", ())}
            found |= named | {*place.descendants(*named)}
    return found


def _row(seed: int, shared: Shared, near: Sequence[Incident], reach: set[str], noise: set[str]) -> Row:
    homes: Counter[str] = Counter()
    holding: list[tuple[int, Incident]] = []
    others = 0
    for incident in near:
        if incident.cause != shared.root and incident.cause in noise:
            continue
        members = [*incident.members] or [incident.cause]
        mine = [e for e in members if e in reach and (e not in noise or incident.cause == shared.root)]
        if incident.cause == shared.root:
            others += sum(e in noise for e in mine)
        if mine:
            homes[incident.cause] += len(mine)
            holding.append((len(mine), incident))
    top = max(homes, key=lambda c: (homes[c], c == shared.root, c), default="-")
    best = max((h for h in holding if h[1].cause == top), key=lambda h: (h[0], h[1].id), default=None)
    confidence = best[1].confidence if best else None
    counted = (sum(homes.values()), homes[shared.root], len(holding), others)
    return Row(seed, shared.kind, shared.root, top, confidence, *counted, dict(homes.most_common(8)))


def summarize(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Returns a line for each kind of fault, and one for all."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(row)
        by_kind["all"].append(row)
    found: list[tuple[str, ...]] = []
    for kind, mine in by_kind.items():
        large, alerts = [r for r in mine if r.alerts >= LARGE], sum(r.alerts for r in mine)
        folded = sum(r.alerts for r in large) / max(1, sum(r.incidents for r in large))
        shares = f"{sum(r.right for r in mine) / max(1, alerts):.3f}", f"{sum(r.blamed == r.root for r in mine)}"
        folds = f"{folded:.0f}:1 ({len(large)})" if large else "-"
        found.append((kind, str(len(mine)), str(alerts), *shares, folds, str(sum(r.others for r in mine))))
    return found


HEAD = (
    "fault",
    "runs",
    "alerts",
    "under the right root",
    "right roots",
    "alerts an incident, of 50 and more",
    "others",
)


def main(arguments: Sequence[str]) -> int:
    """Prints a row for each fault as it ends, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs=2, type=int, default=(100, 103))
    parser.add_argument("--groups", nargs="*", choices=tuple(GROUPS), default=tuple(GROUPS))
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for seed in range(*given.seeds):
        for group in given.groups:
            for row in run(group, seed, given.nodes, given.bare):
                rows.append(row)
                print("| " + " | ".join(str(value) for value in asdict(row).values()) + " |", flush=True)
    print("\n| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    print("\n".join("| " + " | ".join(line) + " |" for line in summarize(rows)))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
