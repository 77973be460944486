"""Faults of the monitoring itself: broken sensors, and telemetry that is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Collapse, Effects, FalseReading
from agents.sim.faults.kind import DAY, HOUR, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.physics.instruments import grain
from pipeline.model.signals import CATALOGUE

SIGNALS = {
    "gpu": ("gpu.temperature", "gpu.power"),
    "coolant": ("coolant.flow", "coolant.supply_temperature"),
    "sensor": ("sensor.temperature",),
}
"""Class of an instrument -> signals that can be wrong."""
EDGE_TAIL_S = 40.0
"""Seconds after its end in which an agent's edge rule still reports an instrument's jump: more than its 15 + 10."""
_PER_K = {"gpu.power": 10.0, "coolant.flow": 0.03}
"""Equivalent of a bias of 1 K in other signals: W; share of the reading. Chosen: 2 to 15 K are then 20 to 150 W of 700,
and 6 to 45 % of the flow."""


@dataclass(frozen=True)
class SensorFault(Kind):
    """An instrument freezes, reads high or low, or is noisy: only its own value changes."""

    name = "sensor_fault"
    row = 30
    target = "instrument"
    detectability = "soft"
    attribution = "instrument"
    seen = "a reading that never changes, that jumps by K while correlated signals do not, or that is noisy"
    unseen = "a bias that was present from the beginning"
    rate = Rate(5.0, "1M sensor-hours", "assumed")
    lasts = Span(2 * HOUR, DAY, 7 * DAY)
    signals = tuple(name for names in SIGNALS.values() for name in names)
    ranges: ClassVar = {"size": (2.0, 15.0), "which": (0.0, 1.0)}
    limits: ClassVar = {"size": (0.0, 100.0), "which": (0.0, 1.0)}
    choices: ClassVar = {"mode": ("stuck", "biased", "noisy"), "direction": ("up", "down")}
    severe = "size"
    tail = EDGE_TAIL_S
    size: float | None = None  # K of the bias, or standard deviation of the noise
    which: float | None = None  # which signal of the instrument, from its first (0) to its last (1)
    mode: str | None = None  # "stuck", "biased" or "noisy"
    direction: str | None = None  # "up": a bias reads high; "down": low

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the signals that show it; which of its instrument's it is depends on the device."""
        return tuple(n for names in SIGNALS.values() for n in names if layout.world.reads(n))

    def severity(self) -> float | None:
        """Returns the severity; None for a stuck instrument, which has no size."""
        return None if self.mode == "stuck" else super().severity()

    def parameters(self) -> dict[str, object]:
        """Returns the parameters, without those that do not apply to a stuck instrument."""
        void = ("size", "direction") if self.mode == "stuck" else ()
        return {**super().parameters(), **dict.fromkeys(void)}

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.size is not None
        assert self.which is not None
        assert self.mode is not None
        size = self.size if self.direction == "up" else -self.size
        distort_reading(fault, effects, self.mode, size, self.which, fault.onset)


def distort_reading(fault: Fault, effects: Effects, mode: str, size: float, which: float, since: float) -> None:
    """Makes a signal of an instrument constant ("stuck"), offset by `size` K or its equivalent ("biased"), or noisy."""
    device_class, device = effects.layout.instrument(fault.device)
    signal = signal_at(device_class, which)
    when = effects.active(since, fault.end)
    if mode == "biased" and signal == "coolant.flow" and size < 0:
        flow = 1 + _PER_K[signal] * size
        effects.collapses.append(Collapse(device, since, fault.end, flow, 1.0, fault.rng_key, real=False))
    ticks = effects.time[when]

    def change(true: NDArray[Any]) -> NDArray[Any]:
        """Returns the readings as the faulty instrument reports them."""
        if mode == "stuck":
            return true
        step = _PER_K.get(signal, 1.0) * (true if signal == "coolant.flow" else 1.0)
        swing = np.ones(len(true)) if mode == "biased" else _draws(fault, ticks)
        low, high = CATALOGUE[signal].valid
        return grain(signal, np.clip(true + step * size * swing, low, high).astype(np.float32))

    jump = (since if size > 0 else fault.end, abs(size)) if mode == "biased" else None
    effects.false_readings.append(
        FalseReading(signal, device, when, change, fault.number if mode == "stuck" else None, jump)
    )


def _draws(fault: Fault, ticks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns a normal draw for each tick, independent of the blocks."""
    return np.array([fault.rng(round(tick * 1e6)).standard_normal() for tick in ticks.tolist()])


def signal_at(device_class: str, which: float) -> str:
    """Returns the signal of an instrument that `which`, 0 to 1, selects."""
    names = SIGNALS[device_class]
    return names[min(int(which * len(names)), len(names) - 1)]


_RESTART_S = 60.0
"""s in which systemd restarts an agent: it ends one that hangs after 30 s (WatchdogSec) and starts it 5 s later."""


@dataclass(frozen=True)
class TelemetryGap(Kind):
    """Agent of a node sends nothing, and the unsent data is lost: no rows, no events; the node itself keeps working.

    An outage of Kafka leaves no gap in stored data: agents spool what they cannot send, and send it later.
    """

    name = "telemetry_gap"
    row = 33
    target = "node"
    detectability = "hard"
    attribution = "telemetry"
    seen = "no data from the node while its job continues"
    unseen = "everything else about the node during the gap; a Kafka outage, after which data is late but complete"
    rate = Rate(1.0, "1,000 node-days", "assumed")
    lasts = Span(10.0, 180.0, HOUR)  # mean 3 min; assumed
    signals = ("node.uptime", "gpu.power")  # their rows, as all others of the node, are missing

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which nothing repairs it by itself: a shorter gap needs no person."""
        return fault.onset + _RESTART_S

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.node.silent.add(fault.device, effects.active(fault.onset, fault.end))
