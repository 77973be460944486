"""Sensors of the board from /sys/class/hwmon: temperatures, voltages, currents, power, fans, energy, alarms."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.columns import DeviceValues, readings_by_signals
from agents.collectors.kernel_files import ProcFile, read_number, read_text

# kind of file -> (signal, factor to its unit), kernel Documentation/hwmon/sysfs-interface
_KINDS = {
    "temp": ("sensor.temperature", 1e-3),
    "in": ("sensor.voltage", 1e-3),
    "curr": ("sensor.current", 1e-3),
    "power": ("sensor.power", 1e-6),
    "fan": ("sensor.fan_speed", 1.0),
    "humidity": ("sensor.ratio", 1e-5),
    "energy": ("sensor.energy", 1),
}
_NAME = re.compile(r"(temp|in|curr|power|fan|humidity|energy)(\d{1,4})_(input|average)")
_LIMITS = ("lcrit", "min", "max", "cap", "crit", "emergency", "rated_max")
_ALARM, _CRITICAL, _FAULT = 1, 2, 3  # states of sensor.alarm
_FLAGS = {
    **dict.fromkeys(("alarm", "min_alarm", "max_alarm", "cap_alarm"), _ALARM),
    **dict.fromkeys(("lcrit_alarm", "crit_alarm", "emergency_alarm"), _CRITICAL),
    "fault": _FAULT,
}
_MISSING_VALUE = 2**64 - 1  # no sensor has this value; it means "missing" in a 64-bit counter
MAX_SENSORS = 512
"""Most sensors of one node. Chosen: two processors of 128 cores with a sensor each, and as many others."""
MAX_FLAGS = 384
"""Most alarm files that are kept open; further ones are left out. With MAX_SENSORS they stay below the default limit of
1024 open files."""
SLOW_S = 0.5
"""Longest time of one sensor. A chip that takes longer, for example because its bus times out, is skipped until the
next scan. Chosen: a chip on I2C responds in some 10 ms, and `deadline` must hold with several such chips."""
RESCAN_S = 60.0
"""Seconds between two searches for new and removed chips. Chosen: drives are pulled by hand."""


@dataclass(frozen=True, slots=True)
class _Sensor:
    """One sensor with its open files."""

    chip: str
    name: str
    kind: str
    value: ProcFile
    flags: tuple[tuple[ProcFile, int], ...]

    def files(self) -> Iterable[ProcFile]:
        """Returns the file of the value and those of the alarm flags."""
        return (self.value, *(file for file, _ in self.flags))


@dataclass(frozen=True, slots=True)
class _Chip:
    """One chip: its location when it was opened, its sensors and their attributes."""

    identity: tuple[str, str]
    sensors: tuple[_Sensor, ...]
    attributes: Mapping[str, Mapping[str, Any]]

    def close(self) -> None:
        """Closes the files of all sensors."""
        for sensor in self.sensors:
            for file in sensor.files():
                file.close()


@dataclass
class Hwmon(Collector):
    """sensor.*: one entity per sensor of every chip whose name matches none of `exclude` (shell patterns).

    A chip's name is its driver and its location on the bus, so it does not depend on other devices.
    """

    name: ClassVar[str] = "hwmon"
    signals: ClassVar[tuple[str, ...]] = (*(signal for signal, _ in _KINDS.values()), "sensor.alarm")
    interval: float = 10.0
    root: Path = Path("/sys/class/hwmon")
    exclude: tuple[str, ...] = ()
    _chips: dict[str, _Chip] = field(default_factory=dict, init=False, repr=False)
    _sensors: tuple[_Sensor, ...] = field(default=(), init=False, repr=False)
    _entities: tuple[str, ...] = field(default=(), init=False, repr=False)
    _slow_chips: set[str] = field(default_factory=set, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _schedule: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)

    def open(self, node: str) -> None:
        """Opens the sensors of all chips."""
        self._node, self._schedule = node, SamplingSchedule(node)
        self._schedule.due(RESCAN_S)
        self._update_chips()

    def read(self) -> tuple[Reading, ...]:
        """Returns the values and alarms of all sensors; looks for new chips if due."""
        if self._schedule.due(RESCAN_S):
            self._update_chips()
        return readings_by_signals(zip(self._entities, map(self._read_sensor, self._sensors), strict=True))

    def _read_sensor(self, sensor: _Sensor) -> DeviceValues:
        """Reads the files of a sensor; nothing if its chip was slow."""
        signal, scale = _KINDS[sensor.kind]
        row: dict[str, float | None] = {signal: None, "sensor.alarm": None} if sensor.flags else {signal: None}
        if sensor.chip in self._slow_chips:
            return row
        begun = self._monotonic()
        value, alarm = sensor.value.number(), _worst_alarm(sensor)
        if self._monotonic() - begun > SLOW_S:
            self._slow_chips.add(sensor.chip)
        if sensor.flags:
            row["sensor.alarm"] = alarm
        broken = value is None or abs(value) >= _MISSING_VALUE or (sensor.kind == "energy" and value < 0)
        if value is not None and not broken and alarm != _FAULT:  # the value of a faulty sensor is meaningless (ibid.)
            row[signal] = value * scale
        return row

    def inventory(self) -> Mapping[str, Device]:
        """Returns the sensors with their attributes."""
        parents = (f"node:{self._node}",)
        facts = {name: facts for chip in self._chips.values() for name, facts in chip.attributes.items()}
        names = (sensor.name for sensor in self._sensors)
        return {entity: Device(parents, facts[name]) for entity, name in zip(self._entities, names, strict=True)}

    def close(self) -> None:
        """Closes the files of all chips."""
        for chip in self._chips.values():
            chip.close()
        self._chips, self._sensors, self._entities = {}, (), ()
        self._slow_chips.clear()

    def _all_sensors(self) -> tuple[_Sensor, ...]:
        return tuple(sensor for chip in self._chips.values() for sensor in chip.sensors)

    def _update_chips(self) -> None:
        """Opens new chips and closes those that were removed or whose driver was reloaded."""
        found = {folder.name: folder for folder in _list_chips(self.root)}
        for name, chip in list(self._chips.items()):
            if (
                name not in found
                or _identity(found[name]) != chip.identity
                or (name not in self._slow_chips and _is_unreadable(chip))
            ):
                self._chips.pop(name).close()
        taken = {sensor.name.rpartition(".")[0] for chip in self._chips.values() for sensor in chip.sensors}
        for name in sorted(found.keys() - self._chips.keys(), key=lambda n: (len(n), n)):
            label = _chip_name(found[name])
            if label is None or any(fnmatch(label, pattern) for pattern in self.exclude):
                continue
            label = (
                f"{label}-{name}" if label in taken else label
            )  # two of the same name and location: add the kernel's number
            taken.add(label)
            self._chips[name] = _open_chip(found[name], label, self._all_sensors())
        self._slow_chips.clear()
        self._sensors = self._all_sensors()
        self._entities = tuple(f"sensor:{self._node}.{sensor.name}" for sensor in self._sensors)
        if not self._sensors:
            raise NoData(f"no sensor below {self.root}: no driver for the board's chips is loaded")


def _list_chips(root: Path) -> list[Path]:
    try:
        return [root / name for name in os.listdir(root)]
    except OSError:  # no hwmon on this kernel
        return []


def _identity(folder: Path) -> tuple[str, str]:
    """Returns the chip's location on the bus. The kernel reuses numbers for other chips."""
    return os.path.realpath(folder), os.path.realpath(folder / "device")


def _is_unreadable(chip: _Chip) -> bool:
    """Returns whether nothing of the chip can be read: it was removed and came back between two scans, or is new."""
    return all(sensor.value.text() is None for sensor in chip.sensors)


def _chip_name(folder: Path) -> str | None:
    """Returns driver and location: coretemp-0, nvme0, jc42-0-0018, k10temp-0000-00-18-3; None for a folder without a
    name.
    """
    driver = read_text(_file_folder(folder) / "name")
    if not driver:
        return None
    place = os.path.basename(os.path.realpath(folder / "device")) if (folder / "device").exists() else ""
    rest = place.removeprefix(driver)
    whole = driver + rest if rest != place else f"{driver}-{place}" if place else driver
    return re.sub(r"[^A-Za-z0-9_-]", "-", whole)


def _file_folder(folder: Path) -> Path:
    """Returns the folder of the chip's files. Old-style drivers, such as ACPI power meters, have them in the device's
    folder.
    """
    return folder if (folder / "name").exists() else folder / "device"


def _open_chip(folder: Path, label: str, others: tuple[_Sensor, ...]) -> _Chip:
    """Opens a chip's files, within the limits that `others` leave."""
    name, identity, folder = folder.name, _identity(folder), _file_folder(folder)
    sensors: list[_Sensor] = []
    attributes = {}
    room = MAX_FLAGS - sum(len(sensor.flags) for sensor in others)
    try:
        listed = set(os.listdir(folder))
    except OSError:  # removed between two calls
        listed = set()
    wanted = sorted({(m[1], int(m[2])) for file in listed if (m := _NAME.fullmatch(file))})
    for kind, number in wanted[: MAX_SENSORS - len(others)]:
        stem = f"{kind}{number}"
        value = f"{stem}_input" if f"{stem}_input" in listed else f"{stem}_average"
        raised = [flag for flag in _FLAGS if f"{stem}_{flag}" in listed]
        room -= len(raised)
        flags = tuple((ProcFile(folder / f"{stem}_{flag}"), _FLAGS[flag]) for flag in raised if room >= 0)
        sensors.append(_Sensor(name, f"{label}.{stem}", kind, ProcFile(folder / value), flags))
        attributes[f"{label}.{stem}"] = _sensor_attributes(folder, stem, kind, listed)
    return _Chip(identity, tuple(sensors), attributes)


def _sensor_attributes(folder: Path, stem: str, kind: str, listed: set[str]) -> dict[str, Any]:
    """Returns label, driver and the limits that the chip was given, in the unit of the signal."""
    facts: dict[str, Any] = {"chip": read_text(folder / "name"), "label": read_text(folder / f"{stem}_label")}
    for limit in _LIMITS:
        value = read_number(folder / f"{stem}_{limit}") if f"{stem}_{limit}" in listed else None
        if value is not None and abs(value) < _MISSING_VALUE:
            facts[limit] = round(value * _KINDS[kind][1], 6)
    return {key: value for key, value in facts.items() if value not in (None, "")}


def _worst_alarm(sensor: _Sensor) -> int | None:
    """Returns the most severe raised flag; None if the chip has none that can be read."""
    states = [state if raised else 0 for file, state in sensor.flags if (raised := file.number()) is not None]
    return max(states, default=None)
