"""Decoders of IPMI's records: known bytes give known values, and no bytes at all make them fail."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agents.collector import NoData
from agents.collectors.bmc.ipmi import Ipmi, decode_device_id, decode_entry, event_time, name_sensors
from agents.collectors.bmc.ipmi_codes import SENSOR_TYPES, event_state, sensor_type
from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTimeout
from agents.collectors.bmc.ipmi_sensors import (
    MAX_RECORDS,
    ConversionFactors,
    SdrReader,
    alarm_state,
    decode_name,
    decode_sensors,
)
from tests.agents.bmc import AMPERES, DEGREES, VOLTS, WATTS, compact, full
from tests.examples import examples


@pytest.mark.parametrize(
    ("unit", "how", "raw", "value"),
    [
        (DEGREES, {}, 42, 42),
        (DEGREES, {"data_format": 2}, 0xD8, -40),
        (DEGREES, {"data_format": 1}, 0xFE, -1),
        (2, {}, 212, 100),  # Fahrenheit
        (3, {"m": 2}, 150, 26.85),  # kelvin
        (VOLTS, {"m": 59, "k2": -3}, 204, 12.036),
        (VOLTS, {"m": -5, "b": -7, "k1": 1, "k2": -2}, 10, -1.2),
        (WATTS, {"m": 4, "b": 300, "k1": -1}, 100, 430),
        (WATTS, {"m": 511, "b": -512, "k1": 7, "k2": -8}, 0, -51.2),
        (AMPERES, {"curve": 8}, 9, 81),
        (AMPERES, {"curve": 7}, 4, 0.25),
        (AMPERES, {"curve": 10}, 16, 4),
        (AMPERES, {"curve": 11}, 27, 3),
        (AMPERES, {"curve": 6}, 5, 32),
    ],
)
def test_a_raw_reading_is_converted_by_its_record(unit: int, how: dict[str, int], raw: int, value: float) -> None:
    (sensor,) = decode_sensors(full(7, "S", unit, **how))
    assert sensor.convert(raw) == pytest.approx(value)


@pytest.mark.parametrize(("curve", "raw"), [(7, 0), (1, 0), (2, 0), (3, 0)])
def test_a_reading_outside_its_curve_is_missing(curve: int, raw: int) -> None:
    (sensor,) = decode_sensors(full(7, "S", VOLTS, curve=curve))
    assert math.isnan(sensor.convert(raw))


def test_unknown_quantities_are_not_sensors() -> None:
    assert decode_sensors(full(1, "flow", 17)) == ()  # cubic feet per minute
    assert decode_sensors(full(1, "per second", VOLTS, units1=0x18)) == ()
    assert decode_sensors(full(1, "no analog reading", VOLTS, data_format=3)) == ()
    assert decode_sensors(full(1, "of another controller", DEGREES, owner=0x2C)) == ()


def test_a_full_record_of_states_has_states() -> None:
    (sensor,) = decode_sensors(full(1, "PSU", 0, data_format=3, event_type=0x6F, kind=8))
    assert (sensor.signal, sensor.is_discrete) == (None, True)


def test_a_shared_record_describes_consecutive_sensors() -> None:
    shared = decode_sensors(compact(0x40, "PSU", 8, share=3, modifier=1))
    assert [(s.number, s.name) for s in shared] == [(0x40, "PSU1"), (0x41, "PSU2"), (0x42, "PSU3")]
    letters = decode_sensors(compact(0x40, "Slot ", 8, share=0x10 | 3, modifier=25))
    assert [s.name for s in letters] == ["SlotZ", "SlotAA", "SlotAB"]
    assert [s.number for s in decode_sensors(compact(0xFE, "PSU", 8, share=15))] == [0xFE, 0xFF]


@pytest.mark.parametrize(
    ("coding", "data", "text"),
    [
        (3, b"PS1 Status", "PS1 Status"),
        (3, b"Fan\0\0", "Fan"),
        (3, b"T\xe9mp", "T\xe9mp"),
        (2, bytes.fromhex("29dca6"), "IPMI"),  # the example of section 43.15
        (1, bytes((0x12, 0x3A, 0x4C)), "123 4."),
    ],
)
def test_names_are_read_in_each_coding(coding: int, data: bytes, text: str) -> None:
    assert decode_name(bytes((coding << 6 | len(data),)) + data, 0) == text


def test_factors_are_signed_as_the_specification_has_them() -> None:
    assert ConversionFactors.from_bytes(bytes((0xFF, 0xC0, 0x00, 0x80, 0, 0x9F))) == ConversionFactors(-1, -512, -1, -7)
    assert ConversionFactors.from_bytes(bytes((0x01, 0x40, 0x02, 0x00, 0, 0x71))) == ConversionFactors(257, 2, 1, 7)


@pytest.mark.parametrize(
    ("comparison", "alarm"), [(0, 0), (0xC0, 0), (0x01, 1), (0x08, 1), (0x18, 2), (0x03, 2), (0x3F, 2), (0x20, 2)]
)
def test_the_worst_threshold_is_the_alarm(comparison: int, alarm: int) -> None:
    assert alarm_state(comparison) == alarm


def test_types_and_states_have_the_specifications_numbers() -> None:
    assert len(SENSOR_TYPES) == 0x2D
    found = {n: sensor_type(n) for n in (0x08, 0x0C, 0x13, 0x1F, 0x20, 0x23, 0x29, 0x2C, 0x2D, 0xC1)}
    assert found == {
        0x08: "power_supply",
        0x0C: "memory",
        0x13: "critical_interrupt",
        0x1F: "os_boot",
        0x20: "os_stop",
        0x23: "watchdog",
        0x29: "battery",
        0x2C: "fru_state",
        0x2D: "type_2d",
        0xC1: "oem_c1",
    }
    assert event_state(0x07, 0x6F, 1) == "thermal trip"
    assert event_state(0x08, 0x0B, 1) == "redundancy lost"
    assert event_state(0x04, 0x01, 0x02) == "below lower critical"
    assert event_state(0x23, 0x6F, 5) == "state 5"
    assert event_state(0xC1, 0x70, 3) == "state 3"


def test_a_vendor_specific_entry_is_kept_raw() -> None:
    timed = decode_entry(bytes.fromhex("0700c01122334401020304050607080a")[:16])
    assert timed is not None
    assert (timed.facts["type"], timed.timestamp, timed.sensor) == ("oem", 0x44332211, None)
    untimed = decode_entry(bytes((8, 0, 0xE0)) + bytes(range(13)))
    assert untimed is not None
    assert (untimed.facts["event"], untimed.timestamp) == ("record type e0", 0)


def test_an_entry_is_dated_by_its_age_on_the_bmcs_clock() -> None:
    entry = decode_entry(bytes((1, 0, 2)) + (0x6000_0000).to_bytes(4, "little") + bytes(9))
    assert entry is not None
    assert event_time(entry, 0x6000_0000 + 30, 10**15) == 10**15 - 30_000_000
    assert event_time(entry, 0x6000_0000 - 30, 10**15) == 10**15  # its clock was set back
    assert event_time(entry, 0x6000_0000 + 10**7, 10**15) == 10**15  # its clock jumped


# --- anything at all -------------------------------------------------------------------------------------------------

RECORDS = st.one_of(
    st.binary(max_size=270),
    st.tuples(st.sampled_from([1, 2]), st.binary(max_size=120)).map(
        lambda made: bytes((0, 0, 0x51, made[0], len(made[1]), 0x20)) + made[1]
    ),
)


@given(RECORDS, st.integers(0, 255))
def test_no_record_makes_the_decoder_fail(record: bytes, raw: int) -> None:
    sensors = decode_sensors(record)
    assert len(sensors) <= 15
    for sensor in sensors:
        assert isinstance(sensor.convert(raw), float)
        assert all(math.isfinite(limit) for limit in sensor.threshold_values().values())
        assert len(sensor.name) <= 64
    assert len(name_sensors(list(sensors), SENSOR_TYPES)) <= len(sensors)


@given(st.one_of(st.binary(max_size=40), st.binary(min_size=16, max_size=16)))
def test_no_log_entry_makes_the_decoder_fail(record: bytes) -> None:
    entry = decode_entry(record)
    assert (entry is None) == (len(record) != 16)
    if entry is not None:
        assert 0 <= entry.facts["record"] <= 0xFFFF
        assert event_time(entry, 10**9, 10**15) <= 10**15


class RandomBmc:
    """A BMC that answers every request with the next of some bytes, refuses it or does not respond."""

    def __init__(self, answers: list[bytes | int | None]) -> None:
        self.answers, self.asked = answers, 0

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        self.asked += 1
        answer = self.answers[self.asked % len(self.answers)]
        if answer is None:
            raise IpmiTimeout("nothing")
        if isinstance(answer, int):
            raise IpmiError(answer, netfn, command)
        return answer

    def close(self) -> None:
        """There is nothing to let go of."""


ANSWERS = st.lists(st.one_of(st.binary(max_size=80), st.integers(1, 255), st.none()), min_size=1, max_size=12)


@given(ANSWERS)
@example([bytes((*[0] * 6, 0xFC, *[0] * 11))])  # a record that is longer than an offset can reach
@settings(max_examples=examples(60), deadline=None)
def test_no_responses_make_the_collector_fail_or_loop(answers: list[bytes | int | None]) -> None:
    noise = RandomBmc(answers)
    ipmi = Ipmi()
    ipmi._connect = lambda path, timeout: noise
    try:
        ipmi.open("n1")
        for _ in range(3):
            ipmi.read()
            assert {e for r in ipmi.read() for e in r.entities} == ipmi.inventory().keys()
    except NoData:
        pass
    assert noise.asked < 100_000


@given(st.binary(max_size=40))
def test_bmc_attributes_are_text_or_missing(answer: bytes) -> None:
    assert len(decode_device_id(answer)) == (4 if len(answer) >= 11 else 0)


def test_an_endless_repository_ends_at_the_record_limit() -> None:
    noise, walk = RandomBmc([b"\x01\x00" + full(1, "T", DEGREES)]), SdrReader()
    while not walk.is_finished():
        assert walk.read_next(noise)
    assert noise.asked == MAX_RECORDS
