"""Slots of GPUs: the index, and so the name, of a GPU stays the same when another one disappears.

The driver numbers the GPUs that it finds; if one is missing, the indices after it shift. A slot is identified by its
PCI address. The GPUs seen since boot are kept in a small file, because a collector that hung is restarted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

NVIDIA_VENDOR = "0x10de"
"""Vendor id in the PCI ID list."""
DISPLAY_CLASS = "0x03"
"""PCI base class of display controllers. Data-centre GPUs are 0x0302, 3D controllers."""


@dataclass(eq=False)
class GpuSlot:
    """One GPU of the node, whether it responds or not. key: its PCI address if known; None if nothing is known."""

    index: int
    key: str | None = None
    handle: Any = None
    links: int | None = None
    lost: bool = False
    recovery_action: int = 0
    pids: tuple[int, ...] = ()
    slow_call_reported: int = 0
    refusal_reported: int = 0
    answered_calls: set[str] = field(default_factory=set)

    @property
    def pci(self) -> str | None:
        """Its PCI address, domain:bus:device.function; None if unknown."""
        return None if self.key is None else kernel_pci_address(self.key)

    attributes: dict[str, Any] = field(default_factory=dict)


MAX_SLOTS = 128
"""A state file with more GPUs is not ours. Chosen: twice the GPUs of the largest machines."""
_ADDRESS = re.compile(r"0*([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.ASCII)


def kernel_pci_address(text: str) -> str | None:
    """Returns `00000000:1B:00.0` of NVML or `0000:1b:00.0` of the kernel in the kernel's form; None for other texts."""
    found = _ADDRESS.fullmatch(text.strip().lower())
    return found[1] + found[2] if found else None


def gpus_on_bus(root: Path) -> tuple[str, ...]:
    """Returns the sorted addresses of the GPUs on the PCI bus by the kernel's list; empty without one."""
    found = []
    try:
        devices = list(os.scandir(root))
    except OSError:  # no PCI bus or no permission: then only the driver reports the GPUs
        return ()
    for device in devices:
        try:
            if _is_gpu(Path(device.path)):
                found.append(kernel_pci_address(device.name))
        except OSError:  # unplugged between two reads
            continue
    return tuple(sorted(filter(None, found)))


def _is_gpu(device: Path) -> bool:
    """Returns whether NVIDIA's driver uses or could use the device. False if another driver has it, such as vfio-pci
    for a guest.
    """
    if (device / "vendor").read_text().strip() != NVIDIA_VENDOR or not (device / "class").read_text().startswith(
        DISPLAY_CLASS
    ):
        return False
    driver = device / "driver"
    return not driver.exists() or driver.resolve().name == "nvidia"


class GpuSlots:
    """All GPUs of the node in order. Slots are added, never removed or reordered."""

    def __init__(self) -> None:
        self.slots: list[GpuSlot] = []

    def assign(
        self,
        driver_gpus: Iterable[tuple[str | None, Any]],
        bus_addresses: Iterable[str],
        remembered: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Assigns each GPU to its slot.

        driver_gpus: (PCI address or other key, handle) in the driver's order; a lost GPU may have neither.
        bus_addresses: GPUs that the kernel sees. remembered: the result of `load_gpus`.
        """
        driver_gpus = list(driver_gpus)
        if not self.slots:
            self._restore_remembered(remembered) if remembered else self._assign_first(
                [key for key, _ in driver_gpus], bus_addresses
            )
        named = {place.key: place for place in self.slots if place.key}
        for place in self.slots:
            place.handle = None
        for key, handle in driver_gpus:
            if key is not None:
                (named.get(key) or self._claim_unnamed(key) or self._append(key)).handle = handle
        for key in bus_addresses:
            if not any(place.key == key for place in self.slots) and self._claim_unnamed(key) is None:
                self._append(key)

    def _restore_remembered(self, remembered: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores earlier slots. A slot whose address was never known stays free."""
        for key, facts in remembered.items():
            while len(self.slots) < facts["index"]:
                self._append(None)
            self._append(key)

    def _assign_first(self, keys: list[str | None], bus_addresses: Iterable[str]) -> None:
        """Creates the first slots in the driver's order, which is that of addresses; by address if the bus has GPUs
        that the driver does not report.
        """
        known = {key for key in keys if key}
        extra = set(bus_addresses) - known
        for key in sorted(known | extra) if extra else keys:
            self._append(key)
        for _ in range(keys.count(None) - len(extra) if extra else 0):
            self._append(None)

    def _claim_unnamed(self, key: str) -> GpuSlot | None:
        """Assigns the address to a slot whose address was not known, and returns it; None if there is none."""
        for place in self.slots:
            if place.key is None:
                place.key = key
                return place
        return None

    def _append(self, key: str | None) -> GpuSlot:
        self.slots.append(GpuSlot(len(self.slots), key))
        return self.slots[-1]


def boot_id() -> str:
    """Returns the kernel's id of this boot; empty if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: the state then belongs to no boot
        return ""


def default_state_file() -> Path | None:
    """Returns the file in the agent's StateDirectory= of systemd; None for an agent started by hand."""
    folder = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder, "gpus.json") if folder else None


def load_gpus(path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Returns the GPUs seen since boot in order: address -> index, serial, uuid. Empty if the file is missing or not
    valid.
    """
    if path is None:
        return {}
    try:
        kept = json.loads(path.read_bytes())
        if kept["boot"] != boot_id():
            return {}
        gpus = {pci: dict(facts) for pci, facts in kept["gpus"].items() if kernel_pci_address(pci) == pci}
        indexes = [facts["index"] for facts in gpus.values()]
        sensible = indexes == sorted(set(indexes)) and all(0 <= index <= MAX_SLOTS for index in indexes)
        return gpus if sensible else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing, or not our format
        return {}


@dataclass
class SlotIndexes:
    """Address without function -> index, of the GPUs in the nvml collector's file; read again when the file changes.

    A reloaded driver numbers anew the GPUs that it still has, while slots keep their index.
    """

    path: Path | None
    _state: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    _indexes: Mapping[str, int] = field(default_factory=dict, init=False, repr=False)

    def load(self) -> Mapping[str, int]:
        """Returns the indexes now; empty without a valid file."""
        if self.path is None:
            return {}
        try:
            status = os.stat(self.path)
        except OSError:  # the nvml collector has seen no GPU yet, or is not used
            return self._indexes
        if (state := (status.st_mtime_ns, status.st_ino)) != self._state:
            gpus = load_gpus(self.path)
            self._state, self._indexes = state, {pci.partition(".")[0]: facts["index"] for pci, facts in gpus.items()}
        return self._indexes


def add_indexes(known: Mapping[str, int], addresses: Iterable[str]) -> dict[str, int]:
    """Returns the known indexes with those of other addresses, which follow in order: nothing is renumbered."""
    found = dict(known)
    for address in addresses:
        found.setdefault(address, max(found.values(), default=-1) + 1)
    return found


def save_gpus(path: Path | None, places: Iterable[GpuSlot]) -> bool:
    """Writes the GPUs seen so far. Returns False if that is not possible; then only the memory of them is lost."""
    if path is None:
        return False
    gpus = {
        place.pci: {"index": place.index}
        | {key: place.attributes[key] for key in ("serial", "uuid") if key in place.attributes}
        for place in places
        if place.pci
    }
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"boot": boot_id(), "gpus": gpus}))
        fresh.replace(path)
    except OSError:
        return False
    return True
