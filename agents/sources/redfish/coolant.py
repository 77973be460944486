"""CoolantConnectors -> rows: flow, temperatures, pressures, heat and valve of each connection."""

from __future__ import annotations

from agents.sources.redfish.document import Document
from agents.sources.redfish.rows import Found, Place, Row, facts

_VALVE = {"Open": 0, "Closed": 1}
_REASONS = {"Normal": 0, "NotInUse": 1, "LeakDetected": 2}


def connector(document: Document, place: Place) -> Found:
    """One CoolantConnector (1.0 to 1.4). Older ones give the difference of pressures alone, or none."""
    if document.absent:
        return Found()
    entity = place.entity("connector")
    values = {
        "coolant.flow": document.number("FlowLitersPerMinute"),
        "coolant.supply_temperature": document.number("SupplyTemperatureCelsius"),
        "coolant.return_temperature": document.number("ReturnTemperatureCelsius"),
        "coolant.delta_temperature": document.number("DeltaTemperatureCelsius"),
        "coolant.pressure": document.pressure("DeltaPressurekPa"),
        "coolant.supply_pressure": document.pressure("SupplyPressurekPa"),
        "coolant.return_pressure": document.pressure("ReturnPressurekPa"),
        "coolant.heat_removed": document.number("HeatRemovedkW", 1000.0),
        "coolant.valve_position": document.share("ValvePositionPercent"),
        "coolant.valve_state": document.one_of("ValveState", _VALVE),
        "coolant.valve_reason": document.one_of("ValveStateReason", _REASONS),
        "coolant.status": document.health(),
    }
    told = facts(
        document,
        side=place.side or None,
        rated_flow=document.number("RatedFlowLitersPerMinute"),
        coolant=document.inner("Coolant").text("CoolantType"),
        loop=document.inner("Links").link("ConnectedCoolingLoop"),
    )
    return Found((Row(entity, "coolant", values, place.parents, told),))
