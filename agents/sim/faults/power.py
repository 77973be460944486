"""Power supplies, shelves and distribution units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.faults.kind import DAY, HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import PSUS, Layout
from agents.sim.schedule import Stop

BRAKE_BIT = np.uint64(0x80)  # NVML clock event reasons: hardware power brake
_CHECKED = 300.0  # s from a node's boot until it is given work again; chosen
_BRAKE_CLOCK = 0.5  # of the SM clock that the brake leaves: NVIDIA's boards take half away by default


@dataclass(frozen=True)
class PsuLoss(Kind):
    """A node's power supply gives nothing more, or a rack's whole shelf: the others of the node carry its share."""

    name = "psu_loss"
    row = 23
    strikes = "psu"
    detectability = "hard"
    attribution = "power"
    seen = (
        "the supply's output and state, the others' output up by 1/(n-1); at times the power brake and half the clock"
    )
    unseen = "whether the supply or its cord failed, if its input is not reported"
    rate = Rate(0.16, "1M GPU-hours", "Llama 3: 0.14 power supplies; shelves 0.01 per rack-year assumed")
    lasts = Span(HOUR, 12 * HOUR, 3 * DAY)
    signals = ("psu.output_power", "psu.status", "psu.input_voltage", "psu.input_status", "gpu.throttle_reasons")
    choices: ClassVar = {
        "part": ("supply", "supply", "feed"),  # assumed
        "brake": ("no", "no", "yes"),  # assumed
        "extent": (*("node",) * 8, "rack"),  # 0.01 shelves per rack-year of 64 GPUs against 0.14 per 1M GPU-hours
    }
    effect_unit = "power"
    part: str | None = None  # "supply": it is broken; "feed": its input is gone
    brake: str | None = None  # "yes": the boards brake, bit 0x80 and half the clock
    extent: str | None = None  # "node": one supply; "rack": the same supply of all nodes of the rack, a shelf

    def effect(self) -> float:
        """Returns the size of its effect."""
        return 1 / (PSUS - 1)

    def guilty(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        nodes = self._nodes(fault, layout)
        if self.extent == "node":
            return (fault.entity,)
        supplies = [layout.entities["psu"][n * PSUS + fault.device % PSUS] for n in nodes.tolist()]
        return layout.places["rack"][layout.rack_of_node[nodes[0]]], *supplies

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        site, nodes = effects.site, self._nodes(fault, effects.layout)
        lost = effects.active(fault.onset, fault.end)
        channel = site.psu_unfed if self.part == "feed" else site.psu_lost
        channel.add(nodes * PSUS + fault.device % PSUS, lost)
        if self.brake == "yes":
            gpus = effects.layout.gpus_of(nodes)
            effects.gpu.clock.scale(gpus, np.where(lost, _BRAKE_CLOCK, 1.0))
            effects.gpu.reasons.add(gpus, np.where(lost, BRAKE_BIT, np.uint64(0)))

    def _nodes(self, fault: Fault, layout: Layout) -> NDArray[np.intp]:
        """Nodes that lose a supply."""
        node = fault.device // PSUS
        return layout.nodes_below("rack", int(layout.rack_of_node[node])) if self.extent == "rack" else np.array([node])


@dataclass(frozen=True)
class PduTrip(Kind):
    """A power distribution unit trips: all nodes it feeds are gone within a second, and boot when it is back."""

    name = "pdu_trip"
    row = 24
    strikes = "power"
    detectability = "hard"
    attribution = "power"
    seen = "no load and no voltage at the unit; all its nodes silent together; afterwards counters and uptime from 0"
    unseen = "what overloaded it"
    rate = Rate(0.02, "PDU-year", "assumed")
    lasts = Span(900.0, HOUR, 12 * HOUR)
    signals = ("power.draw", "power.voltage", "node.uptime")

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        nodes = tuple(layout.nodes_below("power", fault.device).tolist())
        return Stop(fault.onset, nodes, fault.end - fault.onset + _CHECKED)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        nodes, off = effects.layout.nodes_below("power", fault.device), effects.active(fault.onset, fault.end)
        effects.node.dead.add(nodes, off)
        effects.node.reset.add(nodes, effects.impulse(fault.end) > 0)
        effects.site.volts.scale(fault.device, np.where(off, 0.0, 1.0))
