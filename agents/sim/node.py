"""A simulated node as a collector, for tests and trials of an agent on a host without GPUs.

No agent runs it by default: an agent's messages are marked as real, so use a separate spool if you pass it to an
Agent. Its entities are named `sim-` and have the attribute `simulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading
from agents.sim.chunk import Chunk
from agents.sim.command import utc_now
from agents.sim.fleet import ENDLESS_TICKS, FleetSimulator
from agents.sim.scenario import Fleet, Scenario
from pipeline.model.signals import CATALOGUE


@dataclass
class SimulatedNode(Collector):
    """Node `number` of a healthy simulated fleet, one tick of `interval` seconds per read; same seed, same values."""

    name: ClassVar[str] = "simulated"
    signals: ClassVar[tuple[str, ...]] = tuple(s.name for s in CATALOGUE.values() if s.device_class in ("gpu", "nic"))
    number: int = 1
    nodes: int = 1
    gpus: int = 8
    seed: int = 1
    now: Callable[[], int] = utc_now
    _chunks: Iterator[Chunk] | None = field(default=None, init=False, repr=False)
    _simulator: FleetSimulator | None = field(default=None, init=False, repr=False)

    def open(self, node: str) -> None:
        """Starts a simulated fleet, of which it reports one node. Raises NoData for a number beyond the fleet."""
        if not 1 <= self.number <= self.nodes:
            raise NoData(f"node {self.number} of a simulated fleet of {self.nodes}")
        scenario = Scenario(self.interval, self.interval, None, Fleet(self.nodes, self.gpus), source="simulated")
        self._simulator = FleetSimulator(scenario, self.seed, self.now())
        self._chunks = self._simulator.chunks(1, ENDLESS_TICKS)

    def read(self) -> tuple[Reading, ...]:
        """Returns the readings and events of the next tick."""
        simulator, chunk = self._simulator, next(self._chunks or iter(()), None)
        if simulator is None or chunk is None:
            raise NoData("simulated node is not open")
        events = tuple(event for sender, event in chunk.events if sender == self.number - 1)
        sent = tuple(event for event in events if event.kind != "inventory")  # the agent sends it itself
        readings = []
        for device_class, block in chunk.columns.items():
            mine = np.flatnonzero((chunk.senders[device_class] == self.number - 1) & chunk.present[device_class][0])
            if len(mine):
                columns = {name: values[0, mine] for name, values in block.items()}
                names = tuple(chunk.entities[device_class][i] for i in mine.tolist())
                readings.append(Reading(device_class, names, columns, sent))
                sent = ()
        return tuple(readings)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the devices and jobs of the node."""
        if self._simulator is None:
            return {}
        layout, parents, home = self._simulator.layout, self._simulator.parents, self.number - 1
        mine = [entity for entity in layout.parents if layout.sender_of(entity) == home]
        mine += [entity for entity in parents if entity not in layout.parents]  # jobs: of a fleet of one node
        return {entity: Device(tuple(parents[entity]), layout.attributes(entity)) for entity in mine}

    def close(self) -> None:
        """Ends the simulation."""
        self._chunks = self._simulator = None
