"""Nodes with restricted coolant flow (a quick-disconnect not fully open, a clogged manifold), and their service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.schedule import Stop

_BOOT_S = (240.0, 600.0)  # until a server of 8 GPUs is back: memory training and all; chosen
_CHANGES = {
    "driver": ("nvidia_driver", "570.133.20", "575.57.08"),
    "vbios": ("vbios", "96.00.BC.00.01", "96.00.D9.00.02"),
    "firmware": ("bios_version", "2.4.1", "2.6.3"),
}
"""Changed part -> the agent's name of it, its version before and after; chosen."""


def serve(fault: Fault, effects: Effects, done: float, change: str) -> None:
    """Announces maintenance from the onset until `done`, and boots the node into another version in that time."""
    down = fault.onset + 0.4 * (done - fault.onset)
    up = down + min(float(fault.rng(3).uniform(*_BOOT_S)), 0.4 * (done - fault.onset))
    effects.node.dead.add(fault.device, effects.active(down, up))
    effects.node.reset.add(fault.device, effects.impulse(up))
    planner = effects.layout.nodes  # the planner announces the work, since the node is down at times
    data = {"reason": change, "seconds": done - fault.onset}
    effects.add_event(fault.onset, fault.entity, "maintenance_start", planner, **data)
    effects.add_event(done, fault.entity, "maintenance_end", planner, reason=change)
    if change in _CHANGES:
        name, before, after = _CHANGES[change]
        effects.add_event(0.5 * (up + done), fault.entity, "version", versions={name: after}, before={name: before})


_DRAIN_S = 60.0  # s from the announcement until the node's jobs have ended for the work; chosen
_LEAST_LOST = 0.10  # share of the flow from which a detector is asked to see it, as with loops
_THROTTLES = 0.55  # share of the flow without which 99 % of the loaded nodes throttle some GPU at times: measured here


@dataclass(frozen=True)
class NodeRestriction(Kind):
    """Quick-disconnect or manifold lets less coolant through a node: all its GPUs grow hot at the same power."""

    name = "node_restriction"
    row = 27
    strikes = "node"
    detectability = "soft"
    attribution = "node"
    seen = (
        "all GPUs of the node hotter at the same power, most those that draw most; past 87 C throttle bit 0x40, clock "
        "and steps; of a service before it its announcement, the boot, the job that waits; the loop's flow a little"
    )
    unseen = "the node's own flow, which nothing meters; whether coupling, hose or manifold is to blame"
    rate = Rate(0.2, "1,000 node-months", "assumed")
    lasts = Span(2 * HOUR, 4 * HOUR, 72 * HOUR)  # fully grown, until it is opened; assumed
    signals = (
        *("gpu.temperature", "gpu.memory_temperature", "gpu.throttle_reasons", "gpu.sm_clock", "coolant.flow"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    ranges: ClassVar = {"lost": (0.20, 0.70), "hours": (1.0, 12.0), "work": (900.0, 1800.0)}
    limits: ClassVar = {"lost": (0.0, 1.0), "hours": (1e-3, 1e5), "work": (60.0, 1e5)}
    choices: ClassVar = {"course": ("service", "ramp")}  # as often; assumed
    severe = "lost"
    effect_unit = "flow"
    loaded = True
    lost: float | None = None  # share of the node's flow, when fully grown
    hours: float | None = None  # in which a ramp grows; it may be cut off by the end. Assumed: weeks are seen alike
    work: float | None = None  # s of the service before a step; as of other short work on nodes
    course: str | None = None  # "service": low from the end of work on the node; "ramp": it clogs

    @classmethod
    def arriving(cls, layout: Layout, rng: np.random.Generator) -> tuple[Kind, float]:
        """A ramp takes its hours to grow before it lasts as long as a step."""
        span, kind = cls.lasting(layout, rng), cls().drawn(rng)
        assert kind.hours is not None
        grows = kind.hours * HOUR if kind.course == "ramp" else 0.0
        return cls(hours=kind.hours, course=kind.course), span + grows

    def detectable(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        begin, rise = self._course(fault)
        share = min(_LEAST_LOST / max(self._lost, _LEAST_LOST), 1.0)
        return min(begin + share * rise, fault.end)

    def verdict(self, fault: Fault) -> Detectability:
        """A logged fact where so little flow is left at last that GPUs throttle."""
        begin, rise = self._course(fault)
        grown = min((fault.end - begin) / rise, 1.0) if rise else 1.0
        return "hard" if grown * self._lost >= _THROTTLES else "soft"

    def stops(self, fault: Fault, layout: Layout) -> Stop | None:
        """Returns the stop of jobs that it causes."""
        if self.course == "ramp":
            return None
        done, _ = self._course(fault)
        at = fault.onset + min(_DRAIN_S, 0.1 * (done - fault.onset))
        return Stop(at, (fault.device,), done - at, waits=True)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        begin, rise = self._course(fault)
        if self.course == "service":
            serve(fault, effects, begin, "cooling")
        lost = np.float32(self._lost) * effects.ramp(begin, fault.end, rise)
        effects.node.flow.scale(fault.device, 1 - lost)

    @property
    def _lost(self) -> float:
        assert self.lost is not None
        return self.lost

    def _course(self, fault: Fault) -> tuple[float, float]:
        """Second from which flow is lost, and s until all that is lost is."""
        assert self.hours is not None
        assert self.work is not None
        if self.course == "ramp":
            return fault.onset, self.hours * HOUR
        return fault.onset + min(self.work, 0.5 * (fault.end - fault.onset)), 0.0
