"""PowerEquipment -> rows: power shelves, rack and floor PDUs, with their circuits and outlets.

PowerSubsystem of a chassis -> rows: power supplies with their rails, redundancy, and batteries.

Power, the resource that PowerSubsystem replaced in 2020.4 and that many BMCs in use still have, -> rows.
"""

from __future__ import annotations

from agents.collectors.bmc.redfish_document import (
    Document,
    Found,
    Link,
    Place,
    Row,
    Values,
    facts,
    last_of,
    links,
    named,
    redundancy,
)

_BREAKER = {"Normal": 0, "Tripped": 1, "Off": 2}
POWER_STATES = {"On": 0, "Off": 1, "PoweringOn": 2, "PoweringOff": 3, "Paused": 4}
_LINES = ("Line1", "Line2", "Line3")
_CIRCUITS = {"Mains": "mains", "Branches": "branch", "Feeders": "feeder", "Subfeeds": "subfeed"}


def parse_shelf(document: Document, place: Place) -> Found:
    """One PowerDistribution below PowerShelves."""
    return _distribution(document, place, "shelf")


def parse_pdu(document: Document, place: Place) -> Found:
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


def parse_shelf_metrics(document: Document, place: Place) -> Found:
    """PowerDistributionMetrics of a shelf."""
    return Found((Row(place.entity("shelf"), "power", _metrics(document), place.parents),))


def parse_pdu_metrics(document: Document, place: Place) -> Found:
    """PowerDistributionMetrics of a PDU."""
    return Found((Row(place.entity("pdu"), "power", _metrics(document), place.parents),))


def _metrics(document: Document) -> Values:
    return {
        **electrical_values(document),
        "power.temperature": document.number("TemperatureCelsius"),
        "power.humidity": document.share("HumidityPercent"),
    }


def parse_circuit(document: Document, place: Place) -> Found:
    """One Circuit. Where it gives phases alone, its power is their sum and its current stands by line."""
    if document.absent:
        return Found()
    entity = place.entity("circuit")
    values = {
        **electrical_values(document),
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


def parse_outlet(document: Document, place: Place) -> Found:
    """One Outlet; its branch circuit stands before the PDU among its parents."""
    if document.absent:
        return Found()
    values = {
        **electrical_values(document),
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


def electrical_values(document: Document) -> Values:
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


def parse_power_equipment(document: Document, place: Place) -> Found:
    """PowerEquipment: its collections. All but rack PDUs bear their kind in names: Ids are unique per collection."""
    further: list[Link] = [
        *links(document, place, PowerShelves="shelves", RackPDUs="pdus"),
        *links(document, place.at("floor"), FloorPDUs="pdus"),
        *links(document, place.at("transfer"), TransferSwitches="pdus"),
        *links(document, place.at("switchgear"), Switchgear="pdus"),
        *links(document, place.at("bus"), ElectricalBuses="pdus"),
    ]
    return Found(links=tuple(further))


INPUT = {"Normal": 0, "LossOfInput": 1, "OutOfRange": 2}
_CHARGE = {"Idle": 0, "Charging": 1, "Discharging": 2}


def parse_power_subsystem(document: Document, place: Place) -> Found:
    """PowerSubsystem: what the chassis' supplies can give together, and whether one may fail."""
    entity = place.entity("chassis")
    allocation = document.inner("Allocation")
    values = {
        "power.capacity": document.number("CapacityWatts"),
        "power.allocated": allocation.number("AllocatedWatts"),
        "power.requested": allocation.number("RequestedWatts"),
        "power.redundancy": redundancy(document, "PowerSupplyRedundancy"),
    }
    further = links(document, place.under(entity), PowerSupplies="psus", Batteries="batteries")
    return Found((Row(entity, "power", values, place.parents),), further)


def parse_psu(document: Document, place: Place) -> Found:
    """One PowerSupply. Of an empty bay, only that it is empty."""
    values = {
        "psu.status": document.health(),
        "psu.input_status": document.one_of("LineInputStatus", INPUT),
        "psu.capacity": document.number("PowerCapacityWatts"),
        "psu.efficiency": _best(document),
    }
    told = facts(
        document,
        type=document.text("PowerSupplyType"),
        location=document.inner("Location").inner("PartLocation").text("ServiceLabel"),
        efficiency_ratings=_ratings(document),
        rails=[volts for rail in document.each("OutputRails") if (volts := rail.number("NominalVoltage")) is not None]
        or None,
    )
    further = () if document.absent else links(document, place, Metrics="psu_metrics")
    return Found((Row(place.entity("psu"), "psu", values, place.parents, told),), further)


def parse_psu_metrics(document: Document, place: Place) -> Found:
    """PowerSupplyMetrics, with a row for each rail."""
    entity = place.entity("psu")
    fans = list(document.each("FanSpeedsPercent"))
    values = {
        "psu.input_power": document.number("InputPowerWatts"),
        "psu.input_voltage": document.number("InputVoltage"),
        "psu.input_current": document.number("InputCurrentAmps"),
        "psu.frequency": document.number("FrequencyHz"),
        "psu.output_power": document.number("OutputPowerWatts"),
        "psu.energy": document.energy("EnergykWh"),
        "psu.temperature": document.number("TemperatureCelsius"),
        "psu.fan_speed_ratio": _least([document.share("FanSpeedPercent"), *(fan.share("Reading") for fan in fans)]),
        "psu.fan_speed": _least([_turns(document), *(fan.number("SpeedRPM") for fan in fans)]),
    }
    return Found((Row(entity, "psu", values, place.parents), *_rails(document, place, entity)))


def _rails(document: Document, place: Place, psu_: str) -> tuple[Row, ...]:
    """Rails by their index: the arrays of voltages, currents and powers run in parallel (PowerSupplyMetrics)."""
    columns = {
        "power.voltage": document.values("RailVoltage"),
        "power.current": document.values("RailCurrentAmps"),
        "power.draw": document.values("RailPowerWatts"),
    }
    return tuple(
        Row(
            place.entity("output", str(rail)),
            "power",
            {signal: column[rail] for signal, column in columns.items() if rail < len(column)},
            (psu_, *place.parents),
            {"rail": rail},
        )
        for rail in range(max(map(len, columns.values())))
    )


def parse_battery(document: Document, place: Place) -> Found:
    """One Battery."""
    if document.absent:
        return Found()
    values = {
        "battery.status": document.health(),
        "battery.health": document.share("StateOfHealthPercent"),
        "battery.charge_state": document.one_of("ChargeState", _CHARGE),
    }
    told = facts(document, rated_wh=document.number("CapacityRatedWattHours"))
    further = links(document, place, Metrics="battery_metrics")
    return Found((Row(place.entity("battery"), "battery", values, place.parents, told),), further)


def parse_battery_metrics(document: Document, place: Place) -> Found:
    """BatteryMetrics. How long it would last is not among them."""
    out = [value for value in document.values("OutputCurrentAmps") if value is not None]
    values = {
        "battery.charge": document.share("ChargePercent"),
        "battery.stored": document.number("StoredEnergyWattHours", 3600.0),
        "battery.temperature": document.number("TemperatureCelsius"),
        "battery.input_voltage": document.number("InputVoltage"),
        "battery.input_current": document.number("InputCurrentAmps"),
        "battery.output_current": sum(out) if out else None,
        "battery.discharge_cycles": document.number("DischargeCycles"),
    }
    return Found((Row(place.entity("battery"), "battery", values, place.parents),))


def _turns(document: Document) -> float | None:
    """SpeedRPM is part of the excerpt of FanSpeedPercent."""
    excerpt = isinstance(document.body.get("FanSpeedPercent"), dict)
    return document.inner("FanSpeedPercent").number("SpeedRPM") if excerpt else None


def _least(found: list[float | None]) -> float | None:
    return min((value for value in found if value is not None), default=None)


def _ratings(document: Document) -> dict[str, float] | None:
    """Efficiency in percent by load in percent."""
    found = {}
    for rating in document.each("EfficiencyRatings"):
        load, percent = rating.number("LoadPercent"), rating.number("EfficiencyPercent")
        if load is not None and percent is not None:
            found[f"{load:g}"] = percent
    return found or None


def _best(document: Document) -> float | None:
    found = [rating.share("EfficiencyPercent") for rating in document.each("EfficiencyRatings")]
    return max((value for value in found if value is not None), default=None)


def parse_older_power(document: Document, place: Place) -> Found:
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
