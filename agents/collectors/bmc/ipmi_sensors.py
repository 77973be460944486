"""Sensor data records (SDR) of IPMI: decodes records, converts readings, and reads the BMC's repository.

Source of all layouts: IPMI 2.0 rev. 1.1, tables 43-1 (full), 43-2 (compact), sections 36.3 (conversion), 43.15 (names).
The repository is read record by record, so that a slow BMC is read over many reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agents.collectors.bmc.ipmi_codes import SENSOR_SPECIFIC, THRESHOLD
from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTransport

_FULL, _COMPACT = 0x01, 0x02  # record types
_BMC = 0x20  # address of the BMC as owner of a sensor
_UNITS: Mapping[int, tuple[str, Callable[[float], float]]] = {  # base unit (table 43-15) -> signal, and into its unit
    1: ("sensor.temperature", lambda v: v),
    2: ("sensor.temperature", lambda v: (v - 32) * 5 / 9),
    3: ("sensor.temperature", lambda v: v - 273.15),
    4: ("sensor.voltage", lambda v: v),
    5: ("sensor.current", lambda v: v),
    6: ("sensor.power", lambda v: v),
    18: ("sensor.fan_speed", lambda v: v),
}
_PERCENT = ("sensor.ratio", lambda v: v / 100)
_CURVES: Mapping[int, Callable[[float], float]] = {  # linearization, byte 24 of table 43-1; 0 is none
    1: math.log,
    2: math.log10,
    3: math.log2,
    4: math.exp,
    5: lambda v: 10.0**v,
    6: lambda v: 2.0**v,
    7: lambda v: 1 / v,
    8: lambda v: v * v,
    9: lambda v: v**3,
    10: math.sqrt,
    11: math.cbrt,
}
NON_LINEAR = 0x70
"""From this linearization on, every reading has its own factors (Get Sensor Reading Factors)."""
# name of the attribute -> (bit of the readable thresholds, offset of the threshold in a full record)
_LIMITS = {"min": (0, 41), "lcrit": (1, 40), "max": (3, 38), "crit": (4, 37), "emergency": (5, 36)}


@dataclass(frozen=True, slots=True)
class ConversionFactors:
    """y = (M x + B 10^K1) 10^K2."""

    m: int
    b: int
    k1: int
    k2: int

    @classmethod
    def from_bytes(cls, data: bytes) -> ConversionFactors:
        """Decodes the 6 bytes that start with M in a full record and in the response of Get Sensor Reading Factors."""
        return cls(
            _signed(data[0] | (data[1] & 0xC0) << 2, 10),
            _signed(data[2] | (data[3] & 0xC0) << 2, 10),
            _signed(data[5] & 0x0F, 4),
            _signed(data[5] >> 4, 4),
        )


@dataclass(frozen=True, slots=True)
class IpmiSensor:
    """One sensor of the BMC. signal: what it measures; None if it only has states."""

    number: int
    lun: int
    name: str
    kind: int
    event_type: int
    signal: str | None = None
    unit: Callable[[float], float] = float
    data_format: int = 0
    curve: int = 0
    factors: ConversionFactors = ConversionFactors(1, 0, 0, 0)
    thresholds: tuple[tuple[str, int], ...] = ()

    @property
    def has_thresholds(self) -> bool:
        """Whether a reading includes its comparison with thresholds."""
        return self.event_type == THRESHOLD

    @property
    def is_discrete(self) -> bool:
        """Whether a reading is a mask of states."""
        return self.event_type == SENSOR_SPECIFIC or 0x02 <= self.event_type <= 0x0C

    def convert(self, raw: int, factors: ConversionFactors | None = None) -> float:
        """Converts a raw reading to the unit of the signal; NaN if the record's formula has no result."""
        f = factors or self.factors
        try:
            y = (f.m * _decode_raw(raw, self.data_format) + f.b * 10.0**f.k1) * 10.0**f.k2
            return self.unit(_CURVES.get(self.curve, float)(y))
        except (ValueError, OverflowError, ZeroDivisionError):  # outside the curve: a BMC's table may be wrong
            return math.nan

    def threshold_values(self) -> dict[str, float]:
        """Returns the thresholds of the record in the unit of the signal."""
        if self.curve >= NON_LINEAR:
            return {}
        found = {name: self.convert(raw) for name, raw in self.thresholds}
        return {name: round(value, 6) for name, value in found.items() if math.isfinite(value)}


def decode_sensors(record: bytes) -> tuple[IpmiSensor, ...]:
    """Returns the BMC's own sensors in a record; none if it is of another kind, or incomplete."""
    kind = record[3] if len(record) > 3 else 0
    if kind == _FULL and len(record) >= 48 and record[5] == _BMC:
        return _decode_full(record)
    if kind == _COMPACT and len(record) >= 32 and record[5] == _BMC:
        return _decode_compact(record)
    return ()


def alarm_state(comparison: int) -> int:
    """Returns the state of sensor.alarm from the threshold comparison of Get Sensor Reading (table 35-15)."""
    return 2 if comparison & 0b110110 else 1 if comparison & 0b001001 else 0


def _decode_full(record: bytes) -> tuple[IpmiSensor, ...]:
    plain = IpmiSensor(record[7], record[6] & 3, decode_name(record, 47), record[12], record[13])
    data_format, percent, base = record[20] >> 6, record[20] & 1, record[21]
    of_rate = record[20] & 0x3E  # per time, or times another unit: not one of our signals
    unit = None if of_rate or data_format == 3 else _PERCENT if percent else _UNITS.get(base)
    if unit is None:
        return (plain,) if plain.is_discrete else ()
    readable = record[18] if plain.has_thresholds else 0
    thresholds = tuple((name, record[at]) for name, (bit, at) in _LIMITS.items() if readable >> bit & 1)
    whole = replace(plain, signal=unit[0], unit=unit[1], data_format=data_format, curve=record[23] & 0x7F)
    return (replace(whole, factors=ConversionFactors.from_bytes(record[24:30]), thresholds=thresholds),)


def _decode_compact(record: bytes) -> tuple[IpmiSensor, ...]:
    """Decodes a compact record, which may describe up to 15 sensors with consecutive numbers and names."""
    first = IpmiSensor(record[7], record[6] & 3, decode_name(record, 31), record[12], record[13])
    if not first.is_discrete:
        return ()
    count, letters, start = max(record[23] & 0x0F, 1), record[23] >> 4 & 3, record[24] & 0x7F
    if count == 1:
        return (first,)
    ends = [_letter_suffix(start + i) if letters else str(start + i) for i in range(count)]
    return tuple(
        replace(first, number=first.number + i, name=first.name + ends[i])
        for i in range(count)
        if first.number + i <= 0xFF
    )


def decode_name(record: bytes, at: int) -> str:
    """Returns the name whose type and length are at `at`. Returns a truncated name as far as it is complete."""
    length, coding, data = record[at] & 0x1F, record[at] >> 6, record[at + 1 :]
    if coding == 1:  # BCD plus
        return "".join("0123456789 -.:,_"[digit] for byte in data[:length] for digit in (byte >> 4, byte & 15)).strip()
    if coding == 2:  # 6-bit ASCII, four letters in three bytes, low bits first
        bits = int.from_bytes(data[:length], "little")
        return "".join(chr(0x20 + (bits >> 6 * i & 0x3F)) for i in range(len(data[:length]) * 8 // 6)).strip()
    return data[:length].decode("latin-1").replace("\0", "").strip()


def _letter_suffix(number: int) -> str:
    """Returns 0 as A, 25 as Z, 26 as AA (table 43-2, ID string instance modifier)."""
    return chr(65 + number) if number < 26 else chr(64 + number // 26) + chr(65 + number % 26)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _decode_raw(raw: int, data_format: int) -> int:
    """Decodes 0 = unsigned, 1 = 1's complement, 2 = 2's complement (byte 21 of table 43-1)."""
    if data_format == 1 and raw & 0x80:
        return raw - 0xFF
    return _signed(raw, 8) if data_format == 2 else raw


_STORAGE = 0x0A  # network function; commands of IPMI 2.0 table G-1
_GET_INFO, _RESERVE, _GET_SDR = 0x20, 0x22, 0x23
_END = 0xFFFF  # record id: the last one
_RESERVATION_LOST = 0xC5  # completion codes of table 5-2
_TOO_LONG = (0xC6, 0xC7, 0xC8, 0xCA, 0xFF)  # whole records are not returned; some BMCs return only "unspecified"
_HEADER = 5  # bytes; the last one is the number of bytes that follow
_CHUNK = 16  # bytes per response; a BMC must support at least 22 (section 33.12), and other programs use 16 too
_OFFSETS = 0x100  # a request has one byte for the offset (section 33.12): what lies behind cannot be read
_TRIES = 4  # of one record; chosen: a reservation is lost when another program reads the repository
MAX_RECORDS = 2048
"""Most records. Chosen: large servers have some 500, and a list with a loop must end."""


def repository_timestamps(bmc: IpmiTransport) -> bytes:
    """Returns when records were last added and erased, which changes with the repository. Raises IpmiError or
    IpmiTimeout.
    """
    return bmc.request(_STORAGE, _GET_INFO)[5:13]


class SdrReader:
    """Reads the whole repository, one record per step."""

    def __init__(self) -> None:
        self.sensors: list[IpmiSensor] = []
        self._reservation = b"\0\0"
        self._next_record = 0
        self._steps = 0
        self._whole_records = True

    def is_finished(self) -> bool:
        """Returns whether all records were read."""
        return self._next_record == _END

    def read_next(self, bmc: IpmiTransport) -> bool:
        """Reads one record. Returns False if the BMC is busy. After IpmiTimeout the same record is read again."""
        try:
            following, record = self._read_record(bmc)
        except IpmiError as refusal:
            if refusal.is_busy:
                return False
            following, record = _END, b""  # the repository ends with an error: keep the records before it
        self.sensors += decode_sensors(record)
        self._steps += 1
        self._next_record = following if self._steps < MAX_RECORDS else _END
        return True

    def _read_record(self, bmc: IpmiTransport) -> tuple[int, bytes]:
        for left in range(_TRIES, 0, -1):
            try:
                return self._fetch_record(bmc)
            except IpmiError as refusal:
                if left == 1:
                    raise
                if refusal.code == _RESERVATION_LOST:
                    self._reservation = bmc.request(_STORAGE, _RESERVE)[:2].ljust(2, b"\0")
                elif self._whole_records and refusal.code in _TOO_LONG:
                    self._whole_records = False
                else:
                    raise
        return _END, b""

    def _fetch_record(self, bmc: IpmiTransport) -> tuple[int, bytes]:
        """Returns the id of the next record, and this one; in pieces if the BMC does not return it as a whole."""
        if self._whole_records:
            following, record = self._read_piece(bmc, 0, 0xFF)
            if len(record) >= _HEADER and len(record) >= _HEADER + record[4]:
                return following, record
            self._whole_records = False  # it was truncated without an error
        following, record = self._read_piece(bmc, 0, _HEADER)
        size = _HEADER + record[4] if len(record) >= _HEADER else 0
        while len(record) < min(size, _OFFSETS):
            _, piece = self._read_piece(bmc, len(record), min(_CHUNK, size - len(record)))
            if not piece:
                break
            record += piece
        return following, record[:size]

    def _read_piece(self, bmc: IpmiTransport, offset: int, count: int) -> tuple[int, bytes]:
        order = self._reservation + self._next_record.to_bytes(2, "little") + bytes((offset, count))
        answer = bmc.request(_STORAGE, _GET_SDR, order)
        return (int.from_bytes(answer[:2], "little"), answer[2:]) if len(answer) >= 2 else (_END, b"")
