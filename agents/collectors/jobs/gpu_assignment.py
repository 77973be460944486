"""Which GPUs a process holds, from its environment: what its scheduler gave it, narrowed to what CUDA or HIP may see.

A token is a GPU's number on this node, a UUID, or what else the source calls a device.

Numbers of this node's GPUs by UUID and PCI address, without a driver's library.

The nvml collector numbers GPUs as NVML does, by PCI address, and keeps what it saw in a file; without that file the
order of addresses below /proc/driver/nvidia/gpus gives the same numbers. Minor numbers (/dev/nvidiaN) may be others.
Where neither is there (another maker, or no driver), a number stands for itself and a UUID finds nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.gpu.slots import MOST_PLACES, address, recall
from agents.collectors.jobs.process_identity import Identity

MOST = 256
"""Most devices of one process; chosen: four times the GPUs of the largest machines."""
_GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_SEEN = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
)
_CONTAINER = ("NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES")
_ALL, _NONE = frozenset({"all"}), frozenset({"", "none", "void", "-1", "NoDevFiles"})
_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")
_TOKEN = re.compile(r"[A-Za-z0-9_:./-]{1,120}")
_BOUND = ("SLURMD_TRES_BIND", "SLURM_TRES_BIND", "SLURM_GPU_BIND", "SLURM_GPUS_PER_TASK")
"""Slurm has given each task GPUs of its own: what a task sees is its own, not the node's share of the step."""
WANTED = frozenset((*_GIVEN, *_SEEN, *_CONTAINER, *_BOUND))


@dataclass(frozen=True, slots=True)
class Devices:
    """tokens: the devices. assumed: nobody said so; a rank of torchrun takes the GPU of its local rank."""

    tokens: tuple[str, ...] = ()
    assumed: bool = False


NOTHING = Devices()


def devices(environment: Mapping[str, str], who: Identity | None) -> Devices:
    """What a process with this environment holds."""
    given = next((listed(environment[key]) for key in _GIVEN if environment.get(key)), None)
    inside = next((listed(environment[key]) for key in _CONTAINER if key in environment), None)
    seen = next((_leading(listed(environment[key])) for key in _SEEN if key in environment), None)
    narrowed = given is not None and seen is not None and (len(seen) < len(given) or _bound(environment))
    found = _narrowed(given, inside, seen)
    if found is None:
        local = who.local_rank if who is not None and who.claim == 3 else None
        return Devices() if local is None else Devices((str(local),), assumed=True)
    return Devices(found if narrowed and (who is None or who.claim < 3) else share(found, who))


def _bound(environment: Mapping[str, str]) -> bool:
    return any(environment.get(key, "none") != "none" for key in _BOUND)


def listed(text: str) -> tuple[str, ...] | None:
    """The devices of a list such as `0,2-3` or `GPU-1f..,GPU-2a..`; None for all of them."""
    text = text.strip()
    if text in _ALL:
        return None
    found: list[str] = []
    for word in () if text in _NONE else text.split(","):
        word = word.strip()
        if (span := _RANGE.fullmatch(word)) is not None:
            found += map(str, range(int(span[1]), min(int(span[2]), int(span[1]) + MOST) + 1))
        elif _TOKEN.fullmatch(word) or word == "-1":
            found.append(word)
        if len(found) >= MOST:
            break
    return tuple(found[:MOST])


def _leading(found: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """CUDA sees the devices before the first -1 (CUDA C++ Programming Guide, environment variables)."""
    return found[: found.index("-1")] if found and "-1" in found else found


def _narrowed(
    given: tuple[str, ...] | None, inside: tuple[str, ...] | None, seen: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """`seen` in the node's own numbers.

    Slurm numbers what a task sees from 0 where it shuts out the other devices (ConstrainDevices), else as the node
    does: numbers that are among those given are taken as the node's. In a container they count its own devices.
    """
    outer = given or inside
    if seen is None or not outer:
        return seen if seen is not None else outer
    if not all(word.isdecimal() for word in seen) or (given and set(seen) <= set(given)):
        return seen
    return tuple(outer[int(word)] for word in seen if int(word) < len(outer))


def share(found: tuple[str, ...], who: Identity | None) -> tuple[str, ...]:
    """One rank's part of what all ranks of the node see: consecutive, as frameworks take them by local rank."""
    if who is None or who.local_rank is None or not found or (who.local_size or 2) < 2:
        return found
    if who.local_size is None:
        return (found[who.local_rank],) if who.claim == 3 and who.local_rank < len(found) else found
    each = len(found) // who.local_size
    if not each:
        return (found[who.local_rank % len(found)],)
    return found[who.local_rank * each : (who.local_rank + 1) * each] or found


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
