"""ThermalEquipment -> rows: coolant units with their pumps, reservoirs and filters, and the cooling loops.

CoolantConnectors -> rows: flow, temperatures, pressures, heat and valve of each connection.

LeakDetection and LeakDetectors -> rows: the state of each detector, and what the BMC itself does at a leak.

A coolant unit's own row: flow, temperatures and pressures of its secondary side, made of its connectors'.

Flow and heat are the sum over the secondary connectors, the rest is their mean. A value is given only where every
connector that ever gave it gives it now: a sum with a connector missing would look like a loss of flow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agents.collectors.bmc.redfish_document import (
    MAX_EACH,
    MAX_TEXT,
    Document,
    Found,
    Place,
    Row,
    facts,
    last_of,
    links,
    named,
    redundancy,
)

_LEVELS = {"OK": 0, "Warning": 1, "Critical": 2}


def parse_unit(document: Document, place: Place) -> Found:
    """One CoolingUnit: a CDU, an immersion unit or a heat exchanger; all are of the kind cdu.

    Its leak detectors bear `cdu` in their names, since a chassis may have the same Id. Its flow, temperatures and
    pressures are made of its secondary connectors': agents/collectors/bmc/redfish_cooling.py.
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


def parse_unit_air(document: Document, place: Place) -> Found:
    """EnvironmentMetrics of a CoolingUnit: the air around it, and what it draws."""
    values = {
        "coolant.ambient_temperature": document.number("TemperatureCelsius"),
        "coolant.humidity": document.share("HumidityPercent"),
        "coolant.dew_point": document.number("DewPointCelsius"),
        "coolant.power": document.number("PowerWatts"),
    }
    return Found((Row(place.entity("cdu"), "coolant", values, place.parents),))


def parse_pump(document: Document, place: Place) -> Found:
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


def parse_reservoir(document: Document, place: Place) -> Found:
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


def parse_filter(document: Document, place: Place) -> Found:
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


def parse_loop(document: Document, place: Place) -> Found:
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


_VALVE = {"Open": 0, "Closed": 1}
_REASONS = {"Normal": 0, "NotInUse": 1, "LeakDetected": 2}


def parse_connector(document: Document, place: Place) -> Found:
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


LEAK_STATES = {
    "OK": 0,
    "Warning": 1,
    "Critical": 2,
    "Unavailable": 3,
    "Absent": 4,
    # what BMCs say that do not keep to the schema: LeakDetected of a GB300's, the others of OpenBMC's D-Bus
    "LeakDetected": 2,
    "Normal": 0,
    "Abnormal": 2,
    "Unknown": 3,
}
_REACTIONS = {"None": 0, "ForceOff": 1, "GracefulShutdown": 2, "ForceRestart": 3, "GracefulRestart": 4}


def parse_leak_detector(document: Document, place: Place) -> Found:
    """One LeakDetector."""
    values = {
        "leak.state": _leak_state(document),
        "leak.warning_reaction": document.one_of("WarningReactionType", _REACTIONS),
        "leak.critical_reaction": document.one_of("CriticalReactionType", _REACTIONS),
        "leak.reaction_delay": document.number("ReactionDelaySeconds"),
    }
    told = facts(
        document,
        type=document.text("LeakDetectorType"),
        context=document.text("PhysicalContext"),
        location=document.inner("Location").inner("PartLocation").text("ServiceLabel"),
    )
    return Found((Row(place.entity("leak_detector"), "leak", values, place.parents, told),))


def parse_leak_detection(document: Document, place: Place) -> Found:
    """LeakDetection: a link to its detectors, or groups that bear the states of detectors themselves.

    A detector of a group that has a resource of its own is read there, where more is told.
    """
    rows, further = [], list(links(document, place, LeakDetectors="leak_detectors"))
    known = {link.path for link in further}
    for group in document.each("LeakDetectorGroups"):
        for number, one in enumerate(group.each("Detectors")):
            path = one.link("DataSourceUri")
            if path is not None:
                if not any(path.startswith(f"{collection}/") for collection in known):
                    further += links(one, place.at(last_of(path)), DataSourceUri="leak_detector")
                continue
            name = named(one.text("DeviceName") or str(number))
            values = {"leak.state": _leak_state(one)}
            told = facts(document, name=one.text("DeviceName"), group=group.text("GroupName"))
            rows.append(Row(place.entity("leak_detector", name), "leak", values, place.parents, told))
    return Found(tuple(rows), tuple(further))


def _leak_state(document: Document) -> float | None:
    """DetectorState; where there is none, that the detector is absent may stand in Status."""
    found = document.one_of("DetectorState", LEAK_STATES)
    return LEAK_STATES["Absent"] if found is None and document.absent else found


_SUMS = ("coolant.flow", "coolant.heat_removed")
_MEANS = (
    *("coolant.supply_temperature", "coolant.return_temperature", "coolant.delta_temperature"),
    *("coolant.pressure", "coolant.supply_pressure", "coolant.return_pressure"),
)
STALE_S = 15.0
"""Age from which on a connector's values are no longer counted in; chosen: three times the slowest poll that still
tells of a lost pump before the GPUs grow hot."""


@dataclass
class UnitTotals:
    """The newest rows of secondary connectors by unit. Times are monotonic seconds."""

    _rows: dict[str, dict[str, tuple[float, Row]]] = field(default_factory=dict)
    _gave: dict[str, set[str]] = field(default_factory=dict)

    def row(self, unit: str, connector: Row, now: float, members: Iterable[str]) -> Row | None:
        """The unit's row after one of its connectors was read; None until all `members` were read once."""
        known = self._rows.setdefault(unit, {})
        known[connector.entity] = now, connector
        wanted = set(members)
        for gone in known.keys() - wanted:
            del known[gone]
        self._gave.setdefault(connector.entity, set()).update(
            signal for signal in (*_SUMS, *_MEANS) if connector.values.get(signal) is not None
        )
        if known.keys() != wanted:
            return None
        values = {signal: self._of(known, signal, now) for signal in (*_SUMS, *_MEANS)}
        return Row(unit, "coolant", values)

    def _of(self, known: dict[str, tuple[float, Row]], signal: str, now: float) -> float | None:
        found = []
        for entity, (time, row) in known.items():
            if signal in self._gave.get(entity, ()):
                value = row.values.get(signal)
                if value is None or now - time > STALE_S:
                    return None
                found.append(value)
        if not found:
            return None
        return sum(found) if signal in _SUMS else sum(found) / len(found)

    def drop(self, entity: str) -> None:
        """A connector or unit that is gone."""
        self._rows.pop(entity, None)
        self._gave.pop(entity, None)
