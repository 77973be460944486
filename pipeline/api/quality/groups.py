"""Problems of sources as rows that a person can read: one row per cause and place, so that a rack of silent agents is
one row and ten thousand nodes without InfiniBand are one."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.api.quality.sources import NO_DATA, SourceProblem
from pipeline.model.topology import Topology

MAX_GROUPS = 100
"""Rows of one answer. Chosen: what a person reads; the rest is counted."""
MAX_PLACES = 12
"""Racks with a row each. Chosen: of more, the cause is not in a rack."""
LEAST_OF_PLACE, LEAST_SHARE = 2, 0.5
"""Sources, and share of the nodes of a rack, from which a rack has its own row. Chosen: less is chance."""
_SHARED = ("rack", "leaf", "pdu", "cdu", "loop", "row", "pod", "hall", "site")
"""Kinds that the sources of a row may share, the smallest first."""
_WORST = ("agent", "clock", "bmc", "exporter", "tool", "driver", "disk", "collector")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ProblemGroup:
    """Problems with one cause. shared: the smallest thing that all are part of, "" if there is none.

    expected: a collector has nothing to read, as is normal without the hardware.
    """

    id: str
    problems: tuple[SourceProblem, ...]
    shared: str
    expected: bool

    @property
    def nodes(self) -> list[str]:
        """Returns the nodes of the group, each once."""
        return sorted({p.node for p in self.problems})


def group_problems(
    problems: Iterable[SourceProblem], topology: Topology, racks: Mapping[str, int]
) -> list[ProblemGroup]:
    """Returns all groups, the worst first. racks: rack -> number of its nodes."""
    same: dict[tuple[str, ...], list[SourceProblem]] = defaultdict(list)
    for problem in problems:
        same[problem.kind, problem.part, problem.state, _pattern(problem)].append(problem)
    found = []
    for key, members in same.items():
        for place, part in _split_by_rack(members, topology, racks):
            shared = place or _find_shared(part, topology)
            name = hashlib.blake2s("\0".join((*key, place)).encode("utf-8", "replace"), digest_size=6).hexdigest()
            found.append(ProblemGroup(name, tuple(part), shared, part[0].state == NO_DATA))
    return sorted(found, key=_order)


def _order(group: ProblemGroup) -> tuple[bool, int, int, str]:
    return group.expected, _WORST.index(group.problems[0].kind), -len(group.problems), group.id


def _pattern(problem: SourceProblem) -> str:
    """Returns the reason without the names and numbers in which equal reasons differ."""
    name = problem.entity.partition(":")[2]
    text = problem.reason
    for own in filter(None, (name, problem.node)):
        text = text.replace(own, "*")
    return "" if problem.kind == "clock" else _NUMBER.sub("#", text)


def _split_by_rack(
    members: Sequence[SourceProblem], topology: Topology, racks: Mapping[str, int]
) -> list[tuple[str, list[SourceProblem]]]:
    """Returns (rack or "", its problems): racks of which a large part fails, and all others together."""
    of_rack: dict[str, list[SourceProblem]] = defaultdict(list)
    for problem in members:
        rack = find_rack(problem, topology)
        of_rack[rack].append(problem)
    large = {
        rack
        for rack, part in of_rack.items()
        if rack and len(part) >= max(LEAST_OF_PLACE, LEAST_SHARE * racks.get(rack, 0))
    }
    if not large or len(large) > MAX_PLACES or len(of_rack) == 1:
        return [("", list(members))]
    rest = [problem for rack, part in of_rack.items() if rack not in large for problem in part]
    return [*((rack, of_rack[rack]) for rack in sorted(large)), *([("", rest)] if rest else [])]


def find_rack(problem: SourceProblem, topology: Topology) -> str:
    """Returns the rack of a source, "" without one."""
    own = topology.ancestor_of_kind(problem.entity, "rack")
    return own or topology.ancestor_of_kind(f"node:{problem.node}", "rack") or ""


def _find_shared(members: Sequence[SourceProblem], topology: Topology) -> str:
    """Returns the smallest thing that all members are part of; "" for one member and if there is none."""
    if len(members) < LEAST_OF_PLACE:
        return ""
    count: Counter[str] = Counter()
    for problem in members:
        count.update({*topology.ancestors(problem.entity), *topology.ancestors(f"node:{problem.node}")})
    common = [entity for entity, number in count.items() if number == len(members)]
    return next((e for kind in _SHARED for e in sorted(common) if e.startswith(f"{kind}:")), "")
