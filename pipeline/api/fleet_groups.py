"""The cells of the fleet map: every node in its rack, rail, leaf, loop or job. A node on eight rails has eight cells.

A layout changes only with the topology or the list of nodes, so its names are sent once, and values as one byte per
cell in its order.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.model.topology import Topology, kind_of

By = Literal["rack", "rail", "leaf", "loop", "job"]
T = TypeVar("T")
KINDS: Mapping[By, tuple[str, ...]] = {
    "rack": ("rack",),
    "rail": ("rail",),
    "leaf": ("leaf", "switch"),
    "loop": ("loop", "cdu"),
    "job": ("job",),
}
"""Grouping -> kinds of entities that are its groups, the preferred one first."""
PORTS = frozenset({"port", "nic"})
Senders = Callable[[], Mapping[str, str]]
MAX_KEPT = 32
"""Layouts and indexes kept in memory. Chosen: all groupings, narrowed by a few people at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class FleetIndex:
    """The nodes in service. number: node -> its place.  simulated: per node."""

    nodes: tuple[str, ...]
    number: Mapping[str, int]
    simulated: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The cells of a map. groups: (entity, cells) in order, "" for nodes without one.  nodes: (cells,) node number.

    id: the same for equal names and groups.  own: (nodes,) whether a node has a cell.
    """

    id: str
    groups: tuple[tuple[str, int], ...]
    nodes: NDArray[np.int32]
    own: NDArray[np.bool_]


class FleetGroups:
    """Indexes and layouts, kept until what they were made from changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # making one part may need others
        self._kept: OrderedDict[tuple[str, ...], tuple[tuple[object, ...], Any]] = OrderedDict()

    def keep(self, what: tuple[str, ...], made_from: tuple[object, ...], make: Callable[[], T]) -> T:
        """Returns what `make` returned for equal objects; the newest MAX_KEPT are kept."""
        with self._lock:
            known = self._kept.get(what)
            if known is None or known[0] != made_from:
                known = self._kept[what] = made_from, make()
            self._kept.move_to_end(what)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            found: T = known[1]
            return found

    def index(self, nodes: Sequence[tuple[str, bool]]) -> FleetIndex:
        """Returns the index of nodes in service, given with `simulated`."""
        return self.keep(("index",), (nodes,), lambda: _make_index(nodes))

    def layout(self, index: FleetIndex, topology: Topology, senders: Senders, by: By, within: str | None) -> Layout:
        """Returns the cells of the nodes grouped by `by`; within: only nodes that are part of this entity.

        senders: returns rank -> node that sends it, for ranks without a device in the topology.
        """
        pairs = self.keep(("pairs", by), (index, topology), lambda: find_pairs(index, topology, senders(), by))
        return self.keep(
            ("layout", by, within or ""),
            (pairs,),
            lambda: make_layout(index, pairs, find_within(index, topology, senders(), within) if within else None),
        )


def _make_index(nodes: Sequence[tuple[str, bool]]) -> FleetIndex:
    names = tuple(sorted((name for name, _ in nodes), key=natural_key))
    simulated = dict(nodes)
    return FleetIndex(
        names, {name: i for i, name in enumerate(names)}, np.fromiter((simulated[n] for n in names), bool, len(names))
    )


def natural_key(text: str) -> tuple[tuple[int, int | str], ...]:
    """Returns a sort key that puts n9 before n10."""
    return tuple(
        (0, int(part)) if part.isdecimal() and part.isascii() else (1, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )


Pairs = tuple[tuple[str, int], ...]
"""(group, node number), each once, in the order of groups and of nodes."""


def find_pairs(index: FleetIndex, topology: Topology, senders: Mapping[str, str], by: By) -> Pairs:
    """Returns which node is in which group; a node without a group is in ""."""
    found: dict[tuple[str, int], None] = {}
    for group, node in _list_memberships(index, topology, senders, by):
        found[group, node] = None
    grouped = {node for _, node in found}
    found |= {("", i): None for i in range(len(index.nodes)) if i not in grouped}
    keys = {group: (group == "", natural_key(group)) for group, _ in found}
    return tuple(sorted(found, key=lambda pair: (keys[pair[0]], pair[1])))


def _list_memberships(
    index: FleetIndex, topology: Topology, senders: Mapping[str, str], by: By
) -> Iterable[tuple[str, int]]:
    kinds = KINDS[by]
    for node, i in index.number.items():
        group = _nearest(topology, node, kinds)
        if group is not None:
            yield group, i
    below = {"job": frozenset({"rank"}), "rail": PORTS, "leaf": PORTS}.get(by)
    for entity in list(topology.parents) if below else ():
        if kind_of(entity) in (below or ()):
            place = index.number.get(topology.ancestor_of_kind(entity, "node") or senders.get(entity, ""))
            group = _nearest(topology, entity, kinds)
            if place is not None and group is not None:
                yield group, place


def _nearest(topology: Topology, entity: str, kinds: Iterable[str]) -> str | None:
    return next((e for kind in kinds if (e := topology.ancestor_of_kind(entity, kind)) is not None), None)


def find_within(index: FleetIndex, topology: Topology, senders: Mapping[str, str], within: str) -> NDArray[np.bool_]:
    """Returns which nodes are the entity, hold it, are below it, or have a part below it."""
    own = np.zeros(len(index.nodes), bool)
    for entity in (within, *topology.descendants(within)):
        place = index.number.get(topology.ancestor_of_kind(entity, "node") or senders.get(entity, ""))
        if place is not None:
            own[place] = True
    return own


def make_layout(index: FleetIndex, pairs: Pairs, own: NDArray[np.bool_] | None) -> Layout:
    """Returns the cells of the pairs whose node is in `own`."""
    cells = pairs if own is None else [pair for pair in pairs if own[pair[1]]]
    groups: dict[str, int] = {}
    for group, _ in cells:
        groups[group] = groups.get(group, 0) + 1
    nodes = np.fromiter((node for _, node in cells), np.int32, len(cells))
    text = "\n".join([*(f"{group}\t{count}" for group, count in groups.items()), *(index.nodes[i] for _, i in cells)])
    mark = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    have = np.zeros(len(index.nodes), bool)
    have[nodes] = True
    return Layout(mark, tuple(groups.items()), nodes, have)
