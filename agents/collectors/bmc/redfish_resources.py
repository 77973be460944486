"""Table of resources: which parser reads each kind, at which interval, and which are read first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from agents.collectors.bmc import redfish_chassis, redfish_cooling, redfish_power
from agents.collectors.bmc.redfish_document import (
    ParsedResource,
    RedfishDocument,
    ResourceLink,
    ResourceScope,
    last_segment,
    resource_links,
)

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
    "cdu": ResourceKind(redfish_cooling.parse_unit, "sensors", _COOLING, "", 1),
    "connectors": _collection("connector", "CoolantConnectorCollection", "coolant", 2),
    "connector": ResourceKind(redfish_cooling.parse_connector, "fast", ("CoolantConnector",), "coolant", 2),
    "leak_detection": ResourceKind(redfish_cooling.parse_leak_detection, "inventory", ("LeakDetection",), "leaks", 2),
    "leak_groups": ResourceKind(redfish_cooling.parse_leak_detection, "leaks", ("LeakDetection",), "leaks", 2),
    "leak_detectors": _collection("leak_detector", "LeakDetectorCollection", "leaks", 2),
    "leak_detector": ResourceKind(redfish_cooling.parse_leak_detector, "leaks", ("LeakDetector",), "leaks", 2),
    "cdu_environment": ResourceKind(redfish_cooling.parse_unit_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "pumps": _collection("pump", "PumpCollection", "coolant"),
    "pump": ResourceKind(redfish_cooling.parse_pump, "sensors", ("Pump",), "coolant"),
    "reservoirs": _collection("reservoir", "ReservoirCollection", "coolant"),
    "reservoir": ResourceKind(redfish_cooling.parse_reservoir, "sensors", ("Reservoir",), "coolant"),
    "filters": _collection("filter", "FilterCollection", "coolant"),
    "filter": ResourceKind(redfish_cooling.parse_filter, "sensors", ("Filter",), "coolant"),
    "loops": _collection("loop", "CoolingLoopCollection", "coolant"),
    "loop": ResourceKind(redfish_cooling.parse_loop, "sensors", ("CoolingLoop",), "coolant"),
    "power_equipment": ResourceKind(redfish_power.parse_power_equipment, "inventory", ("PowerEquipment",), "power", 4),
    "shelves": _collection("shelf", "PowerDistributionCollection", "power", 4),
    "shelf": ResourceKind(redfish_power.parse_shelf, "sensors", _POWER, "power", 4),
    "shelf_metrics": ResourceKind(redfish_power.parse_shelf_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "pdus": _collection("pdu", "PowerDistributionCollection", "power", 4),
    "pdu": ResourceKind(redfish_power.parse_pdu, "sensors", _POWER, "power", 4),
    "pdu_metrics": ResourceKind(redfish_power.parse_pdu_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "circuits": _collection("circuit", "CircuitCollection", "power"),
    "circuit": ResourceKind(redfish_power.parse_circuit, "sensors", ("Circuit",), "power"),
    "outlets": _collection("outlet", "OutletCollection", "power", 6),
    "outlet": ResourceKind(redfish_power.parse_outlet, "sensors", ("Outlet",), "power", 6),
    "chassis_all": _collection("chassis", "ChassisCollection", "", 3),
    "chassis": ResourceKind(redfish_chassis.parse_chassis, "slow", ("Chassis",), "", 3),
    "sensors_all": _collection("sensor", "SensorCollection", "sensors", 6),
    "sensor": ResourceKind(redfish_chassis.parse_sensor, "sensors", ("Sensor",), "sensors", 6),
    "environment": ResourceKind(redfish_chassis.parse_chassis_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "thermal_subsystem": ResourceKind(
        redfish_chassis.parse_thermal_subsystem, "inventory", ("ThermalSubsystem",), "", 2
    ),
    "thermal_metrics": ResourceKind(
        redfish_chassis.parse_thermal_metrics, "sensors", ("ThermalMetrics",), "environment"
    ),
    "thermal_older": ResourceKind(redfish_chassis.parse_older_thermal, "sensors", ("Thermal",), "environment"),
    "power_subsystem": ResourceKind(redfish_power.parse_power_subsystem, "slow", ("PowerSubsystem",), "power", 4),
    "power_older": ResourceKind(redfish_power.parse_older_power, "sensors", ("Power",), "power", 4),
    "psus": _collection("psu", "PowerSupplyCollection", "power"),
    "psu": ResourceKind(redfish_power.parse_psu, "sensors", ("PowerSupply",), "power"),
    "psu_metrics": ResourceKind(redfish_power.parse_psu_metrics, "sensors", ("PowerSupplyMetrics",), "power"),
    "batteries": _collection("battery", "BatteryCollection", "power", 6),
    "battery": ResourceKind(redfish_power.parse_battery, "slow", ("Battery",), "power", 6),
    "battery_metrics": ResourceKind(redfish_power.parse_battery_metrics, "slow", ("BatteryMetrics",), "power", 6),
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
