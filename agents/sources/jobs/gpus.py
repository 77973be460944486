"""Numbers of this node's GPUs by UUID and PCI address, without a driver's library.

The nvml collector numbers GPUs as NVML does, by PCI address, and keeps what it saw in a file; without that file the
order of addresses below /proc/driver/nvidia/gpus gives the same numbers. Minor numbers (/dev/nvidiaN) may be others.
Where neither is there (another maker, or no driver), a number stands for itself and a UUID finds nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from agents.sources.nvml.places import MOST_PLACES, address, recall

_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_IN_MIG = re.compile(r"MIG-(GPU-[0-9a-fA-F-]{36})/\d+/\d+")
_MOST = 4096  # bytes of one file: a dozen lines


@dataclass(frozen=True, slots=True)
class Gpus:
    """numbers: UUID or PCI address -> number on the node."""

    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, token: str, assumed: bool = False) -> int | None:
        """The GPU that a token names; None where that cannot be told. An assumed one must be known to be there."""
        if token.isascii() and token.isdecimal():
            value = int(token)
            known = value in self.numbers.values() if self.numbers else not assumed
            return value if known and value < MOST_PLACES else None
        if (parted := _IN_MIG.fullmatch(token)) is not None:
            token = parted[1]
        return self.numbers.get(token, self.numbers.get(address(token) or ""))

    def entities(self, node: str, tokens: Iterable[str], assumed: bool = False) -> tuple[str, ...]:
        """`gpu:NODE.I` of those that are known, each once."""
        found = (self.number(token, assumed) for token in tokens)
        return tuple(dict.fromkeys(f"gpu:{node}.{number}" for number in found if number is not None))


def find(seen: Path | None, driver: Path, others: Path) -> Gpus:
    """seen: the nvml collector's memory; driver: NVIDIA's folder with one per GPU; others: amdgpu's, with addresses."""
    remembered = recall(seen)
    numbers: dict[str, int] = {}
    for pci, facts in remembered.items():
        numbers[pci] = facts["index"]
        if isinstance(uuid := facts.get("uuid"), str):
            numbers[uuid] = facts["index"]
    if not numbers:
        for index, pci in enumerate(_addresses(driver)):
            numbers[pci] = index
            if uuid := _uuid(driver / pci / "information"):
                numbers[uuid] = index
    if not numbers:
        numbers = {pci: index for index, pci in enumerate(_addresses(others))}
    return Gpus(numbers)


def _addresses(folder: Path) -> list[str]:
    """PCI addresses that a folder has entries for, in order."""
    try:
        names = os.listdir(folder)
    except OSError:  # no such driver here
        return []
    return sorted(name for name in names if address(name) == name)[:MOST_PLACES]


def _uuid(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MOST).decode("ascii", "replace")
    except OSError:  # the GPU went, or its driver tells nothing
        return ""
    found = _UUID.search(text)
    return found[1] if found else ""
