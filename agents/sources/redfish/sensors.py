"""Sensors of a chassis -> rows of the class sensor, for shelves that show their supplies in no other way."""

from __future__ import annotations

from agents.sources.redfish.document import Document
from agents.sources.redfish.rows import Found, Place, Row, facts

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


def sensor(document: Document, place: Place) -> Found:
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
