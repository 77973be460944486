"""PowerSubsystem of a chassis -> rows: power supplies with their rails, redundancy, and batteries."""

from __future__ import annotations

from agents.sources.redfish.document import Document
from agents.sources.redfish.rows import Found, Place, Row, facts, links, redundancy

INPUT = {"Normal": 0, "LossOfInput": 1, "OutOfRange": 2}
_CHARGE = {"Idle": 0, "Charging": 1, "Discharging": 2}


def subsystem(document: Document, place: Place) -> Found:
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


def psu(document: Document, place: Place) -> Found:
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


def metrics(document: Document, place: Place) -> Found:
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


def battery(document: Document, place: Place) -> Found:
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


def battery_metrics(document: Document, place: Place) -> Found:
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
