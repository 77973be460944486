"""What of an event its sender may report: the event's own entity, and the entities that its data place or end.

`inventory`   only a node's own; of its lines those of entities that the node may have, which it claims. Of jobs and
              stages it says something only with ranks of the job, and one sender at a time: the lines of the others
              are left out, as they are the same
`job_start`   of its `ranks` those that the node may have, in stages of the job; it claims them
`job_end`     of its `ranks` those that the node has; it must name them, as without them it would end a job everywhere
`checkpoint`  of a rank that the node may have

`maintenance_start`, `maintenance_end` and `version` quieten detectors for all that is below their entity, so it must be
the sender's own: not nobody's, as a rack that no sender reports, nor everybody's, as a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import UnionType
from typing import Any

from pipeline.ingest.ownership import SHARED_KINDS, Owners
from pipeline.model.errors import Rejected
from pipeline.model.records import Event
from pipeline.model.topology import kind_of

Refused = dict[str, str]
QUIETEN = frozenset({"maintenance_start", "maintenance_end", "version"})
"""Kinds of event from which detectors expect that an entity and all below it look wrong for a while."""


def owned_part(owners: Owners, node: str, event: Event, time: int) -> tuple[Event, Refused]:
    """The event with what `node` may report of it; and what is left out -> why. Raises Rejected if nothing is left."""
    if reason := owners.check(node, event.entity, time):
        raise Rejected("owner", f"event {event.kind}: {reason}")
    if event.kind in QUIETEN and not owners.holds(node, event.entity):
        raise Rejected(
            "owner", f"event {event.kind}: {event.entity[:80]!a} is not {node}'s own: see [admission] speaks_for"
        )
    part = _PARTS.get(event.kind)
    key, refused = part(owners, node, event, time) if part is not None else ("", {})
    if not refused:
        return event, {}
    named: Any = event.data[key]  # those refused without a reason are left out unsaid
    kept = [entity for entity in named if isinstance(entity, str) and entity not in refused]
    left = {entity: named[entity] for entity in kept} if isinstance(named, dict) else kept
    return replace(event, data={**event.data, key: left}), {entity: why for entity, why in refused.items() if why}


def claim_named(owners: Owners, node: str, event: Event, time: int) -> None:
    """What an owned event names becomes its sender's, or is let go."""
    if event.kind == "inventory":
        lines: Any = event.data.get("entities") or ()
        for entity in lines:
            if kind_of(entity) not in SHARED_KINDS:
                owners.claim(node, entity, time)
            elif lines[entity].get("attributes"):
                owners.describe(node, entity, time)
        owners.release_all_but(node, lines)
    elif event.kind == "job_start":
        for rank in _named(event, dict):
            owners.claim(node, rank, time)
    elif event.kind == "job_end":
        owners.release(node, _named(event, list | dict))


def _named(event: Event, kind: type | UnionType) -> list[str]:
    """The ranks that the event names."""
    ranks = event.data.get("ranks")
    named: Any = ranks if isinstance(ranks, kind) else ()
    return [rank for rank in named if isinstance(rank, str)]


def _inventory(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if event.entity != f"node:{node}":
        raise Rejected("owner", f"event inventory: of {event.entity[:80]!a}; wanted that of its sender, node:{node}")
    lines = event.data.get("entities")
    found = lines if isinstance(lines, dict) else {}
    refused = {e: why for e, line in found.items() if (why := _line(owners, node, e, line, time))}
    jobs = {_job(e) for e in found if kind_of(e) == "rank" and e not in refused}
    for entity, line in found.items():
        if kind_of(entity) in SHARED_KINDS and entity not in refused:
            if not owners.may_describe(node, entity, time):
                refused[entity] = ""
            if isinstance(line, dict) and line.get("attributes") and _job(entity) not in jobs:
                refused[entity] = (
                    f"{entity[:80]!a}: {node} says something of it and runs no rank of {_job(entity)[:80]}"
                )
    return "entities", refused


def _job(entity: str) -> str:
    """The job of a job, of a stage or of a rank."""
    kind, _, name = entity.partition(":")
    return f"job:{name if kind == 'job' else name.rpartition('.')[0]}"


def _line(owners: Owners, node: str, entity: str, line: object, time: int) -> str | None:
    """Why a line of an inventory is left out. What all nodes of a job share has no parents but the job itself."""
    parents = line.get("parents") if isinstance(line, dict) else None
    kind, _, name = entity.partition(":")
    if kind in SHARED_KINDS and parents:
        job = f"job:{name.rpartition('.')[0]}"
        if kind == "job" or parents != [job]:
            return f"{entity[:80]!a}: parents {str(parents)[:80]!a}; wanted {'none' if kind == 'job' else job}"
    return owners.check(node, entity, time)


def _job_start(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    ranks: Any = event.data.get("ranks")
    stages = f"stage:{event.entity.partition(':')[2]}."
    return "ranks", {r: why for r in _named(event, dict) if (why := _place(owners, node, r, ranks[r], stages, time))}


def _place(owners: Owners, node: str, rank: str, place: object, stages: str, time: int) -> str | None:
    """Why a rank is left out of a job_start: its sender may not report it, or its stage is of another job."""
    stage = place.get("stage") if isinstance(place, dict) else None
    if isinstance(stage, str) and stage.startswith("stage:") and not stage.startswith(stages):
        return f"{rank[:80]!a}: in {stage[:80]!a}; expected a stage of its job, {stages[:80]}*"
    return owners.check(node, rank, time)


def _job_end(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if not isinstance(event.data.get("ranks"), list | dict):
        raise Rejected("owner", f"event job_end: {event.entity[:80]!a} without its ranks; wanted those of its sender")
    if not _named(event, list | dict):
        raise Rejected("owner", f"event job_end: {event.entity[:80]!a} of no rank; wanted those of its sender")
    return "ranks", {rank: why for rank in _named(event, list | dict) if (why := owners.check(node, rank, time))}


def _checkpoint(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    rank = f"rank:{event.entity.partition(':')[2]}.{event.data.get('rank')}"
    if kind_of(event.entity) == "job" and (why := owners.check(node, rank, time)):
        raise Rejected("owner", f"event checkpoint: {why}")
    return "", {}


_PARTS: Mapping[str, Callable[[Owners, str, Event, int], tuple[str, Refused]]] = {
    "inventory": _inventory,
    "job_start": _job_start,
    "job_end": _job_end,
    "checkpoint": _checkpoint,
}
