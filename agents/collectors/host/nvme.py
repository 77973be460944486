"""Health of NVMe disks: the log page 02h through the kernel's admin command, state and identity from sysfs.

Each disk is asked in a thread of its own, so that one that does not answer costs only its own values.

The NVMe health log and how it is asked for: the structs of the specification and of linux/nvme_ioctl.h.

Layout: NVM Express Base Specification 2.0, figure "SMART / Health Information Log Page"; numbers are little-endian.
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

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import number_of, text_of
from agents.collectors.timed_calls import Answer, Calls

LOG_BYTES = 512
_KELVIN = 273  # the specification's whole kelvins; NVMe tools subtract 273 as well
_TIMEOUT_MS = 4000  # chosen: below the collector's patience; a healthy disk takes less than a millisecond
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD = _IOWR('N', 0x41, struct nvme_passthru_cmd), linux/nvme_ioctl.h
_GET_LOG_PAGE, _HEALTH, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_WIDE = {
    # signal -> first of its 16 bytes
    "disk.lifetime_read": 32,
    "disk.lifetime_written": 48,
    "disk.power_on_time": 128,
    "disk.unsafe_shutdowns": 144,
    "disk.media_errors": 160,
    "disk.error_log_entries": 176,
}
COUNTERS = (*_WIDE, "disk.hot_time", "disk.throttled_time")
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
    """Values by signal; what the disk does not tell (temperature 0 K) is NaN. Raises ValueError on a short log."""
    if len(log) < LOG_BYTES:
        raise ValueError(f"NVMe health log of {len(log)} bytes; wanted {LOG_BYTES}")

    def number(at: int, width: int) -> int:
        return int.from_bytes(log[at : at + width], "little")

    kelvin = number(1, 2)
    return {
        "disk.critical_warning": log[0],
        "disk.temperature": kelvin - _KELVIN if kelvin else math.nan,
        "disk.spare": log[3] / 100,
        "disk.spare_threshold": log[4] / 100,
        "disk.endurance_used": log[5] / 100,
        **{signal: number(at, 16) for signal, at in _WIDE.items()},
        "disk.hot_time": number(192, 4),
        "disk.throttled_time": number(224, 4) + number(228, 4),  # thermal management temperatures 1 and 2
    }


def read_health_log(path: Path) -> bytes:
    """The health log of the controller behind a device such as /dev/nvme0. Raises OSError; EIO if the disk refuses."""
    log = ctypes.create_string_buffer(LOG_BYTES)
    command = _Command(opcode=_GET_LOG_PAGE, nsid=_ALL_NAMESPACES, timeout_ms=_TIMEOUT_MS)
    command.addr, command.data_len = ctypes.addressof(log), LOG_BYTES
    command.cdw10 = (LOG_BYTES // 4 - 1) << 16 | _HEALTH  # number of dwords less one, log page
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
"""Most disks of one node, and so most threads; chosen: a storage server holds 24 to 60."""


@dataclass
class Nvme(Collector):
    """disk.*: one entity per NVMe controller on PCIe. Without the right to ask disks, their temperature and state.

    patience: seconds within which the disks must answer.
    """

    name: ClassVar[str] = "nvme"
    signals: ClassVar[tuple[str, ...]] = ("disk.state", *GAUGES, *COUNTERS)
    interval: float = 30.0
    deadline: float = 15.0
    root: Path = Path("/sys/class/nvme")
    devices: Path = Path("/dev")
    patience: float = 6.0
    _ask: Callable[[Path], bytes] = field(default_factory=lambda: read_health_log, init=False, repr=False)
    _calls: Calls[bytes] = field(default_factory=Calls, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _disks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _refused: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._rhythm, self._refused = node, Rhythm(node), ""
        self._follow()

    def read(self) -> tuple[Reading, ...]:
        self._follow()
        columns: dict[str, NDArray[Any]] = {"disk.state": np.array([self._state(disk) for disk in self._disks])}
        if self._rhythm.due(_HEALTH_S):
            columns |= self._health()
        return (Reading("disk", self._entities(), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {entity: Device((f"node:{self._node}",), self._facts(d)) for entity, d in self._named().items()}

    def _named(self) -> dict[str, str]:
        return dict(zip(self._entities(), self._disks, strict=True))

    def _entities(self) -> tuple[str, ...]:
        return tuple(f"disk:{self._node}.{disk}" for disk in self._disks)

    def _follow(self) -> None:
        """Controllers that are there now; those of disks across a network are not this node's."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        found = sorted((n for n in names if _CONTROLLER.fullmatch(n)), key=lambda n: int(n[4:]))
        local = [n for n in found if (text_of(self.root / n / "transport") or "pcie") == "pcie"]
        self._disks = tuple(local[:MAX_DISKS])
        if not self._disks:
            raise NoData(f"{self.root}: no NVMe disk; wanted a controller on PCIe")

    def _state(self, disk: str) -> float:
        text = text_of(self.root / disk / "state")
        if text is None:
            return np.nan
        word = text.partition(" ")[0]  # "deleting (no IO)" is deleting
        return _STATES.index(word) if word in _STATES else _OTHER

    def _health(self) -> dict[str, NDArray[Any]]:
        answers = self._calls.ask({d: partial(self._ask, self.devices / d) for d in self._disks}, self.patience)
        logs = [self._log(answers[disk]) for disk in self._disks]
        temperatures = [log.get("disk.temperature", self._warmth(d)) for d, log in zip(self._disks, logs, strict=True)]
        gauges = {s: np.array([log.get(s, np.nan) for log in logs]) for s in GAUGES}
        counters = {s: count_column(_whole(log.get(s)) for log in logs) for s in COUNTERS}
        return {**gauges, **counters, "disk.temperature": np.array(temperatures)}

    def _log(self, answer: Answer[bytes]) -> dict[str, float | int]:
        """Nothing of a disk that failed or does not answer: its values are missing."""
        if isinstance(answer.error, PermissionError):
            self._refused = f"{answer.error.filename or self.devices}: not permitted: add CAP_SYS_ADMIN"
        return decode_health_log(answer.value) if answer.value is not None else {}

    def _warmth(self, disk: str) -> float:
        """Temperature from the driver's hwmon, which needs no right; in thousandths of a degree."""
        files = [*self.root.glob(f"{disk}/hwmon*/temp1_input"), *self.root.glob(f"{disk}/hwmon/hwmon*/temp1_input")]
        number = number_of(files[0]) if files else None
        return np.nan if number is None else number / 1000

    def _facts(self, disk: str) -> dict[str, object]:
        told = {name: text_of(self.root / disk / file) for name, file in _FACTS.items()}
        return {name: text for name, text in {**told, "health_log": self._refused}.items() if text}


def _whole(value: float | None) -> int | None:
    return value if isinstance(value, int) else None
