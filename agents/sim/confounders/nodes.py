"""What happens to nodes without being a fault: short slowdowns, maintenance, other versions, late data, our canary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects, EventTime
from agents.sim.faults.host import contend
from agents.sim.faults.kind import DAY, HOUR, Fault, Kind, Rate, Span
from agents.sim.faults.link import flap
from agents.sim.faults.restriction import serve
from agents.sim.layout import Layout
from agents.sim.physics import canary
from agents.sim.schedule import Stop

_OFTEN = "chosen: often enough to count false alarms"


@dataclass(frozen=True)
class NodeTransient(Kind):
    """A node is slow for half a minute to five: garbage collection, a noisy neighbour, a hiccup of its data loader."""

    name = "node_transient"
    row = 4
    strikes = "node"
    detectability = "benign"
    attribution = "host"
    seen = "compute time of the node's ranks; of some also pressure on its processors"
    unseen = "its reason"
    rate = Rate(100.0, "1,000 node-days", "chosen: 0.1 for each node and day")
    lasts = Span(30.0, high=300.0)
    choices: ClassVar = {"trace": ("pressure", "none")}
    ranges: ClassVar = {"slowdown": (0.05, 0.40)}
    limits: ClassVar = {"slowdown": (0.0, 10.0)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    trace: str | None = None  # pressure: the processors show it; none: only the ranks do
    slowdown: float | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        when = effects.active(fault.onset, fault.end)
        contend(effects, fault, self.slowdown, when)
        if self.trace == "pressure":
            effects.node.cpu.add(fault.device, 0.3 * when)
            effects.node.pressure.add(fault.device, min(0.1 + self.slowdown, 1.0) * when)


@dataclass(frozen=True)
class Maintenance(Kind):
    """People work on a node: drained, cables reseated, booted with new firmware, given back; all of it announced."""

    name = "maintenance"
    row = 7
    strikes = "node"
    detectability = "benign"
    attribution = "node"
    seen = "maintenance_start and maintenance_end, flaps, silence, counters that restart, another version"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(1800.0, high=3 * HOUR)
    choices: ClassVar = {"change": ("firmware", "driver", "none")}
    change: str | None = None  # which version is another afterwards

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        length, rng = fault.end - fault.onset, fault.rng(1)
        ports = effects.layout.gpus_of(np.array([fault.device]))
        for port in rng.choice(ports, min(2, len(ports)), replace=False).tolist():
            begin = fault.onset + float(rng.uniform(0.10, 0.20)) * length
            end = begin + min(float(rng.uniform(20.0, 90.0)), 0.1 * length)  # a cable is out and in again; chosen
            if end > effects.since and begin <= effects.until:
                flap(effects, effects.layout.entities["nic"][port], port, begin, end)
        serve(fault, effects, fault.end, str(self.change))


@dataclass(frozen=True)
class MixedSilicon(Kind):
    """After short work, for which its job waits, a node has another driver or VBIOS: a little slower, for good."""

    name = "mixed_silicon"
    row = 5
    strikes = "node"
    detectability = "benign"
    attribution = "node"
    seen = "the maintenance, another version, then compute time; with another VBIOS also clock and power"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(30 * DAY, high=30 * DAY)
    settles = 2 * HOUR
    choices: ClassVar = {"change": ("driver", "vbios")}
    ranges: ClassVar = {"offset": (0.02, 0.08), "work": (900.0, 1800.0)}
    limits: ClassVar = {"offset": (0.0, 0.5), "work": (60.0, 1e5)}
    severe = "offset"
    effect_unit = "time"
    loaded = True
    change: str | None = None
    offset: float | None = None  # share of compute time (driver) or clock (VBIOS)
    work: float | None = None  # s of the maintenance before

    def _done(self, fault: Fault) -> float:
        assert self.work is not None
        return fault.onset + min(self.work, 0.5 * (fault.end - fault.onset))

    def stops(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (fault.device,), self._done(fault) - fault.onset, waits=True)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.offset is not None
        done = self._done(fault)
        serve(fault, effects, done, str(self.change))
        gpus, other = effects.layout.gpus_of(np.array([fault.device])), effects.active(done, fault.end)
        if self.change == "vbios":
            effects.gpu.clock.scale(gpus, 1 - self.offset * other)
        else:
            effects.gpu.compute.scale(gpus, 1 + self.offset * other)


@dataclass(frozen=True)
class LateTelemetry(Kind):
    """A node's samples are late because of a wrong clock, or some are missing while its agent restarts."""

    name = "late_telemetry"
    row = 9
    strikes = "node"
    detectability = "benign"
    attribution = "telemetry"
    seen = "samples dated later, the clock's offset and its jumps; or a hole of a few samples"
    unseen = "how late a batch came: data that are read later hold the time of the sample alone"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(300.0, high=1800.0)
    choices: ClassVar = {"how": ("skew", "hole")}
    ranges: ClassVar = {"ahead": (0.6, 8.0), "hole": (15.0, 45.0)}
    limits: ClassVar = {"ahead": (0.0, 3600.0), "hole": (0.0, 60.0)}
    how: str | None = None  # skew: the clock is wrong; hole: the agent restarts
    ahead: float | None = None  # s by which the clock is ahead; above the 0.5 s that the agent takes for a jump
    hole: float | None = None  # s without samples: less than the minute after which an entity counts as absent

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.ahead is not None
        assert self.hole is not None
        if self.how == "hole":
            end = min(fault.end, fault.onset + self.hole)
            effects.node.silent.add(fault.device, effects.active(fault.onset, end))
            return
        when = effects.active(fault.onset, fault.end)
        effects.node.clock_offset.add(fault.device, self.ahead * when)
        effects.node.late.add(fault.device, self.ahead * when)
        effects.add_event(fault.onset, fault.entity, "clock_jump", seconds=self.ahead)
        effects.add_event(fault.end, fault.entity, "clock_jump", seconds=-self.ahead)


@dataclass(frozen=True)
class OwnCanary(Kind):
    """Our own canary works on a busy GPU for some seconds to a minute, and its rank waits for it."""

    name = "own_canary"
    row = 13
    strikes = "gpu"
    detectability = "benign"
    attribution = "gpu"
    seen = "compute time of one rank, and a digest that says when the canary began and how long it took"
    unseen = "nothing"
    rate = Rate(25.0, "1,000 node-days", _OFTEN)
    lasts = Span(5.0, high=60.0)
    ranges: ClassVar = {"slowdown": (0.05, 0.30)}
    limits: ClassVar = {"slowdown": (0.0, 10.0)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    slowdown: float | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        tick = float(effects.time[0]) - effects.since
        both = np.minimum(effects.time, fault.end) - np.maximum(effects.time - tick, fault.onset)
        share = np.clip(both / tick, 0.0, 1.0)  # of each tick that the canary has
        effects.gpu.compute.scale(fault.device, 1 + self.slowdown * share)
        effects.gpu.busy.raise_to(fault.device, share)
        problem = canary.PROBLEMS[fault.number % len(canary.PROBLEMS)]
        data = canary.right(problem, EventTime(fault.onset), fault.end - fault.onset)
        effects.add_event(fault.end, fault.entity, "digest", **data)
