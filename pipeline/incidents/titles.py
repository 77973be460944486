"""The title of an incident: the newest summary of its main finding, and what else it has to say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pipeline.incidents.factors import FACTOR_KINDS
from pipeline.model.entity_names import KINDS, pager_title
from pipeline.model.records import LEVELS
from pipeline.model.topology import kind_of

if TYPE_CHECKING:
    from pipeline.incidents.cases import Condition


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


def describe_held(main: Condition, held: Sequence[Condition]) -> str:
    """Returns the summary of a condition that holds until it is cleared, after a semicolon; empty without one, or if
    the main one holds."""
    if not held or main in held:
        return ""
    return f"; {min(held, key=lambda c: (-LEVELS.index(c.level), c.onset, c.detector, c.entity)).summary}"
