"""Leaf switches: one that crashes with all its ports, one that silently loses packets, one that is congested."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import DAY, HARMS, HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.faults.link import DARK, stall_job_at_port, stops_at, take_link_down
from agents.sim.layout import Index, Layout

_TOGETHER = 5.0  # s within which all ports of a leaf that crashes go down
_LOOK = 10.0  # s between two polls of the fabric collector
_LARGE_JOB, _LARGE_MEAN = 512, 72 * 60.0  # GPUs from which on congestion lasts longer, and its mean (s) [Greyhound]
_TRAINS, _LARGEST = 7 / 8, 0.6  # share of the nodes that train; of them in the largest job: agents/sim/schedule.py
_REACHED, _CNPS = 0.8, 2000.0  # share of a leaf's ports; notifications/s of each where steps double. Chosen
_TIMEOUTS = 2e-4  # per second, port and share that is lost: one in some hours, since most is resent in time. Chosen
_PAUSES_PER_S = 50_000.0  # pause frames of 20 us with which a port is paused all the time
_LEAST = 0.025  # share by which a step must be longer to count: 2 to 3 %, above the noise of unpadded batches


def ports_of(leaf: int, layout: Layout) -> Index:
    """Returns the numbers of the ports in use on a leaf."""
    return np.flatnonzero((layout.leaf_of_port == leaf) & layout.port_used)


@dataclass(frozen=True)
class LeafCrash(Kind):
    """Leaf switch crashes: all its ports go down within 5 s until it has booted; jobs on it hang, then die."""

    name = "leaf_crash"
    row = 17
    target = "leaf"
    detectability = "hard"
    attribution = "network"
    seen = "link_state and no received light at every port of the leaf within 5 s, switch_state; the end of its jobs"
    unseen = "why it crashed"
    rate = Rate(0.00051, "leaf-month", "Alibaba HPN: 0.051 % of the leaf switches fail in a month")
    lasts = Span(300.0, high=HOUR)
    signals = ("nic.state", "nic.carrier_changes", "nic.rx_power_min", "event:link_state", "event:switch_state")
    ranges: ClassVar = {"dies_after": (15.0, 90.0)}
    limits: ClassVar = {"dies_after": (0.1, 1e5)}
    dies_after: float | None = None  # s until its jobs have died

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        ports, rng, dies = ports_of(fault.device, effects.layout), fault.rng(), stops_at(fault, self.dies_after)
        spread = rng.uniform(0.0, min(_TOGETHER, 0.2 * (fault.end - fault.onset)), (2, len(ports)))
        names = effects.layout.entities["nic"]
        for port, late, early in zip(ports.tolist(), *spread.tolist(), strict=True):
            take_link_down(effects, names[port], port, fault.onset + late, fault.end - early)
            stall_job_at_port(effects, port, fault.onset + late, dies)
        effects.port.rx_power.add(ports, DARK * effects.active(fault.onset, fault.end))
        data = {"guid": f"0x{zlib.crc32(fault.entity.encode()):016x}", "ports": len(ports)}
        seen = min(fault.onset + _LOOK, fault.end)
        effects.add_event(seen, fault.entity, "switch_state", None, state="gone", **data)
        effects.add_event(fault.end, fault.entity, "switch_state", None, state="seen", **data)

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the jobs on its ports have died."""
        return stops_at(fault, self.dies_after)


class LeafSlows(Kind):
    """What slows down the jobs on the ports of a leaf: the leaf is at fault, and its jobs show it."""

    target = "leaf"
    detectability = "soft"
    attribution = "network"
    loaded = True

    def ports_below(self, fault: Fault, layout: Layout) -> Index:
        """Returns the ports that it slows down."""
        return ports_of(fault.device, layout)

    @abstractmethod
    def lengthening(self, collectives: float) -> float:
        """Returns the share by which it lengthens the steps of a job that spends a share of them in collectives."""

    def slowing_class(self, longer: float) -> Detectability:
        """Returns its class in the truth where the steps of a job are longer by a share, for long."""
        return self.detectability


@dataclass(frozen=True)
class GrayLeaf(LeafSlows):
    """Leaf switch, or a line card of it, silently drops large packets: no counter shows it, but throughput falls."""

    name = "gray_leaf"
    row = 18
    seen = (
        "less traffic and more credit waits on all ports of one leaf, or on half of them, without ECN marks or CNPs; "
        "a few timeouts in hours; longer collectives and steps of all jobs on these ports"
    )
    unseen = (
        "the dropped packets, which no switch counter shows; which part of the switch drops them; any effect on idle "
        "ports"
    )
    rate = Rate(0.0001, "leaf-month", "assumed: 0.01 % of the leaf switches in a month")
    lasts = Span(1800.0, 2 * HOUR, DAY)  # until it is drained; assumed
    signals = (
        *("nic.tx_bytes", "nic.rx_bytes", "nic.port_tx_wait", "nic.ack_timeouts"),
        *("rank.communication_time", "rank.step_time"),
    )
    ranges: ClassVar = {"lost": (0.05, 0.60)}
    limits: ClassVar = {"lost": (0.0, 0.99)}
    choices: ClassVar = {"part": ("leaf", "leaf", "card")}  # assumed
    severe = "lost"
    effect_unit = "time"
    lost: float | None = None  # share of the goodput of its ports
    part: str | None = None  # "leaf": all its ports; "card": the first half of them, one line card of two

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.lost is not None
        ports, port, lost = self.ports_below(fault, effects.layout), effects.port, np.float32(self.lost)
        when = effects.active(fault.onset, fault.end)
        weights = fault.rng().uniform(0.8, 1.0, len(ports)).astype(np.float32)  # not all packets are large; chosen
        weights[0] = 1.0
        gone = lost * when[:, None] * weights
        port.goodput.scale(ports, 1 - gone)
        port.wait.add(ports, 0.5 * gone)  # as for colliding flows: agents/sim/confounders/site.py
        port.timeouts.add(ports, _TIMEOUTS * gone * (effects.job_of_gpu[:, ports] >= 0))
        effects.slow_job(ports, 1 / (1 - lost * when))  # a collective ends with its slowest port

    def ports_below(self, fault: Fault, layout: Layout) -> Index:
        """Returns the ports that it slows down."""
        ports = ports_of(fault.device, layout)
        return ports if self.part == "leaf" else ports[: -(-len(ports) // 2)]

    def lengthening(self, collectives: float) -> float:
        """Returns the share by which steps of a job get longer: what is lost is sent again within its collectives."""
        assert self.lost is not None
        return collectives * self.lost / (1 - self.lost)

    def slowing_class(self, longer: float) -> Detectability:
        """Returns "hard", which needs a page, if a job is slowed by a tenth, else "soft"."""
        return "hard" if longer >= HARMS else "soft"


@dataclass(frozen=True)
class PauseStorm(Kind):
    """NIC cannot drain what it receives (slow PCIe or host memory) and pauses its leaf: bytes move, but slower."""

    name = "pause_storm"
    row = 36
    target = "nic"
    detectability = "soft"
    attribution = "network"
    seen = (
        "PFC pause frames that one port sends, far above its peers; less traffic there; longer collectives of its job"
    )
    unseen = "why the host drains slowly; any error"
    rate = Rate(0.001, "link-month", "assumed; Guo, SIGCOMM'16: pause storms of single NICs stopped whole services")
    lasts = Span(900.0, HOUR, DAY)
    signals = ("nic.tx_pause", "nic.tx_pause_duration", "nic.tx_bytes", "nic.rx_bytes", "rank.communication_time")
    ranges: ClassVar = {"paused": (0.3, 0.8)}
    limits: ClassVar = {"paused": (0.0, 0.99)}
    severe = "paused"
    effect_unit = "bandwidth"
    loaded = True
    world_only = True
    paused: float | None = None  # share of the time in which its leaf may not send to it

    @classmethod
    def exists(cls, layout: Layout) -> bool:
        """Returns whether ports pause: those of InfiniBand have credits instead."""
        return layout.world.fabric.kind != "ib"

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.paused is not None
        here = np.float32(self.paused) * effects.active(fault.onset, fault.end)
        effects.port.pause.add(fault.device, _PAUSES_PER_S * here * (effects.job_of_gpu[:, fault.device] >= 0))
        effects.port.goodput.scale(fault.device, 1 - 0.5 * here)  # its peers wait for it, and catch up; chosen
        effects.slow_job([fault.device], 1 / (1 - here))


@dataclass(frozen=True)
class Congestion(LeafSlows):
    """Leaf is congested: data waits for credits, notifications rise on most ports, every rank's step takes longer."""

    name = "congestion"
    row = 20
    seen = (
        "credit waits, ECN-marked packets and CNPs on most ports of one leaf, in proportion to traffic; longer "
        "collectives"
    )
    unseen = "any error: no link or port is faulty"
    rate = Rate(
        1.5,
        "leaf-month",
        "Greyhound: 40 % of multi-node jobs; counted as one job a day on the 8 leaves of a pod, assumed",
    )
    lasts = Span(120.0, 24 * 60.0, 6 * HOUR)
    signals = (
        *("nic.port_tx_wait", "nic.ecn_marked", "nic.cnp_sent", "nic.cnp_handled"),
        *("rank.communication_time", "rank.step_time"),
    )
    ranges: ClassVar = {"slowdown": (0.10, 0.80), "rise": (1.0, 300.0)}
    limits: ClassVar = {"slowdown": (0.0, 100.0), "rise": (0.0, 1e6)}
    severe = "slowdown"
    effect_unit = "time"
    slowdown: float | None = None  # share by which a step takes longer, on all ranks
    rise: float | None = None  # s until the full effect

    @classmethod
    def draw_duration(cls, layout: Layout, rng: np.random.Generator) -> float:
        """Draws the duration: three times as long if the largest job has 512 GPUs or more."""
        large = layout.gpus * _TRAINS * _LARGEST >= _LARGE_JOB
        return Span(cls.lasts.low, _LARGE_MEAN if large else cls.lasts.mean, cls.lasts.high).draw(rng)

    def lengthening(self, collectives: float) -> float:
        """Returns the share by which steps of a job get longer."""
        assert self.slowdown is not None
        return self.slowdown

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected."""
        assert self.slowdown is not None
        assert self.rise is not None
        return min(fault.onset + self.rise * min(1.0, _LEAST / max(self.slowdown, 1e-9)), fault.end)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        assert self.rise is not None
        rng, ports = fault.rng(), ports_of(fault.device, effects.layout)
        reached = ports[rng.random(len(ports)) < _REACHED]
        weights = rng.uniform(0.3, 1.0, len(ports))[: len(reached)].astype(np.float32)
        grown = self.slowdown * effects.ramp(fault.onset, fault.end, self.rise)
        effects.lengthen_steps(ports, grown)
        effects.port.wait.add(reached, 0.6 * np.minimum(grown, 1)[:, None] * weights)
        effects.port.cnp.add(reached, _CNPS * grown[:, None] * weights)
