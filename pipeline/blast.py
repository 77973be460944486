"""How far an incident's trouble can reach: everything below its cause and members, and the jobs that run there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.model.topology import Topology, kind_of

_PARTS = frozenset({"nvlink", "neuroncore", "sensor", "dimm", "disk", "filesystem", "service", "agent", "collector"})
"""Kinds that no work is placed on: hundreds of them lie below a node, and would hide how many GPUs do."""


@dataclass(frozen=True, slots=True)
class Blast:
    """entities: kind -> how many are in trouble or below it; jobs: those with a rank among them, in order of name.

    Parts of a node that no work is placed on count only where they are in trouble themselves.
    """

    entities: dict[str, int]
    jobs: tuple[str, ...]


def blast_radius(cause: str, members: Iterable[str], topology: Topology) -> Blast:
    """Costs one visit of each entity below the cause and the members."""
    roots = {cause, *members}
    reached = roots | {e for e in topology.below(*roots) if kind_of(e) not in _PARTS}
    jobs = {job for e in reached if (job := topology.above_of_kind(e, "job")) is not None}
    return Blast(dict(sorted(Counter(map(kind_of, reached)).items())), tuple(sorted(jobs)))
