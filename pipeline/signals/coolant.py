"""Signals of the class coolant: one coolant distribution unit and its loop. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("coolant.flow", "L/min", "gauge", "coolant", "f4", "Coolant flow of the loop", "simulator; Redfish later", "", (0, 50_000), harm="down"),
    Signal("coolant.supply_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature to the racks", "simulator; Redfish later", "hw.temperature", (-20, 120), harm="up"),
    Signal("coolant.return_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature from the racks", "simulator; Redfish later", "hw.temperature", (-20, 120), harm="up"),
    Signal("coolant.pressure", "bar", "gauge", "coolant", "f4", "Pressure difference across the loop", "simulator; Redfish later", "", (0, 100), harm="down"),
    Signal("pump.speed", "rpm", "gauge", "coolant", "f4", "Speed of the loop's pump", "simulator; Redfish later", "hw.fan.speed", (0, 100_000), harm="down"),
)  # fmt: skip
