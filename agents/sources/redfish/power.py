"""PowerEquipment -> rows: power shelves, rack and floor PDUs, with their circuits and outlets."""

from __future__ import annotations

from agents.sources.redfish.document import Document, last_of
from agents.sources.redfish.rows import Found, Link, Place, Row, Values, facts, links, redundancy

_BREAKER = {"Normal": 0, "Tripped": 1, "Off": 2}
POWER_STATES = {"On": 0, "Off": 1, "PoweringOn": 2, "PoweringOff": 3, "Paused": 4}
_LINES = ("Line1", "Line2", "Line3")
_CIRCUITS = {"Mains": "mains", "Branches": "branch", "Feeders": "feeder", "Subfeeds": "subfeed"}


def shelf(document: Document, place: Place) -> Found:
    """One PowerDistribution below PowerShelves."""
    return _distribution(document, place, "shelf")


def pdu(document: Document, place: Place) -> Found:
    """One PowerDistribution of another kind: rack or floor PDU, switchgear, transfer switch, bus."""
    return _distribution(document, place, "pdu")


def _distribution(document: Document, place: Place, kind: str) -> Found:
    if document.absent:
        return Found()
    entity = place.entity(kind)
    redundancy_ = redundancy(document, "MainsRedundancy")
    values = {"power.status": document.health(), "power.redundancy": redundancy_}
    told = facts(
        document,
        type=document.text("EquipmentType"),
        chassis=[last_of(path) for one in document.inner("Links").each("Chassis") if (path := one.path("@odata.id"))]
        or None,
    )
    inside = place.under(entity)
    further = [*links(document, place, Metrics=f"{kind}_metrics"), *links(document, inside, Outlets="outlets")]
    for key, word in _CIRCUITS.items():
        further += links(document, inside.at(word), **{key: "circuits"})
    return Found((Row(entity, "power", values, place.parents, told),), tuple(further))


def shelf_metrics(document: Document, place: Place) -> Found:
    """PowerDistributionMetrics of a shelf."""
    return Found((Row(place.entity("shelf"), "power", _metrics(document), place.parents),))


def pdu_metrics(document: Document, place: Place) -> Found:
    """PowerDistributionMetrics of a PDU."""
    return Found((Row(place.entity("pdu"), "power", _metrics(document), place.parents),))


def _metrics(document: Document) -> Values:
    return {
        **electric(document),
        "power.temperature": document.number("TemperatureCelsius"),
        "power.humidity": document.share("HumidityPercent"),
    }


def circuit(document: Document, place: Place) -> Found:
    """One Circuit. Where it gives phases alone, its power is their sum and its current stands by line."""
    if document.absent:
        return Found()
    entity = place.entity("circuit")
    values = {
        **electric(document),
        "power.breaker": document.one_of("BreakerState", _BREAKER),
        "power.current_unbalance": document.share("UnbalancedCurrentPercent"),
        "power.voltage_unbalance": document.share("UnbalancedVoltagePercent"),
        "power.status": document.health(),
        "power.state": document.one_of("PowerState", POWER_STATES),
    }
    told = facts(
        document,
        type=document.text("CircuitType"),
        phases=document.text("PhaseWiringType"),
        nominal_voltage=document.text("NominalVoltage"),
        rated_current=document.number("RatedCurrentAmps"),
    )
    return Found((Row(entity, "power", values, place.parents, told),))


def outlet(document: Document, place: Place) -> Found:
    """One Outlet; its branch circuit stands before the PDU among its parents."""
    if document.absent:
        return Found()
    values = {
        **electric(document),
        "power.status": document.health(),
        "power.state": document.one_of("PowerState", POWER_STATES),
    }
    told = facts(
        document,
        type=document.text("OutletType"),
        rated_current=document.number("RatedCurrentAmps"),
        nominal_voltage=document.text("NominalVoltage"),
    )
    branch = document.inner("Links").link("BranchCircuit")
    above = (f"circuit:{'.'.join((place.bmc, *place.ids[:-1], 'branch', last_of(branch)))}",) if branch else ()
    return Found((Row(place.entity("outlet"), "power", values, (*above, *place.parents), told),))


def electric(document: Document) -> Values:
    """What metrics, circuits and outlets have in common."""
    watts, amps, volts = (
        document.inner(key) for key in ("PolyPhasePowerWatts", "PolyPhaseCurrentAmps", "PolyPhaseVoltage")
    )
    power = document.number("PowerWatts")
    excerpt = document.body.get("PowerWatts")
    more = document.inner("PowerWatts") if isinstance(excerpt, dict) else Document({})
    return {
        "power.draw": power if power is not None else _sum(watts),
        "power.apparent": more.number("ApparentVA"),
        "power.factor": more.number("PowerFactor"),
        "power.voltage": document.number("Voltage"),
        "power.current": document.number("CurrentAmps"),
        "power.frequency": document.number("FrequencyHz"),
        "power.energy": document.energy("EnergykWh"),
        **{f"power.current_{line.lower()}": amps.number(line) for line in (*_LINES, "Neutral")},
        **{f"power.voltage_{line.lower()}": volts.number(f"{line}ToNeutral") for line in _LINES},
    }


def _sum(watts: Document) -> float | None:
    """Power of all phases, where the circuit gives them in one wiring; a mixture would count power twice."""
    for tail in ("ToNeutral", "ToLine"):
        found = [watts.number(key) for key in watts.body if isinstance(key, str) and tail in key]
        known = [value for value in found if value is not None]
        if known and len(known) == len(found):
            return sum(known)
    return None


def equipment(document: Document, place: Place) -> Found:
    """PowerEquipment: its collections. All but rack PDUs bear their kind in names: Ids are unique per collection."""
    further: list[Link] = [
        *links(document, place, PowerShelves="shelves", RackPDUs="pdus"),
        *links(document, place.at("floor"), FloorPDUs="pdus"),
        *links(document, place.at("transfer"), TransferSwitches="pdus"),
        *links(document, place.at("switchgear"), Switchgear="pdus"),
        *links(document, place.at("bus"), ElectricalBuses="pdus"),
    ]
    return Found(links=tuple(further))
