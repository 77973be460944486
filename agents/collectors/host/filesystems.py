"""Mounted file systems: space, inodes, whether they respond in time, and whether the kernel still writes to them.

Each is queried in a thread of its own, so that a hung NFS server is a signal and delays no other file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.timed_calls import CallResult, TimedCalls

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
        self._node = node
        self._update_mounts()

    def read(self) -> tuple[Reading, ...]:
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
