"""Signals of the class sensor: one sensor of the board, its power supplies or fans. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("sensor.temperature", "Cel", "gauge", "sensor", "f4", "Temperature", "hwmon tempN_input; IPMI sensor", "hw.temperature", (-100, 500), harm="up", interval=10),
    Signal("sensor.voltage", "V", "gauge", "sensor", "f4", "Voltage", "hwmon inN_input; IPMI sensor", "hw.voltage", (-1000, 100_000), interval=10),
    Signal("sensor.current", "A", "gauge", "sensor", "f4", "Current", "hwmon currN_input; IPMI sensor", "", (-1e5, 1e5), interval=10),
    Signal("sensor.power", "W", "gauge", "sensor", "f4", "Power", "hwmon powerN_input; IPMI sensor", "hw.power", (0, 1e6), interval=10),
    Signal("sensor.fan_speed", "rpm", "gauge", "sensor", "f4", "Speed of a fan", "hwmon fanN_input; IPMI sensor", "hw.fan.speed", (0, 100_000), harm="down", interval=10),
    Signal("sensor.ratio", "1", "gauge", "sensor", "f4", "A share of the whole: drive of a fan, load of a supply, relative humidity", "hwmon humidityN_input; IPMI sensor in percent", "", (0, 10), interval=10),
    Signal("sensor.energy", "uJ", "counter", "sensor", "u8", "Energy used; starts again at 0 after the sensor's attribute wraps_at", "powercap energy_uj; hwmon energyN_input", "hw.energy", interval=10, wraps=True),
    Signal("sensor.alarm", "1", "state", "sensor", "u1", "What the chip or BMC itself says of its limits", "hwmon *_alarm, *_fault; IPMI threshold comparison", "hw.status", (0, 3), ("none", "alarm", "critical", "fault"), ("none",), "up", interval=10),
    Signal("sensor.status", "1", "state", "sensor", "u2", "Bit mask of the states that a discrete sensor reports, by its attribute type; of a power_supply: 0x1 present, 0x2 failure, 0x4 failure predicted, 0x8 input lost, 0x10 input lost or out of range, 0x20 input out of range, 0x40 configuration error", "IPMI Get Sensor Reading", "hw.status", interval=60),
)  # fmt: skip
