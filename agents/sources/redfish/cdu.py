"""ThermalEquipment -> rows: coolant units with their pumps, reservoirs and filters, and the cooling loops."""

from __future__ import annotations

from dataclasses import replace

from agents.sources.redfish.document import MAX_EACH, MAX_TEXT, Document
from agents.sources.redfish.rows import Found, Place, Row, facts, links, redundancy

_LEVELS = {"OK": 0, "Warning": 1, "Critical": 2}


def unit(document: Document, place: Place) -> Found:
    """One CoolingUnit: a CDU, an immersion unit or a heat exchanger; all are of the kind cdu.

    Its leak detectors bear `cdu` in their names, since a chassis may have the same Id. Its flow, temperatures and
    pressures are made of its secondary connectors': agents/sources/redfish/units.py.
    """
    if document.absent:
        return Found()
    entity = place.entity("cdu")
    values = {
        "coolant.status": document.health(),
        "coolant.pump_redundancy": redundancy(document, "PumpRedundancy"),
        "coolant.connector_redundancy": redundancy(document, "CoolantConnectorRedundancy"),
    }
    told = facts(document, type=document.text("EquipmentType"), coolant=document.inner("Coolant").text("CoolantType"))
    inside = place.under(entity)
    further = (
        *links(document, inside.at("secondary", side="secondary"), SecondaryCoolantConnectors="connectors"),
        *links(document, inside.at("primary", side="primary"), PrimaryCoolantConnectors="connectors"),
        *links(document, replace(inside, ids=("cdu", *place.ids)), LeakDetection="leak_detection"),
        *links(document, inside, Pumps="pumps", Reservoirs="reservoirs", Filters="filters"),
        *links(document, place, EnvironmentMetrics="cdu_environment"),
    )
    return Found((Row(entity, "coolant", values, place.parents, told),), further)


def environment(document: Document, place: Place) -> Found:
    """EnvironmentMetrics of a CoolingUnit: the air around it, and what it draws."""
    values = {
        "coolant.ambient_temperature": document.number("TemperatureCelsius"),
        "coolant.humidity": document.share("HumidityPercent"),
        "coolant.dew_point": document.number("DewPointCelsius"),
        "coolant.power": document.number("PowerWatts"),
    }
    return Found((Row(place.entity("cdu"), "coolant", values, place.parents),))


def pump(document: Document, place: Place) -> Found:
    """One Pump. SpeedRPM is part of the excerpt of its speed."""
    if document.absent:
        return Found()
    values = {
        "pump.speed": document.inner("PumpSpeedPercent").number("SpeedRPM") if _excerpt(document) else None,
        "pump.speed_ratio": document.share("PumpSpeedPercent"),
        "pump.inlet_pressure": document.pressure("InletPressurekPa"),
        "pump.service_time": document.number("ServiceHours"),
        "coolant.status": document.health(),
    }
    told = facts(document, type=document.text("PumpType"))
    return Found((Row(place.entity("pump"), "coolant", values, place.parents, told),))


def reservoir(document: Document, place: Place) -> Found:
    """One Reservoir."""
    if document.absent:
        return Found()
    values = {
        "reservoir.level": document.share("FluidLevelPercent"),
        "reservoir.level_state": document.one_of("FluidLevelStatus", _LEVELS),
        "reservoir.pressure": document.pressure("InternalPressurekPa"),
        "coolant.status": document.health(),
    }
    told = facts(document, type=document.text("ReservoirType"), capacity=document.number("CapacityLiters"))
    return Found((Row(place.entity("reservoir"), "coolant", values, place.parents, told),))


def filter_(document: Document, place: Place) -> Found:
    """One Filter."""
    if document.absent:
        return Found()
    values = {
        "filter.pressure_drop": document.pressure("DeltaLiquidPressurekPa"),
        "filter.service_time": document.number("ServiceHours"),
        "coolant.status": document.health(),
    }
    told = facts(document, rated_service_time=document.number("RatedServiceHours"))
    return Found((Row(place.entity("filter"), "coolant", values, place.parents, told),))


def loop(document: Document, place: Place) -> Found:
    """One CoolingLoop; whom it feeds stands in its attributes, by the names that the BMC gives."""
    if document.absent:
        return Found()
    values = {
        "loop.level": document.share("CoolantLevelPercent"),
        "loop.level_state": document.one_of("CoolantLevelStatus", _LEVELS),
        "loop.quality": document.one_of("CoolantQuality", _LEVELS),
        "coolant.status": document.health(),
    }
    told = facts(
        document,
        coolant=document.inner("Coolant").text("CoolantType"),
        consumers=_names(document, "ConsumingEquipmentNames"),
        suppliers=_names(document, "SupplyEquipmentNames"),
    )
    return Found((Row(place.entity("loop"), "coolant", values, place.parents, told),))


def _excerpt(document: Document) -> bool:
    return isinstance(document.body.get("PumpSpeedPercent"), dict)


def _names(document: Document, key: str) -> list[str] | None:
    found = document.body.get(key)
    if found is not None and not isinstance(found, list):
        document.fault(key, found, "a list")
    names = [name[:MAX_TEXT] for name in found[:MAX_EACH] if isinstance(name, str)] if isinstance(found, list) else []
    return names or None
