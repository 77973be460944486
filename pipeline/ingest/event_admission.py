"""Admission of events: which entities in an event its sender may report; the rest is removed.

`inventory`   only the node's own; its lines for entities that the node may report, which it claims. Attributes of jobs
              and stages only with ranks of the job, and from one sender at a time: equal lines of others are dropped
`job_start`   `ranks` that the node may report, in stages of the job; claims them
`job_end`     `ranks` of the node; required, because without them it would end the job everywhere
`checkpoint`  of a rank that the node may report

`maintenance_start`, `maintenance_end` and `version` suppress detectors for all descendants of their entity. It must
belong to the sender: not an entity without an owner, such as a rack, or a shared one, such as a job.
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
QUIETING_KINDS = frozenset({"maintenance_start", "maintenance_end", "version"})
"""Kinds of event after which detectors expect unusual values of an entity and its descendants for a while."""


def keep_owned(owners: Owners, node: str, event: Event, time: int) -> tuple[Event, Refused]:
    """The event with what `node` may report, and removed entity -> reason. Raises Rejected if nothing is left."""
    if reason := owners.check_owner(node, event.entity, time):
        raise Rejected("owner", f"event {event.kind}: {reason}")
    if event.kind in QUIETING_KINDS and not owners.is_owner(node, event.entity):
        raise Rejected(
            "owner", f"event {event.kind}: {event.entity[:80]!a} does not belong to {node}: see [admission] speaks_for"
        )
    part = _FILTERS.get(event.kind)
    key, refused = part(owners, node, event, time) if part is not None else ("", {})
    if not refused:
        return event, {}
    named: Any = event.data[key]  # those refused without a reason are dropped silently
    kept = [entity for entity in named if isinstance(entity, str) and entity not in refused]
    left = {entity: named[entity] for entity in kept} if isinstance(named, dict) else kept
    return replace(event, data={**event.data, key: left}), {entity: why for entity, why in refused.items() if why}


def claim_entities(owners: Owners, node: str, event: Event, time: int) -> None:
    """Claims the entities in an admitted event for its sender, or releases them."""
    if event.kind == "inventory":
        lines: Any = event.data.get("entities") or ()
        for entity in lines:
            if kind_of(entity) not in SHARED_KINDS:
                owners.claim_entity(node, entity, time)
            elif lines[entity].get("attributes"):
                owners.claim_description(node, entity, time)
        owners.release_unlisted(node, lines)
    elif event.kind == "job_start":
        for rank in _named_ranks(event, dict):
            owners.claim_entity(node, rank, time)
    elif event.kind == "job_end":
        owners.release_entities(node, _named_ranks(event, list | dict))


def _named_ranks(event: Event, kind: type | UnionType) -> list[str]:
    """The ranks in an event."""
    ranks = event.data.get("ranks")
    named: Any = ranks if isinstance(ranks, kind) else ()
    return [rank for rank in named if isinstance(rank, str)]


def _filter_inventory(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if event.entity != f"node:{node}":
        raise Rejected("owner", f"event inventory: of {event.entity[:80]!a}; expected that of its sender, node:{node}")
    lines = event.data.get("entities")
    found = lines if isinstance(lines, dict) else {}
    refused = {e: why for e, line in found.items() if (why := _check_line(owners, node, e, line, time))}
    jobs = {_job_of(e) for e in found if kind_of(e) == "rank" and e not in refused}
    for entity, line in found.items():
        if kind_of(entity) in SHARED_KINDS and entity not in refused:
            if not owners.may_describe(node, entity, time):
                refused[entity] = ""
            if isinstance(line, dict) and line.get("attributes") and _job_of(entity) not in jobs:
                refused[entity] = f"{entity[:80]!a}: {node} describes it and runs no rank of {_job_of(entity)[:80]}"
    return "entities", refused


def _job_of(entity: str) -> str:
    """The job of a job, stage or rank."""
    kind, _, name = entity.partition(":")
    return f"job:{name if kind == 'job' else name.rpartition('.')[0]}"


def _check_line(owners: Owners, node: str, entity: str, line: object, time: int) -> str | None:
    """Describes why an inventory line is removed. A shared entity has no parents except its job."""
    parents = line.get("parents") if isinstance(line, dict) else None
    kind, _, name = entity.partition(":")
    if kind in SHARED_KINDS and parents:
        job = f"job:{name.rpartition('.')[0]}"
        if kind == "job" or parents != [job]:
            return f"{entity[:80]!a}: parents {str(parents)[:80]!a}; expected {'none' if kind == 'job' else job}"
    return owners.check_owner(node, entity, time)


def _filter_job_start(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    ranks: Any = event.data.get("ranks")
    stages = f"stage:{event.entity.partition(':')[2]}."
    return "ranks", {
        r: why for r in _named_ranks(event, dict) if (why := _check_rank(owners, node, r, ranks[r], stages, time))
    }


def _check_rank(owners: Owners, node: str, rank: str, place: object, stages: str, time: int) -> str | None:
    """Describes why a rank is removed: its sender may not report it, or its stage is of another job."""
    stage = place.get("stage") if isinstance(place, dict) else None
    if isinstance(stage, str) and stage.startswith("stage:") and not stage.startswith(stages):
        return f"{rank[:80]!a}: in {stage[:80]!a}; expected a stage of its job, {stages[:80]}*"
    return owners.check_owner(node, rank, time)


def _filter_job_end(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    if not isinstance(event.data.get("ranks"), list | dict):
        raise Rejected("owner", f"event job_end: {event.entity[:80]!a} without `ranks`; expected those of its sender")
    if not _named_ranks(event, list | dict):
        raise Rejected(
            "owner", f"event job_end: {event.entity[:80]!a} with empty `ranks`; expected those of its sender"
        )
    return "ranks", {
        rank: why for rank in _named_ranks(event, list | dict) if (why := owners.check_owner(node, rank, time))
    }


def _check_checkpoint(owners: Owners, node: str, event: Event, time: int) -> tuple[str, Refused]:
    rank = f"rank:{event.entity.partition(':')[2]}.{event.data.get('rank')}"
    if kind_of(event.entity) == "job" and (why := owners.check_owner(node, rank, time)):
        raise Rejected("owner", f"event checkpoint: {why}")
    return "", {}


_FILTERS: Mapping[str, Callable[[Owners, str, Event, int], tuple[str, Refused]]] = {
    "inventory": _filter_inventory,
    "job_start": _filter_job_start,
    "job_end": _filter_job_end,
    "checkpoint": _check_checkpoint,
}
