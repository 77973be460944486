"""Which nodes fail how often, and why: time to failure by type and cause, nodes by frailty, spares.

A failure is an incident that paged, whose cause is one node or a part of it, and that no person called wrong. The
exposure is the time for which the store knows the fleet, for each node of today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.model.records import SECOND, iso
from pipeline.objectives.outages import FAULTS, NodeOf
from pipeline.objectives.rates import judge_frailty, plan_spares, poisson_interval

HOUR = 3600 * SECOND
DAY = 24 * HOUR
MOST_NODES = 50
"""Nodes of the ranking. Chosen: what a page shows."""
LEVEL = 0.9
"""Level of the intervals of rates. Chosen: as the figures of the detectors."""
CAUSES: Mapping[str, str] = {
    "xid": "GPU",
    "memory": "GPU memory",
    "sdc": "Silent data corruption",
    "straggler": "Slow rank",
    "link_nvlink": "NVLink",
    "link_pcie": "PCIe",
    "link": "Network",
    "power": "Power",
    "coolant": "Cooling",
    "thermal": "Cooling",
    "host": "Host",
    "telemetry": "No data",
}
"""Beginning of a detector's name -> the cause that people count; the longest that fits. Others count as Other."""
HARDWARE = frozenset({"GPU", "GPU memory", "Silent data corruption", "NVLink", "PCIe", "Network", "Power", "Cooling"})
HARDWARE |= {"Host"}
"""Causes that count as failures of hardware. A slow rank may be its program, and no data a stopped agent."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of a node. node: without `node:`."""

    incident: str
    node: str
    cause: str
    entity: str
    time: int
    summary: str


@dataclass(frozen=True, slots=True)
class NodeType:
    """What nodes of one kind of GPU have: their names, and GPUs per node."""

    name: str
    nodes: tuple[str, ...]
    gpus: int


def name_cause(detector: str) -> str:
    """Returns the cause that a detector's incidents count for."""
    fits = [prefix for prefix in CAUSES if detector == prefix or detector.startswith(f"{prefix}_")]
    return CAUSES[max(fits, key=len)] if fits else "Other"


def read_failures(cursor: duckdb.DuckDBPyConnection, start: int, end: int, node_of: NodeOf) -> list[Failure]:
    """Returns the failures that began between two times, oldest first."""
    found = []
    for id_, cause, detector, _members, onset, _until, severity, summary in cursor.execute(
        FAULTS, [start, end]
    ).fetchall():
        node = node_of(cause)
        if severity == "page" and node is not None and onset >= start:
            bare = node.removeprefix("node:")
            found.append(Failure(id_, bare, name_cause(detector), cause, onset, summary))
    return found


def read_types(cursor: duckdb.DuckDBPyConnection, nodes: Iterable[str]) -> list[NodeType]:
    """Returns the types of nodes by the model of their GPUs. nodes: all of the fleet, without `node:`."""
    rows = cursor.execute(
        """SELECT p.node, any_value(attributes ->> '$.sku'), count(*)
           FROM (SELECT unnest(parents) AS node, attributes FROM entity WHERE kind = 'gpu') p
           WHERE starts_with(p.node, 'node:') GROUP BY p.node"""
    ).fetchall()
    known = {node.removeprefix("node:"): (str(sku or "unknown"), int(gpus)) for node, sku, gpus in rows}
    by_type: dict[tuple[str, int], list[str]] = {}
    for node in nodes:
        by_type.setdefault(known.get(node, ("unknown", 0)), []).append(node)
    return [NodeType(name, tuple(sorted(found)), gpus) for (name, gpus), found in sorted(by_type.items())]


def list_rates(failures: Sequence[Failure], types: Sequence[NodeType], hours: float) -> list[dict[str, Any]]:
    """Returns time to failure by type and cause, and for all hardware of a type. hours: exposure of each node.

    mttf_days is None without a failure; its bounds are of the exact Poisson interval at LEVEL.
    """
    rows: list[dict[str, Any]] = []
    for kind in types:
        names = frozenset(kind.nodes)
        counts = Counter(failure.cause for failure in failures if failure.node in names)
        hardware = sum(count for cause, count in counts.items() if cause in HARDWARE)
        for cause, count in [("All hardware", hardware), *sorted(counts.items(), key=lambda c: (-c[1], c[0]))]:
            rows.append(_describe_rate(kind, cause, count, hours * len(kind.nodes)))
    return rows


def _describe_rate(kind: NodeType, cause: str, count: int, exposure: float) -> dict[str, Any]:
    low, high = poisson_interval(count, LEVEL)
    days = exposure / 24
    return {
        "type": kind.name,
        "cause": cause,
        "failures": count,
        "nodes": len(kind.nodes),
        "node_days": round(days, 3),
        "mttf_days": round(days / count, 3) if count else None,
        "mttf_low_days": round(days / high, 3),
        "mttf_high_days": round(days / low, 3) if low else None,
        "per_million_gpu_hours": round(count / (exposure * kind.gpus) * 1e6, 3) if exposure * kind.gpus else None,
        "per_thousand_node_days": round(count / days * 1000, 3) if days else None,
    }


def rank_nodes(
    failures: Sequence[Failure], types: Sequence[NodeType], burn_in: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Returns the nodes with hardware failures, the frailest first. burn_in: node -> end of its burn-in (us).

    The average node of the same type is what a node is compared with.
    """
    rows: list[dict[str, Any]] = []
    for kind in types:
        names = frozenset(kind.nodes)
        own = [f for f in failures if f.node in names and f.cause in HARDWARE]
        expected = len(own) / len(kind.nodes) if kind.nodes else 0.0
        counts = Counter(f.node for f in own)
        for node, count in counts.items():
            found = judge_frailty(count, expected)
            mine = [f for f in own if f.node == node]
            rows.append(
                {
                    "node": node,
                    "type": kind.name,
                    "failures": count,
                    "expected": round(expected, 4),
                    "frailty": round(found.mean, 3),
                    "p_lemon": round(found.bad, 4),
                    "causes": dict(Counter(f.cause for f in mine).most_common()),
                    "last": iso(max(f.time for f in mine)),
                    "incidents": [f.incident for f in mine][-10:],
                    "burn_in_until": iso(burn_in[node]) if node in burn_in else None,
                    "suggestion": "retire" if found.suggests_retirement(count) else None,
                }
            )
    return sorted(rows, key=lambda row: (-row["frailty"], -row["failures"], row["node"]))[:MOST_NODES]


PARTS: Mapping[str, str] = {
    "GPU": "GPU",
    "GPU memory": "GPU",
    "Silent data corruption": "GPU",
    "NVLink": "GPU baseboard",
    "PCIe": "Riser or NIC",
    "Network": "Cable or transceiver",
    "Power": "Power supply",
    "Cooling": "Cold plate or fan",
    "Host": "Host part",
}
"""Cause -> the part that is usually replaced. Chosen: by the first step of the advice for these faults."""


def list_spares(
    failures: Sequence[Failure], nodes: int, hours: float, days: float, level: float
) -> list[dict[str, Any]]:
    """Returns how many spares of each part are enough for `days` with probability `level`.

    None where the history of so many hours is shorter: then the prior would decide, not the failures.
    """
    early = hours < 24 * days
    counts = Counter(PARTS[f.cause] for f in failures if f.cause in PARTS)
    rows = []
    for part in sorted(set(PARTS.values())):
        expected, plugin, spares = plan_spares(counts[part], nodes * hours, nodes * days * 24, level)
        rows.append(
            {
                "part": part,
                "failures": counts[part],
                "expected": None if early else round(expected, 3),
                "spares_poisson": None if early else plugin,
                "spares": None if early else spares,
            }
        )
    return sorted(rows, key=lambda row: (-(row["spares"] or 0), -row["failures"], row["part"]))


def read_burn_ins(cursor: duckdb.DuckDBPyConnection, now: int, days: float) -> dict[str, int]:
    """Returns node -> end (us) of its burn-in: the time after a release in which tighter limits hold."""
    rows = cursor.execute(
        """SELECT unnest(a.targets), epoch_us(h.time) FROM acts a JOIN act_history h ON h.act = a.id
           WHERE a.verb = 'release' AND a.document ->> '$.mode' = 'on' AND h.state = 'executed'
             AND h.time > make_timestamptz($1::BIGINT)""",
        [now - round(days * DAY)],
    ).fetchall()
    ends: dict[str, int] = {}
    for target, time in rows:
        node = target.removeprefix("node:")
        ends[node] = max(ends.get(node, 0), time + round(days * DAY))
    return {node: end for node, end in ends.items() if end > now}
