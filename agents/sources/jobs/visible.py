"""Which GPUs a process holds, from its environment: what its scheduler gave it, narrowed to what CUDA or HIP may see.

A token is a GPU's number on this node, a UUID, or what else the source calls a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agents.sources.jobs.identity import Identity

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
