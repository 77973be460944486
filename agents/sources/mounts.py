"""Parser of /proc/self/mountinfo: which file systems are mounted where, and which of them are real."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system. read_only: the file system itself, whatever this mount point allows."""

    point: bytes
    device: str
    type: str
    source: str
    read_only: bool

    @property
    def name(self) -> str:
        return self.point.decode("utf-8", "replace")


def mounts(text: bytes) -> tuple[Mount, ...]:
    """All mounts in the kernel's order; lines of another shape are left out (proc_pid_mountinfo(5))."""
    found = []
    for line in text.split(b"\n"):
        first, _, last = line.partition(b" - ")
        words, tail = first.split(b" "), last.split(b" ")
        if len(words) < 6 or len(tail) < 3:
            continue
        kind, source = (_plain(word).decode("utf-8", "replace") for word in tail[:2])
        device = words[2].decode("ascii", "replace")
        found.append(Mount(_plain(words[4]), device, kind, source, b"ro" in tail[2].split(b",")))
    return tuple(found)


def chosen(found: Iterable[Mount], types: Iterable[str], exclude: Iterable[str]) -> dict[bytes, Mount]:
    """Mounts of wanted types, one per file system: the one with the shortest path, by mount point.

    The last mount at a point hides those before it; types and exclude are shell patterns.
    """
    types, exclude = tuple(types), tuple(exclude)
    visible = {mount.point: mount for mount in found}
    by_device: dict[str, Mount] = {}
    for mount in sorted(visible.values(), key=lambda m: (len(m.point), m.point)):
        wanted = any(fnmatchcase(mount.type, pattern) for pattern in types)
        if wanted and not any(fnmatchcase(mount.name, pattern) for pattern in exclude):
            by_device.setdefault(mount.device, mount)
    return {mount.point: mount for mount in by_device.values()}


def _plain(word: bytes) -> bytes:
    """Blanks, tabs, newlines and backslashes come as octal escapes."""
    return _ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), word)
