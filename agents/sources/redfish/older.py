"""Power, the resource that PowerSubsystem replaced in 2020.4 and that many BMCs in use still have, -> rows."""

from __future__ import annotations

from agents.sources.redfish.document import Document, named
from agents.sources.redfish.psu import INPUT
from agents.sources.redfish.rows import Found, Place, Row, facts, redundancy


def power(document: Document, place: Place) -> Found:
    """Power of a chassis: its control and its supplies, which are named by MemberId, else by their index."""
    entity = place.entity("chassis")
    inside = place.under(entity)
    rows = [Row(entity, "power", _control(document), place.parents)]
    for number, one in enumerate(document.each("PowerSupplies")):
        member = named(one.text("MemberId") or str(number))
        rows.append(_supply(one, inside.at(member)))
    return Found(tuple(rows))


def _control(document: Document) -> dict[str, float | None]:
    """The first PowerControl is the chassis' own; a BMC without metering gives 0 for what it does not know."""
    control = next(document.each("PowerControl"), Document({}))
    return {
        "power.draw": control.number("PowerConsumedWatts"),
        "power.limit": control.inner("PowerLimit").number("LimitInWatts"),
        "power.capacity": control.number("PowerCapacityWatts"),
        "power.allocated": control.number("PowerAllocatedWatts"),
        "power.requested": control.number("PowerRequestedWatts"),
        "power.redundancy": redundancy(document, "Redundancy"),
    }


def _supply(one: Document, place: Place) -> Row:
    efficiency = one.number("EfficiencyPercent")
    output = one.number("PowerOutputWatts")
    values = {
        "psu.input_power": one.number("PowerInputWatts"),
        "psu.input_voltage": one.number("LineInputVoltage"),
        "psu.output_power": output if output is not None else one.number("LastPowerOutputWatts"),
        "psu.capacity": one.number("PowerCapacityWatts"),
        # a Dell of 2020 gives the share of 1 in place of percent
        "psu.efficiency": efficiency if efficiency is None or efficiency <= 1 else efficiency / 100,
        "psu.status": one.health(),
        "psu.input_status": one.one_of("LineInputStatus", INPUT),
    }
    return Row(place.entity("psu"), "psu", values, place.parents, facts(one, type=one.text("PowerSupplyType")))
