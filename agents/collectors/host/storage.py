"""Storage of the server: mounted file systems and NVMe disks.

File systems: space, inodes, whether they respond in time, and whether the kernel still writes to them. Disks: health
log (page 02h) through the kernel's admin command, state and identity from sysfs.

Each is queried in its own thread with a common time limit, so that a hung NFS server or a disk that does not respond is
a signal and delays no other. A device is not called again before its last call returned. Layout of the log: NVM Express
Base Specification 2.0, figure "SMART / Health Information Log Page"; numbers are little-endian; structs of
linux/nvme_ioctl.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.columns import count_column
from agents.collectors.kernel_files import read_number, read_text

T = TypeVar("T")


@dataclass
class CallResult(Generic[T]):
    """Result of a call, or the OSError that it raised. `seconds` is None while the call is running."""

    started: float
    seconds: float | None = None
    value: T | None = None
    error: OSError | None = None


class TimedCalls(Generic[T]):
    """Runs calls in threads. Only the threads of calls that hang outlive a read."""

    def __init__(self) -> None:
        self._running: dict[str, CallResult[T]] = {}
        self._finished = threading.Condition()

    def run(self, calls: Mapping[str, Callable[[], T]], patience: float) -> dict[str, CallResult[T]]:
        """Starts all calls and waits up to `patience` seconds for them together. Calls that still hang are not started
        again.
        """
        with self._finished:
            requested = {name: self._running[name] for name in calls if name in self._running}
        for name, call in calls.items():
            if name not in requested:
                requested[name] = self._start(name, call)
        with self._finished:
            self._finished.wait_for(lambda: all(a.seconds is not None for a in requested.values()), patience)
            return {name: CallResult(a.started, a.seconds, a.value, a.error) for name, a in requested.items()}

    @staticmethod
    def elapsed(answer: CallResult[T]) -> float:
        """Returns the seconds that a call has been running, or took."""
        return time.monotonic() - answer.started if answer.seconds is None else answer.seconds

    def _start(self, name: str, call: Callable[[], T]) -> CallResult[T]:
        answer: CallResult[T] = CallResult(time.monotonic())
        with self._finished:
            self._running[name] = answer
        thread = threading.Thread(target=self._run, args=(name, call, answer), name=f"call {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread could be started: nothing is running that would ever return
            with self._finished:
                del self._running[name]
            raise
        return answer

    def _run(self, name: str, call: Callable[[], T], answer: CallResult[T]) -> None:
        value, error = None, None
        try:
            value = call()
        except OSError as failed:
            error = failed
        with self._finished:
            answer.value, answer.error, answer.seconds = value, error, time.monotonic() - answer.started
            del self._running[name]
            self._finished.notify_all()


_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system. read_only: the file system itself, regardless of this mount point."""

    point: bytes
    device: str
    type: str
    source: str
    read_only: bool

    @property
    def name(self) -> str:
        """The mount point as text."""
        return self.point.decode("utf-8", "replace")


def parse_mounts(text: bytes) -> tuple[Mount, ...]:
    """Returns all mounts of /proc/self/mountinfo in the kernel's order. Lines in another format are skipped
    (proc_pid_mountinfo(5)).
    """
    found = []
    for line in text.split(b"\n"):
        first, _, last = line.partition(b" - ")
        words, tail = first.split(b" "), last.split(b" ")
        if len(words) < 6 or len(tail) < 3:
            continue
        kind, source = (_unescape(word).decode("utf-8", "replace") for word in tail[:2])
        device = words[2].decode("ascii", "replace")
        found.append(Mount(_unescape(words[4]), device, kind, source, b"ro" in tail[2].split(b",")))
    return tuple(found)


def select_mounts(found: Iterable[Mount], types: Iterable[str], exclude: Iterable[str]) -> dict[bytes, Mount]:
    """Returns mounts of the selected types by mount point, one per file system: the one with the shortest path.

    The last mount at a point hides earlier ones. types and exclude are shell patterns.
    """
    types, exclude = tuple(types), tuple(exclude)
    visible = {mount.point: mount for mount in found}
    by_device: dict[str, Mount] = {}
    for mount in sorted(visible.values(), key=lambda m: (len(m.point), m.point)):
        wanted = any(fnmatchcase(mount.type, pattern) for pattern in types)
        if wanted and not any(fnmatchcase(mount.name, pattern) for pattern in exclude):
            by_device.setdefault(mount.device, mount)
    return {mount.point: mount for mount in by_device.values()}


def _unescape(word: bytes) -> bytes:
    """Replaces the octal escapes of blanks, tabs, newlines and backslashes."""
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), word)


MAX_FILE_SYSTEMS = 64
"""Most file systems of one node, and so most threads. Chosen: a GPU server mounts a dozen."""
_MAX_TEXT = 1 << 20  # bytes of mountinfo: some 8,000 mounts, more than a busy Kubernetes node has
_HANGS, _ANSWERS, _FAILS = 0, 1, 2  # states of filesystem.responds
_SPACE = ("used", "available", "total", "files_used", "files_total")


@dataclass
class Filesystems(Collector):
    """filesystem.*: one entity per file system. node.disk_*: the one at `root`.

    types: shell patterns of file system types to include; exclude: shell patterns of mount points to leave out.
    required: mount points that must be mounted. patience: seconds within which a file system must respond.
    """

    name: ClassVar[str] = "filesystems"
    signals: ClassVar[tuple[str, ...]] = (
        *(f"filesystem.{name}" for name in ("mounted", "responds", "latency", "read_only", *_SPACE)),
        *("node.disk_used", "node.disk_total"),
    )
    interval: float = 30.0
    deadline: float = 15.0
    proc: Path = Path("/proc")
    root: Path = Path("/")
    types: tuple[str, ...] = (
        *("ext[234]", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"),
        *("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "wekafs", "beegfs", "ceph", "9p", "virtiofs", "panfs"),
        *("fuseblk", "fuse", "fuse.*"),
    )
    exclude: tuple[str, ...] = (
        *("/var/lib/kubelet/*", "/var/lib/docker/*", "/var/lib/containerd/*", "/run/*", "/snap/*", "/boot*"),
        *("/var/lib/lxcfs", "*/.gvfs", "*/gvfs"),
    )
    required: tuple[str, ...] = ()
    patience: float = 5.0
    _statvfs: Callable[[bytes], os.statvfs_result] = field(default_factory=lambda: os.statvfs, init=False, repr=False)
    _calls: TimedCalls[os.statvfs_result] = field(default_factory=TimedCalls, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _mounts: dict[bytes, Mount | None] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """Finds the mounted file systems."""
        self._node = node
        self._update_mounts()

    def read(self) -> tuple[Reading, ...]:
        """Returns the space of each file system; one that does not answer in time has none."""
        self._update_mounts()
        points = {os.fsdecode(point): partial(self._statvfs, point) for point, mount in self._mounts.items() if mount}
        points.setdefault(str(self.root), partial(self._statvfs, os.fsencode(self.root)))
        answers = self._calls.run(points, self.patience)
        root = self._space_columns([answers[str(self.root)]])
        sums = {"node.disk_used": root["used"], "node.disk_total": root["total"]}
        node = Reading("node", (f"node:{self._node}",), sums)
        if not self._mounts:
            return (node,)
        reported = [answers.get(os.fsdecode(point)) for point in self._mounts]
        return (node, Reading("filesystem", self._entities(), self._columns(reported)))

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node and its file systems with type and source."""
        node = f"node:{self._node}"
        facts = [{"type": m.type, "source": m.source} if m else {} for m in self._mounts.values()]
        below = {entity: Device((node,), known) for entity, known in zip(self._entities(), facts, strict=True)}
        return {node: Device(), **below}

    def _update_mounts(self) -> None:
        """Updates the selected mounts. Required mount points are always included, as None if they are not mounted."""
        try:
            with open(self.proc / "self" / "mountinfo", "rb") as file:
                found = parse_mounts(file.read(_MAX_TEXT))
        except OSError as failed:
            raise NoData(f"{failed.filename}: {failed.strerror}; expected the list of mounts: mount /proc") from failed
        required = {os.fsencode(os.path.normpath(point)) for point in self.required}
        here: dict[bytes, Mount | None] = {m.point: m for m in found if m.point in required}
        here |= {point: m for point, m in select_mounts(found, self.types, self.exclude).items() if point not in here}
        here |= {point: None for point in required if point not in here}
        keep = sorted(here, key=lambda point: (point not in required, point))[:MAX_FILE_SYSTEMS]
        self._mounts = {point: here[point] for point in sorted(keep)}

    def _entities(self) -> tuple[str, ...]:
        return tuple(f"filesystem:{self._node}.{point.decode('utf-8', 'backslashreplace')}" for point in self._mounts)

    def _columns(self, reported: list[CallResult[os.statvfs_result] | None]) -> dict[str, NDArray[Any]]:
        """Returns the columns. A missing mount has no values except that it is missing."""
        here = list(self._mounts.values())
        columns = {
            "filesystem.mounted": np.array([mount is not None for mount in here]),
            "filesystem.responds": np.array([np.nan if a is None else _response_state(a) for a in reported]),
            "filesystem.latency": np.array([np.nan if a is None else self._calls.elapsed(a) for a in reported]),
            "filesystem.read_only": np.array([np.nan if mount is None else mount.read_only for mount in here]),
        }
        return columns | {f"filesystem.{name}": values for name, values in self._space_columns(reported).items()}

    @staticmethod
    def _space_columns(reported: list[CallResult[os.statvfs_result] | None]) -> dict[str, NDArray[Any]]:
        """Returns the space columns by the last part of the signal's name. File systems without a limit of inodes
        report 0.
        """
        nothing = (np.nan,) * len(_SPACE)
        rows = [nothing if a is None or a.value is None else _space_values(a.value) for a in reported]
        return {name: np.array([row[i] for row in rows]) for i, name in enumerate(_SPACE)}


def _space_values(found: os.statvfs_result) -> tuple[float, ...]:
    """Returns values in the order of _SPACE. Sizes are in units of f_frsize (statvfs(3))."""
    size, files = found.f_frsize, (np.nan, np.nan)
    if found.f_files:
        files = (found.f_files - found.f_ffree, found.f_files)
    return ((found.f_blocks - found.f_bfree) * size, found.f_bavail * size, found.f_blocks * size, *files)


def _response_state(answer: CallResult[os.statvfs_result]) -> float:
    """Returns the state of a response. Without permission (EACCES) nothing is known about the file system."""
    if answer.seconds is None:
        return _HANGS
    if isinstance(answer.error, PermissionError):
        return np.nan
    return _ANSWERS if answer.error is None else _FAILS


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
        """Returns the little-endian number of `width` bytes."""
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
        """Finds the NVMe disks."""
        self._node, self._schedule, self._missing_privilege = node, SamplingSchedule(node), ""
        self._update_disks()

    def read(self) -> tuple[Reading, ...]:
        """Returns the state of each disk, and its health log if due."""
        self._update_disks()
        columns: dict[str, NDArray[Any]] = {"disk.state": np.array([self._read_state(disk) for disk in self._disks])}
        if self._schedule.due(_HEALTH_S):
            columns |= self._health_columns()
        return (Reading("disk", self._entities(), columns),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the disks with their attributes."""
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
