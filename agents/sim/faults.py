"""Kinds of faults: one dataclass per kind, its fields are its parameters. A new kind is a class and its line in KINDS.

A parameter left out (None) is drawn from the seed, within `ranges`. `detectability` is what truth.jsonl calls class:
hard (a logged fact), soft (only statistics tell), benign (nobody is to blame).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Defect, Effects, Happening
from agents.sim.layout import Layout
from agents.sim.noise import generator

THERMAL_BITS = (0x20, 0x40)  # NVML clock event reasons: software and hardware thermal slowdown


@dataclass(frozen=True)
class Kind(ABC):
    """One kind of fault with its parameters."""

    name: ClassVar[str]
    device_class: ClassVar[str]
    detectability: ClassVar[Literal["hard", "soft", "invisible", "benign"]]
    signals: ClassVar[tuple[str, ...]]
    ranges: ClassVar[dict[str, tuple[float, float]]] = {}  # what a parameter is drawn from
    limits: ClassVar[dict[str, tuple[float, float]]] = {}  # what it may be set to

    def drawn(self, rng: np.random.Generator) -> Self:
        """The kind with every open parameter drawn; the number of draws does not depend on what was given."""
        draws = {name: round(float(rng.uniform(*bounds)), 4) for name, bounds in self.ranges.items()}
        return replace(self, **{n: v for n, v in draws.items() if getattr(self, n) is None})

    def candidates(self, layout: Layout) -> Sequence[str]:
        """Entities that it may strike when the scenario names none: only what a job uses, where that matters."""
        return layout.entities[self.device_class]

    @abstractmethod
    def act(self, fault: Fault, effects: Effects) -> None:
        """Adds what the fault does within the block."""

    def parameters(self) -> dict[str, object]:
        """For truth.jsonl."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Fault:
    """A kind that strikes one entity in [onset, end) seconds. `device` is its place in the fleet's order."""

    number: int
    kind: Kind
    entity: str
    device: int
    onset: float
    end: float
    rng_key: tuple[int, ...]

    def moments(self, every: float, length: float) -> NDArray[np.float64]:
        """(n, 2) begin and end of each flap: the first within 20 s of onset, the next 0.5 to 1.5 x `every` later."""
        rng = generator(*self.rng_key)
        n = int((self.end - self.onset) / (0.5 * every)) + 1
        begins = (
            self.onset + rng.uniform(5.0, 20.0) + np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, n) * every)])
        )
        ends = begins + rng.uniform(0.5, 1.5, len(begins)) * min(length, 0.3 * every)
        return np.stack([begins, ends], axis=1)[ends < self.end]


@dataclass(frozen=True)
class SilentDataCorruption(Kind):
    """GPU computes wrongly now and then: its canary digest differs from its peers', no telemetry tells."""

    name = "sdc"
    device_class = "gpu"
    detectability = "hard"
    signals = ()
    ranges: ClassVar = {"probability": (0.3, 0.9)}
    limits: ClassVar = {"probability": (0.0, 1.0)}
    probability: float | None = None  # of a wrong digest per canary round

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.probability is not None
        effects.defects.append(Defect(fault.device, fault.onset, fault.end, self.probability))


@dataclass(frozen=True)
class LinkDegradation(Kind):
    """Dirty optic or cable: symbol and checksum errors rise, the link flaps, the job's collectives slow down."""

    name = "link_degradation"
    device_class = "nic"
    detectability = "hard"
    signals = ("nic.carrier_changes", "nic.symbol_errors", "nic.crc_errors", "nic.rx_errors", "nic.state")
    ranges: ClassVar = {"symbol_rate": (0.5, 5.0), "flap_every": (120.0, 300.0)}
    limits: ClassVar = {
        "symbol_rate": (0.0, 1e6),
        "flap_every": (1.0, 1e6),
        "flap_length": (0.1, 1e5),
        "collective": (1.0, 100.0),
    }
    symbol_rate: float | None = None  # symbol errors per second when fully grown; 0.04/s is BER 1e-13 at 400 Gb/s
    flap_every: float | None = None  # mean time between flaps (s)
    flap_length: float = 12.0  # mean time a flap lasts (s); published flaps last 1 to 30 s
    collective: float = 1.1  # factor on the job's time in collectives; 2 while the link is down

    def candidates(self, layout: Layout) -> Sequence[str]:
        return layout.entities["nic"][: layout.ranks]

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.symbol_rate is not None
        assert self.flap_every is not None
        port, grown = fault.device, effects.ramp(fault.onset, fault.end, 60.0)
        effects.symbols[:, port] += self.symbol_rate * grown
        effects.crc[:, port] += (
            0.3 * self.symbol_rate * grown
        )  # some errors pass as whole packets with a bad sum; chosen
        job = effects.layout.job_of_gpu[port]
        if job >= 0:
            effects.network[grown > 0, job] *= self.collective
        for begin, end in fault.moments(self.flap_every, self.flap_length):
            if end > effects.since and begin <= effects.until:
                _flap(effects, fault.entity, port, begin, end)


@dataclass(frozen=True)
class Straggler(Kind):
    """GPU slowed by heat (bad thermal contact): SM clock falls, a throttle bit is set, the whole job waits for it."""

    name = "straggler"
    device_class = "gpu"
    detectability = "soft"
    signals = ("rank.compute_time", "gpu.sm_clock", "gpu.throttle_reasons", "gpu.temperature")
    ranges: ClassVar = {"slowdown": (0.10, 0.30), "reason": (0.0, 1.0)}
    limits: ClassVar = {"slowdown": (0.0, 0.9), "reason": (0, 1), "ramp": (1.0, 1e6)}
    slowdown: float | None = None  # share of the SM clock that is lost
    reason: float | None = None  # which thermal bit is set: below 0.5 the software's (0x20), else the hardware's (0x40)
    ramp: float = 60.0  # time until the slowdown is fully grown (s)

    def candidates(self, layout: Layout) -> Sequence[str]:
        return layout.entities["gpu"][: layout.ranks]

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.slowdown is not None
        assert self.reason is not None
        grown = effects.ramp(fault.onset, fault.end, self.ramp)
        effects.clock[:, fault.device] *= 1 - np.float32(self.slowdown) * grown
        effects.hot[:, fault.device] = np.maximum(effects.hot[:, fault.device], grown)
        bit = THERMAL_BITS[int(self.reason >= 0.5)]
        effects.reasons[:, fault.device] |= np.where(grown > 0, np.uint64(bit), np.uint64(0))


@dataclass(frozen=True)
class CoolantLoss(Kind):
    """Pump of a coolant loop fails: flow, pump speed and pressure fall, then the GPUs of the loop's racks grow hot."""

    name = "coolant"
    device_class = "coolant"
    detectability = "soft"
    signals = ("coolant.flow", "pump.speed", "coolant.pressure", "coolant.return_temperature", "gpu.temperature")
    ranges: ClassVar = {"flow": (0.30, 0.60)}
    limits: ClassVar = {"flow": (0.05, 1.0), "ramp": (1.0, 1e6)}
    flow: float | None = None  # share of the flow that is left
    ramp: float = 10.0  # time in which the pump runs down (s)

    def act(self, fault: Fault, effects: Effects) -> None:
        assert self.flow is not None
        lost = np.float32(1 - self.flow) * effects.ramp(fault.onset, fault.end, self.ramp)
        effects.flow[:, fault.device] = np.minimum(effects.flow[:, fault.device], 1 - lost)


@dataclass(frozen=True)
class TelemetryGap(Kind):
    """Agent of a node sends nothing: no rows, no events; the node itself works on."""

    name = "telemetry_gap"
    device_class = "node"
    detectability = "benign"
    signals = ()

    def act(self, fault: Fault, effects: Effects) -> None:
        effects.silent[effects.within(fault.onset, fault.end), fault.device] = True


KINDS: dict[str, type[Kind]] = {
    k.name: k for k in (SilentDataCorruption, LinkDegradation, Straggler, CoolantLoss, TelemetryGap)
}


def _flap(effects: Effects, entity: str, port: int, begin: float, end: float) -> None:
    """One time down and up again: state, carrier changes, events and the stall of the job's collectives."""
    effects.down[effects.within(begin, end), port] = True
    job = effects.layout.job_of_gpu[port]
    if job >= 0:
        effects.network[effects.within(begin, end), job] *= 2.0
    for moment, state in ((begin, "down"), (end, "up")):
        if effects.since < moment <= effects.until:
            effects.flips[np.searchsorted(effects.time, moment), port] += 1
            effects.events.append(Happening(float(moment), entity, "link_state", {"state": state}))
