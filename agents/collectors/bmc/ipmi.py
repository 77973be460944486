"""Data of this server's BMC through the kernel's /dev/ipmi0: power, sensors, system event log."""

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
from agents.collectors.bmc.ipmi_codes import sensor_type
from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTimeout, IpmiTransport, KernelIpmi, RequestBudget
from agents.collectors.bmc.ipmi_log import SelReader, event_time
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
        node = f"node:{self._node}"
        sensors = {
            self._sensor_entity(name): Device(
                (node,), {"label": s.name, "type": sensor_type(s.kind), **s.threshold_values()}
            )
            for name, s in self._sensors.items()
        }
        return {node: Device((), self._facts), **sensors}

    def close(self) -> None:
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
        except IpmiError:  # a BMC without this command: keep what was read
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
