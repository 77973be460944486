"""Several sources as one topology: the first source that names a parent of a kind decides about that kind.

So NetBox gives the rack of a node, Slurm its leaf switch, and neither removes the other's. Where two sources differ
about one kind, the first in the list wins and the difference is a conflict. Agents come last: what an inventory says
about a kind counts where no source names a parent of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.model.topology import ParentGraph, kind_of, overlay_parents
from pipeline.topology.source import Link, SourceTopology


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two sources differ about the parents of one kind. used, by: what counts, and its source."""

    entity: str
    kind: str
    used: tuple[str, ...]
    by: str
    other: tuple[str, ...]
    other_by: str


@dataclass(slots=True)
class MergedTopology:
    """parents: entity -> its parents.  sources: (entity, parent) -> source.  refused: (source, entity) -> reason.

    links: with their source.  attributes: of all sources, the first wins.
    """

    parents: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, object]] = field(default_factory=dict)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    links: list[tuple[Link, str]] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


def merge_sources(named: Sequence[tuple[str, SourceTopology]]) -> MergedTopology:
    """Merges sources, the one that counts most first. A line that makes a circle with earlier sources is refused."""
    merged, graph = MergedTopology(), ParentGraph()
    cabled: set[str] = set()
    for source, found in named:
        lines: dict[str, tuple[str, ...]] = {}
        for entity, above in found.parents.items():
            known = merged.parents.get(entity)
            if known is None:
                lines[entity] = above
            elif above:
                lines[entity] = _combine(merged, entity, known, above, source)
        bad = graph.set_valid(lines)
        merged.refused |= {(source, entity): why for entity, why in bad.items()}
        for entity, above in lines.items():
            if entity not in bad:
                merged.parents[entity] = above
                for parent in above:
                    merged.sources.setdefault((entity, parent), source)
        for entity, facts in found.attributes.items():
            merged.attributes[entity] = {**facts, **merged.attributes.get(entity, {})}
        fresh = [link for link in found.links if link.a not in cabled and link.b not in cabled]
        merged.links += ((link, source) for link in fresh)
        cabled.update(end for link in fresh for end in (link.a, link.b))
    return merged


def _combine(
    merged: MergedTopology, entity: str, known: tuple[str, ...], above: tuple[str, ...], source: str
) -> tuple[str, ...]:
    """The parents of an entity with what a further source adds; notes differences."""
    kinds = {kind_of(parent) for parent in known}
    for kind in dict.fromkeys(kind_of(parent) for parent in above if kind_of(parent) in kinds):
        ours, theirs = (tuple(p for p in line if kind_of(p) == kind) for line in (known, above))
        if set(ours) != set(theirs):
            by = merged.sources[entity, ours[0]]
            merged.conflicts.append(Conflict(entity, kind, ours, by, theirs, source))
    return (*known, *(parent for parent in above if kind_of(parent) not in kinds))


def overlay_lines(
    site: Mapping[str, tuple[str, ...]], reported: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Parents of each entity of the site, with what an inventory adds."""
    return {entity: overlay_parents(above, reported.get(entity, ())) for entity, above in site.items()}
