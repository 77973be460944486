"""Parsers of a chassis: its power and limit, the air at inlet and exhaust, and its Sensors.

Sensors are rows of the class sensor, for shelves that report their supplies in no other way.
"""

from __future__ import annotations

from dataclasses import replace

from agents.collectors.bmc.redfish_document import (
    EntityRow,
    ParsedResource,
    RedfishDocument,
    ResourceLink,
    ResourceScope,
    common_attributes,
    resource_links,
)
from agents.collectors.bmc.redfish_power import POWER_STATES

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
