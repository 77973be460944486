"""Health of NVMe disks: log page 02h through the kernel's admin command, state and identity from sysfs.

Each disk is queried in a thread of its own, so that one that does not respond costs only its own values. Layout: NVM
Express Base Specification 2.0, figure "SMART / Health Information Log Page"; numbers are little-endian; structs of
linux/nvme_ioctl.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import read_number, read_text
from agents.collectors.timed_calls import CallResult, TimedCalls

LOG_BYTES = 512
_KELVIN = 273  # the specification uses whole kelvins; NVMe tools subtract 273 as well
_TIMEOUT_MS = 4000  # chosen: below the collector's `patience`; a healthy disk takes less than a millisecond
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD = _IOWR('N', 0x41, struct nvme_passthru_cmd), linux/nvme_ioctl.h
_GET_LOG_PAGE, _HEALTH, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_COUNTER_OFFSETS = {
    # signal -> first of its 16 bytes
    "disk.lifetime_read": 32,
    "disk.lifetime_written": 48,
    "disk.power_on_time": 128,
    "disk.unsafe_shutdowns": 144,
    "disk.media_errors": 160,
    "disk.error_log_entries": 176,
}
COUNTERS = (*_COUNTER_OFFSETS, "disk.hot_time", "disk.throttled_time")
GAUGES = ("disk.temperature", "disk.critical_warning", "disk.spare", "disk.spare_threshold", "disk.endurance_used")


class _Command(ctypes.Structure):
    """struct nvme_passthru_cmd of linux/nvme_ioctl.h, 72 bytes."""

    _fields_ = (
        *(("opcode", ctypes.c_uint8), ("flags", ctypes.c_uint8), ("rsvd1", ctypes.c_uint16)),
        *((name, ctypes.c_uint32) for name in ("nsid", "cdw2", "cdw3")),
        *(("metadata", ctypes.c_uint64), ("addr", ctypes.c_uint64)),
        *((name, ctypes.c_uint32) for name in ("metadata_len", "data_len")),
        *((f"cdw{i}", ctypes.c_uint32) for i in range(10, 16)),
        *(("timeout_ms", ctypes.c_uint32), ("result", ctypes.c_uint32)),
    )


def decode_health_log(log: bytes) -> dict[str, float | int]:
    """Returns values by signal. What the disk does not report (temperature 0 K) is NaN. Raises ValueError for a short
    log.
    """
    if len(log) < LOG_BYTES:
        raise ValueError(f"NVMe health log of {len(log)} bytes; expected {LOG_BYTES}")

    def number(at: int, width: int) -> int:
        return int.from_bytes(log[at : at + width], "little")

    kelvin = number(1, 2)
    return {
        "disk.critical_warning": log[0],
        "disk.temperature": kelvin - _KELVIN if kelvin else math.nan,
        "disk.spare": log[3] / 100,
        "disk.spare_threshold": log[4] / 100,
        "disk.endurance_used": log[5] / 100,
        **{signal: number(at, 16) for signal, at in _COUNTER_OFFSETS.items()},
        "disk.hot_time": number(192, 4),
        "disk.throttled_time": number(224, 4) + number(228, 4),  # thermal management temperatures 1 and 2
    }


def read_health_log(path: Path) -> bytes:
    """Returns the health log of the controller of a device such as /dev/nvme0.

    Raises OSError; EIO if the disk refuses.
    """
    log = ctypes.create_string_buffer(LOG_BYTES)
    command = _Command(opcode=_GET_LOG_PAGE, nsid=_ALL_NAMESPACES, timeout_ms=_TIMEOUT_MS)
    command.addr, command.data_len = ctypes.addressof(log), LOG_BYTES
    command.cdw10 = (LOG_BYTES // 4 - 1) << 16 | _HEALTH  # number of dwords minus one, log page
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(handle, _ADMIN_COMMAND, command)
    finally:
        os.close(handle)
    if status:
        raise OSError(5, f"refused with NVMe status {status:#x}", str(path))
    return log.raw


_CONTROLLER = re.compile(r"nvme\d+")
_STATES = ("new", "live", "resetting", "connecting", "deleting", "dead")  # drivers/nvme/host/sysfs.c
_OTHER = len(_STATES)
_FACTS = {"model": "model", "serial": "serial", "firmware": "firmware_rev", "address": "address"}
_HEALTH_S = 600.0
MAX_DISKS = 128
"""Most disks of one node, and so most threads. Chosen: a storage server holds 24 to 60."""


@dataclass
class Nvme(Collector):
    """disk.*: one entity per NVMe controller on PCIe. Without permission to send commands, only temperature and state.

    patience: seconds within which the disks must respond.
    """

    name: ClassVar[str] = "nvme"
    signals: ClassVar[tuple[str, ...]] = ("disk.state", *GAUGES, *COUNTERS)
    interval: float = 30.0
    deadline: float = 15.0
    root: Path = Path("/sys/class/nvme")
    devices: Path = Path("/dev")
    patience: float = 6.0
    _read_log: Callable[[Path], bytes] = field(default_factory=lambda: read_health_log, init=False, repr=False)
    _calls: TimedCalls[bytes] = field(default_factory=TimedCalls, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _disks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _missing_privilege: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._schedule, self._missing_privilege = node, SamplingSchedule(node), ""
        self._update_disks()

    def read(self) -> tuple[Reading, ...]:
        self._update_disks()
        columns: dict[str, NDArray[Any]] = {"disk.state": np.array([self._read_state(disk) for disk in self._disks])}
        if self._schedule.due(_HEALTH_S):
            columns |= self._health_columns()
        return (Reading("disk", self._entities(), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {
            entity: Device((f"node:{self._node}",), self._attributes(d))
            for entity, d in self._disks_by_entity().items()
        }

    def _disks_by_entity(self) -> dict[str, str]:
        return dict(zip(self._entities(), self._disks, strict=True))

    def _entities(self) -> tuple[str, ...]:
        return tuple(f"disk:{self._node}.{disk}" for disk in self._disks)

    def _update_disks(self) -> None:
        """Updates the list of controllers. Disks behind a network do not belong to this node."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        found = sorted((n for n in names if _CONTROLLER.fullmatch(n)), key=lambda n: int(n[4:]))
        local = [n for n in found if (read_text(self.root / n / "transport") or "pcie") == "pcie"]
        self._disks = tuple(local[:MAX_DISKS])
        if not self._disks:
            raise NoData(f"{self.root}: no NVMe disk; expected a controller on PCIe")

    def _read_state(self, disk: str) -> float:
        text = read_text(self.root / disk / "state")
        if text is None:
            return np.nan
        word = text.partition(" ")[0]  # "deleting (no IO)" is deleting
        return _STATES.index(word) if word in _STATES else _OTHER

    def _health_columns(self) -> dict[str, NDArray[Any]]:
        answers = self._calls.run({d: partial(self._read_log, self.devices / d) for d in self._disks}, self.patience)
        logs = [self._decode_result(answers[disk]) for disk in self._disks]
        temperatures = [
            log.get("disk.temperature", self._hwmon_temperature(d)) for d, log in zip(self._disks, logs, strict=True)
        ]
        gauges = {s: np.array([log.get(s, np.nan) for log in logs]) for s in GAUGES}
        counters = {s: count_column(_int_or_none(log.get(s)) for log in logs) for s in COUNTERS}
        return {**gauges, **counters, "disk.temperature": np.array(temperatures)}

    def _decode_result(self, answer: CallResult[bytes]) -> dict[str, float | int]:
        """Returns the values of one disk; empty if it failed or did not respond."""
        if isinstance(answer.error, PermissionError):
            self._missing_privilege = f"{answer.error.filename or self.devices}: not permitted: add CAP_SYS_ADMIN"
        return decode_health_log(answer.value) if answer.value is not None else {}

    def _hwmon_temperature(self, disk: str) -> float:
        """Returns the temperature from the driver's hwmon, which needs no privilege and counts in 0.001 degrees."""
        files = [*self.root.glob(f"{disk}/hwmon*/temp1_input"), *self.root.glob(f"{disk}/hwmon/hwmon*/temp1_input")]
        number = read_number(files[0]) if files else None
        return np.nan if number is None else number / 1000

    def _attributes(self, disk: str) -> dict[str, object]:
        reported = {name: read_text(self.root / disk / file) for name, file in _FACTS.items()}
        return {name: text for name, text in {**reported, "health_log": self._missing_privilege}.items() if text}


def _int_or_none(value: float | None) -> int | None:
    return value if isinstance(value, int) else None
