"""Redfish documents -> rows: the values of each resource, in both forms of a value, and the faults of a document."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.collector import Device
from agents.collectors.bmc.redfish_cooling import UnitTotals
from agents.collectors.bmc.redfish_document import (
    PREFIX,
    EntityRow,
    ParsedResource,
    ParseFaults,
    RedfishDocument,
    ResourceScope,
    last_segment,
    name_part,
    resource_path,
)
from agents.collectors.bmc.redfish_events import MAX_EVENT, SseParser, parse_event
from agents.collectors.bmc.redfish_poller import add_feed_parents
from agents.collectors.bmc.redfish_resources import RESOURCES, matches_kind
from pipeline.model.signals import CATALOGUE
from pipeline.model.signals.signal import HEALTH
from pipeline.model.topology import Topology

PLACE = ResourceScope("b1", ("X",), ("rack:r1",))


def parsed(kind: str, body: Any, place: ResourceScope = PLACE) -> tuple[ParsedResource, ParseFaults]:
    faults = ParseFaults()
    return RESOURCES[kind].parse(RedfishDocument(body, f"{PREFIX}/{kind}", faults), place), faults


def values(kind: str, body: Any, entity: str = "") -> dict[str, float | None]:
    found, faults = parsed(kind, body)
    assert faults.count == 0, faults.last
    row = next(row for row in found.rows if not entity or row.entity == entity)
    return {signal: value for signal, value in row.values.items() if value is not None}


def excerpt(value: float) -> dict[str, Any]:
    return {"Reading": value, "DataSourceUri": f"{PREFIX}/Chassis/X/Sensors/S"}


CONNECTOR = {
    "@odata.type": "#CoolantConnector.v1_4_0.CoolantConnector",
    "Status": {"State": "Enabled", "Health": "Warning"},
    "RatedFlowLitersPerMinute": 40,
    "FlowLitersPerMinute": excerpt(31.5),
    "SupplyTemperatureCelsius": excerpt(29.0),
    "ReturnTemperatureCelsius": 41,
    "DeltaTemperatureCelsius": excerpt(12.0),
    "SupplyPressurekPa": excerpt(412.0),
    "ReturnPressurekPa": 250.0,
    "DeltaPressurekPa": excerpt(162.0),
    "HeatRemovedkW": excerpt(25.5),
    "ValvePositionPercent": excerpt(80),
    "ValveState": "Closed",
    "ValveStateReason": "LeakDetected",
    "Links": {"ConnectedCoolingLoop": {"@odata.id": f"{PREFIX}/ThermalEquipment/CoolingLoops/Row"}},
}


def test_a_connector_has_flow_temperatures_pressures_heat_and_valve() -> None:
    assert values("connector", CONNECTOR) == {
        "coolant.flow": 31.5,
        "coolant.supply_temperature": 29.0,
        "coolant.return_temperature": 41.0,
        "coolant.delta_temperature": 12.0,
        "coolant.supply_pressure": pytest.approx(4.12),
        "coolant.return_pressure": pytest.approx(2.5),
        "coolant.pressure": pytest.approx(1.62),
        "coolant.heat_removed": 25_500.0,
        "coolant.valve_position": pytest.approx(0.8),
        "coolant.valve_state": 1,
        "coolant.valve_reason": 2,
        "coolant.status": 1,
    }
    found, _ = parsed("connector", CONNECTOR)
    assert found.rows[0].attributes["rated_flow"] == 40
    assert found.rows[0].attributes["loop"] == f"{PREFIX}/ThermalEquipment/CoolingLoops/Row"


@pytest.mark.parametrize("broken", ["NaN", "31.5", True, [31.5], {"Reading": "high"}, float("nan"), math.inf, 10**400])
def test_a_value_that_is_not_a_number_is_a_fault_and_costs_no_other_value(broken: Any) -> None:
    found, faults = parsed("connector", {**CONNECTOR, "FlowLitersPerMinute": broken})
    assert faults.count == 1
    assert "FlowLitersPerMinute" in faults.last
    assert found.rows[0].values["coolant.flow"] is None
    assert found.rows[0].values["coolant.pressure"] == pytest.approx(1.62)


@pytest.mark.parametrize("missing", [None, {"Reading": None}, {"DataSourceUri": "/redfish/v1/x"}, {}])
def test_a_value_that_is_missing_or_null_is_not_a_fault(missing: Any) -> None:
    found, faults = parsed("connector", {**CONNECTOR, "FlowLitersPerMinute": missing})
    assert (found.rows[0].values["coolant.flow"], faults.count) == (None, 0)


@pytest.mark.parametrize("kind", [kind for kind in RESOURCES if kind not in ("psu", "leak_detector")])
def test_absent_devices_have_no_values(kind: str) -> None:
    found, faults = parsed(kind, {"Status": {"State": "Absent"}})
    assert faults.count == 0
    assert all(value is None or value == 4 for row in found.rows for value in row.values.values())


@pytest.mark.parametrize(
    ("message", "state"),
    [
        ({"DetectorState": "OK"}, 0),
        ({"DetectorState": "Warning"}, 1),
        ({"DetectorState": "Critical"}, 2),
        ({"DetectorState": "Unavailable"}, 3),
        ({"DetectorState": "Absent"}, 4),
        ({"DetectorState": "LeakDetected"}, 2),
        ({"Status": {"State": "Absent"}}, 4),
    ],
)
def test_a_leak_detector_has_attributes_and_reactions(message: dict[str, Any], state: int) -> None:
    about = {"CriticalReactionType": "ForceOff", "WarningReactionType": "None", "ReactionDelaySeconds": 15}
    assert values("leak_detector", message | about) == {
        "leak.state": state,
        "leak.critical_reaction": 1,
        "leak.warning_reaction": 0,
        "leak.reaction_delay": 15,
    }


def test_an_unknown_word_is_a_fault() -> None:
    found, faults = parsed("leak_detector", {"DetectorState": "Flooded"})
    assert (found.rows[0].values["leak.state"], faults.count) == (None, 1)


def test_groups_have_the_states_of_detectors_without_resource() -> None:
    path = f"{PREFIX}/Chassis/X/LeakDetectors/Moisture"
    detectors = [
        {"DeviceName": "Rope 1", "DetectorState": "Critical"},
        {"DeviceName": "Moisture", "DataSourceUri": path, "DetectorState": "OK"},
    ]
    found, faults = parsed("leak_detection", {"LeakDetectorGroups": [{"GroupName": "Floor", "Detectors": detectors}]})
    assert faults.count == 0
    assert [(row.entity, row.values["leak.state"]) for row in found.rows] == [("leak_detector:b1.X.Rope-1", 2)]
    assert [(link.part, link.path, link.place.ids) for link in found.links] == [
        ("leak_detector", path, ("X", "Moisture"))
    ]


def test_a_unit_links_to_its_parts_and_has_the_worst_redundancy() -> None:
    body = {
        "Status": {"State": "Enabled", "Health": "OK"},
        "PumpRedundancy": [{"Status": {"Health": "OK"}}, {"Status": {"Health": "Critical"}}],
        "SecondaryCoolantConnectors": {"@odata.id": f"{PREFIX}/ThermalEquipment/CDUs/X/SecondaryCoolantConnectors"},
        "Pumps": {"@odata.id": f"{PREFIX}/ThermalEquipment/CDUs/X/Pumps"},
    }
    found, _ = parsed("cdu", body)
    assert found.rows[0].values["coolant.pump_redundancy"] == 2
    assert {link.part for link in found.links} == {"connectors", "pumps"}
    assert all(link.place.parents == ("cdu:b1.X", "rack:r1") for link in found.links)
    assert next(link.place.side for link in found.links if link.part == "connectors") == "secondary"


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        (
            "pump",
            {"PumpSpeedPercent": {"Reading": 62, "SpeedRPM": 1800}, "InletPressurekPa": 90, "ServiceHours": 7.5},
            {"pump.speed": 1800, "pump.speed_ratio": 0.62, "pump.inlet_pressure": 0.9, "pump.service_time": 7.5},
        ),
        ("pump", {"PumpSpeedPercent": 50}, {"pump.speed_ratio": 0.5}),
        (
            "reservoir",
            {"FluidLevelPercent": excerpt(64), "InternalPressurekPa": excerpt(138), "FluidLevelStatus": "Warning"},
            {"reservoir.level": 0.64, "reservoir.pressure": 1.38, "reservoir.level_state": 1},
        ),
        (
            "filter",
            {"DeltaLiquidPressurekPa": 20, "ServiceHours": 9},
            {"filter.pressure_drop": 0.2, "filter.service_time": 9},
        ),
        (
            "loop",
            {"CoolantLevelPercent": 95, "CoolantLevelStatus": "OK", "CoolantQuality": "Critical"},
            {"loop.level": 0.95, "loop.level_state": 0, "loop.quality": 2},
        ),
        (
            "cdu_environment",
            {"DewPointCelsius": excerpt(12.5), "HumidityPercent": 40, "TemperatureCelsius": 25},
            {"coolant.dew_point": 12.5, "coolant.humidity": 0.4, "coolant.ambient_temperature": 25},
        ),
        (
            "circuit",
            {
                "BreakerState": "Tripped",
                "UnbalancedCurrentPercent": 12,
                "PolyPhaseCurrentAmps": {"Line1": excerpt(8), "Line2": 9, "Neutral": 1},
                "PolyPhasePowerWatts": {"Line1ToLine2": excerpt(700), "Line2ToLine3": 800, "Line3ToLine1": 900},
            },
            {
                "power.breaker": 1,
                "power.current_unbalance": 0.12,
                "power.current_line1": 8,
                "power.current_line2": 9,
                "power.current_neutral": 1,
                "power.draw": 2400,
            },
        ),
        (
            "pdu_metrics",
            {"PowerWatts": {"Reading": 6000, "ApparentVA": 6300, "PowerFactor": 0.95}, "EnergykWh": 2},
            {"power.draw": 6000, "power.apparent": 6300, "power.factor": 0.95, "power.energy": 7_200_000},
        ),
        ("outlet", {"PowerState": "Off", "Voltage": 230}, {"power.state": 1, "power.voltage": 230}),
        (
            "environment",
            {"PowerWatts": 374, "PowerLimitWatts": {"SetPoint": 500}, "PowerLoadPercent": excerpt(75)},
            {"power.draw": 374, "power.limit": 500, "power.load": 0.75},
        ),
        (
            "thermal_metrics",
            {
                "TemperatureSummaryCelsius": {"Intake": excerpt(24)},
                "TemperatureReadingsCelsius": [
                    {"Reading": 39, "DeviceName": "Exhaust left"},
                    {"Reading": 41, "PhysicalContext": "Exhaust"},
                ],
            },
            {"power.inlet_temperature": 24, "power.exhaust_temperature": 40},
        ),
        (
            "power_subsystem",
            {
                "CapacityWatts": 2000,
                "Allocation": {"AllocatedWatts": 1200},
                "PowerSupplyRedundancy": [{"Status": {"State": "Enabled", "Health": "Warning"}}],
            },
            {"power.capacity": 2000, "power.allocated": 1200, "power.redundancy": 1},
        ),
        (
            "psu",
            {
                "LineInputStatus": "LossOfInput",
                "PowerCapacityWatts": 3000,
                "EfficiencyRatings": [{"LoadPercent": 50, "EfficiencyPercent": 96}],
            },
            {"psu.input_status": 1, "psu.capacity": 3000, "psu.efficiency": 0.96},
        ),
        ("psu", {"Status": {"State": "Absent"}}, {"psu.status": 4}),
        (
            "battery_metrics",
            {"ChargePercent": excerpt(90), "StoredEnergyWattHours": 2, "OutputCurrentAmps": [excerpt(1), 2]},
            {"battery.charge": 0.9, "battery.stored": 7200, "battery.output_current": 3},
        ),
        (
            "thermal_older",
            {"Temperatures": [{"Name": "Inlet Temp", "ReadingCelsius": 21}, {"Name": "CPU1", "ReadingCelsius": 60}]},
            {"power.inlet_temperature": 21},
        ),
    ],
)
def test_a_resource_has_its_values_in_our_units(kind: str, body: Any, wanted: dict[str, float]) -> None:
    assert values(kind, body) == pytest.approx(wanted)


def test_a_supply_has_input_output_fan_and_a_row_for_each_rail() -> None:
    body = {
        "InputPowerWatts": excerpt(937),
        "InputVoltage": excerpt(230),
        "InputCurrentAmps": 4.1,
        "FrequencyHz": 50,
        "OutputPowerWatts": excerpt(900),
        "TemperatureCelsius": excerpt(44),
        "FanSpeedPercent": {"Reading": 68, "SpeedRPM": 3290},
        "RailVoltage": [excerpt(12.1), excerpt(5.0)],
        "RailCurrentAmps": [excerpt(70)],
        "RailPowerWatts": [None, 25],
    }
    wanted = {"psu.input_power": 937, "psu.fan_speed": 3290, "psu.fan_speed_ratio": 0.68, "psu.frequency": 50}
    known = values("psu_metrics", body, "psu:b1.X")
    assert {signal: known[signal] for signal in wanted} == pytest.approx(wanted)
    found, _ = parsed("psu_metrics", body)
    rails = {row.entity: {k: v for k, v in row.values.items() if v is not None} for row in found.rows[1:]}
    assert rails == {
        "output:b1.X.0": {"power.voltage": 12.1, "power.current": 70},
        "output:b1.X.1": {"power.voltage": 5.0, "power.draw": 25},
    }
    assert all(row.parents == ("psu:b1.X", "rack:r1") for row in found.rows[1:])


def test_the_older_power_has_the_chassis_and_its_supplies_by_member() -> None:
    body = {
        "PowerControl": [{"PowerConsumedWatts": 429, "PowerCapacityWatts": 1628, "PowerLimit": {"LimitInWatts": 348}}],
        "PowerSupplies": [
            {"MemberId": "Slot.1", "LineInputVoltage": 206, "EfficiencyPercent": 0.91, "LastPowerOutputWatts": None},
            {"MemberId": "Slot.2", "PowerOutputWatts": 90, "EfficiencyPercent": 94, "Status": {"State": "Absent"}},
            {"LineInputVoltage": 205, "PowerInputWatts": 88},
        ],
        "Redundancy": [{"Status": {"State": "Enabled", "Health": "OK"}}],
    }
    found, faults = parsed("power_older", body)
    assert faults.count == 0
    known = {row.entity: {k: v for k, v in row.values.items() if v is not None} for row in found.rows}
    assert known == {
        "chassis:b1.X": {"power.draw": 429, "power.capacity": 1628, "power.limit": 348, "power.redundancy": 0},
        "psu:b1.X.Slot.1": {"psu.input_voltage": 206, "psu.efficiency": 0.91},
        "psu:b1.X.Slot.2": {"psu.output_power": 90, "psu.efficiency": 0.94, "psu.status": 4},
        "psu:b1.X.2": {"psu.input_voltage": 205, "psu.input_power": 88},
    }


def test_a_chassis_without_subsystems_leads_to_power_and_thermal() -> None:
    body = {key: {"@odata.id": f"{PREFIX}/chassis/{key}"} for key in ("Power", "Thermal")}
    assert [link.part for link in parsed("chassis", body)[0].links] == ["power_older", "thermal_older"]


def test_a_wrong_subsystem_link_is_replaced_by_the_regular_path() -> None:
    body = {"PowerSubsystem": {"@odata.id": f"{PREFIX}/chassis/Sensors"}}
    (link,) = parsed("chassis", body)[0].links
    assert (link.part, link.path) == ("power_subsystem", f"{PREFIX}/chassis/PowerSubsystem")


@pytest.mark.parametrize(
    "path",
    [
        "http://other/redfish/v1/x",
        "//other/redfish/v1",
        "/redfish/v1/../../etc",
        "/redfish/v1/a b",
        "/redfish/v1/a\r\nX: y",
        "/redfish/v2",
        "/redfish/v1/ü",
        "/redfish/v1/" + "a" * 600,
        "",
        "/redfish/v1/x#/y",
    ],
)
def test_paths_outside_the_service_are_not_followed(path: str) -> None:
    assert resource_path(path) is None


def test_names_are_the_last_segment_of_the_path() -> None:
    assert last_segment(f"{PREFIX}/Chassis/Rack%201%2FA/") == "Rack-1-A"
    assert name_part("System.Embedded.1") == "System.Embedded.1"
    assert name_part("") == "-"


def test_a_document_of_another_type_is_not_parsed() -> None:
    assert matches_kind(RedfishDocument({"@odata.type": "#Pump.v1_2_0.Pump"}), "pump")
    assert matches_kind(RedfishDocument({}), "pump")
    faults = ParseFaults()
    assert not matches_kind(RedfishDocument({"@odata.type": "#SensorCollection.SensorCollection"}, "x", faults), "pump")
    assert not matches_kind(RedfishDocument({"@odata.type": 7}, "x", faults), "pump")
    assert faults.count == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WORDS = sorted(
    set(CONNECTOR)
    | {"Members", "PowerSupplies", "RailVoltage", "FanSpeedsPercent", "LeakDetectorGroups", "Detectors", "Allocation"}
    | {"PolyPhasePowerWatts", "TemperatureReadingsCelsius", "Temperatures", "PowerControl", "EnergykWh", "Location"}
    | {"EfficiencyRatings", "OutputRails", "PumpSpeedPercent", "Health", "State", "DetectorState", "Pumps", "Metrics"}
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine makes documents slowly
@given(st.sampled_from(sorted(RESOURCES)), st.dictionaries(st.sampled_from(WORDS), JSON, max_size=10))
def test_no_document_breaks_a_parser_and_all_signals_are_in_the_catalogue(kind: str, body: dict[str, Any]) -> None:
    found, _ = parsed(kind, body)
    for row in found.rows:
        for signal, value in row.values.items():
            assert CATALOGUE[signal].device_class == row.device_class
            assert value is None or math.isfinite(value)
    for link in found.links:
        assert link.path.startswith(PREFIX)
        assert link.part in RESOURCES


# --- server-sent events ----------------------------------------------------------------------------------------------

EVENT = (
    b'{"Events": [{"MessageId": "Environmental.1.1.LeakDetectedCritical", "MessageSeverity": "Critical", '
    b'"OriginOfCondition": {"@odata.id": "/redfish/v1/ThermalEquipment/CDUs/1/LeakDetection/LeakDetectors/A"}}]}'
)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_read_in_any_pieces(end: bytes, size: int) -> None:
    lines = [
        b": hello",
        b"",
        b"id: 41",
        b"data: {",
        b"data: }",
        b"",
        b"event: x",
        b"data:1",
        b"id: 42",
        b"retry: 1500",
        b"",
        b"data: half",
    ]
    stream = end.join(lines)
    parser = SseParser()
    found = [data for at in range(0, len(stream), size) for data in parser.feed(stream[at : at + size])]
    assert found == [b"{\n}", b"1"]
    assert (parser.last_id, parser.retry) == ("42", 1.5)


def test_an_event_that_is_too_long_is_dropped_and_the_next_one_is_read() -> None:
    parser = SseParser()
    line = b"data: " + b"x" * (MAX_EVENT // 2 + 10) + b"\n"
    assert list(parser.feed(line * 3 + b"\n" + b"data: ok\n\n")) == [b"ok"]
    assert parser.dropped == 1


def test_a_record_has_resource_leak_state_and_message() -> None:
    (message,), bad = parse_event(EVENT)
    assert (message.leak, bad) == (2, 0)
    assert message.origin.endswith("/LeakDetectors/A")
    assert message.data["severity"] == "Critical"


@given(st.binary(max_size=200))
def test_no_bytes_break_the_stream(data: bytes) -> None:
    parser = SseParser()
    for found in parser.feed(data + b"\n\n"):
        parse_event(found)


@given(JSON)
def test_no_event_breaks_the_parser(body: Any) -> None:
    message, _ = parse_event(
        json.dumps({"Events": [body, {"MessageId": body, "OriginOfCondition": body, "MessageArgs": body}]}).encode()
    )
    for one in message:
        json.dumps(dict(one.data), allow_nan=False)


# --- supply of coolant ------------------------------------------------------------------------------------------------

LOOPS = {f"{PREFIX}/L/{name}": f"loop:b1.{name}" for name in ("row", "rack")}


def devices(primary: str, secondary: str, consumers: list[str]) -> dict[str, Device]:
    reported = {"side": "primary", "loop": f"{PREFIX}/L/{primary}"}
    return {
        "cdu:b1.1": Device(("row:3",), {"name": "Unit 1"}),
        "connector:b1.1.primary.1": Device(("cdu:b1.1", "row:3"), reported),
        "connector:b1.1.secondary.1": Device(
            ("cdu:b1.1", "row:3"), {"side": "secondary", "loop": f"{PREFIX}/L/{secondary}"}
        ),
        "loop:b1.row": Device(("row:3",), {"consumers": consumers}),
        "loop:b1.rack": Device(("row:3",)),
    }


def test_a_loop_feeds_the_unit_at_its_primary_side_and_the_unit_the_loop_at_its_secondary() -> None:
    found = add_feed_parents(devices("row", "rack", ["Unit 1", "Unit 9"]), LOOPS)
    assert found["cdu:b1.1"].parents == ("loop:b1.row", "row:3")
    assert found["loop:b1.rack"].parents == ("cdu:b1.1", "row:3")
    assert found["loop:b1.row"].parents == ("row:3",)


def test_a_loop_at_both_sides_makes_no_circle() -> None:
    found = add_feed_parents(devices("row", "row", ["Unit 1"]), LOOPS)
    Topology({entity: device.parents for entity, device in found.items()})
    assert found["cdu:b1.1"].parents[0] == "loop:b1.row"


def test_a_sensor_has_its_quantity_and_alarm() -> None:
    body = {"ReadingType": "Rotational", "Reading": 9000, "Status": {"State": "Enabled", "Health": "Warning"}}
    assert values("sensor", body) == {"sensor.fan_speed": 9000, "sensor.alarm": 1}
    assert parsed("sensor", {"ReadingType": "Barometric", "Reading": 100})[0].rows == ()


# --- where a word or a value must not be believed --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (
            {"State": "Absent", "Health": "Critical"},
            "absent",
        ),  # an empty slot, whatever properties of the removed device remain
        ({"State": "Enabled", "Health": "Critical"}, "critical"),
        ({"State": "StandbySpare", "Health": "Warning"}, "warning"),
        ({"State": "StandbySpare", "Health": "OK"}, "standby"),
    ],
)
def test_absent_overrides_health_and_bad_health_overrides_standby(status: dict[str, str], word: str) -> None:
    assert RedfishDocument({"Status": status}).health() == HEALTH.index(word)


def test_a_units_flow_is_missing_if_a_connector_is_stale() -> None:
    units, pair = UnitTotals(), ("connector:b1.1", "connector:b1.2")

    def read(entity: str, now: float) -> float | None:
        row = units.update("cdu:b1", EntityRow(entity, "coolant", {"coolant.flow": 100.0}), now, pair)
        return row.values["coolant.flow"] if row is not None else None

    assert read(pair[0], 0.0) is None
    assert read(pair[1], 1.0) == 200
    assert read(pair[0], 14.0) == 200
    assert read(pair[0], 17.0) is None  # else a pump that stopped at the other one would not be missed
    assert read(pair[1], 18.0) == 200
