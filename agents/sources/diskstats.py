"""What /proc/diskstats tells of each whole disk: transfers, time and requests under way. Part of the collector host."""

from __future__ import annotations

import re
from pathlib import Path

from agents.collector import Reading
from agents.sources.kernel_text import Values
from agents.sources.rows import count_column

_SECTOR = 512  # bytes; the unit of /proc/diskstats whatever the disk's own (kernel Documentation/admin-guide/iostats)
_NOT_WHOLE = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")  # no disks, or layers over disks that are counted already
_CONTROLLER = re.compile(r"nvme\d+")
_FIELDS = {
    # signal -> (position in a line, factor), kernel Documentation/admin-guide/iostats
    "disk.reads": (3, 1),
    "disk.read": (5, _SECTOR),
    "disk.read_time": (6, 1),
    "disk.writes": (7, 1),
    "disk.written": (9, _SECTOR),
    "disk.write_time": (10, 1),
    "disk.in_flight": (11, 1),
    "disk.io_time": (12, 1),
}
SIGNALS = (*_FIELDS, "node.disk_read", "node.disk_written")
MAX_DISKS = 256
"""Most disks of one node; chosen: a storage server with 100 drives, twice over."""


def transfers(text: str) -> dict[str, dict[str, int]]:
    """Values by signal of each name; lines of another shape are left out, and one that was cut off."""
    found = {}
    for line in text[: text.rfind("\n") + 1].splitlines():
        words = line.split()
        if len(words) > 12 and all(w.isascii() and w.isdecimal() and len(w) < 21 for w in words[3:13]):
            found[words[2]] = {signal: int(words[at]) * factor for signal, (at, factor) in _FIELDS.items()}
    return found


class Disks:
    """Tells whole disks from partitions and layers; each name is looked up once."""

    def __init__(self, sys: Path, node: str) -> None:
        self._sys, self._node = sys, node
        self._known: dict[str, str | None] = {}
        self.seen: tuple[str, ...] = ()

    def read(self, text: str) -> tuple[Reading, Values]:
        """The disks one by one, and their sums for the node. The namespaces of an NVMe controller are one disk."""
        disks: dict[str, dict[str, int]] = {}
        for name, values in transfers(text).items():
            disk = self._disk(name)
            if disk is not None and (disk in disks or len(disks) < MAX_DISKS):
                sums = disks.setdefault(disk, dict.fromkeys(_FIELDS, 0))
                for signal, value in values.items():
                    sums[signal] += value
        self.seen = tuple(f"disk:{self._node}.{disk}" for disk in disks)
        columns = {signal: count_column(values[signal] for values in disks.values()) for signal in _FIELDS}
        read = sum(values["disk.read"] for values in disks.values())
        written = sum(values["disk.written"] for values in disks.values())
        return Reading("disk", self.seen, columns), {"node.disk_read": read, "node.disk_written": written}

    def _disk(self, name: str) -> str | None:
        """Name of the disk that a name of diskstats stands for; None for a partition or a layer."""
        if name not in self._known:
            below = self._sys / "block" / name.replace("/", "!")
            whole = not name.startswith(_NOT_WHOLE) and below.exists()
            controller = (below / "device").resolve().name
            self._known[name] = (controller if _CONTROLLER.fullmatch(controller) else name) if whole else None
        return self._known[name]
