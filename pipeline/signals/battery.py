"""Signals of the class battery: one battery or capacitor unit of a power shelf. One line per signal."""

from __future__ import annotations

from pipeline.signals.coolant import HEALTH, WELL
from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("battery.charge", "1", "gauge", "battery", "f4", "Charge that is left", "Redfish BatteryMetrics ChargePercent", "hw.battery.charge", (0, 1), harm="down", interval=300),
    Signal("battery.health", "1", "gauge", "battery", "f4", "Capacity as a share of what it was when new", "Redfish Battery StateOfHealthPercent", "", (0, 1), harm="down", interval=300),
    Signal("battery.stored", "J", "gauge", "battery", "f4", "Energy that is stored", "Redfish BatteryMetrics StoredEnergyWattHours", "", (0, 1e10), harm="down", interval=300),
    Signal("battery.temperature", "Cel", "gauge", "battery", "f4", "Temperature of the battery", "Redfish BatteryMetrics TemperatureCelsius", "hw.temperature", (-60, 200), harm="up", interval=300),
    Signal("battery.input_voltage", "V", "gauge", "battery", "f4", "Voltage at the input", "Redfish BatteryMetrics InputVoltage", "hw.voltage", (0, 1e5), interval=300),
    Signal("battery.input_current", "A", "gauge", "battery", "f4", "Current into the battery", "Redfish BatteryMetrics InputCurrentAmps", "", (-1e5, 1e5), interval=300),
    Signal("battery.output_current", "A", "gauge", "battery", "f4", "Current out of the battery, all outputs together", "Redfish BatteryMetrics OutputCurrentAmps", "", (-1e5, 1e5), interval=300),
    Signal("battery.discharge_cycles", "1", "gauge", "battery", "f4", "Discharges so far, counted in full ones", "Redfish BatteryMetrics DischargeCycles", "", (0, 1e6), harm="up", interval=300),
    Signal("battery.charge_state", "", "state", "battery", "u1", "Whether it charges or discharges", "Redfish Battery ChargeState", "", (0, 2), ("idle", "charging", "discharging"), ("idle", "charging"), "up", interval=300),
    Signal("battery.status", "", "state", "battery", "u1", "What the BMC says of the battery", "Redfish Battery Status", "hw.status", (0, 6), HEALTH, WELL, "up", interval=300),
)  # fmt: skip
