"""Parsers of power equipment: shelves and PDUs with circuits and outlets, power supplies with rails, batteries, and the
older Power.

Power was replaced by PowerSubsystem in 2020.4; many BMCs in use still have it.
"""

from __future__ import annotations

from agents.collectors.bmc.redfish_document import (
    EntityRow,
    ParsedResource,
    RedfishDocument,
    ResourceLink,
    ResourceScope,
    RowValues,
    common_attributes,
    last_segment,
    name_part,
    resource_links,
    worst_redundancy,
)

_BREAKER = {"Normal": 0, "Tripped": 1, "Off": 2}
POWER_STATES = {"On": 0, "Off": 1, "PoweringOn": 2, "PoweringOff": 3, "Paused": 4}
_LINES = ("Line1", "Line2", "Line3")
_CIRCUITS = {"Mains": "mains", "Branches": "branch", "Feeders": "feeder", "Subfeeds": "subfeed"}


def parse_shelf(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a PowerDistribution below PowerShelves."""
    return _parse_distribution(document, place, "shelf")


def parse_pdu(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a PowerDistribution of another kind: rack or floor PDU, switchgear, transfer switch, bus."""
    return _parse_distribution(document, place, "pdu")


def _parse_distribution(document: RedfishDocument, place: ResourceScope, kind: str) -> ParsedResource:
    if document.is_absent:
        return ParsedResource()
    entity = place.entity_name(kind)
    redundancy_ = worst_redundancy(document, "MainsRedundancy")
    values = {"power.status": document.health(), "power.redundancy": redundancy_}
    reported = common_attributes(
        document,
        type=document.text("EquipmentType"),
        chassis=[
            last_segment(path) for one in document.child("Links").children("Chassis") if (path := one.path("@odata.id"))
        ]
        or None,
    )
    inside = place.within(entity)
    further = [
        *resource_links(document, place, Metrics=f"{kind}_metrics"),
        *resource_links(document, inside, Outlets="outlets"),
    ]
    for key, word in _CIRCUITS.items():
        further += resource_links(document, inside.extend(word), **{key: "circuits"})
    return ParsedResource((EntityRow(entity, "power", values, place.parents, reported),), tuple(further))


def parse_shelf_metrics(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses PowerDistributionMetrics of a shelf."""
    return ParsedResource(
        (EntityRow(place.entity_name("shelf"), "power", _distribution_values(document), place.parents),)
    )


def parse_pdu_metrics(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses PowerDistributionMetrics of a PDU."""
    return ParsedResource(
        (EntityRow(place.entity_name("pdu"), "power", _distribution_values(document), place.parents),)
    )


def _distribution_values(document: RedfishDocument) -> RowValues:
    return {
        **electrical_values(document),
        "power.temperature": document.number("TemperatureCelsius"),
        "power.humidity": document.ratio("HumidityPercent"),
    }


def parse_circuit(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Circuit. If it only reports phases, its power is their sum and its current is set per line."""
    if document.is_absent:
        return ParsedResource()
    entity = place.entity_name("circuit")
    values = {
        **electrical_values(document),
        "power.breaker": document.enum_value("BreakerState", _BREAKER),
        "power.current_unbalance": document.ratio("UnbalancedCurrentPercent"),
        "power.voltage_unbalance": document.ratio("UnbalancedVoltagePercent"),
        "power.status": document.health(),
        "power.state": document.enum_value("PowerState", POWER_STATES),
    }
    reported = common_attributes(
        document,
        type=document.text("CircuitType"),
        phases=document.text("PhaseWiringType"),
        nominal_voltage=document.text("NominalVoltage"),
        rated_current=document.number("RatedCurrentAmps"),
    )
    return ParsedResource((EntityRow(entity, "power", values, place.parents, reported),))


def parse_outlet(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses an Outlet. Its branch circuit precedes the PDU in its parents."""
    if document.is_absent:
        return ParsedResource()
    values = {
        **electrical_values(document),
        "power.status": document.health(),
        "power.state": document.enum_value("PowerState", POWER_STATES),
    }
    reported = common_attributes(
        document,
        type=document.text("OutletType"),
        rated_current=document.number("RatedCurrentAmps"),
        nominal_voltage=document.text("NominalVoltage"),
    )
    branch = document.child("Links").link("BranchCircuit")
    above = (f"circuit:{'.'.join((place.bmc, *place.ids[:-1], 'branch', last_segment(branch)))}",) if branch else ()
    return ParsedResource(
        (EntityRow(place.entity_name("outlet"), "power", values, (*above, *place.parents), reported),)
    )


def electrical_values(document: RedfishDocument) -> RowValues:
    """Returns the values that metrics, circuits and outlets have in common."""
    watts, amps, volts = (
        document.child(key) for key in ("PolyPhasePowerWatts", "PolyPhaseCurrentAmps", "PolyPhaseVoltage")
    )
    power = document.number("PowerWatts")
    excerpt = document.body.get("PowerWatts")
    more = document.child("PowerWatts") if isinstance(excerpt, dict) else RedfishDocument({})
    return {
        "power.draw": power if power is not None else _phase_power(watts),
        "power.apparent": more.number("ApparentVA"),
        "power.factor": more.number("PowerFactor"),
        "power.voltage": document.number("Voltage"),
        "power.current": document.number("CurrentAmps"),
        "power.frequency": document.number("FrequencyHz"),
        "power.energy": document.energy("EnergykWh"),
        **{f"power.current_{line.lower()}": amps.number(line) for line in (*_LINES, "Neutral")},
        **{f"power.voltage_{line.lower()}": volts.number(f"{line}ToNeutral") for line in _LINES},
    }


def _phase_power(watts: RedfishDocument) -> float | None:
    """Returns the power of all phases if they have one wiring. A mixture would count power twice."""
    for tail in ("ToNeutral", "ToLine"):
        found = [watts.number(key) for key in watts.body if isinstance(key, str) and tail in key]
        known = [value for value in found if value is not None]
        if known and len(known) == len(found):
            return sum(known)
    return None


def parse_power_equipment(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses PowerEquipment: its collections. All but rack PDUs have their kind in names, since Ids are unique per
    collection.
    """
    further: list[ResourceLink] = [
        *resource_links(document, place, PowerShelves="shelves", RackPDUs="pdus"),
        *resource_links(document, place.extend("floor"), FloorPDUs="pdus"),
        *resource_links(document, place.extend("transfer"), TransferSwitches="pdus"),
        *resource_links(document, place.extend("switchgear"), Switchgear="pdus"),
        *resource_links(document, place.extend("bus"), ElectricalBuses="pdus"),
    ]
    return ParsedResource(links=tuple(further))


INPUT_STATES = {"Normal": 0, "LossOfInput": 1, "OutOfRange": 2}
_CHARGE = {"Idle": 0, "Charging": 1, "Discharging": 2}


def parse_power_subsystem(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses PowerSubsystem: capacity and redundancy of the chassis' supplies together."""
    entity = place.entity_name("chassis")
    allocation = document.child("Allocation")
    values = {
        "power.capacity": document.number("CapacityWatts"),
        "power.allocated": allocation.number("AllocatedWatts"),
        "power.requested": allocation.number("RequestedWatts"),
        "power.redundancy": worst_redundancy(document, "PowerSupplyRedundancy"),
    }
    further = resource_links(document, place.within(entity), PowerSupplies="psus", Batteries="batteries")
    return ParsedResource((EntityRow(entity, "power", values, place.parents),), further)


def parse_psu(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a PowerSupply. For an empty bay, only that it is empty."""
    values = {
        "psu.status": document.health(),
        "psu.input_status": document.enum_value("LineInputStatus", INPUT_STATES),
        "psu.capacity": document.number("PowerCapacityWatts"),
        "psu.efficiency": _best_efficiency(document),
    }
    reported = common_attributes(
        document,
        type=document.text("PowerSupplyType"),
        location=document.child("Location").child("PartLocation").text("ServiceLabel"),
        efficiency_ratings=_efficiency_by_load(document),
        rails=[
            volts for rail in document.children("OutputRails") if (volts := rail.number("NominalVoltage")) is not None
        ]
        or None,
    )
    further = () if document.is_absent else resource_links(document, place, Metrics="psu_metrics")
    return ParsedResource((EntityRow(place.entity_name("psu"), "psu", values, place.parents, reported),), further)


def parse_psu_metrics(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses PowerSupplyMetrics, with a row for each rail."""
    entity = place.entity_name("psu")
    fans = list(document.children("FanSpeedsPercent"))
    values = {
        "psu.input_power": document.number("InputPowerWatts"),
        "psu.input_voltage": document.number("InputVoltage"),
        "psu.input_current": document.number("InputCurrentAmps"),
        "psu.frequency": document.number("FrequencyHz"),
        "psu.output_power": document.number("OutputPowerWatts"),
        "psu.energy": document.energy("EnergykWh"),
        "psu.temperature": document.number("TemperatureCelsius"),
        "psu.fan_speed_ratio": _minimum([document.ratio("FanSpeedPercent"), *(fan.ratio("Reading") for fan in fans)]),
        "psu.fan_speed": _minimum([_fan_rpm(document), *(fan.number("SpeedRPM") for fan in fans)]),
    }
    return ParsedResource((EntityRow(entity, "psu", values, place.parents), *_rail_rows(document, place, entity)))


def _rail_rows(document: RedfishDocument, place: ResourceScope, psu_: str) -> tuple[EntityRow, ...]:
    """Returns rails by index: the arrays of voltages, currents and powers are parallel (PowerSupplyMetrics)."""
    columns = {
        "power.voltage": document.numbers("RailVoltage"),
        "power.current": document.numbers("RailCurrentAmps"),
        "power.draw": document.numbers("RailPowerWatts"),
    }
    return tuple(
        EntityRow(
            place.entity_name("output", str(rail)),
            "power",
            {signal: column[rail] for signal, column in columns.items() if rail < len(column)},
            (psu_, *place.parents),
            {"rail": rail},
        )
        for rail in range(max(map(len, columns.values())))
    )


def parse_battery(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses a Battery."""
    if document.is_absent:
        return ParsedResource()
    values = {
        "battery.status": document.health(),
        "battery.health": document.ratio("StateOfHealthPercent"),
        "battery.charge_state": document.enum_value("ChargeState", _CHARGE),
    }
    reported = common_attributes(document, rated_wh=document.number("CapacityRatedWattHours"))
    further = resource_links(document, place, Metrics="battery_metrics")
    return ParsedResource(
        (EntityRow(place.entity_name("battery"), "battery", values, place.parents, reported),), further
    )


def parse_battery_metrics(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses BatteryMetrics. The remaining time is not among them."""
    out = [value for value in document.numbers("OutputCurrentAmps") if value is not None]
    values = {
        "battery.charge": document.ratio("ChargePercent"),
        "battery.stored": document.number("StoredEnergyWattHours", 3600.0),
        "battery.temperature": document.number("TemperatureCelsius"),
        "battery.input_voltage": document.number("InputVoltage"),
        "battery.input_current": document.number("InputCurrentAmps"),
        "battery.output_current": sum(out) if out else None,
        "battery.discharge_cycles": document.number("DischargeCycles"),
    }
    return ParsedResource((EntityRow(place.entity_name("battery"), "battery", values, place.parents),))


def _fan_rpm(document: RedfishDocument) -> float | None:
    """Returns SpeedRPM, which is part of the excerpt of FanSpeedPercent."""
    excerpt = isinstance(document.body.get("FanSpeedPercent"), dict)
    return document.child("FanSpeedPercent").number("SpeedRPM") if excerpt else None


def _minimum(found: list[float | None]) -> float | None:
    return min((value for value in found if value is not None), default=None)


def _efficiency_by_load(document: RedfishDocument) -> dict[str, float] | None:
    """Returns efficiency in percent by load in percent."""
    found = {}
    for rating in document.children("EfficiencyRatings"):
        load, percent = rating.number("LoadPercent"), rating.number("EfficiencyPercent")
        if load is not None and percent is not None:
            found[f"{load:g}"] = percent
    return found or None


def _best_efficiency(document: RedfishDocument) -> float | None:
    found = [rating.ratio("EfficiencyPercent") for rating in document.children("EfficiencyRatings")]
    return max((value for value in found if value is not None), default=None)


def parse_older_power(document: RedfishDocument, place: ResourceScope) -> ParsedResource:
    """Parses Power of a chassis: its control and its supplies, named by MemberId, else by index."""
    entity = place.entity_name("chassis")
    inside = place.within(entity)
    rows = [EntityRow(entity, "power", _control_values(document), place.parents)]
    for number, one in enumerate(document.children("PowerSupplies")):
        member = name_part(one.text("MemberId") or str(number))
        rows.append(_supply_row(one, inside.extend(member)))
    return ParsedResource(tuple(rows))


def _control_values(document: RedfishDocument) -> dict[str, float | None]:
    """Returns values of the first PowerControl, which is the chassis' own. A BMC without metering reports 0 for unknown
    values.
    """
    control = next(document.children("PowerControl"), RedfishDocument({}))
    return {
        "power.draw": control.number("PowerConsumedWatts"),
        "power.limit": control.child("PowerLimit").number("LimitInWatts"),
        "power.capacity": control.number("PowerCapacityWatts"),
        "power.allocated": control.number("PowerAllocatedWatts"),
        "power.requested": control.number("PowerRequestedWatts"),
        "power.redundancy": worst_redundancy(document, "Redundancy"),
    }


def _supply_row(one: RedfishDocument, place: ResourceScope) -> EntityRow:
    efficiency = one.number("EfficiencyPercent")
    output = one.number("PowerOutputWatts")
    values = {
        "psu.input_power": one.number("PowerInputWatts"),
        "psu.input_voltage": one.number("LineInputVoltage"),
        "psu.output_power": output if output is not None else one.number("LastPowerOutputWatts"),
        "psu.capacity": one.number("PowerCapacityWatts"),
        # a Dell of 2020 reports a ratio instead of percent
        "psu.efficiency": efficiency if efficiency is None or efficiency <= 1 else efficiency / 100,
        "psu.status": one.health(),
        "psu.input_status": one.enum_value("LineInputStatus", INPUT_STATES),
    }
    return EntityRow(
        place.entity_name("psu"), "psu", values, place.parents, common_attributes(one, type=one.text("PowerSupplyType"))
    )
