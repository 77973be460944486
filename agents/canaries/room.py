"""How much memory the kernel lets this process and its children have: that of its control group and those above."""

from __future__ import annotations

import math
from pathlib import Path

PYTORCH = 8 << 30
"""Bytes that a worker with PyTorch and CUDA may need on the host; chosen: it takes 3 to 5 GiB."""


def limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes; infinite where nobody says. A service is stopped whole when one of its processes exceeds it."""
    lowest = math.inf
    for line in _lines(proc):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.strip("/")
        for place in (folder, *folder.parents):
            lowest = min(lowest, _bytes(place / name))
            if place == top:
                break
    return lowest


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no control groups
        return []


def _bytes(path: Path) -> float:
    try:
        return float(int(path.read_text()))
    except (OSError, ValueError):  # the root has none, and "max" is none
        return math.inf
