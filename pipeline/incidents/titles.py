"""The title of an incident whose cause is a group: the summary of its main finding, with the number of members."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.incidents.factors import FACTOR_KINDS
from pipeline.model.entity_names import KINDS, pager_title
from pipeline.model.topology import kind_of


def count_alike(entity: str, members: Iterable[str]) -> int:
    """Returns how many members are of the kind of an entity."""
    kind = f"{kind_of(entity)}:"
    return sum(member.startswith(kind) for member in members)


def name_cause(cause: str, entity: str, summary: str, alike: int) -> str:
    """Returns the summary of a finding about an entity as the title of its cause, with the number of members like it:
    `Rack r1: 7 nodes: silent for 3 min`. Unchanged if it is about the cause, or if they are no group with one cause."""
    kind = kind_of(entity)
    if alike < 2 or entity == cause or kind_of(cause) not in FACTOR_KINDS or kind not in KINDS:
        return summary
    return pager_title(cause, f"{alike} {KINDS[kind][1]}: {summary.removeprefix(pager_title(entity, ''))}")
