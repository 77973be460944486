"""CPU time of one solve at 100,000 GPUs: one shared fault, independent findings and the slow ranks of a large job."""

from __future__ import annotations

import random
import time

from benchmarks.rootcause.faults import Shared, independent
from benchmarks.rootcause.fleet import make_fleet
from pipeline.incidents.cases import Case
from pipeline.incidents.desk import Desk
from pipeline.model.records import SECOND

START = 1_790_000_000 * SECOND
NODES = 12_500


def measure(nodes: int = NODES, repeats: int = 5) -> dict[str, float]:
    """Returns CPU milliseconds of the index and of a solve, and the sizes."""
    dice, fleet = random.Random(1), make_fleet(nodes, 1)
    desk = Desk(fleet.topology())
    lines = [*Shared(fleet, "cdu", 0.0, 3600.0, dice).lines, *independent(fleet, 600.0, 2.0, dice)]
    lines += Shared(fleet, "leaf", 0.0, 3600.0, dice).lines
    findings = [line.finding(START + 600 * SECOND, START) for line in lines]
    rules = desk._causes
    began = time.process_time()
    rules.index.refresh(START)
    index_ms = (time.process_time() - began) * 1000
    desk.topology.merge({}, {fleet.nodes[0]: {"nvidia_driver": "580.1"}})
    began = time.process_time()
    rules.index.refresh(START)
    renewed_ms = (time.process_time() - began) * 1000
    cases: list[Case] = []
    for finding in findings:
        case = desk._create_case(finding)
        case.add_finding(finding, START)
        cases.append(case)
    spent = []
    for _ in range(repeats):
        began = time.process_time()
        found = rules.solver.weigh(cases)
        spent.append((time.process_time() - began) * 1000)
    return {
        "gpus": nodes * 8,
        "factors": len(rules.index.units) + nodes,
        "conditions": len(cases),
        "weighed": len(found),
        "index_ms": index_ms,
        "renewed_ms": renewed_ms,
        "first_ms": spent[0],
        "solve_ms": min(spent),
    }
