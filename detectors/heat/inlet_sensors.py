"""Which sensors of a node measure its intake air, and where they are."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.streams import Bools
from detectors.base.topology_index import per_device_topology
from pipeline.model.records import Frame
from pipeline.model.topology import Topology

_INLET = re.compile(r"inlet|intake|ambient|\bfront\b", re.IGNORECASE)  # names that server makers use


@dataclass(frozen=True, slots=True)
class Inlets:
    """(N,) per sensor. inlet: measures intake air.   rack: number into `racks`, -1 none.   node: number of its node.

    of_node: node -> positions of its inlets.
    """

    inlet: Bools
    rack: NDArray[np.int32]
    node: NDArray[np.int32]
    racks: list[str]
    of_node: dict[str, list[int]]


class InletIndex:
    """Which sensors are inlets, and where they are."""

    @per_device_topology
    def find(self, frame: Frame) -> Inlets:
        """Returns the inlets of a frame of class sensor."""
        above, numbers, of_node = frame.topology.ancestor_of_kind, dict[str, int](), dict[str, list[int]]()
        inlet = np.array([bool(_INLET.search(_sensor_name(e, frame.topology))) for e in frame.entities], bool)
        racks = [above(e, "rack") for e in frame.entities]
        rack = np.array([numbers.setdefault(r, len(numbers)) if r else -1 for r in racks], np.int32)
        for i in np.flatnonzero(inlet).tolist():
            if node := above(frame.entities[i], "node"):
                of_node.setdefault(node, []).append(i)
        return Inlets(inlet, rack, frame.topology.group_numbers(frame.entities, "node"), list(numbers), of_node)


def _sensor_name(entity: str, topology: Topology) -> str:
    """Returns all names that a sensor has."""
    facts = topology.attributes.get(entity, {})
    return " ".join([entity.rpartition(".")[2], *(str(facts.get(k, "")) for k in ("label", "context", "name"))])
