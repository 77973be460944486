"""What measures intake air, sensors of a node or the chassis of a BMC, and where it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, notes
from detectors.base.streams import Bools
from detectors.base.topology_index import per_device_topology
from pipeline.model.records import SECOND, Frame
from pipeline.model.topology import Topology, kind_of

_INLET = re.compile(r"inlet|intake|ambient|\bfront\b", re.IGNORECASE)  # names that server makers use

CHASSIS_AIR = "power.inlet_temperature"
FRESH = 180 * SECOND
"""us for which a reading counts beside those of others: three of a minute each, as BMCs are read in turn. Chosen."""


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
        inlet = np.array([_is_inlet(e, frame.topology) for e in frame.entities], bool)
        racks = [above(e, "rack") for e in frame.entities]
        rack = np.array([numbers.setdefault(r, len(numbers)) if r else -1 for r in racks], np.int32)
        for i in np.flatnonzero(inlet).tolist():
            if node := above(frame.entities[i], "node"):
                of_node.setdefault(node, []).append(i)
        return Inlets(inlet, rack, frame.topology.group_numbers(frame.entities, "node"), list(numbers), of_node)


def _is_inlet(entity: str, topology: Topology) -> bool:
    """Returns whether it measures intake air: a chassis, or a sensor by any of its names."""
    facts = topology.attributes.get(entity, {})
    names = (entity.rpartition(".")[2], *(str(facts.get(key, "")) for key in ("label", "context", "name")))
    return kind_of(entity) == "chassis" or bool(_INLET.search(" ".join(names)))


@dataclass
class AirPlaces(State):
    """Sensors and chassis with intake air as one class of devices, in which each keeps its place.

    Redfish reports intake air as a property of a chassis (ThermalMetrics, or Thermal of older BMCs), with sensors of
    their own or without. It counts where neither the chassis nor its node has a sensor of intake air.

    names: by place, in order of first appearance; empty while only sensors were seen: their places are their columns.
    """

    names: list[str] = notes(list)
    _index: InletIndex = field(default_factory=InletIndex, init=False, repr=False)
    _sensed: frozenset[str] = field(default=frozenset(), init=False, repr=False)

    def join(self, frames: Mapping[str, Frame], size: int) -> Frame | None:
        """Returns a frame of what measures intake air, with the other sensors beside it; None without one. size: places
        so far."""
        sensors, chassis = frames.get("sensor"), frames.get("power")
        if sensors is not None:
            self._sensed = self._find_sensed(sensors)
        if chassis is None or not np.isfinite(chassis[CHASSIS_AIR]).any():
            chassis = None
        if not self.names and (chassis is None or (sensors is None and size)):
            return sensors
        parts = [frame for frame in (sensors, chassis) if frame is not None]
        places = [self._places(frame, self._sensed if frame is chassis else frozenset()) for frame in parts]
        if not parts:
            return None
        air, fans = np.full((2, len(self.names)), np.nan)
        for frame, place in zip(parts, places, strict=True):
            here = place >= 0
            air[place[here]] = frame[CHASSIS_AIR if frame is chassis else "sensor.temperature"][here]
            fans[place[here]] = frame["sensor.fan_speed"][here]
        values = {"sensor.temperature": air, "sensor.fan_speed": fans}
        return Frame(parts[0].time, "air", tuple(self.names), values, parts[0].topology)

    @per_device_topology
    def _find_sensed(self, sensors: Frame) -> frozenset[str]:
        """Returns the nodes and chassis with sensors of intake air."""
        inlets, above = self._index.find(sensors).inlet, sensors.topology.ancestors
        every = (a for i in np.flatnonzero(inlets).tolist() for a in above(sensors.entities[i]))
        return frozenset(a for a in every if kind_of(a) in ("node", "chassis"))

    @per_device_topology
    def _places(self, frame: Frame, sensed: frozenset[str]) -> NDArray[np.intp]:
        """(N,) place of each device, -1 of what measures no intake air or is a second thermometer of it. New ones get
        the next places."""
        place, above = {name: i for i, name in enumerate(self.names)}, frame.topology.ancestor_of_kind
        at = np.full(len(frame.entities), -1, np.intp)
        for i, entity in enumerate(frame.entities):
            chassis = kind_of(entity) == "chassis"
            if chassis and (entity in sensed or above(entity, "node") in sensed):
                continue
            if chassis or frame.device_class == "sensor":
                at[i] = place.setdefault(entity, len(place))
        self.names = list(place)
        return at
