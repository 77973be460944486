"""What some nodes have in common and others have not: place, job, SKU, versions, recent changes.

For each value (`leaf:l7`, driver 560.35) the nodes that have it inside the selection are compared with those outside:
the upper tail of the hypergeometric distribution (one-sided Fisher test), times the number of values that two or more
nodes have (Bonferroni). A value that all nodes have, or only one, separates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.api.fleet_groups import FleetIndex
from pipeline.model.topology import Topology, kind_of

SEPARATES = 0.01
"""Corrected probability below which a value separates the selection. Chosen: one false answer in 100 questions."""
MAX_ROWS = 50
"""Values in an answer. Chosen: what a person reads."""
MAX_OTHERS = 5
"""Values that do not separate, shown as the nearest ones. Chosen."""
PLACES = frozenset(
    {
        *("rack", "row", "hall", "pod", "loop", "cdu", "pdu", "leaf", "spine", "switch", "rail", "fabric", "site"),
        *("job", "chassis", "nvlink_domain", "enclosure"),
    }
)
"""Kinds of ancestors that are compared."""
DEVICES = frozenset({"node", "gpu", "port", "nic", "bmc"})
"""Kinds whose attributes are compared, each under its node."""
_NOT_COMPARED = frozenset({"simulated", "node", "uid"})
_NAMES: Mapping[str, str] = {"port": "NIC", "nic": "NIC", "gpu": "GPU", "bmc": "BMC", "node": ""}


@dataclass(frozen=True, slots=True)
class NodeAttributes:
    """values: (attribute, value) by number.  nodes, items: pairs of a node number and a number of `values`, each
    once."""

    values: tuple[tuple[str, str], ...]
    nodes: NDArray[np.int32]
    items: NDArray[np.int32]


def list_attributes(
    index: FleetIndex, topology: Topology, facts: Mapping[str, Mapping[str, object]], senders: Mapping[str, str]
) -> NodeAttributes:
    """Returns places, jobs and attributes of all nodes. facts: attributes by entity; read by key only, as another
    thread adds to them."""
    pairs: dict[tuple[int, tuple[str, str]], None] = {}
    for entity in [*index.nodes, *list(topology.parents)]:
        kind = kind_of(entity)
        if kind not in DEVICES and kind != "rank":
            continue
        place = index.number.get(topology.ancestor_of_kind(entity, "node") or senders.get(entity, ""))
        if place is None:
            continue
        for above in topology.ancestors(entity):
            if kind_of(above) in PLACES:
                pairs[place, (kind_of(above), above)] = None
        for name, value in facts.get(entity, {}).items():
            if isinstance(value, str | int | float) and value != "" and name not in _NOT_COMPARED:
                pairs[place, (f"{_NAMES.get(kind, kind)} {name}".strip(), str(value))] = None
    return make_attributes(pairs)


def make_attributes(pairs: Iterable[tuple[int, tuple[str, str]]]) -> NodeAttributes:
    """Returns pairs of a node number and (attribute, value) as arrays."""
    numbers: dict[tuple[str, str], int] = {}
    flat = [(node, numbers.setdefault(item, len(numbers))) for node, item in pairs]
    table = np.array(flat, np.int32).reshape(-1, 2)
    return NodeAttributes(tuple(numbers), table[:, 0], table[:, 1])


def compare_shares(
    parts: Sequence[NodeAttributes], selected: NDArray[np.bool_], universe: NDArray[np.bool_]
) -> dict[str, Any]:
    """Returns the values that separate selected nodes from the others of `universe`, best evidence first.

    p: probability that as many selected nodes have the value by chance; p_corrected: times `compared`, at most 1.
    """
    inside, total = int(selected.sum()), int(universe.sum())
    rows: list[dict[str, Any]] = []
    compared = 0
    tail = _HypergeometricTail(total, inside)
    for part in parts:
        have = universe[part.nodes]
        every = np.bincount(part.items[have], minlength=len(part.values))
        within = np.bincount(part.items[have & selected[part.nodes]], minlength=len(part.values))
        candidate = (every >= 2) & (every < total)
        compared += int(candidate.sum())
        have_two = np.flatnonzero(candidate & (within >= 2)).tolist()
        rows.extend(_row(part.values[i], int(within[i]), int(every[i]), tail) for i in have_two)
    for row in rows:
        row["p_corrected"] = min(1.0, row["p"] * compared)
        row["separates"] = row["p_corrected"] < SEPARATES
    rows.sort(key=lambda r: (r["p"], -r["inside"], r["outside"], r["attribute"], r["value"]))
    found = [row for row in rows if row["separates"]]
    others = [row for row in rows if not row["separates"] and row["p"] < 0.5][:MAX_OTHERS]
    return {
        "selected": inside,
        "others": total - inside,
        "compared": compared,
        "threshold": SEPARATES,
        "shared": [*found[:MAX_ROWS], *others],
    }


def _row(value: tuple[str, str], inside: int, every: int, tail: _HypergeometricTail) -> dict[str, Any]:
    attribute, text = value
    p = tail.probability(inside, every)
    return {"attribute": attribute, "value": text, "inside": inside, "outside": every - inside, "p": p}


class _HypergeometricTail:
    """P(X >= k) for X nodes with a value among `drawn` of `total`; logarithms of factorials are made once."""

    def __init__(self, total: int, drawn: int) -> None:
        self._total, self._drawn = total, drawn
        self._log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, total + 1)))])

    def probability(self, least: int, marked: int) -> float:
        """Returns the probability of `least` or more of the `marked` nodes."""
        k = np.arange(least, min(marked, self._drawn) + 1)
        k = k[self._drawn - k <= self._total - marked]
        if not len(k):
            return 1.0
        logs = (
            self._choose(marked, k)
            + self._choose(self._total - marked, self._drawn - k)
            - self._choose(self._total, np.array(self._drawn))
        )
        return float(min(1.0, np.exp(logs).sum()))

    def _choose(self, n: int, k: NDArray[np.intp]) -> NDArray[np.float64]:
        table = self._log_factorial
        return np.asarray(table[n] - table[k] - table[n - k])
