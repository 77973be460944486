"""What looks like a broken link and is none: flows that collide, counters that misbehave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import Layout

_OFTEN = Rate(25.0, "1,000 node-days", "chosen: frequent enough to certify that no detector pages on it")
_SILENT = (30.0, 120.0)  # s that a module does not answer; chosen: at least one of the agent's looks falls into it
_SILENT_EVERY = 600.0  # s; chosen
_REGISTER = 1 << 32


@dataclass(frozen=True)
class EcmpCollision(Kind):
    """Flows of some ports of a leaf were hashed onto one uplink: these ports send less, without a single error."""

    name = "ecmp_collision"
    row = 14
    strikes = "nic"
    detectability = "benign"
    attribution = "network"
    seen = "less traffic of two to four ports of one leaf, waits and notifications of these ports as their traffic"
    unseen = "any error; any other port"
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
        """The affected port and one to three others of its leaf."""
        rng = fault.rng()
        others = np.flatnonzero(layout.leaf_of_port == layout.leaf_of_port[fault.device])
        others = others[others != fault.device]
        return np.append(rng.permutation(others)[: int(rng.integers(1, 4))], fault.device)


@dataclass(frozen=True)
class CounterOddity(Kind):
    """Counters of a port misbehave: reset, wrap at 32 bits, stand at their top, or answer with all bits set."""

    name = "counter_oddity"
    row = 8
    strikes = "nic"
    detectability = "benign"
    attribution = "instrument"
    seen = (
        "counters that fall (with counter_reset and a new generation), jump by 2^32, stand at 65535; senseless gauges"
    )
    unseen = "anything that is wrong with the link: nothing is"
    rate = _OFTEN
    lasts = Span(HOUR, high=6 * HOUR)
    signals = (
        *("nic.generation", "nic.rx_packets", "nic.tx_packets", "nic.symbol_errors", "event:counter_reset"),
        *("nic.module_temperature", "nic.rx_power_min"),
    )
    choices: ClassVar = {"variant": ("reset", "wrap", "saturate", "sentinel")}
    variant: str | None = None
    """reset: its driver is reloaded. wrap: reloaded, and its packet counters have 32 bits until the next reload.
    saturate: reloaded, and its symbol errors are at the maximum of 16 bits. sentinel: module and error counter at times
    answer with all bits set."""

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
        """Begin and end of each time in which it does not answer; the first within two minutes of the onset."""
        rng, found, begin = fault.rng(), [], fault.onset
        begin += float(rng.uniform(0.0, 120.0))
        while (end := begin + float(rng.uniform(*_SILENT))) < fault.end:
            found.append((begin, end))
            begin = end + float(rng.uniform(0.5, 1.5)) * _SILENT_EVERY
        return found
