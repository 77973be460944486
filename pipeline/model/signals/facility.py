"""Signals of cooling and power supply. One line per signal.

Cooling: coolant (CDU, connector, pump, reservoir, filter, loop) and leak. A cdu has the flow, temperatures and
pressures of its secondary side, which feeds the racks. Power: power (PDU, shelf, chassis, circuit, outlet, output), psu
and battery.
"""

from __future__ import annotations

from pipeline.model.signals.signal import HEALTH, HEALTHY, Signal

COOLANT_SIGNALS: tuple[Signal, ...] = (
    Signal("coolant.flow", "L/min", "gauge", "coolant", "f4", "Coolant flow of the loop or connector", "Redfish CoolantConnector FlowLitersPerMinute; simulator", "", (0, 50_000), harm="down"),
    Signal("coolant.supply_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature to the racks", "Redfish CoolantConnector SupplyTemperatureCelsius; simulator", "hw.temperature", (-20, 120), harm="up"),
    Signal("coolant.return_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature from the racks", "Redfish CoolantConnector ReturnTemperatureCelsius; simulator", "hw.temperature", (-20, 120), harm="up"),
    Signal("coolant.pressure", "bar", "gauge", "coolant", "f4", "Pressure difference across the loop", "Redfish CoolantConnector DeltaPressurekPa; simulator", "", (0, 100), harm="down"),
    Signal("pump.speed", "rpm", "gauge", "coolant", "f4", "Speed of the loop's pump", "Redfish Pump PumpSpeedPercent SpeedRPM; simulator", "hw.fan.speed", (0, 100_000), harm="down", interval=30),
    Signal("coolant.delta_temperature", "K", "gauge", "coolant", "f4", "Return minus supply temperature", "Redfish CoolantConnector DeltaTemperatureCelsius", "", (-100, 100)),
    Signal("coolant.supply_pressure", "bar", "gauge", "coolant", "f4", "Pressure on the supply side", "Redfish CoolantConnector SupplyPressurekPa", "", (-1, 100)),
    Signal("coolant.return_pressure", "bar", "gauge", "coolant", "f4", "Pressure on the return side", "Redfish CoolantConnector ReturnPressurekPa", "", (-1, 100)),
    Signal("coolant.heat_removed", "W", "gauge", "coolant", "f4", "Heat removed by the coolant", "Redfish CoolantConnector HeatRemovedkW", "", (-1e7, 1e8)),
    Signal("coolant.valve_position", "1", "gauge", "coolant", "f4", "Opening of the connector's valve", "Redfish CoolantConnector ValvePositionPercent", "", (0, 1), harm="down"),
    Signal("coolant.valve_state", "", "state", "coolant", "u1", "Whether the connector's valve is open", "Redfish CoolantConnector ValveState", "", (0, 1), ("open", "closed"), ("open",), "up"),
    Signal("coolant.valve_reason", "", "state", "coolant", "u1", "Reason for the state of the connector's valve", "Redfish CoolantConnector ValveStateReason", "", (0, 2), ("normal", "not_in_use", "leak_detected"), ("normal", "not_in_use"), "up"),
    Signal("coolant.status", "", "state", "coolant", "u1", "Status of the unit, connector, pump, reservoir, filter or loop, from the BMC", "Redfish Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up"),
    Signal("coolant.pump_redundancy", "", "state", "coolant", "u1", "Redundancy of the unit's pumps", "Redfish CoolingUnit PumpRedundancy Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=30),
    Signal("coolant.connector_redundancy", "", "state", "coolant", "u1", "Redundancy of the unit's connectors", "Redfish CoolingUnit CoolantConnectorRedundancy Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=30),
    Signal("coolant.power", "W", "gauge", "coolant", "f4", "Electrical power drawn by the unit", "Redfish EnvironmentMetrics PowerWatts of a CDU", "hw.power", (0, 1e7), interval=30),
    Signal("coolant.ambient_temperature", "Cel", "gauge", "coolant", "f4", "Temperature of the air at the unit", "Redfish EnvironmentMetrics TemperatureCelsius of a CDU", "hw.host.ambient_temperature", (-60, 120), harm="up", interval=30),
    Signal("coolant.humidity", "1", "gauge", "coolant", "f4", "Relative humidity of the air at the unit", "Redfish EnvironmentMetrics HumidityPercent of a CDU", "", (0, 1), harm="up", interval=30),
    Signal("coolant.dew_point", "Cel", "gauge", "coolant", "f4", "Dew point of the air at the unit; colder coolant causes condensation", "Redfish EnvironmentMetrics DewPointCelsius of a CDU", "", (-100, 100), harm="up", interval=30),
    Signal("pump.speed_ratio", "1", "gauge", "coolant", "f4", "Speed of the pump as a share of its maximum", "Redfish Pump PumpSpeedPercent", "", (0, 1.5), harm="down", interval=30),
    Signal("pump.inlet_pressure", "bar", "gauge", "coolant", "f4", "Pressure at the pump's inlet", "Redfish Pump InletPressurekPa", "", (-1, 100), harm="down", interval=30),
    Signal("pump.service_time", "h", "gauge", "coolant", "f4", "Hours that the pump has run", "Redfish Pump ServiceHours", "", (0, 1e6), harm="up", interval=30),
    Signal("reservoir.level", "1", "gauge", "coolant", "f4", "Fill level of the reservoir", "Redfish Reservoir FluidLevelPercent", "", (0, 1), harm="down", interval=30),
    Signal("reservoir.level_state", "", "state", "coolant", "u1", "State of the reservoir level, from the BMC", "Redfish Reservoir FluidLevelStatus", "", (0, 2), ("ok", "warning", "critical"), ("ok",), "up", interval=30),
    Signal("reservoir.pressure", "bar", "gauge", "coolant", "f4", "Pressure in the reservoir", "Redfish Reservoir InternalPressurekPa", "", (-1, 100), interval=30),
    Signal("filter.pressure_drop", "bar", "gauge", "coolant", "f4", "Pressure lost in the filter; it rises as it clogs", "Redfish Filter DeltaLiquidPressurekPa", "", (-1, 100), harm="up", interval=30),
    Signal("filter.service_time", "h", "gauge", "coolant", "f4", "Hours that the filter has been in use", "Redfish Filter ServiceHours", "", (0, 1e6), harm="up", interval=30),
    Signal("loop.level", "1", "gauge", "coolant", "f4", "Coolant level of the loop as a share of the nominal level", "Redfish CoolingLoop CoolantLevelPercent", "", (0, 1), harm="down", interval=30),
    Signal("loop.level_state", "", "state", "coolant", "u1", "State of the coolant level in the loop, from the BMC", "Redfish CoolingLoop CoolantLevelStatus", "", (0, 2), ("ok", "warning", "critical"), ("ok",), "up", interval=30),
    Signal("loop.quality", "", "state", "coolant", "u1", "State of the coolant quality, from the BMC", "Redfish CoolingLoop CoolantQuality", "", (0, 2), ("ok", "warning", "critical"), ("ok",), "up", interval=30),
)  # fmt: skip


_REACTIONS = ("none", "force_off", "graceful_shutdown", "force_restart", "graceful_restart")
LEAK_SIGNALS: tuple[Signal, ...] = (
    Signal("leak.state", "", "state", "leak", "u1", "State of the leak detector", "Redfish LeakDetector DetectorState", "hw.status", states=("ok", "warning", "critical", "unavailable", "absent"), normal=("ok", "absent"), harm="up", interval=5),
    Signal("leak.warning_reaction", "", "state", "leak", "u1", "The BMC's own reaction to a warning", "Redfish LeakDetector WarningReactionType", states=_REACTIONS, interval=5),
    Signal("leak.critical_reaction", "", "state", "leak", "u1", "The BMC's own reaction to a critical leak", "Redfish LeakDetector CriticalReactionType", states=_REACTIONS, interval=5),
    Signal("leak.reaction_delay", "s", "gauge", "leak", "f4", "Delay from the detection to the BMC's reaction", "Redfish LeakDetector ReactionDelaySeconds", "", (0, 1e6), interval=5),
)  # fmt: skip


POWER_SIGNALS: tuple[Signal, ...] = (
    Signal("power.draw", "W", "gauge", "power", "f4", "Power delivered; for a chassis: drawn", "Redfish PowerWatts, RailPowerWatts; simulator", "hw.power", (0, 1e7), interval=30),
    Signal("power.voltage", "V", "gauge", "power", "f4", "Voltage: of a pdu or circuit its input, of an outlet or rail its output", "Redfish Voltage, RailVoltage; simulator", "hw.voltage", (0, 1e5), interval=30),
    Signal("power.current", "A", "gauge", "power", "f4", "Current", "Redfish CurrentAmps, RailCurrentAmps", "", (0, 1e5), harm="up", interval=30),
    Signal("power.frequency", "Hz", "gauge", "power", "f4", "Frequency of the mains", "Redfish FrequencyHz", "", (0, 1000), interval=30),
    Signal("power.energy", "J", "counter", "power", "u8", "Energy delivered since the BMC's counter was reset", "Redfish EnergykWh", "hw.energy", interval=30),
    Signal("power.apparent", "V.A", "gauge", "power", "f4", "Apparent power", "Redfish PowerWatts ApparentVA", "", (0, 1e7), interval=30),
    Signal("power.factor", "1", "gauge", "power", "f4", "Power factor", "Redfish PowerWatts PowerFactor", "", (-1, 1), harm="down", interval=30),
    Signal("power.load", "1", "gauge", "power", "f4", "Power drawn as a share of the limit", "Redfish EnvironmentMetrics PowerLoadPercent", "", (0, 10), harm="up", interval=30),
    Signal("power.limit", "W", "gauge", "power", "f4", "Configured power limit", "Redfish EnvironmentMetrics PowerLimitWatts SetPoint; PowerControl PowerLimit", "", (0, 1e7), interval=30),
    Signal("power.capacity", "W", "gauge", "power", "f4", "Total power that the supplies can deliver", "Redfish PowerSubsystem CapacityWatts; PowerControl PowerCapacityWatts", "", (0, 1e7), harm="down", interval=300),
    Signal("power.allocated", "W", "gauge", "power", "f4", "Power allocated to the chassis", "Redfish PowerSubsystem Allocation AllocatedWatts; PowerControl PowerAllocatedWatts", "", (0, 1e7), interval=300),
    Signal("power.requested", "W", "gauge", "power", "f4", "Power requested by the chassis", "Redfish PowerSubsystem Allocation RequestedWatts; PowerControl PowerRequestedWatts", "", (0, 1e7), interval=300),
    Signal("power.redundancy", "", "state", "power", "u1", "Redundancy of the power supplies or of the mains", "Redfish PowerSupplyRedundancy, MainsRedundancy Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=300),
    Signal("power.status", "", "state", "power", "u1", "Status of the chassis, shelf, pdu, circuit or outlet, from the BMC", "Redfish Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=30),
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
    Signal("power.inlet_temperature", "Cel", "gauge", "power", "f4", "Air temperature at the inlet", "Redfish ThermalMetrics; Thermal of PhysicalContext Intake", "hw.temperature", (-60, 120), harm="up", interval=30),
    Signal("power.exhaust_temperature", "Cel", "gauge", "power", "f4", "Air temperature at the exhaust", "Redfish ThermalMetrics; Thermal of PhysicalContext Exhaust", "hw.temperature", (-60, 150), harm="up", interval=30),
    Signal("power.ambient_temperature", "Cel", "gauge", "power", "f4", "Ambient air temperature", "Redfish ThermalMetrics TemperatureSummaryCelsius Ambient", "hw.host.ambient_temperature", (-60, 120), harm="up", interval=30),
)  # fmt: skip


PSU_SIGNALS: tuple[Signal, ...] = (
    Signal("psu.input_power", "W", "gauge", "psu", "f4", "Power drawn from the feed", "Redfish PowerSupplyMetrics InputPowerWatts", "hw.power", (0, 1e6), interval=30),
    Signal("psu.input_voltage", "V", "gauge", "psu", "f4", "Voltage of the feed", "Redfish PowerSupplyMetrics InputVoltage; Power LineInputVoltage", "hw.voltage", (0, 1e5), harm="down", interval=30),
    Signal("psu.input_current", "A", "gauge", "psu", "f4", "Current drawn from the feed", "Redfish PowerSupplyMetrics InputCurrentAmps", "", (0, 1e4), interval=30),
    Signal("psu.frequency", "Hz", "gauge", "psu", "f4", "Frequency of the feed", "Redfish PowerSupplyMetrics FrequencyHz", "", (0, 1000), interval=30),
    Signal("psu.output_power", "W", "gauge", "psu", "f4", "Power delivered to the chassis", "Redfish PowerSupplyMetrics OutputPowerWatts; Power LastPowerOutputWatts", "hw.power_supply.usage", (0, 1e6), interval=30),
    Signal("psu.energy", "J", "counter", "psu", "u8", "Energy drawn since the BMC's counter was reset", "Redfish PowerSupplyMetrics EnergykWh", "hw.energy", interval=30),
    Signal("psu.capacity", "W", "gauge", "psu", "f4", "Power that the supply can deliver", "Redfish PowerSupply PowerCapacityWatts", "hw.power_supply.limit", (0, 1e6), harm="down", interval=30),
    Signal("psu.efficiency", "1", "gauge", "psu", "f4", "Efficiency: the best of its ratings, or the value of an older BMC", "Redfish PowerSupply EfficiencyRatings; Power EfficiencyPercent", "", (0, 1), harm="down", interval=30),
    Signal("psu.temperature", "Cel", "gauge", "psu", "f4", "Temperature of the supply", "Redfish PowerSupplyMetrics TemperatureCelsius", "hw.temperature", (-60, 200), harm="up", interval=30),
    Signal("psu.fan_speed", "rpm", "gauge", "psu", "f4", "Speed of the supply's slowest fan", "Redfish PowerSupplyMetrics FanSpeedPercent SpeedRPM", "hw.fan.speed", (0, 100_000), harm="down", interval=30),
    Signal("psu.fan_speed_ratio", "1", "gauge", "psu", "f4", "Drive of the supply's slowest fan", "Redfish PowerSupplyMetrics FanSpeedPercent", "hw.fan.speed_ratio", (0, 1.5), interval=30),
    Signal("psu.status", "", "state", "psu", "u1", "Status of the supply, from the BMC", "Redfish PowerSupply Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=30),
    Signal("psu.input_status", "", "state", "psu", "u1", "Status of the feed, from the BMC", "Redfish PowerSupply LineInputStatus", "", (0, 2), ("normal", "loss_of_input", "out_of_range"), ("normal",), "up", interval=30),
)  # fmt: skip


BATTERY_SIGNALS: tuple[Signal, ...] = (
    Signal("battery.charge", "1", "gauge", "battery", "f4", "Remaining charge", "Redfish BatteryMetrics ChargePercent", "hw.battery.charge", (0, 1), harm="down", interval=300),
    Signal("battery.health", "1", "gauge", "battery", "f4", "Capacity as a share of the original capacity", "Redfish Battery StateOfHealthPercent", "", (0, 1), harm="down", interval=300),
    Signal("battery.stored", "J", "gauge", "battery", "f4", "Stored energy", "Redfish BatteryMetrics StoredEnergyWattHours", "", (0, 1e10), harm="down", interval=300),
    Signal("battery.temperature", "Cel", "gauge", "battery", "f4", "Temperature of the battery", "Redfish BatteryMetrics TemperatureCelsius", "hw.temperature", (-60, 200), harm="up", interval=300),
    Signal("battery.input_voltage", "V", "gauge", "battery", "f4", "Voltage at the input", "Redfish BatteryMetrics InputVoltage", "hw.voltage", (0, 1e5), interval=300),
    Signal("battery.input_current", "A", "gauge", "battery", "f4", "Current into the battery", "Redfish BatteryMetrics InputCurrentAmps", "", (-1e5, 1e5), interval=300),
    Signal("battery.output_current", "A", "gauge", "battery", "f4", "Current out of the battery, all outputs together", "Redfish BatteryMetrics OutputCurrentAmps", "", (-1e5, 1e5), interval=300),
    Signal("battery.discharge_cycles", "1", "gauge", "battery", "f4", "Equivalent full discharge cycles", "Redfish BatteryMetrics DischargeCycles", "", (0, 1e6), harm="up", interval=300),
    Signal("battery.charge_state", "", "state", "battery", "u1", "Charge state", "Redfish Battery ChargeState", "", (0, 2), ("idle", "charging", "discharging"), ("idle", "charging"), "up", interval=300),
    Signal("battery.status", "", "state", "battery", "u1", "Status of the battery, from the BMC", "Redfish Battery Status", "hw.status", (0, 6), HEALTH, HEALTHY, "up", interval=300),
)  # fmt: skip
