"""Slow GPUs: heat, a worn cold plate, a clock that is stuck low, a downgraded PCIe link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.gpu import node_of, reset
from agents.sim.faults.kind import DAY, HARMS, HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Index, Layout
from agents.sim.physics.kernel_log import address
from agents.sim.schedule import Stop

_SEEN_FROM = 0.08  # rise of the resistance from which a detector must find it


@dataclass(frozen=True)
class ColdPlate(Kind):
    """Thermal contact of a GPU degrades over weeks: it gets hotter, and throttles only above its limit."""

    name = "cold_plate"
    row = 11
    target = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = (
        "a temperature that rises above its peers' at the same power; above 87 C throttle bit 0x40, lower clock, "
        "longer steps"
    )
    unseen = "whether paste, plate or a clogged channel is the cause; any sign while the GPU is idle"
    rate = Rate(0.5, "1M GPU-hours", "assumed: slow degradation that stops no job, in addition to the 0.3 of straggler")
    lasts = Span(7 * DAY, high=60 * DAY)
    signals = ("gpu.temperature", "gpu.memory_temperature", "gpu.throttle_reasons", "gpu.sm_clock")
    ranges: ClassVar = {"rise": (0.10, 0.60), "days": (7.0, 60.0)}
    limits: ClassVar = {"rise": (0.0, 10.0), "days": (1e-4, 3650.0)}
    severe = "rise"
    effect_unit = "resistance"
    loaded = True
    rise: float | None = None  # share by which the thermal resistance has grown at the end of the ramp
    days: float | None = None  # how long the ramp takes; it may be cut off by the end

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        assert self.rise is not None
        assert self.days is not None
        share = _SEEN_FROM / self.rise if self.rise > _SEEN_FROM else np.inf
        return min(fault.onset + share * self.days * DAY, fault.end)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.rise is not None
        assert self.days is not None
        grown = effects.ramp(fault.onset, fault.end, self.days * DAY)
        effects.gpu.resistance.scale(fault.device, 1 + np.float32(self.rise) * grown)


@dataclass(frozen=True)
class PcieDowngrade(Kind):
    """PCIe link of a GPU retrains to half its lanes or to generation 3: transfers are slow and the job waits."""

    name = "pcie_downgrade"
    row = 13
    target = "gpu"
    detectability = "hard"
    attribution = "gpu"
    seen = (
        "width or generation of the link, replays and an AER event when it retrains; longer compute time, lower "
        "power; longer job steps only if its rank becomes the slowest, e.g. in the last stage"
    )
    unseen = "whether slot, riser or GPU is the cause"
    rate = Rate(1.3, "1M GPU-hours", "Minder: 6.6 % of faults are PCIe downgrades; of Llama 3's 19.7")
    lasts = Span(HOUR, high=2 * DAY)
    idle_soft = True
    signals = ("gpu.pcie_width", "gpu.pcie_generation", "gpu.pcie_replays", "rank.compute_time", "event:aer")
    ranges: ClassVar = {"slowdown": (0.05, 0.50), "replays": (20.0, 400.0)}
    limits: ClassVar = {"slowdown": (0.0, 10.0), "replays": (0.0, 1e6)}
    choices: ClassVar = {"lost": ("width", "generation")}
    severe = "slowdown"
    effect_unit = "time"
    slowdown: float | None = None  # share by which the compute time of its rank grows: inputs and offloads are slow
    replays: float | None = None  # retransmitted packets at the retrain, rounded down
    lost: str | None = None  # width: 16 lanes to 8; generation: 5 to 3

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        assert self.replays is not None
        gpu, device, on = effects.gpu, fault.device, effects.active(fault.onset, fault.end)
        channel, low = (gpu.pcie_width, 8) if self.lost == "width" else (gpu.pcie_generation, 3)
        channel.lower_to(device, np.where(on, low, channel.of_devices(device)))
        gpu.starved.raise_to(device, on * np.float32(self.slowdown / (1 + self.slowdown)))
        gpu.pcie_replays.add(device, int(self.replays) * effects.impulse(fault.onset))
        node, _, index = fault.entity.removeprefix("gpu:").rpartition(".")
        count = int(self.replays)
        data = {"device": f"{address(int(index))}.0", "id": "10de:2330", "kind": "correctable", "growth": count}
        split = {name: n for name, n in (("RxErr", count // 4), ("BadTLP", count - count // 4)) if n}
        if count:
            effects.add_event(fault.onset, f"node:{node}", "aer", None, **data, total=count, errors=split)


@dataclass(frozen=True)
class MemoryHeat(Kind):
    """Thermal pad of a GPU's memory loses contact: the memory gets hotter under load, the core does not."""

    name = "memory_heat"
    row = 34
    target = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = "memory temperature that rises above its peers' under load, by nothing when idle; the core as always"
    unseen = "whether pad or stack is the cause"
    rate = Rate(0.3, "1M GPU-hours", "assumed")
    lasts = Span(6 * HOUR, DAY, 7 * DAY)
    signals = ("gpu.memory_temperature",)
    ranges: ClassVar = {"rise": (8.0, 25.0), "ramp": (600.0, 4 * HOUR)}
    limits: ClassVar = {"rise": (0.0, 60.0), "ramp": (1.0, 1e6)}
    severe = "rise"
    effect_unit = "temperature"
    loaded = True
    world_only = True
    rise: float | None = None  # K at full load
    ramp: float | None = None  # s until the full effect

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.rise is not None
        assert self.ramp is not None
        grown = effects.ramp(fault.onset, fault.end, self.ramp)
        effects.gpu.memory_heat.add(fault.device, np.float32(self.rise) * grown)


@dataclass(frozen=True)
class SlowReturn(Kind):
    """A GPU is slow from the first step after its node's return from repair: its rank was never seen healthy."""

    name = "slow_return"
    row = 35
    target = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = "the repair, for which its job waits; then longer compute time of one rank than of its peers, from the start"
    unseen = "the rank's own past; any throttle bit"
    rate = Rate(0.3, "1M GPU-hours", "assumed; Llama 3 and MegaScale report slow hosts after repair")
    lasts = Span(2 * HOUR, 4 * HOUR, 2 * DAY)
    signals = ("rank.compute_time", "gpu.sm_active", "gpu.power")
    ranges: ClassVar = {"slowdown": (0.10, 0.50), "work": (600.0, 1800.0)}
    limits: ClassVar = {"slowdown": (0.0, 10.0), "work": (60.0, 1e5)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    world_only = True
    slowdown: float | None = None  # share by which the compute time of its rank is longer
    work: float | None = None  # s of the repair

    def _done(self, fault: Fault) -> float:
        assert self.work is not None
        return fault.onset + min(self.work, 0.3 * (fault.end - fault.onset))

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        return self._done(fault)

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.onset, (node_of(fault.device, layout),), self._done(fault) - fault.onset, waits=True)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        slow = effects.active(fault.onset, fault.end)
        effects.gpu.starved.raise_to(fault.device, slow * np.float32(self.slowdown / (1 + self.slowdown)))


THERMAL_BITS = (0x20, 0x40)  # NVML clock event reasons: software and hardware thermal slowdown


@dataclass(frozen=True)
class Straggler(Kind):
    """GPU slowed by heat (bad thermal contact): SM clock falls, a throttle bit is set, the whole job waits for it."""

    name = "straggler"
    row = 11
    target = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = (
        "compute time of its rank, its clock, temperature and throttle bits; step time of all ranks if its rank "
        "becomes the slowest, e.g. in the last stage"
    )
    unseen = "which rank is slow, from step times alone: all ranks of the job share them"
    rate = Rate(0.3, "1M GPU-hours", "Llama 3: 0.28 thermal; slow degradation is cold_plate")
    lasts = Span(1200.0, 2 * HOUR)
    signals = ("rank.compute_time", "gpu.sm_clock", "gpu.throttle_reasons", "gpu.temperature")
    ranges: ClassVar = {"slowdown": (0.10, 0.30), "reason": (0.0, 1.0)}
    limits: ClassVar = {"slowdown": (0.0, 0.9), "reason": (0, 1), "ramp": (1.0, 1e6)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    slowdown: float | None = None  # share of the SM clock that is lost
    reason: float | None = None  # which thermal bit is set: below 0.5 the software's (0x20), else the hardware's (0x40)
    ramp: float = 60.0  # time until the full effect (s)

    def effect(self) -> float:
        """Returns the size of its effect."""
        assert self.slowdown is not None
        return 1 / (1 - self.slowdown) - 1

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        assert self.reason is not None
        gpu, grown = effects.gpu, effects.ramp(fault.onset, fault.end, self.ramp)
        gpu.clock.scale(fault.device, 1 - np.float32(self.slowdown) * grown)
        gpu.hot.raise_to(fault.device, grown)
        bit = THERMAL_BITS[int(self.reason >= 0.5)]
        gpu.reasons.add(fault.device, np.where(grown > 0, np.uint64(bit), np.uint64(0)))


_OUT_S = 600.0  # s that a node is out for drain, reset and check; chosen, as after GspTimeout


@dataclass(frozen=True)
class ClockStuck(Kind):
    """Clock of a GPU, or of all GPUs of its node, is stuck low or has lost its lock, without a throttle bit, until a
    reset."""

    name = "clock_stuck"
    row = 12
    target = "gpu"
    detectability = "soft"
    attribution = "gpu"
    seen = (
        "SM clock below its peers' under load without a throttle bit, lower power and temperature, longer compute "
        "time of its rank; longer job steps only if its rank becomes the slowest; the reset at the end"
    )
    unseen = "the cause; any sign while the GPU is idle, because its clock is low then"
    rate = Rate(0.3, "1M GPU-hours", "assumed; seen once after a vendor diagnostic")
    lasts = Span(1800.0, 2 * HOUR, DAY)  # until it is reset; assumed
    signals = ("gpu.sm_clock", "gpu.power", "gpu.temperature", "rank.compute_time", "event:counter_reset")
    ranges: ClassVar = {"lost": (0.05, 0.40)}
    limits: ClassVar = {"lost": (0.0, 0.8)}  # below a fifth of its clock a GPU is idle or shut down
    choices: ClassVar = {"extent": ("gpu", "gpu", "gpu", "node")}  # assumed
    severe = "lost"
    effect_unit = "clock"
    loaded = True
    lost: float | None = None  # share of the SM clock
    extent: str | None = None  # "gpu": this one; "node": all GPUs of its node by the same share

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns "hard", which needs a page, if steps are longer by a tenth, else "soft"."""
        assert self.lost is not None
        return "hard" if 1 / (1 - self.lost) - 1 >= HARMS else "soft"

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        if self.extent == "gpu":
            return (fault.entity,)
        names = layout.entities["gpu"]
        node = layout.entities["node"][node_of(fault.device, layout)]
        return node, *(names[gpu] for gpu in self._gpus(fault, layout).tolist())

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.lost is not None
        gpus = self._gpus(fault, effects.layout)
        effects.gpu.clock.scale(gpus, 1 - np.float32(self.lost) * effects.active(fault.onset, fault.end))
        for gpu in gpus.tolist():
            reset(effects, gpu, fault.end)

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.end, (node_of(fault.device, layout),), _OUT_S)

    def _gpus(self, fault: Fault, layout: Layout) -> Index:
        """Returns the numbers of the GPUs whose clock is low."""
        if self.extent == "gpu":
            return np.array([fault.device])
        return layout.gpus_of(np.array([node_of(fault.device, layout)]))
