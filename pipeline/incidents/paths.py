"""Why an incident has its cause: the findings that it explains, each with the path from the cause and how it shows.

Computed when a person reads the incident, from the topology at its onset. The weighed causes are stored with it
(Incident.explanation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.incidents.cases import detector_family
from pipeline.model.entity_names import KINDS
from pipeline.model.topology import WORK, Topology, kind_of

MOST_EXPLAINED = 200
"""Most findings that are listed, the earliest first. Chosen: what a page shows; `explained_count` has their number."""
_FAULTS: Mapping[str, str] = {
    "cdu": "coolant supply",
    "loop": "coolant supply",
    "rack": "rack supply",
    "row": "intake air",
    "pdu": "power supply",
    "leaf": "network switch",
    "rail": "network rail",
    "job": "work of the job",
    "stage": "work of the stage",
    "version": "software version",
    "change": "recent change",
}
"""Kind of cause -> what fails; of any other kind the device itself."""
_SYMPTOMS: Mapping[str, tuple[str, ...]] = {
    "coolant": ("flow or temperature of coolant",),
    "thermal": ("heat",),
    "power": ("power",),
    "telemetry": ("no telemetry",),
    "link": ("link errors or link down",),
    "straggler": ("slow work",),
    "memory": ("memory errors",),
    "xid": ("driver error",),
    "sdc": ("wrong results",),
    "host": ("host",),
}
_BETWEEN: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("cdu", "straggler"): ("heat", "lower clock"),
    ("loop", "straggler"): ("heat", "lower clock"),
    ("row", "straggler"): ("heat", "lower clock"),
    ("rack", "straggler"): ("heat or less power", "lower clock"),
    ("pdu", "straggler"): ("less power", "lower clock"),
    ("leaf", "straggler"): ("slow collectives",),
    ("rail", "straggler"): ("slow collectives",),
    ("port", "straggler"): ("slow collectives",),
}
"""(kind of cause, family of the detector) -> what lies between: facility -> heat -> clock -> slow rank -> job."""


def explain_incident(found: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
    """Returns the `explanation` of the API for an incident with its findings, as `read_incident` returns them."""
    cause, stored = str(found["cause"]), found["explanation"]
    findings: Sequence[Mapping[str, Any]] = found["findings"]
    shown = sorted(findings, key=lambda f: (f["onset"], f["entity"], f["detector"]))[:MOST_EXPLAINED]
    return {
        "root": cause,
        "kind": kind_of(cause),
        "probability": found["confidence"],
        "basis": stored.get("basis"),
        "margin": stored.get("margin"),
        "evidence": stored.get("evidence", ""),
        "faults_per_day": stored.get("faults_per_day"),
        "alternatives": stored.get("alternatives", []),
        "explained_count": len(findings),
        "explained": [
            {
                **{name: f[name] for name in ("entity", "detector", "level", "onset", "summary")},
                "path": list(find_path(cause, f["entity"], topology)),
                "step": describe_step(cause, f["entity"], f["detector"]),
            }
            for f in shown
        ],
    }


def describe_step(cause: str, entity: str, detector: str) -> str:
    """Returns how a fault of the cause shows in a finding: `coolant supply → heat → lower clock → slow work`."""
    kind, family = kind_of(cause), detector_family(detector)
    symptom = _SYMPTOMS.get(family, (family,))
    if entity == cause:
        return " → ".join(symptom)
    fault = _FAULTS.get(kind, f"fault of the {KINDS.get(kind, (kind,))[0]}")
    return " → ".join((fault, *_BETWEEN.get((kind, family), ()), *symptom))


def find_path(cause: str, entity: str, topology: Topology) -> tuple[str, ...]:
    """Returns the entities from the cause to the entity, both included; only the two if no path is known.

    Over the ports of its node for a leaf or rail, and over the ranks of a device for a job.
    """
    if (up := _path_up(entity, cause, topology)) is not None:
        return up[::-1]
    if (down := _path_up(cause, entity, topology)) is not None:
        return down
    over = _path_over_sibling(cause, entity, topology)
    return over if over is not None else (cause, entity)


def _path_up(entity: str, above: str, topology: Topology) -> tuple[str, ...] | None:
    """Returns the shortest path from an entity to something above it."""
    if entity == above:
        return (entity,)
    if above not in topology.ancestors(entity):
        return None
    before: dict[str, str] = {}
    level = [entity]
    while above not in before:
        following = []
        for below in level:
            for parent in topology.parents.get(below, ()):
                if parent not in before and parent != entity:
                    before[parent] = below
                    following.append(parent)
        level = following
    path = [above]
    while path[-1] != entity:
        path.append(before[path[-1]])
    return tuple(path[::-1])


def _path_over_sibling(cause: str, entity: str, topology: Topology) -> tuple[str, ...] | None:
    """Returns a path over something that is below the cause and below, or on the node of, the entity."""
    for home, rest in _homes(entity, topology):
        for below in topology.descendants(home):
            if cause in topology.ancestors(below):
                down, up = _path_up(below, cause, topology), _path_up(below, home, topology)
                return tuple(dict.fromkeys((*(down or ())[::-1], *(up or ()), *rest)))
    return None


def _homes(entity: str, topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the entity, then its node or the nodes of the ranks of its job, each with the path to the entity."""
    yield entity, (entity,)
    for part in (entity, *(topology.descendants(entity) if kind_of(entity) in WORK else ())):
        node = topology.ancestor_of_kind(part, "node")
        if node is not None:
            yield node, ((_path_up(part, node, topology) or ())[::-1] + (_path_up(part, entity, topology) or ()))
