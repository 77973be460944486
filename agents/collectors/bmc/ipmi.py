"""Data of this server's BMC through the kernel's /dev/ipmi0: power, sensors, and new entries of the system event log.

Source of all layouts: IPMI 2.0 rev. 1.1, sections 31 (commands) and 32 (records).
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.bmc.ipmi_codes import THRESHOLD, event_state, sensor_type
from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTimeout, IpmiTransport, KernelIpmi, RequestBudget
from agents.collectors.bmc.ipmi_sensors import (
    NON_LINEAR,
    ConversionFactors,
    IpmiSensor,
    SdrReader,
    alarm_state,
    repository_timestamps,
)
from agents.collectors.columns import DeviceValues, readings_by_signals
from pipeline.model.records import Event

_STORAGE = 0x0A  # network function; commands of table G-1
_GET_INFO, _GET_ENTRY, _GET_TIME = 0x40, 0x43, 0x48
_FIRST, _LAST = 0x0000, 0xFFFF  # ids of Get SEL Entry; _LAST as the next id means that there is none
_SYSTEM_EVENT, _OEM_TIMED, _OEM = 0x02, 0xC0, 0xE0  # record types (table 32-1)
_CLOCK_SET = 0x2000_0000  # timestamps below count from the BMC's own start (section 37)
_BMC = 0x20  # its own address
_READING_AND_THRESHOLD = 0b0101  # upper half of event data 1: what data 2 and 3 hold (table 29-6)
_SIZE = 16  # bytes of every record
MAX_ENTRIES = 32
"""Most entries of one read. Chosen: the rest of a burst follows at the next reads, in order."""
LOOK_BACK_S = 3600
"""Age of the oldest entry at the first read. Chosen: longer than a restart of a collector takes."""


@dataclass(frozen=True, slots=True)
class SelEntry:
    """One record of the log. timestamp: seconds of the BMC's clock; 0 if the record has none.

    sensor: (lun, number), if the BMC wrote it about its own sensor. readings: raw reading and threshold, if present.
    """

    record: int
    timestamp: int
    sensor: tuple[int, int] | None
    facts: dict[str, Any]
    readings: tuple[int, int] | None = None


class SelReader:
    """Position in the log. A log that was cleared is read from its start."""

    def __init__(self) -> None:
        self._last_record: int | None = None
        self._last_info = b""

    def read_new(self, bmc: IpmiTransport) -> tuple[list[SelEntry], int]:
        """Returns the entries added since the last call, at most MAX_ENTRIES, and the BMC's clock.

        The first call returns those of the last hour. If the BMC stops responding, returns the entries read before.
        """
        info = bmc.request(_STORAGE, _GET_INFO)
        stamp, count = info[:13], int.from_bytes(info[1:3], "little")
        if stamp == self._last_info:
            return [], 0
        now = read_clock(bmc)
        if self._last_record is None:
            found, drained = self._read_recent(bmc, count, now), True
        else:
            if stamp[9:13] != self._last_info[9:13] and self._last_info:  # cleared since
                self._last_record = _FIRST
            found, drained = self._read_after(bmc) if count else ([], True)
        if drained:
            self._last_info = stamp
        return found, now

    def _read_recent(self, bmc: IpmiTransport, count: int, now: int) -> list[SelEntry]:
        """Returns the entries of the last hour before the newest one, as far as their ids are consecutive."""
        if not count:
            self._last_record = _FIRST
            return []
        newest = _read_entry(bmc, _LAST)[1]
        if newest is None:
            return []
        found = [newest]
        while len(found) < MAX_ENTRIES and found[-1].record > 1:
            before = _read_entry(bmc, found[-1].record - 1)[1]
            if before is None or before.record != found[-1].record - 1:
                break
            found.append(before)
        self._last_record = newest.record
        return [e for e in reversed(found) if e.timestamp >= _CLOCK_SET and 0 <= now - e.timestamp <= LOOK_BACK_S]

    def _read_after(self, bmc: IpmiTransport) -> tuple[list[SelEntry], bool]:
        """Returns entries after the last known one, and whether these are all."""
        following, known = _read_entry(bmc, self._last_record) if self._last_record else (_FIRST, None)
        if known is None:  # it no longer exists, or there was none: the log was cleared or wrapped
            following = _FIRST
        found: list[SelEntry] = []
        while following != _LAST and len(found) < MAX_ENTRIES:
            try:
                following, entry = _read_entry(bmc, following)
            except (IpmiError, IpmiTimeout):  # the rest follows at the next read
                return found, False
            if entry is None or entry.record == self._last_record:
                return found, True
            found.append(entry)
            self._last_record = entry.record
        return found, following == _LAST


def read_clock(bmc: IpmiTransport) -> int:
    """Returns the BMC's clock in seconds; it may be local time, or not set. 0 if the BMC does not provide it."""
    try:
        return int.from_bytes(bmc.request(_STORAGE, _GET_TIME)[:4], "little")
    except IpmiError:
        return 0


def _read_entry(bmc: IpmiTransport, record: int) -> tuple[int, SelEntry | None]:
    """Returns (id of the next entry, the entry); (_LAST, None) if there is none with that id. Raises IpmiError if the
    BMC is busy.
    """
    try:
        answer = bmc.request(_STORAGE, _GET_ENTRY, b"\0\0" + record.to_bytes(2, "little") + b"\0\xff")
    except IpmiError as refusal:
        if refusal.is_busy:
            raise
        return _LAST, None
    return (int.from_bytes(answer[:2], "little"), decode_entry(answer[2:])) if len(answer) >= 2 else (_LAST, None)


def decode_entry(record: bytes) -> SelEntry | None:
    """Decodes one record of 16 bytes; None for anything else."""
    if len(record) != _SIZE:
        return None
    number, kind = int.from_bytes(record[:2], "little"), record[2]
    timestamp = int.from_bytes(record[3:7], "little") if kind < _OEM else 0
    facts: dict[str, Any] = {"record": number, "timestamp": timestamp, "raw": record.hex()}
    if kind != _SYSTEM_EVENT:
        label = "oem" if kind >= _OEM_TIMED else "unknown"
        return SelEntry(number, timestamp, None, {**facts, "type": label, "event": f"record type {kind:02x}"})
    event_type, offset, reported = record[12] & 0x7F, record[13] & 0x0F, record[13] >> 4
    facts |= {"type": sensor_type(record[10]), "event": event_state(record[10], event_type, offset)}
    facts |= {"asserted": record[12] & 0x80 == 0}
    by_bmc = record[7] == _BMC  # generator: the BMC itself, whose sensors are in its repository
    exact = event_type == THRESHOLD and reported == _READING_AND_THRESHOLD
    return SelEntry(
        *(number, timestamp, (record[8] & 3, record[11]) if by_bmc else None, facts),
        readings=(record[14], record[15]) if exact else None,
    )


def event_time(entry: SelEntry, bmc_now: int, now: int) -> int:
    """Returns the UTC time in us at which an entry was written, from its age by the BMC's clock; `now` if the age is
    not usable.
    """
    age = bmc_now - entry.timestamp
    return now - age * 1_000_000 if entry.timestamp >= _CLOCK_SET and 0 <= age <= 24 * 3600 else now


_CHASSIS, _SENSOR, _APP, _GROUP = 0x00, 0x04, 0x06, 0x2C  # network functions
_GET_STATUS = 0x01  # Get Chassis Status, section 28.2
_GET_DEVICE_ID = 0x01
_GET_READING, _GET_FACTORS = 0x2D, 0x23  # IPMI 2.0, sections 35.14 and 35.5
_GET_POWER, _POWER_REQUEST = 0x02, b"\xdc\x01\0\0"  # DCMI 1.5, section 6.6.1: system power statistics
_MEASURING = 0x40  # state of Get Power Reading: it is being measured
_SCANNED, _UNAVAILABLE = 0x40, 0x20  # bits of Get Sensor Reading (table 35-15)
_STATES_MISSING = np.iinfo(np.uint16).max
_LOG_KEY = "the log"  # key of the log in `_unsupported`; no sensor name has a blank
_GAUGES = ("temperature", "voltage", "current", "power", "fan_speed", "ratio")
REFRESH_S = 3600.0
"""Seconds between two checks of the repository for changes, and between two retries of unsupported requests. Chosen."""
MAX_SENSORS = 512
"""Most sensors. Chosen: at 10 ms each, five seconds of a BMC's time a minute."""


@dataclass
class Ipmi(Collector):
    """node.power, sensor.* of the BMC, and events `sel`. A read ends after `budget` s; the next one continues there.

    timeout: seconds that one response may take. discrete: sensor types whose states are read, in addition to all
    sensors that measure something.
    """

    name: ClassVar[str] = "ipmi"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.power", "node.chassis_faults", *(f"sensor.{gauge}" for gauge in _GAUGES)),
        *("sensor.alarm", "sensor.status"),
    )
    events: ClassVar[tuple[str, ...]] = ("sel",)
    interval: float = 60.0
    deadline: float = 25.0
    device: Path = Path("/dev/ipmi0")
    timeout: float = 5.0
    budget: float = 15.0
    discrete: tuple[str, ...] = ("power_supply", "power_unit", "cooling_device", "fan", "battery", "drive_slot")
    _connect: Callable[[Path, float], IpmiTransport] = field(default=KernelIpmi, init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _transport: IpmiTransport | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """Opens the IPMI device and resets sensors and log position. Raises NoData without a BMC."""
        self.close()
        self._node, self._schedule = node, SamplingSchedule(node, self._now)
        self._sel_reader, self._sdr_reader, self._timestamps = SelReader(), SdrReader(), b""
        self._sensors: dict[str, IpmiSensor] = {}
        self._unsupported: set[str] = set()
        self._last_sensor = ""
        self._schedule.due(REFRESH_S)
        self._transport = self._open_device()
        try:
            self._facts = decode_device_id(self._transport.request(_APP, _GET_DEVICE_ID))
        except (IpmiError, IpmiTimeout) as why:
            raise NoData(f"{self.device}: {why}") from None
        except OSError as error:
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def read(self) -> tuple[Reading, ...]:
        """Returns the sensors that are due and the new entries of the event log."""
        try:
            return self._read()
        except OSError as error:  # the driver was unloaded, or gave up its BMC
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def _read(self) -> tuple[Reading, ...]:
        if self._transport is None:
            raise NoData(f"{self.device}: not open")
        bmc = RequestBudget(self._transport, self._monotonic() + self.budget, self._monotonic)
        power, faults = math.nan, int(_STATES_MISSING)
        events, values = list[Event](), dict[str, DeviceValues]()
        with suppress(IpmiTimeout):  # for each part separately: what the BMC does not provide is missing
            power = self._read_power(bmc)
        with suppress(IpmiTimeout):
            faults = self._read_faults(bmc)
        with suppress(IpmiTimeout):
            events = self._log_events(bmc)
        with suppress(IpmiTimeout):
            self._read_repository(bmc)
        for name in self._next_sensors():
            if bmc.is_spent:
                break
            with suppress(IpmiTimeout):
                values[name] = self._read_sensor(bmc, name)
            self._last_sensor = name
        if not bmc.answers:
            raise NoData(f"{self.device}: {bmc.last_error}")
        whole = {"node.power": np.array([power], float), "node.chassis_faults": np.array([faults], np.uint16)}
        node = Reading("node", (f"node:{self._node}",), whole, tuple(events))
        rows = ((self._sensor_entity(name), values.get(name) or empty_row(s)) for name, s in self._sensors.items())
        return (node, *readings_by_signals(rows))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node with attributes of its BMC, and the sensors with their thresholds."""
        node = f"node:{self._node}"
        sensors = {
            self._sensor_entity(name): Device(
                (node,), {"label": s.name, "type": sensor_type(s.kind), **s.threshold_values()}
            )
            for name, s in self._sensors.items()
        }
        return {node: Device((), self._facts), **sensors}

    def close(self) -> None:
        """Closes the IPMI device."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _open_device(self) -> IpmiTransport:
        try:
            return self._connect(self.device, self.timeout)
        except FileNotFoundError:
            raise NoData(f"no {self.device}: no BMC, or ipmi_devintf and ipmi_si are not loaded") from None
        except PermissionError:
            raise NoData(f"{self.device}: no permission: add CAP_DAC_OVERRIDE, or make the file accessible") from None
        except OSError as error:
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def _sensor_entity(self, name: str) -> str:
        return f"sensor:{self._node}.ipmi.{name}"

    def _request(self, bmc: IpmiTransport, netfn: int, command: int, data: bytes = b"") -> bytes:
        """Returns the response; empty if refused.

        What the BMC does not support is not requested again for REFRESH_S.
        """
        name = f"{netfn:02x} {command:02x}"
        if name in self._unsupported:
            return b""
        try:
            return bmc.request(netfn, command, data)
        except IpmiError as refusal:
            if refusal.is_lasting:
                self._unsupported.add(name)
            return b""

    def _read_power(self, bmc: IpmiTransport) -> float:
        """Returns the power of the whole server in W; NaN if the BMC does not measure it."""
        found = self._request(bmc, _GROUP, _GET_POWER, _POWER_REQUEST)
        return int.from_bytes(found[1:3], "little") if len(found) >= 18 and found[17] & _MEASURING else math.nan

    def _read_faults(self, bmc: IpmiTransport) -> int:
        """Returns the mask of node.chassis_faults."""
        found = self._request(bmc, _CHASSIS, _GET_STATUS)
        if len(found) < 3:
            return int(_STATES_MISSING)
        power, rest = found[0], found[2]
        return power >> 1 & 0x0F | (rest & 1) << 4 | (rest >> 2 & 0b11) << 5

    def _log_events(self, bmc: IpmiTransport) -> list[Event]:
        """Returns an event for every new entry of the log."""
        if _LOG_KEY in self._unsupported:
            return []
        try:
            entries, bmc_now = self._sel_reader.read_new(bmc)
        except IpmiError as refusal:
            if refusal.is_lasting:
                self._unsupported.add(_LOG_KEY)
            return []
        names = {(s.lun, s.number): name for name, s in self._sensors.items()}
        found = []
        for entry in entries:
            data = dict(entry.facts)
            name = names.get(entry.sensor) if entry.sensor is not None else None
            if name is not None:
                data["sensor"] = self._sensor_entity(name)
                values = [self._sensors[name].convert(raw) for raw in entry.readings or ()]
                if self._sensors[name].curve < NON_LINEAR and values and all(map(math.isfinite, values)):
                    data["reading"], data["threshold"] = values
            found.append(Event(event_time(entry, bmc_now, self._now()), f"node:{self._node}", "sel", data))
        return found

    def _read_repository(self, bmc: IpmiTransport) -> None:
        """Continues reading the repository. Its sensors are used once it has been read completely."""
        if self._schedule.due(REFRESH_S):
            self._unsupported.clear()
            self._sdr_reader = SdrReader() if self._repository_changed(bmc) else self._sdr_reader
        if self._sdr_reader.is_finished():
            return
        while not self._sdr_reader.is_finished():
            if not self._sdr_reader.read_next(bmc):
                return
        self._sensors, self._last_sensor = name_sensors(self._sdr_reader.sensors, self.discrete), ""
        self._repository_changed(bmc)

    def _repository_changed(self, bmc: IpmiTransport) -> bool:
        try:
            old, self._timestamps = self._timestamps, repository_timestamps(bmc)
        except IpmiError:  # a BMC without this command: keep the values read so far
            return False
        return old != self._timestamps

    def _next_sensors(self) -> list[str]:
        """Returns the sensors, starting after the last one of the previous read."""
        names = list(self._sensors)
        start = names.index(self._last_sensor) + 1 if self._last_sensor in self._sensors else 0
        return [name for name in names[start:] + names[:start] if name not in self._unsupported]

    def _read_sensor(self, bmc: IpmiTransport, name: str) -> DeviceValues:
        """Returns the values of one sensor."""
        sensor, row = self._sensors[name], dict(empty_row(self._sensors[name]))
        try:
            found = bmc.request(_SENSOR, _GET_READING, bytes((sensor.number,)), sensor.lun)
            if len(found) < 2 or not found[1] & _SCANNED or found[1] & _UNAVAILABLE:
                return row
            if sensor.signal is not None:
                row[sensor.signal] = self._sensor_value(bmc, sensor, found[0])
        except IpmiError as refusal:
            if refusal.is_lasting:
                self._unsupported.add(name)
            return row
        if sensor.has_thresholds and len(found) > 2:
            row["sensor.alarm"] = alarm_state(found[2])
        if sensor.is_discrete and len(found) > 2:
            row["sensor.status"] = int.from_bytes(found[2:4], "little") & 0x7FFF  # the highest bit is always set
        return row

    def _sensor_value(self, bmc: IpmiTransport, sensor: IpmiSensor, raw: int) -> float:
        if sensor.curve < NON_LINEAR:
            return sensor.convert(raw)
        answer = bmc.request(_SENSOR, _GET_FACTORS, bytes((sensor.number, raw)), sensor.lun)
        return sensor.convert(raw, ConversionFactors.from_bytes(answer[1:7])) if len(answer) >= 7 else math.nan


def empty_row(sensor: IpmiSensor) -> DeviceValues:
    """Returns a row of all signals of the sensor, all missing."""
    can = {sensor.signal: True, "sensor.alarm": sensor.has_thresholds, "sensor.status": sensor.is_discrete}
    return {signal: None for signal, reported in can.items() if signal is not None and reported}


def name_sensors(sensors: list[IpmiSensor], discrete: tuple[str, ...]) -> dict[str, IpmiSensor]:
    """Returns sensors that measure, and those of the `discrete` types, by unique names for entities."""
    found: dict[str, IpmiSensor] = {}
    for sensor in sensors:
        if sensor.signal is None and sensor_type(sensor.kind) not in discrete:
            continue
        name = re.sub(r"[^A-Za-z0-9_+-]+", "-", sensor.name).strip("-") or f"{sensor.lun}-{sensor.number:02x}"
        found[f"{name}-{sensor.number:02x}" if name in found else name] = sensor
    return dict(list(found.items())[:MAX_SENSORS])


def decode_device_id(answer: bytes) -> dict[str, str]:
    """Returns the BMC's attributes from Get Device ID (section 20.1)."""
    if len(answer) < 11:
        return {}
    return {
        "bmc_firmware": f"{answer[2] & 0x7F}.{answer[3]:02x}",
        "bmc_ipmi": f"{answer[4] & 0x0F}.{answer[4] >> 4}",
        "bmc_manufacturer": str(int.from_bytes(answer[6:9], "little") & 0xFFFFF),
        "bmc_product": str(int.from_bytes(answer[9:11], "little")),
    }
