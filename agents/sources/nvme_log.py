"""The NVMe health log and how it is asked for: the structs of the specification and of linux/nvme_ioctl.h.

Layout: NVM Express Base Specification 2.0, figure "SMART / Health Information Log Page"; numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
from pathlib import Path

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


def health(log: bytes) -> dict[str, float | int]:
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


def ask(path: Path) -> bytes:
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
