"""Which resources are read, by which parser, how often, and which come first: a line per kind of resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from agents.collectors.bmc import redfish_chassis, redfish_cooling, redfish_power
from agents.collectors.bmc.redfish_document import Document, Found, Link, Place, last_of, links

Pace = Literal["fast", "leaks", "sensors", "slow", "inventory"]
"""How often: the keys of a BMC's configuration that say the seconds."""
Subject = Literal["", "coolant", "leaks", "power", "environment", "sensors"]
"""What a resource is read for: those of a BMC's configuration; "" always."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of resource. types: what its @odata.type may be. member: of a collection, the kind of its members.

    before: those with less are read first when a BMC is met, so that the fast sensors are found soonest.
    """

    read: Callable[[Document, Place], Found]
    pace: Pace
    types: tuple[str, ...]
    subject: Subject = ""
    before: int = 5
    member: str = ""


def root(document: Document, place: Place) -> Found:
    """The service root, without which nothing is found."""
    further = (
        *links(document, place, ThermalEquipment="thermal_equipment", EventService="event_service"),
        *links(document, place, PowerEquipment="power_equipment", Chassis="chassis_all"),
    )
    return Found(links=further)


def thermal_equipment(document: Document, place: Place) -> Found:
    """ThermalEquipment: coolant units and loops."""
    further: tuple[Link, ...] = (
        *links(document, place, CDUs="cdus", CoolingLoops="loops"),
        *links(document, place.at("immersion"), ImmersionUnits="cdus"),
        *links(document, place.at("exchanger"), HeatExchangers="cdus"),
        *links(document, place, LeakDetection="leak_detection"),
    )
    return Found(links=further)


def nothing(document: Document, place: Place) -> Found:
    """A resource that is read for something else than values: a collection, the event service."""
    return Found()


def _all(member: str, types: str, subject: Subject, before: int = 5) -> Resource:
    return Resource(nothing, "inventory", (types,), subject, before, member)


_COOLING = ("CoolingUnit",)
_POWER = ("PowerDistribution",)
RESOURCES: Mapping[str, Resource] = {
    "root": Resource(root, "inventory", ("ServiceRoot",), "", 0),
    "event_service": Resource(nothing, "inventory", ("EventService",), "", 3),
    "thermal_equipment": Resource(thermal_equipment, "inventory", ("ThermalEquipment",), "", 1),
    "cdus": _all("cdu", "CoolingUnitCollection", "", 1),
    "cdu": Resource(redfish_cooling.parse_unit, "sensors", _COOLING, "", 1),
    "connectors": _all("connector", "CoolantConnectorCollection", "coolant", 2),
    "connector": Resource(redfish_cooling.parse_connector, "fast", ("CoolantConnector",), "coolant", 2),
    "leak_detection": Resource(redfish_cooling.parse_leak_detection, "inventory", ("LeakDetection",), "leaks", 2),
    "leak_groups": Resource(redfish_cooling.parse_leak_detection, "leaks", ("LeakDetection",), "leaks", 2),
    "leak_detectors": _all("leak_detector", "LeakDetectorCollection", "leaks", 2),
    "leak_detector": Resource(redfish_cooling.parse_leak_detector, "leaks", ("LeakDetector",), "leaks", 2),
    "cdu_environment": Resource(redfish_cooling.parse_unit_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "pumps": _all("pump", "PumpCollection", "coolant"),
    "pump": Resource(redfish_cooling.parse_pump, "sensors", ("Pump",), "coolant"),
    "reservoirs": _all("reservoir", "ReservoirCollection", "coolant"),
    "reservoir": Resource(redfish_cooling.parse_reservoir, "sensors", ("Reservoir",), "coolant"),
    "filters": _all("filter", "FilterCollection", "coolant"),
    "filter": Resource(redfish_cooling.parse_filter, "sensors", ("Filter",), "coolant"),
    "loops": _all("loop", "CoolingLoopCollection", "coolant"),
    "loop": Resource(redfish_cooling.parse_loop, "sensors", ("CoolingLoop",), "coolant"),
    "power_equipment": Resource(redfish_power.parse_power_equipment, "inventory", ("PowerEquipment",), "power", 4),
    "shelves": _all("shelf", "PowerDistributionCollection", "power", 4),
    "shelf": Resource(redfish_power.parse_shelf, "sensors", _POWER, "power", 4),
    "shelf_metrics": Resource(redfish_power.parse_shelf_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "pdus": _all("pdu", "PowerDistributionCollection", "power", 4),
    "pdu": Resource(redfish_power.parse_pdu, "sensors", _POWER, "power", 4),
    "pdu_metrics": Resource(redfish_power.parse_pdu_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "circuits": _all("circuit", "CircuitCollection", "power"),
    "circuit": Resource(redfish_power.parse_circuit, "sensors", ("Circuit",), "power"),
    "outlets": _all("outlet", "OutletCollection", "power", 6),
    "outlet": Resource(redfish_power.parse_outlet, "sensors", ("Outlet",), "power", 6),
    "chassis_all": _all("chassis", "ChassisCollection", "", 3),
    "chassis": Resource(redfish_chassis.parse_chassis, "slow", ("Chassis",), "", 3),
    "sensors_all": _all("sensor", "SensorCollection", "sensors", 6),
    "sensor": Resource(redfish_chassis.parse_sensor, "sensors", ("Sensor",), "sensors", 6),
    "environment": Resource(redfish_chassis.parse_chassis_air, "sensors", ("EnvironmentMetrics",), "environment"),
    "thermal_subsystem": Resource(redfish_chassis.parse_thermal_subsystem, "inventory", ("ThermalSubsystem",), "", 2),
    "thermal_metrics": Resource(redfish_chassis.parse_thermal_metrics, "sensors", ("ThermalMetrics",), "environment"),
    "thermal_older": Resource(redfish_chassis.parse_older_thermal, "sensors", ("Thermal",), "environment"),
    "power_subsystem": Resource(redfish_power.parse_power_subsystem, "slow", ("PowerSubsystem",), "power", 4),
    "power_older": Resource(redfish_power.parse_older_power, "sensors", ("Power",), "power", 4),
    "psus": _all("psu", "PowerSupplyCollection", "power"),
    "psu": Resource(redfish_power.parse_psu, "sensors", ("PowerSupply",), "power"),
    "psu_metrics": Resource(redfish_power.parse_psu_metrics, "sensors", ("PowerSupplyMetrics",), "power"),
    "batteries": _all("battery", "BatteryCollection", "power", 6),
    "battery": Resource(redfish_power.parse_battery, "slow", ("Battery",), "power", 6),
    "battery_metrics": Resource(redfish_power.parse_battery_metrics, "slow", ("BatteryMetrics",), "power", 6),
}


def member_place(kind: str, place: Place, path: str) -> Place:
    """Where a member of a collection stands: named after the last segment of its path, which is its Id."""
    return place.at(last_of(path)) if kind != "connector" else place.at(last_of(path), side=place.side)


def fits(document: Document, kind: str) -> bool:
    """Whether a document is of the kind that was looked for, as far as it says; what it says else is a fault."""
    said = document.body.get("@odata.type")
    if said is None:
        return True
    word = said.lstrip("#").partition(".")[0] if isinstance(said, str) else ""
    if word in RESOURCES[kind].types:
        return True
    document.fault("@odata.type", said, " or ".join(RESOURCES[kind].types))
    return False
