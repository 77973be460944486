"""Which GPUs a process holds: from its environment, and from the GPUs' numbers on this node.

The environment gives what the scheduler assigned, narrowed to what CUDA or HIP may see. A token is a GPU's number on
this node, a UUID, or another name of a device.

The nvml collector numbers GPUs as NVML does, by PCI address, and keeps them in a file. Without that file, the order of
addresses in /proc/driver/nvidia/gpus gives the same numbers; minor numbers (/dev/nvidiaN) may differ. With neither
(another vendor, or no driver), a number is used as it is and a UUID is unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.collectors.gpu.slots import MAX_SLOTS, kernel_pci_address, load_gpus
from agents.collectors.jobs.process_identity import ProcessIdentity

MAX_DEVICES = 256
"""Most devices of one process. Chosen: four times the GPUs of the largest machines."""
_SCHEDULER_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_VISIBLE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
)
_CONTAINER_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES")
_ALL_WORDS, _NO_DEVICE_WORDS = frozenset({"all"}), frozenset({"", "none", "void", "-1", "NoDevFiles"})
_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")
_TOKEN = re.compile(r"[A-Za-z0-9_:./-]{1,120}")
_BINDING_VARIABLES = ("SLURMD_TRES_BIND", "SLURM_TRES_BIND", "SLURM_GPU_BIND", "SLURM_GPUS_PER_TASK")
"""Set where Slurm gave each task its own GPUs: then a task sees its own GPUs, not the step's share of the node."""
DEVICE_VARIABLES = frozenset((*_SCHEDULER_VARIABLES, *_VISIBLE_VARIABLES, *_CONTAINER_VARIABLES, *_BINDING_VARIABLES))


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """Devices of a process. assumed: not assigned by anything; a rank of torchrun uses the GPU of its local rank."""

    tokens: tuple[str, ...] = ()
    assumed: bool = False


NO_DEVICES = HeldDevices()


def find_devices(environment: Mapping[str, str], identity: ProcessIdentity | None) -> HeldDevices:
    """Returns the devices of a process with this environment."""
    assigned = next((parse_device_list(environment[key]) for key in _SCHEDULER_VARIABLES if environment.get(key)), None)
    container = next((parse_device_list(environment[key]) for key in _CONTAINER_VARIABLES if key in environment), None)
    visible = next(
        (_before_minus_one(parse_device_list(environment[key])) for key in _VISIBLE_VARIABLES if key in environment),
        None,
    )
    narrowed = (
        assigned is not None
        and visible is not None
        and (len(visible) < len(assigned) or _is_bound_per_task(environment))
    )
    found = _map_to_node(assigned, container, visible)
    if found is None:
        local = identity.local_rank if identity is not None and identity.claim == 3 else None
        return HeldDevices() if local is None else HeldDevices((str(local),), assumed=True)
    return HeldDevices(
        found if narrowed and (identity is None or identity.claim < 3) else share_of_rank(found, identity)
    )


def _is_bound_per_task(environment: Mapping[str, str]) -> bool:
    return any(environment.get(key, "none") != "none" for key in _BINDING_VARIABLES)


def parse_device_list(text: str) -> tuple[str, ...] | None:
    """Returns the devices of a list such as `0,2-3` or `GPU-1f..,GPU-2a..`; None for all devices."""
    text = text.strip()
    if text in _ALL_WORDS:
        return None
    found: list[str] = []
    for word in () if text in _NO_DEVICE_WORDS else text.split(","):
        word = word.strip()
        if (span := _RANGE.fullmatch(word)) is not None:
            found += map(str, range(int(span[1]), min(int(span[2]), int(span[1]) + MAX_DEVICES) + 1))
        elif _TOKEN.fullmatch(word) or word == "-1":
            found.append(word)
        if len(found) >= MAX_DEVICES:
            break
    return tuple(found[:MAX_DEVICES])


def _before_minus_one(found: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the devices before the first -1, as CUDA does (CUDA C++ Programming Guide, environment variables)."""
    return found[: found.index("-1")] if found and "-1" in found else found


def _map_to_node(
    assigned: tuple[str, ...] | None, container: tuple[str, ...] | None, visible: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Returns the visible devices in the node's own numbers.

    Slurm numbers a task's devices from 0 if it hides the others (ConstrainDevices), else as the node does: numbers that
    are among the assigned ones are the node's. In a container, numbers count the container's own devices.
    """
    outer = assigned or container
    if visible is None or not outer:
        return visible if visible is not None else outer
    if not all(word.isdecimal() for word in visible) or (assigned and set(visible) <= set(assigned)):
        return visible
    return tuple(outer[int(word)] for word in visible if int(word) < len(outer))


def share_of_rank(found: tuple[str, ...], identity: ProcessIdentity | None) -> tuple[str, ...]:
    """Returns one rank's share of the devices that all ranks of the node see: consecutive, by local rank."""
    if identity is None or identity.local_rank is None or not found or (identity.local_size or 2) < 2:
        return found
    if not identity.local_size:
        return (found[identity.local_rank],) if identity.claim == 3 and identity.local_rank < len(found) else found
    each = len(found) // identity.local_size
    if not each:
        return (found[identity.local_rank % len(found)],)
    return found[identity.local_rank * each : (identity.local_rank + 1) * each] or found


_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_MIG_INSTANCE = re.compile(r"MIG-(GPU-[0-9a-fA-F-]{36})/\d+/\d+")
_MAX_FILE_BYTES = 4096  # bytes of one file: a dozen lines


@dataclass(frozen=True, slots=True)
class GpuNumbers:
    """GPU numbers of this node. numbers: UUID or PCI address -> number."""

    numbers: dict[str, int] = field(default_factory=dict)

    def find_number(self, token: str, assumed: bool = False) -> int | None:
        """Returns the number of the GPU that a token names; None if unknown. An assumed number must exist."""
        if token.isascii() and token.isdecimal():
            value = int(token)
            known = value in self.numbers.values() if self.numbers else not assumed
            return value if known and value < MAX_SLOTS else None
        if (parted := _MIG_INSTANCE.fullmatch(token)) is not None:
            token = parted[1]
        return self.numbers.get(token, self.numbers.get(kernel_pci_address(token) or ""))

    def list_entities(self, node: str, tokens: Iterable[str], assumed: bool = False) -> tuple[str, ...]:
        """Returns `gpu:NODE.I` of each known token, without repeats."""
        found = (self.find_number(token, assumed) for token in tokens)
        return tuple(dict.fromkeys(f"gpu:{node}.{number}" for number in found if number is not None))


def load_gpu_numbers(nvml_state: Path | None, driver: Path, others: Path) -> GpuNumbers:
    """Returns the GPU numbers of this node.

    nvml_state: state file of the nvml collector; driver: NVIDIA's folder of GPUs; others: that of amdgpu.
    """
    remembered = load_gpus(nvml_state)
    numbers: dict[str, int] = {}
    for pci, facts in remembered.items():
        numbers[pci] = facts["index"]
        if isinstance(uuid := facts.get("uuid"), str):
            numbers[uuid] = facts["index"]
    if not numbers:
        for index, pci in enumerate(_list_pci_addresses(driver)):
            numbers[pci] = index
            if uuid := _read_uuid(driver / pci / "information"):
                numbers[uuid] = index
    if not numbers:
        numbers = {pci: index for index, pci in enumerate(_list_pci_addresses(others))}
    return GpuNumbers(numbers)


def _list_pci_addresses(folder: Path) -> list[str]:
    """Returns the PCI addresses among a folder's entries, in order."""
    try:
        names = os.listdir(folder)
    except OSError:  # no such driver here
        return []
    return sorted(name for name in names if kernel_pci_address(name) == name)[:MAX_SLOTS]


def _read_uuid(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            text = opened.read(_MAX_FILE_BYTES).decode("ascii", "replace")
    except OSError:  # the GPU is gone, or its driver gives no information
        return ""
    found = _UUID.search(text)
    return found[1] if found else ""
