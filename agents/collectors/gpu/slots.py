"""Which GPU is which: a place, and so a name, per GPU that stays the same when another one vanishes.

The driver numbers the GPUs that it has; when one is gone, the numbers after it move down. A place is known by its PCI
address. What was seen since the boot is kept in a small file, because a collector that hung is started anew.
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

NVIDIA = "0x10de"
"""Vendor number, from the PCI ID list."""
DISPLAY = "0x03"
"""PCI base class of display controllers; data-centre GPUs are 0x0302, 3D controllers."""


@dataclass(eq=False)
class Place:
    """One GPU of the node, whether it answers or not. key: its PCI address if that is known; None while nothing is."""

    index: int
    key: str | None = None
    handle: Any = None
    links: int | None = None
    lost: bool = False
    action: int = 0
    pids: tuple[int, ...] = ()
    slow_told: int = 0
    refusal_told: int = 0
    answered: set[str] = field(default_factory=set)

    @property
    def pci(self) -> str | None:
        """domain:bus:device.function"""
        return None if self.key is None else address(self.key)

    facts: dict[str, Any] = field(default_factory=dict)


MOST_PLACES = 128
"""A memory with more is not ours; chosen: twice the GPUs of the largest machines."""
_ADDRESS = re.compile(r"0*([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.ASCII)


def address(text: str) -> str | None:
    """`00000000:1B:00.0` of NVML and `0000:1b:00.0` of the kernel, both as the kernel does; None if it is neither."""
    found = _ADDRESS.fullmatch(text.strip().lower())
    return found[1] + found[2] if found else None


def fitted(root: Path) -> tuple[str, ...]:
    """Addresses of the GPUs that the kernel sees on the PCI bus, in order; none where it tells nothing."""
    found = []
    try:
        devices = list(os.scandir(root))
    except OSError:  # no PCI bus, or not for us to see: then the driver alone says what there is
        return ()
    for device in devices:
        try:
            if _is_gpu(Path(device.path)):
                found.append(address(device.name))
        except OSError:  # unplugged between two reads
            continue
    return tuple(sorted(filter(None, found)))


def _is_gpu(device: Path) -> bool:
    """A GPU that NVIDIA's driver has or could have; not one that another took, such as vfio-pci for a guest."""
    if (device / "vendor").read_text().strip() != NVIDIA or not (device / "class").read_text().startswith(DISPLAY):
        return False
    driver = device / "driver"
    return not driver.exists() or driver.resolve().name == "nvidia"


class Places:
    """All GPUs of the node, in order. Grows; never shrinks and never changes order."""

    def __init__(self) -> None:
        self.all: list[Place] = []

    def settle(
        self,
        counted: Iterable[tuple[str | None, Any]],
        on_bus: Iterable[str],
        remembered: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Gives each GPU its place.

        counted: (PCI address or other key, handle) as the driver numbers them; a lost one may have neither.
        on_bus: addresses of GPUs that the kernel sees. remembered: what `recall` gave.
        """
        counted = list(counted)
        if not self.all:
            self._restore(remembered) if remembered else self._begin([key for key, _ in counted], on_bus)
        named = {place.key: place for place in self.all if place.key}
        for place in self.all:
            place.handle = None
        for key, handle in counted:
            if key is not None:
                (named.get(key) or self._unnamed(key) or self._append(key)).handle = handle
        for key in on_bus:
            if not any(place.key == key for place in self.all) and self._unnamed(key) is None:
                self._append(key)

    def _restore(self, remembered: Mapping[str, Mapping[str, Any]]) -> None:
        """The places that they had before; one whose address was never known stays free."""
        for key, facts in remembered.items():
            while len(self.all) < facts["index"]:
                self._append(None)
            self._append(key)

    def _begin(self, keys: list[str | None], on_bus: Iterable[str]) -> None:
        """The driver's order, which is that of addresses; by address where the bus has GPUs that it does not count."""
        known = {key for key in keys if key}
        extra = set(on_bus) - known
        for key in sorted(known | extra) if extra else keys:
            self._append(key)
        for _ in range(keys.count(None) - len(extra) if extra else 0):
            self._append(None)

    def _unnamed(self, key: str) -> Place | None:
        """A place whose address was not known takes it."""
        for place in self.all:
            if place.key is None:
                place.key = key
                return place
        return None

    def _append(self, key: str | None) -> Place:
        self.all.append(Place(len(self.all), key))
        return self.all[-1]


def boot() -> str:
    """The kernel's id of this boot; empty where it gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux: what is remembered then has no boot to belong to
        return ""


def memory_of_the_service() -> Path | None:
    """Where systemd lets the agent keep things (StateDirectory=); None for an agent that a person started."""
    folder = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    return Path(folder, "gpus.json") if folder else None


def recall(path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """GPUs seen since the boot, in order: address -> index, serial, uuid; none where nothing sensible was kept."""
    if path is None:
        return {}
    try:
        kept = json.loads(path.read_bytes())
        if kept["boot"] != boot():
            return {}
        gpus = {pci: dict(facts) for pci, facts in kept["gpus"].items() if address(pci) == pci}
        indexes = [facts["index"] for facts in gpus.values()]
        sensible = indexes == sorted(set(indexes)) and all(0 <= index <= MOST_PLACES for index in indexes)
        return gpus if sensible else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, or not ours
        return {}


def keep(path: Path | None, places: Iterable[Place]) -> bool:
    """Writes what was seen; False where that is not possible, which costs no more than the memory of it."""
    if path is None:
        return False
    gpus = {
        place.pci: {"index": place.index} | {key: place.facts[key] for key in ("serial", "uuid") if key in place.facts}
        for place in places
        if place.pci
    }
    fresh = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"boot": boot(), "gpus": gpus}))
        fresh.replace(path)
    except OSError:
        return False
    return True
