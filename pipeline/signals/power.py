"""Signals of the class power: a distribution unit (pdu), shelf, chassis, circuit, outlet, or rail of a supply (output).

One line per signal.
"""

from __future__ import annotations

from pipeline.signals.coolant import HEALTH, WELL
from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("power.draw", "W", "gauge", "power", "f4", "Power delivered to what is fed; of a chassis, drawn", "Redfish PowerWatts, RailPowerWatts; simulator", "hw.power", (0, 1e7), interval=30),
    Signal("power.voltage", "V", "gauge", "power", "f4", "Voltage: of a pdu or circuit its input, of an outlet or rail its output", "Redfish Voltage, RailVoltage; simulator", "hw.voltage", (0, 1e5), interval=30),
    Signal("power.current", "A", "gauge", "power", "f4", "Current", "Redfish CurrentAmps, RailCurrentAmps", "", (0, 1e5), harm="up", interval=30),
    Signal("power.frequency", "Hz", "gauge", "power", "f4", "Frequency of the mains", "Redfish FrequencyHz", "", (0, 1000), interval=30),
    Signal("power.energy", "J", "counter", "power", "u8", "Energy delivered since the BMC's counter was reset", "Redfish EnergykWh", "hw.energy", interval=30),
    Signal("power.apparent", "V.A", "gauge", "power", "f4", "Apparent power", "Redfish PowerWatts ApparentVA", "", (0, 1e7), interval=30),
    Signal("power.factor", "1", "gauge", "power", "f4", "Power factor", "Redfish PowerWatts PowerFactor", "", (-1, 1), harm="down", interval=30),
    Signal("power.load", "1", "gauge", "power", "f4", "Power drawn as a share of what may be drawn", "Redfish EnvironmentMetrics PowerLoadPercent", "", (0, 10), harm="up", interval=30),
    Signal("power.limit", "W", "gauge", "power", "f4", "Power limit that is set", "Redfish EnvironmentMetrics PowerLimitWatts SetPoint; PowerControl PowerLimit", "", (0, 1e7), interval=30),
    Signal("power.capacity", "W", "gauge", "power", "f4", "Power that the supplies together can give", "Redfish PowerSubsystem CapacityWatts; PowerControl PowerCapacityWatts", "", (0, 1e7), harm="down", interval=300),
    Signal("power.allocated", "W", "gauge", "power", "f4", "Power that is allocated to the chassis", "Redfish PowerSubsystem Allocation AllocatedWatts; PowerControl PowerAllocatedWatts", "", (0, 1e7), interval=300),
    Signal("power.requested", "W", "gauge", "power", "f4", "Power that the chassis asks for", "Redfish PowerSubsystem Allocation RequestedWatts; PowerControl PowerRequestedWatts", "", (0, 1e7), interval=300),
    Signal("power.redundancy", "", "state", "power", "u1", "Redundancy of the power supplies or of the mains", "Redfish PowerSupplyRedundancy, MainsRedundancy Status", "hw.status", (0, 6), HEALTH, WELL, "up", interval=300),
    Signal("power.status", "", "state", "power", "u1", "What the BMC says of the chassis, shelf, pdu, circuit or outlet", "Redfish Status", "hw.status", (0, 6), HEALTH, WELL, "up", interval=30),
    Signal("power.breaker", "", "state", "power", "u1", "State of the circuit's breaker", "Redfish Circuit BreakerState", "", (0, 2), ("normal", "tripped", "off"), ("normal",), "up", interval=30),
    Signal("power.state", "", "state", "power", "u1", "Whether the outlet, circuit or chassis is on", "Redfish PowerState", "", (0, 4), ("on", "off", "powering_on", "powering_off", "paused"), ("on",), "up", interval=30),
    Signal("power.current_unbalance", "1", "gauge", "power", "f4", "Unbalance of the currents of the phases", "Redfish Circuit UnbalancedCurrentPercent", "", (0, 10), harm="up", interval=30),
    Signal("power.voltage_unbalance", "1", "gauge", "power", "f4", "Unbalance of the voltages of the phases", "Redfish Circuit UnbalancedVoltagePercent", "", (0, 10), harm="up", interval=30),
    Signal("power.current_line1", "A", "gauge", "power", "f4", "Current of line 1", "Redfish PolyPhaseCurrentAmps Line1", "", (0, 1e5), harm="up", interval=30),
    Signal("power.current_line2", "A", "gauge", "power", "f4", "Current of line 2", "Redfish PolyPhaseCurrentAmps Line2", "", (0, 1e5), harm="up", interval=30),
    Signal("power.current_line3", "A", "gauge", "power", "f4", "Current of line 3", "Redfish PolyPhaseCurrentAmps Line3", "", (0, 1e5), harm="up", interval=30),
    Signal("power.current_neutral", "A", "gauge", "power", "f4", "Current of the neutral", "Redfish PolyPhaseCurrentAmps Neutral", "", (0, 1e5), harm="up", interval=30),
    Signal("power.voltage_line1", "V", "gauge", "power", "f4", "Voltage of line 1 against the neutral", "Redfish PolyPhaseVoltage Line1ToNeutral", "hw.voltage", (0, 1e5), interval=30),
    Signal("power.voltage_line2", "V", "gauge", "power", "f4", "Voltage of line 2 against the neutral", "Redfish PolyPhaseVoltage Line2ToNeutral", "hw.voltage", (0, 1e5), interval=30),
    Signal("power.voltage_line3", "V", "gauge", "power", "f4", "Voltage of line 3 against the neutral", "Redfish PolyPhaseVoltage Line3ToNeutral", "hw.voltage", (0, 1e5), interval=30),
    Signal("power.temperature", "Cel", "gauge", "power", "f4", "Temperature of the chassis, shelf or pdu", "Redfish EnvironmentMetrics, PowerDistributionMetrics TemperatureCelsius", "hw.temperature", (-60, 200), harm="up", interval=30),
    Signal("power.humidity", "1", "gauge", "power", "f4", "Relative humidity of the air", "Redfish EnvironmentMetrics, PowerDistributionMetrics HumidityPercent", "", (0, 1), harm="up", interval=30),
    Signal("power.dew_point", "Cel", "gauge", "power", "f4", "Dew point of the air", "Redfish EnvironmentMetrics DewPointCelsius", "", (-100, 100), harm="up", interval=30),
    Signal("power.inlet_temperature", "Cel", "gauge", "power", "f4", "Temperature of the air that goes in", "Redfish ThermalMetrics; Thermal of PhysicalContext Intake", "hw.temperature", (-60, 120), harm="up", interval=30),
    Signal("power.exhaust_temperature", "Cel", "gauge", "power", "f4", "Temperature of the air that comes out", "Redfish ThermalMetrics; Thermal of PhysicalContext Exhaust", "hw.temperature", (-60, 150), harm="up", interval=30),
    Signal("power.ambient_temperature", "Cel", "gauge", "power", "f4", "Temperature of the air around", "Redfish ThermalMetrics TemperatureSummaryCelsius Ambient", "hw.host.ambient_temperature", (-60, 120), harm="up", interval=30),
)  # fmt: skip
