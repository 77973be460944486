"""What the BMC knows of this server, through the kernel's /dev/ipmi0: power, its sensors, its event log."""

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

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.bmc.ipmi_codes import sensor_type
from agents.collectors.bmc.ipmi_device import Bmc, KernelBmc, Patience, Refused, Silent
from agents.collectors.bmc.ipmi_log import Log, event_time
from agents.collectors.bmc.ipmi_sensors import NON_LINEAR, Factors, Sensor, Walk, alarm_of, stamp
from agents.collectors.columns import Row, readings
from pipeline.model.records import Event

_CHASSIS, _SENSOR, _APP, _GROUP = 0x00, 0x04, 0x06, 0x2C  # network functions
_GET_STATUS = 0x01  # Get Chassis Status, section 28.2
_GET_DEVICE_ID = 0x01
_GET_READING, _GET_FACTORS = 0x2D, 0x23  # IPMI 2.0, sections 35.14 and 35.5
_GET_POWER, _POWER_REQUEST = 0x02, b"\xdc\x01\0\0"  # DCMI 1.5, section 6.6.1: system power statistics
_MEASURING = 0x40  # state of Get Power Reading: it is being measured
_SCANNED, _UNAVAILABLE = 0x40, 0x20  # of Get Sensor Reading (table 35-15)
_STATES_MISSING = np.iinfo(np.uint16).max
_LOG = "the log"  # among what was refused; no sensor's name has a blank
_GAUGES = ("temperature", "voltage", "current", "power", "fan_speed", "ratio")
REFRESH_S = 3600.0
"""How often the repository is asked whether it changed, and refused sensors are asked anew; chosen."""
MAX_SENSORS = 512
"""Most sensors that are read; chosen: at 10 ms each, five seconds of a BMC's time a minute."""


@dataclass
class Ipmi(Collector):
    """node.power, sensor.* of the BMC, and events `sel`. A look ends after `budget` s; the next one goes on there.

    timeout: seconds that one answer may take. discrete: types of sensor whose states are read, besides all that
    measure something.
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
    _connect: Callable[[Path, float], Bmc] = field(default=KernelBmc, init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _bmc: Bmc | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        self.close()
        self._node, self._rhythm = node, Rhythm(node, self._now)
        self._log, self._walk, self._stamp = Log(), Walk(), b""
        self._sensors: dict[str, Sensor] = {}
        self._refused: set[str] = set()
        self._last = ""
        self._rhythm.due(REFRESH_S)
        self._bmc = self._connected()
        try:
            self._facts = identity(self._bmc.request(_APP, _GET_DEVICE_ID))
        except (Refused, Silent) as why:
            raise NoData(f"{self.device}: {why}") from None
        except OSError as error:
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def read(self) -> tuple[Reading, ...]:
        try:
            return self._read()
        except OSError as error:  # the driver was unloaded, or gave its BMC up
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def _read(self) -> tuple[Reading, ...]:
        if self._bmc is None:
            raise NoData(f"{self.device}: not open")
        bmc = Patience(self._bmc, self._monotonic() + self.budget, self._monotonic)
        power, faults = math.nan, int(_STATES_MISSING)
        events, values = list[Event](), dict[str, Row]()
        with suppress(Silent):  # of each part alone: what the BMC does not tell is missing
            power = self._power(bmc)
        with suppress(Silent):
            faults = self._faults(bmc)
        with suppress(Silent):
            events = self._news(bmc)
        with suppress(Silent):
            self._learn(bmc)
        for name in self._turn():
            if bmc.spent:
                break
            with suppress(Silent):
                values[name] = self._look(bmc, name)
            self._last = name
        if not bmc.answers:
            raise NoData(f"{self.device}: {bmc.why}")
        whole = {"node.power": np.array([power], float), "node.chassis_faults": np.array([faults], np.uint16)}
        node = Reading("node", (f"node:{self._node}",), whole, tuple(events))
        rows = ((self._entity(name), values.get(name) or nothing_of(s)) for name, s in self._sensors.items())
        return (node, *readings(rows))

    def inventory(self) -> Mapping[str, Device]:
        node = f"node:{self._node}"
        sensors = {
            self._entity(name): Device((node,), {"label": s.name, "type": sensor_type(s.kind), **s.limits()})
            for name, s in self._sensors.items()
        }
        return {node: Device((), self._facts), **sensors}

    def close(self) -> None:
        if self._bmc is not None:
            self._bmc.close()
            self._bmc = None

    def _connected(self) -> Bmc:
        try:
            return self._connect(self.device, self.timeout)
        except FileNotFoundError:
            raise NoData(f"no {self.device}: no BMC, or ipmi_devintf and ipmi_si are not loaded") from None
        except PermissionError:
            raise NoData(f"{self.device}: not open to us: add CAP_DAC_OVERRIDE, or give us the file") from None
        except OSError as error:
            raise NoData(f"{self.device}: {os.strerror(error.errno or 0)}") from None

    def _entity(self, name: str) -> str:
        return f"sensor:{self._node}.ipmi.{name}"

    def _ask(self, bmc: Bmc, netfn: int, command: int, data: bytes = b"") -> bytes:
        """The answer; nothing where it is refused. What the BMC does not have is not asked again for REFRESH_S."""
        name = f"{netfn:02x} {command:02x}"
        if name in self._refused:
            return b""
        try:
            return bmc.request(netfn, command, data)
        except Refused as refusal:
            if refusal.lasting:
                self._refused.add(name)
            return b""

    def _power(self, bmc: Bmc) -> float:
        """What the whole server draws, W; NaN where the BMC does not measure it."""
        found = self._ask(bmc, _GROUP, _GET_POWER, _POWER_REQUEST)
        return int.from_bytes(found[1:3], "little") if len(found) >= 18 and found[17] & _MEASURING else math.nan

    def _faults(self, bmc: Bmc) -> int:
        """Mask of node.chassis_faults."""
        found = self._ask(bmc, _CHASSIS, _GET_STATUS)
        if len(found) < 3:
            return int(_STATES_MISSING)
        power, rest = found[0], found[2]
        return power >> 1 & 0x0F | (rest & 1) << 4 | (rest >> 2 & 0b11) << 5

    def _news(self, bmc: Bmc) -> list[Event]:
        """An event for every new entry of the log."""
        if _LOG in self._refused:
            return []
        try:
            entries, bmc_now = self._log.news(bmc)
        except Refused as refusal:
            if refusal.lasting:
                self._refused.add(_LOG)
            return []
        names = {(s.lun, s.number): name for name, s in self._sensors.items()}
        found = []
        for entry in entries:
            data = dict(entry.facts)
            name = names.get(entry.sensor) if entry.sensor is not None else None
            if name is not None:
                data["sensor"] = self._entity(name)
                values = [self._sensors[name].value(raw) for raw in entry.readings or ()]
                if self._sensors[name].curve < NON_LINEAR and values and all(map(math.isfinite, values)):
                    data["reading"], data["threshold"] = values
            found.append(Event(event_time(entry, bmc_now, self._now()), f"node:{self._node}", "sel", data))
        return found

    def _learn(self, bmc: Bmc) -> None:
        """Goes on with the repository; its sensors hold once it is read whole."""
        if self._rhythm.due(REFRESH_S):
            self._refused.clear()
            self._walk = Walk() if self._changed(bmc) else self._walk
        if self._walk.done():
            return
        while not self._walk.done():
            if not self._walk.step(bmc):
                return
        self._sensors, self._last = named(self._walk.sensors, self.discrete), ""
        self._changed(bmc)

    def _changed(self, bmc: Bmc) -> bool:
        try:
            old, self._stamp = self._stamp, stamp(bmc)
        except Refused:  # a BMC without this command: what was found stays
            return False
        return old != self._stamp

    def _turn(self) -> list[str]:
        """The sensors, beginning after the one that the last look came to."""
        names = list(self._sensors)
        start = names.index(self._last) + 1 if self._last in self._sensors else 0
        return [name for name in names[start:] + names[:start] if name not in self._refused]

    def _look(self, bmc: Bmc, name: str) -> Row:
        """What the BMC says of one sensor."""
        sensor, row = self._sensors[name], dict(nothing_of(self._sensors[name]))
        try:
            found = bmc.request(_SENSOR, _GET_READING, bytes((sensor.number,)), sensor.lun)
            if len(found) < 2 or not found[1] & _SCANNED or found[1] & _UNAVAILABLE:
                return row
            if sensor.signal is not None:
                row[sensor.signal] = self._value(bmc, sensor, found[0])
        except Refused as refusal:
            if refusal.lasting:
                self._refused.add(name)
            return row
        if sensor.compares and len(found) > 2:
            row["sensor.alarm"] = alarm_of(found[2])
        if sensor.discrete and len(found) > 2:
            row["sensor.status"] = int.from_bytes(found[2:4], "little") & 0x7FFF  # the highest bit is always set
        return row

    def _value(self, bmc: Bmc, sensor: Sensor, raw: int) -> float:
        if sensor.curve < NON_LINEAR:
            return sensor.value(raw)
        answer = bmc.request(_SENSOR, _GET_FACTORS, bytes((sensor.number, raw)), sensor.lun)
        return sensor.value(raw, Factors.of(answer[1:7])) if len(answer) >= 7 else math.nan


def nothing_of(sensor: Sensor) -> Row:
    """A row of what the sensor can tell, all missing."""
    can = {sensor.signal: True, "sensor.alarm": sensor.compares, "sensor.status": sensor.discrete}
    return {signal: None for signal, told in can.items() if signal is not None and told}


def named(sensors: list[Sensor], discrete: tuple[str, ...]) -> dict[str, Sensor]:
    """Sensors that measure, and those of the `discrete` types, by their names as parts of entities; each once."""
    found: dict[str, Sensor] = {}
    for sensor in sensors:
        if sensor.signal is None and sensor_type(sensor.kind) not in discrete:
            continue
        name = re.sub(r"[^A-Za-z0-9_+-]+", "-", sensor.name).strip("-") or f"{sensor.lun}-{sensor.number:02x}"
        found[f"{name}-{sensor.number:02x}" if name in found else name] = sensor
    return dict(list(found.items())[:MAX_SENSORS])


def identity(answer: bytes) -> dict[str, str]:
    """What the BMC says of itself to Get Device ID (section 20.1)."""
    if len(answer) < 11:
        return {}
    return {
        "bmc_firmware": f"{answer[2] & 0x7F}.{answer[3]:02x}",
        "bmc_ipmi": f"{answer[4] & 0x0F}.{answer[4] >> 4}",
        "bmc_manufacturer": str(int.from_bytes(answer[6:9], "little") & 0xFFFFF),
        "bmc_product": str(int.from_bytes(answer[9:11], "little")),
    }
