"""Faults of cooling and power: coolant loops, facility water and air; power supplies, shelves and PDUs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Collapse, Effects, EventTime
from agents.sim.faults.kind import DAY, HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import PSUS, Layout
from agents.sim.physics.edge import CLEAR_TAIL_S
from agents.sim.physics.noise import Floats
from agents.sim.schedule import Stop

WARM_K = 3.0  # K from which a temperature is a finding: the coolant detector's minimum effect


@dataclass(frozen=True)
class CoolantLoss(Kind):
    """Pump of a coolant loop fails: flow, pump speed and pressure fall, then the GPUs of the loop's racks grow hot."""

    name = "coolant"
    row = 25
    target = "coolant"
    detectability = "soft"
    attribution = "cooling"
    seen = (
        "flow, pressure and pump speed of the loop together, with the agent's events; temperatures of all its GPUs, up "
        "to their shutdown"
    )
    unseen = "why the pump failed"
    rate = Rate(0.02, "CDU-year", "assumed: a pump fails once in ten years, and a standby pump covers four of five")
    lasts = Span(900.0, HOUR)
    signals = (
        "coolant.flow",
        "pump.speed",
        "coolant.pressure",
        "coolant.return_temperature",
        "gpu.temperature",
        "gpu.throttle_reasons",
        "event:flow_collapse",
        "event:pressure_collapse",
        "event:temperature_rise",
    )
    ranges: ClassVar = {"flow": (0.0, 0.60)}
    limits: ClassVar = {"flow": (0.0, 1.0), "ramp": (1.0, 1e6)}
    effect_unit = "flow"
    tail = CLEAR_TAIL_S
    flow: float | None = None  # share of the flow that is left
    ramp: float = 10.0  # time in which the pump runs down (s)

    def effect(self) -> float:
        """Returns the size of its effect."""
        assert self.flow is not None
        return 1 - self.flow

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.flow is not None
        lost = np.float32(1 - self.flow) * effects.ramp(fault.onset, fault.end, self.ramp)
        effects.site.flow.lower_to(fault.device, 1 - lost)
        collapse = Collapse(fault.device, fault.onset, fault.end, self.flow, self.ramp, fault.rng_key)
        effects.collapses.append(collapse)


@dataclass(frozen=True)
class FacilityWater(Kind):
    """Facility water is too warm, or a heat exchanger is fouled: the supply of a loop and all that it cools get
    warmer."""

    name = "facility_water"
    row = 26
    target = "coolant"
    detectability = "soft"
    attribution = "cooling"
    seen = (
        "supply and return of the loop and all its GPUs warmer by the same amount; flow, pressure and resistance "
        "unchanged"
    )
    unseen = "whether water, valve or exchanger is the cause; fouling before it has warmed the supply by 3 K"
    rate = Rate(0.1, "CDU-year", "assumed: a step 0.5 times a year in a hall of 8 loops, fouling half as often")
    lasts = Span(2 * HOUR, 12 * HOUR)
    signals = ("coolant.supply_temperature", "coolant.return_temperature", "gpu.temperature")
    ranges: ClassVar = {"rise": (3.0, 12.0), "days": (30.0, 180.0)}
    limits: ClassVar = {"rise": (0.0, 40.0), "days": (1e-4, 1000.0)}
    choices: ClassVar = {"course": ("step", "step", "fouling")}
    severe = "rise"
    effect_unit = "temperature"
    rise: float | None = None  # K, at full effect
    days: float | None = None  # in which fouling grows; it may be cut off by the end
    course: str | None = None  # "step": a valve or the water, within minutes; "fouling": the exchanger, slowly

    @classmethod
    def draw_random(cls, layout: Layout, rng: np.random.Generator) -> tuple[Kind, float]:
        """Draws a fault: fouling lasts as long as it grows, a step some hours."""
        span = cls.draw_duration(layout, rng)
        kind = cls().drawn(rng)
        assert kind.days is not None
        seconds = kind.days * DAY if kind.course == "fouling" else span
        return cls(days=kind.days, course=kind.course), seconds

    def ramp(self) -> float:
        """Returns the seconds until the full effect; a failed valve warms the volume of a loop within five minutes
        (chosen)."""
        assert self.days is not None
        return 300.0 if self.course == "step" else self.days * DAY

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        assert self.rise is not None
        return min(fault.onset + self.ramp() * WARM_K / max(self.rise, WARM_K), fault.end)

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns "hard" if GPUs throttle at the end, else "soft"."""
        assert self.rise is not None
        grown = self.rise * min((fault.end - fault.onset) / self.ramp(), 1.0)
        return "hard" if layout.world.hottest(warmer=grown) >= layout.world.part.slowdown else "soft"

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.rise is not None
        grown = effects.ramp(fault.onset, fault.end, self.ramp())
        effects.site.supply.add(fault.device, np.float32(self.rise) * grown)


@dataclass(frozen=True)
class CoolantLeak(Kind):
    """Hose or coupling in a rack leaks: its loop's reservoir empties, the pressure falls, then the leak rope gets
    wet."""

    name = "coolant_leak"
    row = 28
    target = "rack"
    detectability = "hard"
    attribution = "cooling"
    seen = (
        "falling level of the loop's reservoir and pressure, slowly, then suddenly the rack's leak rope; soft if the "
        "reservoir lasts longer than a day"
    )
    unseen = "which rack leaks, before its rope is wet"
    rate = Rate(0.02, "rack-year", "assumed")
    lasts = Span(HOUR, 6 * HOUR, 3 * DAY)
    signals = ("leak.state", "reservoir.level", "coolant.pressure", "event:leak")
    ranges: ClassVar = {"loss": (0.1, 0.6), "wet": (0.2, 0.7)}
    limits: ClassVar = {"loss": (0.0, 1.0), "wet": (0.0, 1.0)}
    severe = "loss"
    tail = 10.0
    loss: float | None = None  # lost share of the reservoir at the end
    wet: float | None = None  # share of its time after which the rope is wet

    @classmethod
    def exists(cls, layout: Layout) -> bool:
        """Returns whether the site has coolant."""
        return bool(layout.entities["leak"])

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns "hard" if the reservoir would be empty within a day of its onset, else "soft"."""
        assert self.loss is not None
        return "hard" if fault.end - fault.onset <= self.loss * DAY else "soft"

    def rope_wet_time(self, fault: Fault) -> float:
        """Returns the second at which the rope gets wet."""
        assert self.wet is not None
        return fault.onset + self.wet * (fault.end - fault.onset)

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        assert self.loss is not None
        fallen = fault.onset + (fault.end - fault.onset) * 0.05 / max(self.loss, 0.05)  # ten times the noise
        return min(fallen, self.rope_wet_time(fault))

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities: until the rope is wet, only the loop that loses coolant can be known."""
        loop = layout.entities["coolant"][int(layout.loop_of_rack[fault.device])]
        return fault.entity, layout.entities["leak"][fault.device], loop

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.loss is not None
        loop = int(effects.layout.loop_of_rack[fault.device])
        lost = np.float32(self.loss) * effects.ramp(fault.onset, fault.end, fault.end - fault.onset)
        effects.site.level.scale(loop, 1 - lost)
        effects.site.pressure.scale(loop, 1 - 0.3 * lost)  # of the static pressure that the reservoir keeps; chosen
        rope = self.rope_wet_time(fault)
        effects.site.leak.add(fault.device, effects.active(rope, fault.end))
        entity = effects.layout.entities["leak"][fault.device]
        first, dry = float(math.ceil(rope)), float(math.ceil(fault.end))  # one reading a second
        effects.add_event(first, entity, "leak", state="active", since=EventTime(first), leak="critical", value=2)
        effects.add_event(
            dry + 1, entity, "leak", state="cleared", since=EventTime(first), leak="ok", value=0
        )  # two readings


@dataclass(frozen=True)
class WarmInlets(Kind):
    """What makes the inlets of whole rows of racks warmer."""

    target = "rack"
    detectability = "soft"
    attribution = "cooling"
    signals = ("sensor.temperature", "sensor.fan_speed")
    limits: ClassVar = {"rise": (0.0, 30.0), "ramp": (1.0, 1e6)}
    severe = "rise"
    effect_unit = "temperature"
    rise: float | None = None  # K at the inlet, at full effect
    ramp: float | None = None  # s until the full effect

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        assert self.ramp is not None
        assert self.rise is not None
        return min(fault.onset + self.ramp * WARM_K / max(self.rise, WARM_K), fault.end)

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the signals and events that show it; GPUs that air cools get warmer too."""
        return self.signals if layout.world.cooling.has_loop else (*self.signals, "gpu.temperature")


@dataclass(frozen=True)
class Recirculation(WarmInlets):
    """Warm exhaust air returns to the inlets of a row of racks: they get warmer, and the fans speed up to their
    maximum."""

    name = "recirculation"
    row = 29
    seen = "air inlets of all nodes of the row warmer, their fans faster"
    unseen = "which panel is missing or which air handler stopped; any effect on GPUs that are liquid-cooled"
    rate = Rate(0.19, "rack-year", "assumed: 0.5 a month in a hall of 32 racks")
    lasts = Span(2 * HOUR, 6 * HOUR, 2 * DAY)
    ranges: ClassVar = {"rise": (3.0, 10.0), "ramp": (600.0, 3600.0)}

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        return tuple(layout.targets["rack"][rack] for rack in layout.row_of(fault.device).tolist())

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.ramp is not None
        assert self.rise is not None
        grown = effects.ramp(fault.onset, fault.end, self.ramp)
        warm_air(fault.device, np.float32(self.rise) * grown, effects)
        for rack in effects.layout.row_of(fault.device).tolist():  # fans reach at most twice their usual speed
            effects.node.fans.raise_to(effects.layout.nodes_below("rack", rack), 1 + grown)


@dataclass(frozen=True)
class HallAir(WarmInlets):
    """Air handlers of a hall stop: the inlets of all its rows get warmer together."""

    name = "hall_air"
    row = 37
    seen = "air inlets of all nodes warmer, their fans faster; GPUs that air cools too"
    unseen = "which handler stopped"
    rate = Rate(0.02, "rack-year", "assumed: once in two years in a hall of 32 racks")
    lasts = Span(HOUR, 3 * HOUR, 12 * HOUR)
    ranges: ClassVar = {"rise": (4.0, 12.0), "ramp": (300.0, 1800.0)}
    world_only = True

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        return layout.targets["rack"]

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.ramp is not None
        assert self.rise is not None
        grown = effects.ramp(fault.onset, fault.end, self.ramp)
        effects.node.inlet.add(slice(None), np.float32(self.rise) * grown)
        effects.node.fans.raise_to(slice(None), 1 + grown)


def warm_air(rack: int, rise: Floats, effects: Effects) -> None:
    """Adds (ticks,) K to the inlets of all nodes in the row of a rack."""
    for other in effects.layout.row_of(rack).tolist():
        effects.node.inlet.add(effects.layout.nodes_below("rack", other), rise)


BRAKE_BIT = np.uint64(0x80)  # NVML clock event reasons: hardware power brake
_CHECKED = 300.0  # s from a node's boot until it is given work again; chosen
_BRAKE_CLOCK = 0.5  # factor on the SM clock: NVIDIA boards halve it by default


@dataclass(frozen=True)
class PsuLoss(Kind):
    """A power supply of a node, or a power shelf of a rack, has no output: the node's other supplies carry its
    share."""

    name = "psu_loss"
    row = 23
    target = "psu"
    detectability = "hard"
    attribution = "power"
    seen = (
        "output and status of the supply, output of the others up by 1/(n-1); sometimes the power brake and half the "
        "clock"
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
    part: str | None = None  # "supply": it is broken; "feed": it has no input
    brake: str | None = None  # "yes": the boards brake, bit 0x80 and half the clock
    extent: str | None = None  # "node": one supply; "rack": the same supply of all nodes of the rack, a shelf

    def effect(self) -> float:
        """Returns the size of its effect."""
        return 1 / (PSUS - 1)

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        nodes = self._nodes(fault, layout)
        if self.extent == "node":
            return (fault.entity,)
        supplies = [layout.entities["psu"][n * PSUS + fault.device % PSUS] for n in nodes.tolist()]
        return layout.targets["rack"][layout.rack_of_node[nodes[0]]], *supplies

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the signals and events that show it: those of the GPUs only if their boards brake."""
        return self.signals if self.brake == "yes" else tuple(n for n in self.signals if n.startswith("psu."))

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
        """Returns the nodes that lose a supply."""
        node = fault.device // PSUS
        return layout.nodes_below("rack", int(layout.rack_of_node[node])) if self.extent == "rack" else np.array([node])


@dataclass(frozen=True)
class PduTrip(Kind):
    """A power distribution unit trips: all its nodes lose power within a second, and boot when it is restored."""

    name = "pdu_trip"
    row = 24
    target = "power"
    detectability = "hard"
    attribution = "power"
    seen = (
        "no load and no voltage at the unit; no data from all its nodes at once; then counters and uptime restart "
        "from 0"
    )
    unseen = "what overloaded it"
    rate = Rate(0.02, "PDU-year", "assumed")
    lasts = Span(900.0, HOUR, 12 * HOUR)
    signals = ("power.draw", "power.voltage", "node.uptime")

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        nodes = tuple(layout.nodes_below("power", fault.device).tolist())
        return Stop(fault.onset, nodes, fault.end - fault.onset + _CHECKED)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        nodes, off = effects.layout.nodes_below("power", fault.device), effects.active(fault.onset, fault.end)
        effects.node.dead.add(nodes, off)
        effects.node.reset.add(nodes, effects.impulse(fault.end) > 0)
        effects.site.volts.scale(fault.device, np.where(off, 0.0, 1.0))
