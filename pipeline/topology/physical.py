"""Lines that no building has: a device in two places, a container inside what it contains, a kind that is misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from pipeline.model.topology import kind_of

CONTAINERS = ("gpu", "node", "chassis", "rack", "row", "hall", "building", "site")
"""Kinds that contain each other in space, the smallest first. Suppliers, fabric and jobs are not of them: a node has
two feeds and a leaf switch for each rail."""
KINDS = (
    *CONTAINERS,
    *("pod", "cdu", "loop", "pdu", "panel", "feed", "port", "nic", "leaf", "spine", "core", "switch", "rail", "block"),
)
"""Kinds that readers of sources write and rules of detectors and causes use; a site may have others."""
_LEVEL = {kind: level for level, kind in enumerate(CONTAINERS)}
LEAST_LIKENESS = 0.75
"""Similarity (difflib) from which a kind is taken for another one misspelt. Chosen: `nod` and `rcak` are, `pod` is a
kind of its own."""


def find_impossible(parents: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str, str]]:
    """(entity, problem, hint) of each line that cannot be true."""
    for entity, above in parents.items():
        level = _LEVEL.get(kind_of(entity), -1)
        held = [parent for parent in above if kind_of(parent) in _LEVEL]
        for parent in held:
            if _LEVEL[kind_of(parent)] <= level:
                text = f"is inside {parent}: a {kind_of(entity)} is never inside a {kind_of(parent)}"
                yield entity, text, "swap entity and parent"
        for kind in dict.fromkeys(map(kind_of, held)):
            if len(places := [parent for parent in held if kind_of(parent) == kind]) > 1:
                yield entity, f"is in {' and in '.join(places[:4])}", f"leave one {kind}"


def find_misspelt_kinds(parents: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str, str]]:
    """(first entity, problem, hint) of each kind that is not in KINDS and resembles one of them."""
    first: dict[str, str] = {}
    for entity, above in parents.items():
        for name in (entity, *above):
            first.setdefault(kind_of(name), name)
    for kind in first.keys() - set(KINDS):
        if near := difflib.get_close_matches(kind.lower(), KINDS, 1, LEAST_LIKENESS):
            yield first[kind], f"no rule uses the kind {kind}", f"did you mean {near[0]}?"
