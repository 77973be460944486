"""Chassis -> rows: what a chassis draws and may draw, and the air at its inlet and exhaust.

Sensors of a chassis -> rows of the class sensor, for shelves that show their supplies in no other way.
"""

from __future__ import annotations

from dataclasses import replace

from agents.collectors.bmc.redfish_document import Document, Found, Link, Place, Row, facts, links
from agents.collectors.bmc.redfish_power import POWER_STATES

_OLDER = {"Power": "power_older", "Thermal": "thermal_older"}


def parse_chassis(document: Document, place: Place) -> Found:
    """One Chassis. The older resources Power and Thermal are read where it has no subsystem of the newer kind.

    A link to a subsystem that does not lead to one, as a mock-up and an early firmware have it, is taken for its
    regular path.
    """
    if document.absent:
        return Found()
    entity = place.entity("chassis")
    values = {"power.status": document.health(), "power.state": document.one_of("PowerState", POWER_STATES)}
    told = facts(document, type=document.text("ChassisType"), max_power=document.number("MaxPowerWatts"))
    inside = place.under(entity)
    power = "PowerSubsystem" if "PowerSubsystem" in document.body else "Power"
    thermal = "ThermalSubsystem" if "ThermalSubsystem" in document.body else "Thermal"
    further = (
        *links(document, place, EnvironmentMetrics="environment"),
        *_regular(links(document, place, **{power: _OLDER.get(power, "power_subsystem")}), document, power),
        *_regular(links(document, place, **{thermal: _OLDER.get(thermal, "thermal_subsystem")}), document, thermal),
        *links(document, inside, LeakDetectors="leak_detectors", Sensors="sensors_all"),
    )
    return Found((Row(entity, "power", values, place.parents, told),), further)


def _regular(found: tuple[Link, ...], document: Document, key: str) -> tuple[Link, ...]:
    """Links to a subsystem; one that leads elsewhere is taken for the subsystem's regular path."""
    regular = f"{document.where}/{key}"
    return tuple(link if link.path.endswith(f"/{key}") else replace(link, path=regular) for link in found)


def parse_chassis_air(document: Document, place: Place) -> Found:
    """EnvironmentMetrics of a chassis."""
    values = {
        "power.draw": document.number("PowerWatts"),
        "power.energy": document.energy("EnergykWh"),
        "power.load": document.share("PowerLoadPercent"),
        "power.limit": document.number("PowerLimitWatts", reading="SetPoint"),
        "power.temperature": document.number("TemperatureCelsius"),
        "power.humidity": document.share("HumidityPercent"),
        "power.dew_point": document.number("DewPointCelsius"),
    }
    return Found((Row(place.entity("chassis"), "power", values, place.parents),))


def parse_thermal_subsystem(document: Document, place: Place) -> Found:
    """ThermalSubsystem: where the chassis' connectors, leak detectors, pumps and temperatures are."""
    inside = place.under(place.entity("chassis"))
    parts = replace(inside, ids=("chassis", *inside.ids))  # a coolant unit may have the same Id as a chassis
    further = (
        *links(document, inside, CoolantConnectors="connectors", LeakDetection="leak_detection"),
        *links(document, parts, Pumps="pumps", Filters="filters", Reservoirs="reservoirs"),
        *links(document, place, ThermalMetrics="thermal_metrics"),
    )
    return Found(links=further)


def parse_thermal_metrics(document: Document, place: Place) -> Found:
    """ThermalMetrics: the summary where there is one, else the mean of the readings whose sensor is named so."""
    summary = document.inner("TemperatureSummaryCelsius")
    named: dict[str, list[float]] = {"intake": [], "exhaust": []}
    for reading in document.each("TemperatureReadingsCelsius"):
        context = reading.text("PhysicalContext") or reading.text("DeviceName") or ""
        value = reading.number("Reading")
        if value is not None:
            _put(named, context, value)
    values = {
        "power.inlet_temperature": _first(summary.number("Intake"), named["intake"]),
        "power.exhaust_temperature": _first(summary.number("Exhaust"), named["exhaust"]),
        "power.ambient_temperature": summary.number("Ambient"),
    }
    return Found((Row(place.entity("chassis"), "power", values, place.parents),))


def _put(named: dict[str, list[float]], context: str, value: float) -> None:
    """Into inlet or exhaust, by the words of the schema's PhysicalContext and of the field."""
    word = context.lower()
    if "intake" in word or "inlet" in word:
        named["intake"].append(value)
    elif "exhaust" in word or "outlet" in word:
        named["exhaust"].append(value)


def _first(summary: float | None, readings: list[float]) -> float | None:
    return summary if summary is not None else sum(readings) / len(readings) if readings else None


def parse_older_thermal(document: Document, place: Place) -> Found:
    """Thermal, deprecated with 2020.4: air temperatures by PhysicalContext, or by name where that is all there is."""
    named: dict[str, list[float]] = {"intake": [], "exhaust": []}
    for sensor in document.each("Temperatures"):
        value = None if sensor.absent else sensor.number("ReadingCelsius")
        if value is not None:
            _put(named, f"{sensor.text('PhysicalContext') or ''} {sensor.text('Name') or ''}", value)
    values = {
        "power.inlet_temperature": _first(None, named["intake"]),
        "power.exhaust_temperature": _first(None, named["exhaust"]),
    }
    return Found((Row(place.entity("chassis"), "power", values, place.parents),))


_KINDS = {
    # ReadingType -> (signal, how much of its unit one of the reading's is), Sensor 1.12
    "Temperature": ("sensor.temperature", 1.0),
    "Voltage": ("sensor.voltage", 1.0),
    "Current": ("sensor.current", 1.0),
    "Power": ("sensor.power", 1.0),
    "Rotational": ("sensor.fan_speed", 1.0),
    "Percent": ("sensor.ratio", 0.01),
    "Humidity": ("sensor.ratio", 0.01),
}
_ALARMS = {"OK": 0, "Warning": 1, "Critical": 2}  # states of sensor.alarm


def parse_sensor(document: Document, place: Place) -> Found:
    """One Sensor of a quantity that the class sensor has; others are left out."""
    kind = document.text("ReadingType")
    if document.absent or kind not in _KINDS:
        return Found()
    signal, scale = _KINDS[kind]
    values = {
        signal: document.number("Reading", scale),
        "sensor.alarm": document.inner("Status").one_of("Health", _ALARMS),
    }
    told = facts(document, label=document.text("Name"), type=kind, context=document.text("PhysicalContext"))
    return Found((Row(place.entity("sensor"), "sensor", values, place.parents, told),))
