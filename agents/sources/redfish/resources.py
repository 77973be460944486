"""Which resources are read, by which parser, how often, and which come first: a line per kind of resource."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from agents.sources.redfish import cdu, coolant, environment, leaks, older, power, psu, sensors
from agents.sources.redfish.document import Document, last_of
from agents.sources.redfish.rows import Found, Link, Place, links

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
    "cdu": Resource(cdu.unit, "sensors", _COOLING, "", 1),
    "connectors": _all("connector", "CoolantConnectorCollection", "coolant", 2),
    "connector": Resource(coolant.connector, "fast", ("CoolantConnector",), "coolant", 2),
    "leak_detection": Resource(leaks.detection, "inventory", ("LeakDetection",), "leaks", 2),
    "leak_groups": Resource(leaks.detection, "leaks", ("LeakDetection",), "leaks", 2),
    "leak_detectors": _all("leak_detector", "LeakDetectorCollection", "leaks", 2),
    "leak_detector": Resource(leaks.detector, "leaks", ("LeakDetector",), "leaks", 2),
    "cdu_environment": Resource(cdu.environment, "sensors", ("EnvironmentMetrics",), "environment"),
    "pumps": _all("pump", "PumpCollection", "coolant"),
    "pump": Resource(cdu.pump, "sensors", ("Pump",), "coolant"),
    "reservoirs": _all("reservoir", "ReservoirCollection", "coolant"),
    "reservoir": Resource(cdu.reservoir, "sensors", ("Reservoir",), "coolant"),
    "filters": _all("filter", "FilterCollection", "coolant"),
    "filter": Resource(cdu.filter_, "sensors", ("Filter",), "coolant"),
    "loops": _all("loop", "CoolingLoopCollection", "coolant"),
    "loop": Resource(cdu.loop, "sensors", ("CoolingLoop",), "coolant"),
    "power_equipment": Resource(power.equipment, "inventory", ("PowerEquipment",), "power", 4),
    "shelves": _all("shelf", "PowerDistributionCollection", "power", 4),
    "shelf": Resource(power.shelf, "sensors", _POWER, "power", 4),
    "shelf_metrics": Resource(power.shelf_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "pdus": _all("pdu", "PowerDistributionCollection", "power", 4),
    "pdu": Resource(power.pdu, "sensors", _POWER, "power", 4),
    "pdu_metrics": Resource(power.pdu_metrics, "sensors", ("PowerDistributionMetrics",), "power"),
    "circuits": _all("circuit", "CircuitCollection", "power"),
    "circuit": Resource(power.circuit, "sensors", ("Circuit",), "power"),
    "outlets": _all("outlet", "OutletCollection", "power", 6),
    "outlet": Resource(power.outlet, "sensors", ("Outlet",), "power", 6),
    "chassis_all": _all("chassis", "ChassisCollection", "", 3),
    "chassis": Resource(environment.chassis, "slow", ("Chassis",), "", 3),
    "sensors_all": _all("sensor", "SensorCollection", "sensors", 6),
    "sensor": Resource(sensors.sensor, "sensors", ("Sensor",), "sensors", 6),
    "environment": Resource(environment.metrics, "sensors", ("EnvironmentMetrics",), "environment"),
    "thermal_subsystem": Resource(environment.thermal_subsystem, "inventory", ("ThermalSubsystem",), "", 2),
    "thermal_metrics": Resource(environment.thermal_metrics, "sensors", ("ThermalMetrics",), "environment"),
    "thermal_older": Resource(environment.thermal_older, "sensors", ("Thermal",), "environment"),
    "power_subsystem": Resource(psu.subsystem, "slow", ("PowerSubsystem",), "power", 4),
    "power_older": Resource(older.power, "sensors", ("Power",), "power", 4),
    "psus": _all("psu", "PowerSupplyCollection", "power"),
    "psu": Resource(psu.psu, "sensors", ("PowerSupply",), "power"),
    "psu_metrics": Resource(psu.metrics, "sensors", ("PowerSupplyMetrics",), "power"),
    "batteries": _all("battery", "BatteryCollection", "power", 6),
    "battery": Resource(psu.battery, "slow", ("Battery",), "power", 6),
    "battery_metrics": Resource(psu.battery_metrics, "slow", ("BatteryMetrics",), "power", 6),
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
