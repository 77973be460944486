"""Signals of liquid cooling: coolant (CDU, connector, pump, reservoir, filter, loop) and leak. One line per signal.

A cdu has the flow, temperatures and pressures of its secondary side, which feeds the racks.
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
