"""Work on a node as people and its agent tell of it: announced, booted, perhaps into another version."""

from __future__ import annotations

from agents.sim.effects import Effects
from agents.sim.faults.kind import Fault

_BOOT_S = (240.0, 600.0)  # until a server of 8 GPUs is back: memory training and all; chosen
_CHANGES = {
    "driver": ("nvidia_driver", "570.133.20", "575.57.08"),
    "vbios": ("vbios", "96.00.BC.00.01", "96.00.D9.00.02"),
    "firmware": ("bios_version", "2.4.1", "2.6.3"),
}
"""What is changed -> what the agent calls it, its version before and after; chosen."""


def serve(fault: Fault, effects: Effects, done: float, change: str) -> None:
    """Announces maintenance from the onset until `done`, and boots the node into another version meanwhile."""
    down = fault.onset + 0.4 * (done - fault.onset)
    up = down + min(float(fault.rng(3).uniform(*_BOOT_S)), 0.4 * (done - fault.onset))
    effects.node.dead.add(fault.device, effects.within(down, up))
    effects.node.reset.add(fault.device, effects.at(up))
    planner = effects.layout.nodes  # who plans the work tells of it; the node is down at times
    data = {"reason": change, "seconds": done - fault.onset}
    effects.tell(fault.onset, fault.entity, "maintenance_start", planner, **data)
    effects.tell(done, fault.entity, "maintenance_end", planner, reason=change)
    if change in _CHANGES:
        name, before, after = _CHANGES[change]
        effects.tell(0.5 * (up + done), fault.entity, "version", versions={name: after}, before={name: before})
