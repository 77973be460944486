"""Benign events of a site and its network.

Site: set-points, power caps, warm air in summer, instruments after service. Network: colliding flows and misbehaving
counters, which look like a broken link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.faults.facility import warm_air
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.faults.leaf import ports_of
from agents.sim.faults.telemetry import EDGE_TAIL_S, distort_reading
from agents.sim.layout import Layout
from agents.sim.physics.gpus import EXPONENT
from agents.sim.physics.noise import Floats

OFTEN = Rate(25.0, "1,000 node-days", "chosen: at least 20 of each benign kind in 1,000 node-days")
CAP_BIT = np.uint64(0x4)  # NVML clock event reasons: software power cap


@dataclass(frozen=True)
class SetpointShift(Kind):
    """Set-point of a loop's supply is moved by 1 to 3 K within 10 to 30 minutes, and back hours later."""

    name = "setpoint_shift"
    row = 6
    target = "coolant"
    detectability = "benign"
    attribution = "cooling"
    seen = "supply, return and all GPUs of the loop warmer or colder by the same amount"
    unseen = "that it was intended"
    rate = OFTEN
    lasts = Span(HOUR, 3 * HOUR, 12 * HOUR)
    signals = ("coolant.supply_temperature", "coolant.return_temperature", "gpu.temperature")
    ranges: ClassVar = {"shift": (1.0, 3.0), "ramp": (600.0, 1800.0)}
    limits: ClassVar = {"shift": (0.0, 5.0), "ramp": (1.0, 1e6)}
    choices: ClassVar = {"direction": ("up", "down")}
    shift: float | None = None  # K
    ramp: float | None = None  # s of each ramp, up and down
    direction: str | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.shift is not None
        assert self.ramp is not None
        shift = np.float32(self.shift if self.direction == "up" else -self.shift)
        effects.site.supply.add(fault.device, shift * rise_and_fall(fault, effects, self.ramp))


@dataclass(frozen=True)
class PowerCap(Kind):
    """Power policy caps the GPUs of a unit, of a job or of the whole fleet: clocks fall by 5 to 15 % together."""

    name = "power_cap"
    row = 10
    target = "power"
    detectability = "benign"
    attribution = "power"
    seen = (
        "the software power cap bit, clock and power of all its GPUs at the same time, and the step time of their jobs"
    )
    unseen = "who set the cap, and why"
    rate = OFTEN
    lasts = Span(600.0, 2 * HOUR, 12 * HOUR)
    signals = ("gpu.throttle_reasons", "gpu.sm_clock", "gpu.power", "rank.compute_time")
    ranges: ClassVar = {"share": (0.05, 0.15)}
    limits: ClassVar = {"share": (0.0, 0.9)}
    choices: ClassVar = {"reach": ("unit", "unit", "jobs", "jobs", "fleet")}
    share: float | None = None  # lost share of the clock
    reach: str | None = None  # "unit": a power distribution unit; "jobs": all that run on it; "fleet"

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.share is not None
        on = effects.active(fault.onset, fault.end)[:, None] & self._capped(fault, effects)
        effects.gpu.capped.lower_to(slice(None), np.where(on, 1 - self.share, 1.0))
        effects.gpu.watts.lower_to(
            slice(None), np.where(on, effects.layout.world.part.board_w * (1 - self.share) ** EXPONENT, np.inf)
        )
        effects.gpu.reasons.add(slice(None), np.where(on, CAP_BIT, np.uint64(0)))

    def _capped(self, fault: Fault, effects: Effects) -> NDArray[np.bool_]:
        """Returns (ticks or 1, GPUs): whether the policy applies."""
        unit: NDArray[np.bool_] = (effects.layout.pdu_of_gpu == fault.device)[None]
        if self.reach == "unit":
            return unit
        if self.reach == "fleet":
            return np.ones_like(unit)
        running = effects.job_of_gpu
        return np.stack([unit[0] | np.isin(row, np.unique(row[unit[0] & (row >= 0)])) for row in running])


@dataclass(frozen=True)
class PartialCap(Kind):
    """An operator caps the power of some GPUs of a node, of a node or of a rack, and leaves it so for hours."""

    name = "partial_cap"
    row = 18
    target = "node"
    detectability = "benign"
    attribution = "power"
    seen = "the software power cap bit, clock and power of these GPUs, and the step time of their jobs"
    unseen = "who set the cap, and why"
    rate = Rate(10.0, "1,000 node-days", "chosen: what only some sites do; agents/sim/world.py has each site's rate")
    lasts = Span(HOUR, 6 * HOUR, 48 * HOUR)
    signals = ("gpu.throttle_reasons", "gpu.sm_clock", "gpu.power", "rank.compute_time")
    world_only = True
    ranges: ClassVar = {"share": (0.03, 0.25), "which": (0.0, 1.0)}
    limits: ClassVar = {"share": (0.0, 0.9), "which": (0.0, 1.0)}
    choices: ClassVar = {"reach": ("gpus", "gpus", "node", "rack")}
    share: float | None = None  # lost share of the clock
    which: float | None = None  # how many GPUs of the node, from one (0) to all but one (1)
    reach: str | None = None

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.share is not None
        on, gpus = effects.active(fault.onset, fault.end), self._gpus(fault, effects.layout)
        watts = effects.layout.world.part.board_w * (1 - self.share) ** EXPONENT
        effects.gpu.capped.lower_to(gpus, np.where(on, 1 - self.share, 1.0))
        effects.gpu.watts.lower_to(gpus, np.where(on, watts, np.inf))
        effects.gpu.reasons.add(gpus, np.where(on, CAP_BIT, np.uint64(0)))

    def _gpus(self, fault: Fault, layout: Layout) -> NDArray[np.intp]:
        """Returns the numbers of the capped GPUs."""
        assert self.which is not None
        nodes = np.array([fault.device])
        if self.reach == "rack":
            nodes = np.flatnonzero(layout.rack_of_node == layout.rack_of_node[fault.device])
        gpus = layout.gpus_of(nodes)
        most = max(layout.gpus_per_node - 1, 1)
        count = 1 + int(self.which * (most - 1)) if self.reach == "gpus" else len(gpus)
        return np.asarray(fault.rng().permutation(gpus)[:count], np.intp)


@dataclass(frozen=True)
class BmcSilence(Kind):
    """BMC of a node does not respond for minutes: it is busy, or its network drops requests."""

    name = "bmc_silence"
    row = 19
    target = "node"
    detectability = "benign"
    attribution = "telemetry"
    seen = "no rows of the node's sensors and power supplies; everything else of the node goes on"
    unseen = "why it does not respond"
    rate = Rate(10.0, "1,000 node-days", "chosen: what only some sites do; agents/sim/world.py has each site's rate")
    lasts = Span(60.0, 600.0, HOUR)
    signals = ("sensor.temperature", "psu.status")
    world_only = True

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.node.bmc_silent.add(fault.device, effects.active(fault.onset, fault.end))


@dataclass(frozen=True)
class InletRise(Kind):
    """A warm afternoon: the air at the inlets of a row of racks is 1 to 3 K warmer for some hours."""

    name = "inlet_rise"
    row = 11
    target = "rack"
    detectability = "benign"
    attribution = "cooling"
    seen = "air inlets of the row warmer by less than 3 K, fans a little faster"
    unseen = "that it is the weather"
    rate = OFTEN
    lasts = Span(2 * HOUR, 4 * HOUR, 12 * HOUR)
    signals = ("sensor.temperature", "sensor.fan_speed")
    ranges: ClassVar = {"rise": (1.0, 3.0), "ramp": (1800.0, 3600.0)}
    limits: ClassVar = {"rise": (0.0, 5.0), "ramp": (1.0, 1e6)}
    rise: float | None = None  # K
    ramp: float | None = None  # s of each ramp, up and down

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.rise is not None
        assert self.ramp is not None
        warm_air(fault.device, np.float32(self.rise) * rise_and_fall(fault, effects, self.ramp), effects)


@dataclass(frozen=True)
class SensorOffset(Kind):
    """After an announced service an instrument reads slightly high or low: the device is healthy."""

    name = "sensor_offset"
    row = 15
    target = "instrument"
    detectability = "benign"
    attribution = "instrument"
    seen = "the service, then one reading offset by up to 2 K while correlated signals are unchanged"
    unseen = "whether the reading before or after the service is correct"
    rate = OFTEN
    lasts = Span(2 * HOUR, 12 * HOUR, 3 * 24 * HOUR)
    signals = (
        *("gpu.temperature", "gpu.power", "coolant.flow", "coolant.supply_temperature", "sensor.temperature"),
        *("event:maintenance_start", "event:maintenance_end"),
    )
    ranges: ClassVar = {"size": (0.5, 2.0), "which": (0.0, 1.0), "work": (300.0, 900.0)}
    limits: ClassVar = {"size": (0.0, 5.0), "which": (0.0, 1.0), "work": (1.0, 1e5)}
    choices: ClassVar = {"direction": ("up", "down")}
    tail = EDGE_TAIL_S
    size: float | None = None  # K, or the equivalent in W and flow
    which: float | None = None  # which signal of the instrument, from its first (0) to its last (1)
    work: float | None = None  # s of the service before, at most a fifth of its time; chosen
    direction: str | None = None  # "up": it reads high; "down": low

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.size is not None
        assert self.which is not None
        done, planner = self.done(fault), effects.layout.nodes
        data = {"reason": "calibration", "seconds": done - fault.onset}
        effects.add_event(fault.onset, fault.entity, "maintenance_start", planner, **data)
        effects.add_event(done, fault.entity, "maintenance_end", planner, reason="calibration")
        size = self.size if self.direction == "up" else -self.size
        distort_reading(fault, effects, "biased", size, self.which, done)

    def done(self, fault: Fault) -> float:
        """Returns the second at which the service ends and the offset begins."""
        assert self.work is not None
        return fault.onset + min(self.work, 0.2 * (fault.end - fault.onset))


def rise_and_fall(fault: Fault, effects: Effects, ramp: float) -> Floats:
    """Returns (ticks,) 0 to 1: rises within `ramp` s from the onset, and falls to 0 at the end in the same time."""
    ramp = min(ramp, (fault.end - fault.onset) / 2)
    share = np.minimum((effects.time - fault.onset) / ramp, (fault.end - effects.time) / ramp)
    return np.clip(share, 0, 1).astype(np.float32)


_OFTEN = Rate(25.0, "1,000 node-days", "chosen: frequent enough to certify that no detector pages on it")
_SILENT = (30.0, 120.0)  # s without response of a module; chosen: at least one poll of the agent falls into it
_SILENT_EVERY = 600.0  # s; chosen
_REGISTER = 1 << 32


@dataclass(frozen=True)
class EcmpCollision(Kind):
    """Flows of some ports of a leaf are hashed onto one uplink: these ports send less, without errors."""

    name = "ecmp_collision"
    row = 14
    target = "nic"
    detectability = "benign"
    attribution = "network"
    seen = (
        "less traffic on two to four ports of one leaf, credit waits and CNPs of these ports in proportion to traffic"
    )
    unseen = "any error; any effect on other ports"
    rate = _OFTEN
    lasts = Span(300.0, 900.0, HOUR)
    signals = ("nic.tx_bytes", "nic.rx_bytes", "nic.port_tx_wait", "nic.cnp_handled", "rank.communication_time")
    ranges: ClassVar = {"goodput": (0.5, 0.85), "collective": (1.02, 1.12)}
    limits: ClassVar = {"goodput": (0.01, 1.0), "collective": (1.0, 10.0)}
    severe = "collective"
    loaded = True
    goodput: float | None = None  # factor on what these ports send
    collective: float | None = None  # factor on the job's time in collectives: below 2 % of a step

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.goodput is not None
        assert self.collective is not None
        ports, here = self._ports(fault, effects.layout), effects.active(fault.onset, fault.end)
        effects.port.goodput.scale(ports, 1 - (1 - self.goodput) * here)
        effects.port.wait.add(ports, 0.5 * (1 - self.goodput) * here)
        effects.port.cnp.add(ports, 300.0 * (1 - self.goodput) * here)
        effects.slow_job(ports, 1 + (self.collective - 1) * here)

    def _ports(self, fault: Fault, layout: Layout) -> np.ndarray:
        """Returns the affected port and one to three others of its leaf."""
        rng = fault.rng()
        others = ports_of(int(layout.leaf_of_port[fault.device]), layout)
        others = others[others != fault.device]
        return np.append(rng.permutation(others)[: int(rng.integers(1, 4))], fault.device)


@dataclass(frozen=True)
class CounterOddity(Kind):
    """Counters of a port misbehave: they reset, wrap at 32 bits, saturate, or read as all ones."""

    name = "counter_oddity"
    row = 8
    target = "nic"
    detectability = "benign"
    attribution = "instrument"
    seen = (
        "counters that decrease (with counter_reset and a new generation), jump by 2^32 or stay at 65535; invalid "
        "gauges"
    )
    unseen = "any link problem: there is none"
    rate = _OFTEN
    lasts = Span(HOUR, high=6 * HOUR)
    signals = (
        *("nic.generation", "nic.rx_packets", "nic.tx_packets", "nic.symbol_errors", "event:counter_reset"),
        *("nic.module_temperature", "nic.rx_power_min"),
    )
    choices: ClassVar = {"variant": ("reset", "wrap", "saturate", "sentinel")}
    variant: str | None = None
    """reset: its driver is reloaded. wrap: reloaded, and its packet counters have 32 bits until the next reload.
    saturate: reloaded, and its symbol errors are at the maximum of 16 bits. sentinel: module and error counter
    sometimes read as all ones."""

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        port, device, here = effects.port, fault.device, effects.active(fault.onset, fault.end)
        if self.variant == "sentinel":
            for begin, end in self._silences(fault):
                port.sentinel.add(device, effects.active(begin, end))
            return
        for moment in (fault.onset,) if self.variant == "reset" else (fault.onset, fault.end):
            port.reset.add(device, effects.impulse(moment) > 0)
        if self.variant == "wrap":
            stood = int(fault.rng().integers(1, _REGISTER))
            port.narrow.add(device, np.where(here, stood, 0))
        elif self.variant == "saturate":
            port.saturated.add(device, here)

    def _silences(self, fault: Fault) -> list[tuple[float, float]]:
        """Returns begin and end of each time without response; the first within two minutes of the onset."""
        rng, found, begin = fault.rng(), [], fault.onset
        begin += float(rng.uniform(0.0, 120.0))
        while (end := begin + float(rng.uniform(*_SILENT))) < fault.end:
            found.append((begin, end))
            begin = end + float(rng.uniform(0.5, 1.5)) * _SILENT_EVERY
        return found
