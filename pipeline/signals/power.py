"""Signals of the class power: one power distribution unit. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("power.draw", "W", "gauge", "power", "f4", "Power delivered to the racks fed", "simulator; Redfish later", "hw.power", (0, 1e7)),
    Signal("power.voltage", "V", "gauge", "power", "f4", "Input voltage", "simulator; Redfish later", "hw.voltage", (0, 1e5)),
)  # fmt: skip
