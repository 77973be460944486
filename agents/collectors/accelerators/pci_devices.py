"""Accelerators on the PCI bus, and their entity names: `gpu:NODE.I` for the first vendor, `gpu:NODE.VENDORI` for
others.

A node usually has accelerators of one vendor; with two, their numbers would clash. The PCI bus decides which is first,
since it does not change when a driver or an agent starts or stops.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Vendor:
    """How a vendor's accelerators are found: vendor id, prefix of the class, device ids (None: all)."""

    vendor: str
    class_prefix: str = ""
    devices: Mapping[str, str] | None = None


_NEURON = dict.fromkeys(("0x7064", "0x7065", "0x7066", "0x7067"), "inferentia") | {
    "0x7164": "trainium",
    "0x7264": "inferentia2",
    "0x7364": "trainium2",
}
_TPU = {
    "0x0027": "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0063": "TPU v5e",
    "0x0062": "TPU v5p",
    "0x006f": "TPU v6e",
    "0x0076": "TPU7x",
}
VENDORS: Mapping[str, Vendor] = {
    # in order of precedence; ids from the PCI ID list, Neuron's driver and Google's tpu-info
    "nvidia": Vendor("0x10de", "0x03"),
    "amd": Vendor("0x1002", "0x12"),
    "gaudi": Vendor("0x1da3"),
    "neuron": Vendor("0x1d0f", devices=_NEURON),  # Amazon's disks and network cards have the same vendor
    "tpu": Vendor("0x1ae0", devices=_TPU),  # Google's network card has the same vendor
}
_OLDER_AMD = "0x0380"
"""Class of AMD's accelerators up to the MI200 (display controller without a screen); graphics cards are 0x0300."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One accelerator on the bus: its address, and the vendor's name for its device id."""

    address: str
    model: str


def list_devices(maker: str, pci: Path = PCI_DEVICES) -> tuple[PciDevice, ...]:
    """Returns a vendor's accelerators in the order of their addresses; empty if the kernel lists none."""
    try:
        folders = sorted(os.scandir(pci), key=lambda folder: folder.name)
    except OSError:  # no PCI bus, or not visible to us
        return ()
    known = VENDORS[maker]
    return tuple(
        PciDevice(folder.name, model)
        for folder in folders
        if (model := _match_model(Path(folder.path), known)) is not None
    )


def entity_prefix(maker: str, pci: Path = PCI_DEVICES) -> str:
    """Returns the text before a number in this vendor's entities: "" for a node's first vendor."""
    earlier = list(VENDORS)[: list(VENDORS).index(maker)]
    return maker if any(list_devices(other, pci) for other in earlier) else ""


def _match_model(folder: Path, known: Vendor) -> str | None:
    try:
        if (folder / "vendor").read_text().strip() != known.vendor:
            return None
        kind = (folder / "class").read_text().strip() if known.class_prefix else ""
        device = (folder / "device").read_text().strip() if known.devices is not None else ""
    except OSError:  # unplugged between two reads
        return None
    if known.devices is not None:
        return known.devices.get(device)
    older = known is VENDORS["amd"] and kind.startswith(_OLDER_AMD)
    return "" if kind.startswith(known.class_prefix) or older else None
