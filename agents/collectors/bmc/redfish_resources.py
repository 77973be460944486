"""Table of Redfish resources: which parser reads each kind, at which interval, and which are read first.

The parsers of a chassis are here: its power and limit, the air at inlet and exhaust, and its Sensors. Sensors are rows
of the class sensor, for shelves that report their supplies in no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from agents.collectors.bmc.redfish_cooling import (
    parse_connector,
    parse_filter,
    parse_leak_detection,
    parse_leak_detector,
    parse_loop,
    parse_pump,
    parse_reservoir,
    parse_unit,
    parse_unit_air,
)
from agents.collectors.bmc.redfish_document import (
    EntityRow,
    ParsedResource,
    RedfishDocument,
    ResourceLink,
    ResourceScope,
    common_attributes,
    last_segment,
    resource_links,
)
from agents.collectors.bmc.redfish_power import (
    POWER_STATES,
    parse_battery,
    parse_battery_metrics,
    parse_circuit,
    parse_older_power,
    parse_outlet,
    parse_pdu,
    parse_pdu_metrics,
    parse_power_equipment,
    parse_power_subsystem,
    parse_psu,
    parse_psu_metrics,
    parse_shelf,
    parse_shelf_metrics,
)

_OLDER = {"Power": "power_older", "Thermal": "thermal_older"}


def parse_chassis(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Chassis. The older resources Power and Thermal are read if it has no newer subsystem.

    If the link to a subsystem leads elsewhere, as in a mock-up and an early firmware, its regular path is used.
    """
    if document.is_absent:
        return ParsedResource()
    entity = place.entity_name("chassis")
    values = {"power.status": document.health(), "power.state": document.enum_value("PowerState", POWER_STATES)}
    reported = common_attributes(
        document, type=document.text("ChassisType"), max_power=document.number("MaxPowerWatts")
    )
    inside = place.within(entity)
    power = "PowerSubsystem" if "PowerSubsystem" in document.body else "Power"
    thermal = "ThermalSubsystem" if "ThermalSubsystem" in document.body else "Thermal"
    further = (
        *resource_links(document, place, EnvironmentMetrics="environment"),
        *_with_regular_path(
            resource_links(document, place, **{power: _OLDER.get(power, "power_subsystem")}), document, power
        ),
        *_with_regular_path(
            resource_links(document, place, **{thermal: _OLDER.get(thermal, "thermal_subsystem")}), document, thermal
        ),
        *resource_links(document, inside, LeakDetectors="leak_detectors", Sensors="sensors_all"),
    )
    return ParsedResource((EntityRow(entity, "power", values, place.parents, reported),), further)


def _with_regular_path(
    found: tuple[ResourceLink, ...], document: RedfishDocument, key: str
) -> tuple[ResourceLink, ...]:
    """Returns links to a subsystem; one that leads elsewhere is replaced by the subsystem's regular path."""
    regular = f"{document.where}/{key}"
    return tuple(link if link.path.endswith(f"/{key}") else replace(link, path=regular) for link in found)


def parse_chassis_air(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses EnvironmentMetrics of a chassis."""
    values = {
        "power.draw": document.number("PowerWatts"),
        "power.energy": document.energy("EnergykWh"),
        "power.load": document.ratio("PowerLoadPercent"),
        "power.limit": document.number("PowerLimitWatts", reading="SetPoint"),
        "power.temperature": document.number("TemperatureCelsius"),
        "power.humidity": document.ratio("HumidityPercent"),
        "power.dew_point": document.number("DewPointCelsius"),
    }
    return ParsedResource((EntityRow(place.entity_name("chassis"), "power", values, place.parents),))


def parse_thermal_subsystem(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses ThermalSubsystem: links to the chassis' connectors, leak detectors, pumps and temperatures."""
    inside = place.within(place.entity_name("chassis"))
    parts = replace(inside, ids=("chassis", *inside.ids))  # a coolant unit may have the same Id as a chassis
    further = (
        *resource_links(document, inside, CoolantConnectors="connectors", LeakDetection="leak_detection"),
        *resource_links(document, parts, Pumps="pumps", Filters="filters", Reservoirs="reservoirs"),
        *resource_links(document, place, ThermalMetrics="thermal_metrics"),
    )
    return ParsedResource(links=further)


def parse_thermal_metrics(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses ThermalMetrics: the summary if there is one, else the mean of the readings with a matching context."""
    summary = document.child("TemperatureSummaryCelsius")
    named: dict[str, list[float]] = {"intake": [], "exhaust": []}
    for reading in document.children("TemperatureReadingsCelsius"):
        context = reading.text("PhysicalContext") or reading.text("DeviceName") or ""
        value = reading.number("Reading")
        if value is not None:
            _add_reading(named, context, value)
    values = {
        "power.inlet_temperature": _summary_or_mean(summary.number("Intake"), named["intake"]),
        "power.exhaust_temperature": _summary_or_mean(summary.number("Exhaust"), named["exhaust"]),
        "power.ambient_temperature": summary.number("Ambient"),
    }
    return ParsedResource((EntityRow(place.entity_name("chassis"), "power", values, place.parents),))


def _add_reading(named: dict[str, list[float]], context: str, value: float) -> None:
    """Adds a reading to intake or exhaust, by the words of the schema's PhysicalContext and of practice."""
    word = context.lower()
    if "intake" in word or "inlet" in word:
        named["intake"].append(value)
    elif "exhaust" in word or "outlet" in word:
        named["exhaust"].append(value)


def _summary_or_mean(summary: float | None, readings: list[float]) -> float | None:
    return summary if summary is not None else sum(readings) / len(readings) if readings else None


def parse_older_thermal(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses Thermal, deprecated with 2020.4: air temperatures by PhysicalContext, or by name if that is missing."""
    named: dict[str, list[float]] = {"intake": [], "exhaust": []}
    for sensor in document.children("Temperatures"):
        value = None if sensor.is_absent else sensor.number("ReadingCelsius")
        if value is not None:
            _add_reading(named, f"{sensor.text('PhysicalContext') or ''} {sensor.text('Name') or ''}", value)
    values = {
        "power.inlet_temperature": _summary_or_mean(None, named["intake"]),
        "power.exhaust_temperature": _summary_or_mean(None, named["exhaust"]),
    }
    return ParsedResource((EntityRow(place.entity_name("chassis"), "power", values, place.parents),))


_KINDS = {
    # ReadingType -> (signal, factor to its unit), Sensor 1.12
    "Temperature": ("sensor.temperature", 1.0),
    "Voltage": ("sensor.voltage", 1.0),
    "Current": ("sensor.current", 1.0),
    "Power": ("sensor.power", 1.0),
    "Rotational": ("sensor.fan_speed", 1.0),
    "Percent": ("sensor.ratio", 0.01),
    "Humidity": ("sensor.ratio", 0.01),
}
_ALARMS = {"OK": 0, "Warning": 1, "Critical": 2}  # states of sensor.alarm


def parse_sensor(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Sensor of a quantity that the class sensor has. Others are left out."""
    kind = document.text("ReadingType")
    if document.is_absent or kind not in _KINDS:
        return ParsedResource()
    signal, scale = _KINDS[kind]
    values = {
        signal: document.number("Reading", scale),
        "sensor.alarm": document.child("Status").enum_value("Health", _ALARMS),
    }
    reported = common_attributes(
        document, label=document.text("Name"), type=kind, context=document.text("PhysicalContext")
    )
    return ParsedResource((EntityRow(place.entity_name("sensor"), "sensor", values, place.parents, reported),))


IntervalKey = Literal["fast", "leaks", "sensors", "slow", "inventory"]
"""Interval of a resource: a key of a BMC's configuration with the seconds."""
Subject = Literal["", "coolant", "leaks", "power", "environment", "sensors"]
"""Subject of a resource in a BMC's configuration; "" = always read."""


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """One kind of resource. types: allowed @odata.type. member: kind of a collection's members.

    priority: lower ones are read first when a BMC is contacted, so that the fast sensors are found soonest.
    """

    parse: Callable[[RedfishDocument, ResourceScope], ParsedResource]
    interval: IntervalKey
    types: tuple[str, ...]
    subject: Subject = ""
    priority: int = 5
    member: str = ""


def parse_root(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses the service root, which leads to everything else."""
    further = (
        *resource_links(document, place, ThermalEquipment="thermal_equipment", EventService="event_service"),
        *resource_links(document, place, PowerEquipment="power_equipment", Chassis="chassis_all"),
    )
    return ParsedResource(links=further)


def parse_thermal_equipment(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses ThermalEquipment: coolant units and loops."""
    further: tuple[ResourceLink, ...] = (
        *resource_links(document, place, CDUs="cdus", CoolingLoops="loops"),
        *resource_links(document, place.extend("immersion"), ImmersionUnits="cdus"),
        *resource_links(document, place.extend("exchanger"), HeatExchangers="cdus"),
        *resource_links(document, place, LeakDetection="leak_detection"),
    )
    return ParsedResource(links=further)


def parse_nothing(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Returns nothing: a resource that is read for something other than values, such as a collection or the event
    service.
    """
    return ParsedResource()


def _collection(member: str, types: str, subject: Subject, before: int = 5) -> ResourceKind:
    return ResourceKind(parse_nothing, "inventory", (types,), subject, before, member)


_COOLING = ("CoolingUnit",)
_POWER = ("PowerDistribution",)
RESOURCES: Mapping[str, ResourceKind] = {
    "root": ResourceKind(parse_root, "inventory", ("ServiceRoot",), "", 0),
    "event_service": ResourceKind(parse_nothing, "inventory", ("EventService",), "", 3),
    "thermal_equipment": ResourceKind(parse_thermal_equipment, "inventory", ("ThermalEquipment",), "", 1),
    "cdus": _collection("cdu", "CoolingUnitCollection", "", 1),
    "cdu": ResourceKind(parse_unit, "sensors", _COOLING, "", 1),
    "connectors": _collection("connector", "CoolantConnectorCollection", "coolant", 2),
    "connector": ResourceKind(parse_connector, "fast", ("CoolantConnector",), "coolant", 2),
    "leak_detection": ResourceKind(parse_leak_detection, "inventory", ("LeakDetection",), "leaks", 2),
    "leak_groups": ResourceKind(parse_leak_detection, "leaks", ("LeakDetection",), "leaks", 2),
    "leak_detectors": _collection("leak_detector", "LeakDetectorCollection", "leaks", 2),
    "leak_detector": ResourceKind(parse_leak_detector, "leaks", ("LeakDetector",), "leaks", 2),
    "cdu_environment": ResourceKind(parse_unit_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "pumps": _collection("pump", "PumpCollection", "coolant"),
    "pump": ResourceKind(parse_pump, "sensors", ("Pump",), "coolant"),
    "reservoirs": _collection("reservoir", "ReservoirCollection", "coolant"),
    "reservoir": ResourceKind(parse_reservoir, "sensors", ("Reservoir",), "coolant"),
    "filters": _collection("filter", "FilterCollection", "coolant"),
    "filter": ResourceKind(parse_filter, "sensors", ("Filter",), "coolant"),
    "loops": _collection("loop", "CoolingLoopCollection", "coolant"),
    "loop": ResourceKind(parse_loop, "sensors", ("CoolingLoop",), "coolant"),
    "power_equipment": ResourceKind(parse_power_equipment, "inventory", ("PowerEquipment",), "power", 4),
    "shelves": _collection("shelf", "PowerDistributionCollection", "power", 4),
    "shelf": ResourceKind(parse_shelf, "sensors", _POWER, "power", 4),
    "shelf_metrics": ResourceKind(parse_shelf_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "pdus": _collection("pdu", "PowerDistributionCollection", "power", 4),
    "pdu": ResourceKind(parse_pdu, "sensors", _POWER, "power", 4),
    "pdu_metrics": ResourceKind(parse_pdu_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "circuits": _collection("circuit", "CircuitCollection", "power"),
    "circuit": ResourceKind(parse_circuit, "sensors", ("Circuit",), "power"),
    "outlets": _collection("outlet", "OutletCollection", "power", 6),
    "outlet": ResourceKind(parse_outlet, "sensors", ("Outlet",), "power", 6),
    "chassis_all": _collection("chassis", "ChassisCollection", "", 3),
    "chassis": ResourceKind(parse_chassis, "slow", ("Chassis",), "", 3),
    "sensors_all": _collection("sensor", "SensorCollection", "sensors", 6),
    "sensor": ResourceKind(parse_sensor, "sensors", ("Sensor",), "sensors", 6),
    "environment": ResourceKind(parse_chassis_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "thermal_subsystem": ResourceKind(parse_thermal_subsystem, "inventory", ("ThermalSubsystem",), "", 2),
    "thermal_metrics": ResourceKind(parse_thermal_metrics, "sensors", ("ThermalMetrics",), "environment"),
    "thermal_older": ResourceKind(parse_older_thermal, "sensors", ("Thermal",), "environment"),
    "power_subsystem": ResourceKind(parse_power_subsystem, "slow", ("PowerSubsystem",), "power", 4),
    "power_older": ResourceKind(parse_older_power, "sensors", ("Power",), "power", 4),
    "psus": _collection("psu", "PowerSupplyCollection", "power"),
    "psu": ResourceKind(parse_psu, "sensors", ("PowerSupply",), "power"),
    "psu_metrics": ResourceKind(parse_psu_metrics, "sensors", ("PowerSupplyMetrics",), "power"),
    "batteries": _collection("battery", "BatteryCollection", "power", 6),
    "battery": ResourceKind(parse_battery, "slow", ("Battery",), "power", 6),
    "battery_metrics": ResourceKind(parse_battery_metrics, "slow", ("BatteryMetrics",), "power", 6),
}


def member_scope(kind: str, place: ResourceScope, path: str) -> ResourceScope:
    """Returns the scope of a collection's member, named after the last segment of its path, which is its Id."""
    return (
        place.extend(last_segment(path)) if kind != "connector" else place.extend(last_segment(path), side=place.side)
    )


def matches_kind(document: RedfishDocument, kind: str) -> bool:
    """Returns whether a document is of the expected kind, if it says so. Another type is a fault."""
    error_bytes = document.body.get("@odata.type")
    if error_bytes is None:
        return True
    word = error_bytes.lstrip("#").partition(".")[0] if isinstance(error_bytes, str) else ""
    if word in RESOURCES[kind].types:
        return True
    document.add_fault("@odata.type", error_bytes, " or ".join(RESOURCES[kind].types))
    return False
