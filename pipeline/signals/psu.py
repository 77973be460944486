"""Signals of the class psu: one power supply unit. One line per signal."""

from __future__ import annotations

from pipeline.signals.coolant import HEALTH, WELL
from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("psu.input_power", "W", "gauge", "psu", "f4", "Power drawn from the feed", "Redfish PowerSupplyMetrics InputPowerWatts", "hw.power", (0, 1e6), interval=30),
    Signal("psu.input_voltage", "V", "gauge", "psu", "f4", "Voltage of the feed", "Redfish PowerSupplyMetrics InputVoltage; Power LineInputVoltage", "hw.voltage", (0, 1e5), harm="down", interval=30),
    Signal("psu.input_current", "A", "gauge", "psu", "f4", "Current drawn from the feed", "Redfish PowerSupplyMetrics InputCurrentAmps", "", (0, 1e4), interval=30),
    Signal("psu.frequency", "Hz", "gauge", "psu", "f4", "Frequency of the feed", "Redfish PowerSupplyMetrics FrequencyHz", "", (0, 1000), interval=30),
    Signal("psu.output_power", "W", "gauge", "psu", "f4", "Power given to the chassis", "Redfish PowerSupplyMetrics OutputPowerWatts; Power LastPowerOutputWatts", "hw.power_supply.usage", (0, 1e6), interval=30),
    Signal("psu.energy", "J", "counter", "psu", "u8", "Energy drawn since the BMC's counter was reset", "Redfish PowerSupplyMetrics EnergykWh", "hw.energy", interval=30),
    Signal("psu.capacity", "W", "gauge", "psu", "f4", "Power that the supply can give", "Redfish PowerSupply PowerCapacityWatts", "hw.power_supply.limit", (0, 1e6), harm="down", interval=30),
    Signal("psu.efficiency", "1", "gauge", "psu", "f4", "Efficiency: the best of its ratings, or what an older BMC gives", "Redfish PowerSupply EfficiencyRatings; Power EfficiencyPercent", "", (0, 1), harm="down", interval=30),
    Signal("psu.temperature", "Cel", "gauge", "psu", "f4", "Temperature of the supply", "Redfish PowerSupplyMetrics TemperatureCelsius", "hw.temperature", (-60, 200), harm="up", interval=30),
    Signal("psu.fan_speed", "rpm", "gauge", "psu", "f4", "Speed of the supply's slowest fan", "Redfish PowerSupplyMetrics FanSpeedPercent SpeedRPM", "hw.fan.speed", (0, 100_000), harm="down", interval=30),
    Signal("psu.fan_speed_ratio", "1", "gauge", "psu", "f4", "Drive of the supply's slowest fan", "Redfish PowerSupplyMetrics FanSpeedPercent", "hw.fan.speed_ratio", (0, 1.5), interval=30),
    Signal("psu.status", "", "state", "psu", "u1", "What the BMC says of the supply", "Redfish PowerSupply Status", "hw.status", (0, 6), HEALTH, WELL, "up", interval=30),
    Signal("psu.input_status", "", "state", "psu", "u1", "What the BMC says of the feed", "Redfish PowerSupply LineInputStatus", "", (0, 2), ("normal", "loss_of_input", "out_of_range"), ("normal",), "up", interval=30),
)  # fmt: skip
