"""Nodes with restricted coolant flow (a quick-disconnect not fully open, a clogged manifold), and their service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.schedule import Stop

_BOOT_S = (240.0, 600.0)  # s until a server of 8 GPUs has booted, memory training included; chosen
_CHANGES = {
    "driver": ("nvidia_driver", "570.133.20", "575.57.08"),
    "vbios": ("vbios", "96.00.BC.00.01", "96.00.D9.00.02"),
    "firmware": ("bios_version", "2.4.1", "2.6.3"),
}
"""Changed part -> the agent's name of it, its version before and after; chosen."""


def apply_maintenance(fault: Fault, effects: Effects, done: float, change: str, announced: bool = True) -> None:
    """Announces maintenance from the onset until `done`, and boots the node into another version in that time."""
    down = fault.onset + 0.4 * (done - fault.onset)
    up = down + min(float(fault.rng(3).uniform(*_BOOT_S)), 0.4 * (done - fault.onset))
    effects.node.dead.add(fault.device, effects.active(down, up))
    effects.node.reset.add(fault.device, effects.impulse(up))
    planner = effects.layout.nodes  # the planner announces the work, since the node is down at times
    data = {"reason": change, "seconds": done - fault.onset}
    if announced:
        effects.add_event(fault.onset, fault.entity, "maintenance_start", planner, **data)
        effects.add_event(done, fault.entity, "maintenance_end", planner, reason=change)
    if change in _CHANGES:
        name, before, after = _CHANGES[change]
        effects.add_event(0.5 * (up + done), fault.entity, "version", versions={name: after}, before={name: before})


_DRAIN_S = 60.0  # s from the announcement until the node's jobs have ended for the work; chosen
_LEAST_LOST = 0.10  # lost share of the flow from which a detector must find it, as for loops


@dataclass(frozen=True)
class NodeRestriction(Kind):
    """Quick-disconnect or manifold restricts the coolant flow of a node: all its GPUs get hotter at the same power."""

    name = "node_restriction"
    row = 27
    target = "node"
    detectability = "soft"
    attribution = "node"
    seen = (
        "all GPUs of the node hotter at the same power, most of all those with the highest power; above 87 C throttle "
        "bit 0x40, lower clock and longer steps; for a preceding service its announcement, boot and waiting job; "
        "slightly less flow of the loop"
    )
    unseen = "the node's own flow, which is not metered; whether coupling, hose or manifold is the cause"
    rate = Rate(0.2, "1,000 node-months", "assumed")
    lasts = Span(2 * HOUR, 4 * HOUR, 72 * HOUR)  # at full effect, until it is opened; assumed
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
    lost: float | None = None  # share of the node's flow, at full effect
    hours: float | None = None  # duration of a ramp; the end may cut it off. Assumed: a ramp of weeks is detected alike
    work: float | None = None  # s of the service before a step; as for other short maintenance
    course: str | None = None  # "service": low from the end of work on the node; "ramp": it clogs

    @classmethod
    def draw_random(cls, layout: Layout, rng: np.random.Generator) -> tuple[Kind, float]:
        """Draws a fault: a ramp grows for its hours and then lasts as long as a step."""
        span, kind = cls.draw_duration(layout, rng), cls().drawn(rng)
        assert kind.hours is not None
        grows = kind.hours * HOUR if kind.course == "ramp" else 0.0
        return cls(hours=kind.hours, course=kind.course), span + grows

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        begin, rise = self._course(fault)
        share = min(_LEAST_LOST / max(self._lost, _LEAST_LOST), 1.0)
        return min(begin + share * rise, fault.end)

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns "hard" if so little flow is left at the end that GPUs throttle, else "soft"."""
        begin, rise = self._course(fault)
        grown = min((fault.end - begin) / rise, 1.0) if rise else 1.0
        left = 1 - grown * self._lost
        return "hard" if layout.world.hottest(left) >= layout.world.part.slowdown else "soft"

    def job_stop(self, fault: Fault, layout: Layout) -> Stop | None:
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
            apply_maintenance(fault, effects, begin, "cooling")
        lost = np.float32(self._lost) * effects.ramp(begin, fault.end, rise)
        effects.node.flow.scale(fault.device, 1 - lost)

    @property
    def _lost(self) -> float:
        assert self.lost is not None
        return self.lost

    def _course(self, fault: Fault) -> tuple[float, float]:
        """Returns the second from which flow is lost, and the seconds until the full loss."""
        assert self.hours is not None
        assert self.work is not None
        if self.course == "ramp":
            return fault.onset, self.hours * HOUR
        return fault.onset + min(self.work, 0.5 * (fault.end - fault.onset)), 0.0
