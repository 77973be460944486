"""Parsers of cooling equipment: coolant units with pumps, reservoirs and filters, loops, connectors and leak detectors.

A coolant unit's flow and heat are the sum over its secondary connectors, its temperatures and pressures their mean. A
value is set only if every connector that ever reported it reports it now: a sum without one connector would look like a
loss of flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agents.collectors.bmc.redfish_document import (
    MAX_EACH,
    MAX_TEXT,
    EntityRow,
    ParsedResource,
    RedfishDocument,
    ResourceScope,
    common_attributes,
    last_segment,
    name_part,
    resource_links,
    worst_redundancy,
)

_LEVELS = {"OK": 0, "Warning": 1, "Critical": 2}


def parse_unit(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a CoolingUnit: a CDU, an immersion unit or a heat exchanger; all have the kind cdu.

    Its leak detectors have `cdu` in their names, since a chassis may have the same Id. Its flow, temperatures and
    pressures come from its secondary connectors (UnitTotals).
    """
    if document.is_absent:
        return ParsedResource()
    entity = place.entity_name("cdu")
    values = {
        "coolant.status": document.health(),
        "coolant.pump_redundancy": worst_redundancy(document, "PumpRedundancy"),
        "coolant.connector_redundancy": worst_redundancy(document, "CoolantConnectorRedundancy"),
    }
    reported_values = common_attributes(
        document, type=document.text("EquipmentType"), coolant=document.child("Coolant").text("CoolantType")
    )
    inside = place.within(entity)
    further = (
        *resource_links(
            document, inside.extend("secondary", side="secondary"), SecondaryCoolantConnectors="connectors"
        ),
        *resource_links(document, inside.extend("primary", side="primary"), PrimaryCoolantConnectors="connectors"),
        *resource_links(document, replace(inside, ids=("cdu", *place.ids)), LeakDetection="leak_detection"),
        *resource_links(document, inside, Pumps="pumps", Reservoirs="reservoirs", Filters="filters"),
        *resource_links(document, place, EnvironmentMetrics="cdu_environment"),
    )
    return ParsedResource((EntityRow(entity, "coolant", values, place.parents, reported_values),), further)


def parse_unit_air(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses EnvironmentMetrics of a CoolingUnit: the air around it, and its power."""
    values = {
        "coolant.ambient_temperature": document.number("TemperatureCelsius"),
        "coolant.humidity": document.ratio("HumidityPercent"),
        "coolant.dew_point": document.number("DewPointCelsius"),
        "coolant.power": document.number("PowerWatts"),
    }
    return ParsedResource((EntityRow(place.entity_name("cdu"), "coolant", values, place.parents),))


def parse_pump(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Pump. SpeedRPM is part of the excerpt of its speed."""
    if document.is_absent:
        return ParsedResource()
    values = {
        "pump.speed": document.child("PumpSpeedPercent").number("SpeedRPM") if _has_pump_excerpt(document) else None,
        "pump.speed_ratio": document.ratio("PumpSpeedPercent"),
        "pump.inlet_pressure": document.pressure("InletPressurekPa"),
        "pump.service_time": document.number("ServiceHours"),
        "coolant.status": document.health(),
    }
    reported_values = common_attributes(document, type=document.text("PumpType"))
    return ParsedResource((EntityRow(place.entity_name("pump"), "coolant", values, place.parents, reported_values),))


def parse_reservoir(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Reservoir."""
    if document.is_absent:
        return ParsedResource()
    values = {
        "reservoir.level": document.ratio("FluidLevelPercent"),
        "reservoir.level_state": document.enum_value("FluidLevelStatus", _LEVELS),
        "reservoir.pressure": document.pressure("InternalPressurekPa"),
        "coolant.status": document.health(),
    }
    reported_values = common_attributes(
        document, type=document.text("ReservoirType"), capacity=document.number("CapacityLiters")
    )
    return ParsedResource(
        (EntityRow(place.entity_name("reservoir"), "coolant", values, place.parents, reported_values),)
    )


def parse_filter(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Filter."""
    if document.is_absent:
        return ParsedResource()
    values = {
        "filter.pressure_drop": document.pressure("DeltaLiquidPressurekPa"),
        "filter.service_time": document.number("ServiceHours"),
        "coolant.status": document.health(),
    }
    reported_values = common_attributes(document, rated_service_time=document.number("RatedServiceHours"))
    return ParsedResource((EntityRow(place.entity_name("filter"), "coolant", values, place.parents, reported_values),))


def parse_loop(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a CoolingLoop. Its consumers and suppliers are attributes, by the names that the BMC uses."""
    if document.is_absent:
        return ParsedResource()
    values = {
        "loop.level": document.ratio("CoolantLevelPercent"),
        "loop.level_state": document.enum_value("CoolantLevelStatus", _LEVELS),
        "loop.quality": document.enum_value("CoolantQuality", _LEVELS),
        "coolant.status": document.health(),
    }
    reported_values = common_attributes(
        document,
        coolant=document.child("Coolant").text("CoolantType"),
        consumers=_equipment_names(document, "ConsumingEquipmentNames"),
        suppliers=_equipment_names(document, "SupplyEquipmentNames"),
    )
    return ParsedResource((EntityRow(place.entity_name("loop"), "coolant", values, place.parents, reported_values),))


def _has_pump_excerpt(document: RedfishDocument) -> bool:
    return isinstance(document.body.get("PumpSpeedPercent"), dict)


def _equipment_names(document: RedfishDocument, key: str) -> list[str] | None:
    found = document.body.get(key)
    if found is not None and not isinstance(found, list):
        document.add_fault(key, found, "a list")
    names = [name[:MAX_TEXT] for name in found[:MAX_EACH] if isinstance(name, str)] if isinstance(found, list) else []
    return names or None


_VALVE = {"Open": 0, "Closed": 1}
_REASONS = {"Normal": 0, "NotInUse": 1, "LeakDetected": 2}


def parse_connector(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a CoolantConnector (1.0 to 1.4). Older ones have only the difference of pressures, or none."""
    if document.is_absent:
        return ParsedResource()
    entity = place.entity_name("connector")
    values = {
        "coolant.flow": document.number("FlowLitersPerMinute"),
        "coolant.supply_temperature": document.number("SupplyTemperatureCelsius"),
        "coolant.return_temperature": document.number("ReturnTemperatureCelsius"),
        "coolant.delta_temperature": document.number("DeltaTemperatureCelsius"),
        "coolant.pressure": document.pressure("DeltaPressurekPa"),
        "coolant.supply_pressure": document.pressure("SupplyPressurekPa"),
        "coolant.return_pressure": document.pressure("ReturnPressurekPa"),
        "coolant.heat_removed": document.number("HeatRemovedkW", 1000.0),
        "coolant.valve_position": document.ratio("ValvePositionPercent"),
        "coolant.valve_state": document.enum_value("ValveState", _VALVE),
        "coolant.valve_reason": document.enum_value("ValveStateReason", _REASONS),
        "coolant.status": document.health(),
    }
    reported_values = common_attributes(
        document,
        side=place.side or None,
        rated_flow=document.number("RatedFlowLitersPerMinute"),
        coolant=document.child("Coolant").text("CoolantType"),
        loop=document.child("Links").link("ConnectedCoolingLoop"),
    )
    return ParsedResource((EntityRow(entity, "coolant", values, place.parents, reported_values),))


LEAK_STATES = {
    "OK": 0,
    "Warning": 1,
    "Critical": 2,
    "Unavailable": 3,
    "Absent": 4,
    # values outside the schema: LeakDetected of a GB300's BMC, the others of OpenBMC's D-Bus
    "LeakDetected": 2,
    "Normal": 0,
    "Abnormal": 2,
    "Unknown": 3,
}
_REACTIONS = {"None": 0, "ForceOff": 1, "GracefulShutdown": 2, "ForceRestart": 3, "GracefulRestart": 4}


def parse_leak_detector(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a LeakDetector."""
    values = {
        "leak.state": _detector_state(document),
        "leak.warning_reaction": document.enum_value("WarningReactionType", _REACTIONS),
        "leak.critical_reaction": document.enum_value("CriticalReactionType", _REACTIONS),
        "leak.reaction_delay": document.number("ReactionDelaySeconds"),
    }
    reported_values = common_attributes(
        document,
        type=document.text("LeakDetectorType"),
        context=document.text("PhysicalContext"),
        location=document.child("Location").child("PartLocation").text("ServiceLabel"),
    )
    return ParsedResource(
        (EntityRow(place.entity_name("leak_detector"), "leak", values, place.parents, reported_values),)
    )


def parse_leak_detection(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses LeakDetection: a link to its detectors, or groups that contain the states of detectors themselves.

    A detector of a group that has its own resource is read there, since that has more data.
    """
    rows, further = [], list(resource_links(document, place, LeakDetectors="leak_detectors"))
    known = {link.path for link in further}
    for group in document.children("LeakDetectorGroups"):
        for number, one in enumerate(group.children("Detectors")):
            path = one.link("DataSourceUri")
            if path is not None:
                if not any(path.startswith(f"{collection}/") for collection in known):
                    further += resource_links(one, place.extend(last_segment(path)), DataSourceUri="leak_detector")
                continue
            name = name_part(one.text("DeviceName") or str(number))
            values = {"leak.state": _detector_state(one)}
            reported_values = common_attributes(document, name=one.text("DeviceName"), group=group.text("GroupName"))
            rows.append(
                EntityRow(place.entity_name("leak_detector", name), "leak", values, place.parents, reported_values)
            )
    return ParsedResource(tuple(rows), tuple(further))


def _detector_state(document: RedfishDocument) -> float | None:
    """Returns DetectorState. Without it, Status may report that the detector is absent."""
    found = document.enum_value("DetectorState", LEAK_STATES)
    return LEAK_STATES["Absent"] if found is None and document.is_absent else found


_SUMS = ("coolant.flow", "coolant.heat_removed")
_MEANS = (
    *("coolant.supply_temperature", "coolant.return_temperature", "coolant.delta_temperature"),
    *("coolant.pressure", "coolant.supply_pressure", "coolant.return_pressure"),
)
STALE_S = 15.0
"""Age from which a connector's values are no longer used. Chosen: three times the slowest poll that still detects a
failed pump before the GPUs get hot."""


@dataclass
class UnitTotals:
    """The newest rows of secondary connectors by unit. Times are monotonic seconds."""

    _rows: dict[str, dict[str, tuple[float, EntityRow]]] = field(default_factory=dict)
    _reported: dict[str, set[str]] = field(default_factory=dict)

    def update(self, unit: str, connector: EntityRow, now: float, members: Iterable[str]) -> EntityRow | None:
        """Returns the unit's row after one of its connectors was read; None until all `members` were read once."""
        known = self._rows.setdefault(unit, {})
        known[connector.entity] = now, connector
        wanted = set(members)
        for gone in known.keys() - wanted:
            del known[gone]
        self._reported.setdefault(connector.entity, set()).update(
            signal for signal in (*_SUMS, *_MEANS) if connector.values.get(signal) is not None
        )
        if known.keys() != wanted:
            return None
        values = {signal: self._combine(known, signal, now) for signal in (*_SUMS, *_MEANS)}
        return EntityRow(unit, "coolant", values)

    def _combine(self, known: dict[str, tuple[float, EntityRow]], signal: str, now: float) -> float | None:
        found = []
        for entity, (time, row) in known.items():
            if signal in self._reported.get(entity, ()):
                value = row.values.get(signal)
                if value is None or now - time > STALE_S:
                    return None
                found.append(value)
        if not found:
            return None
        return sum(found) if signal in _SUMS else sum(found) / len(found)

    def remove(self, entity: str) -> None:
        """Removes a connector or unit that no longer exists."""
        self._rows.pop(entity, None)
        self._reported.pop(entity, None)
