"""Names of accelerators: `gpu:NODE.I` for the first maker on the PCI bus, `gpu:NODE.MAKERI` for every further one.

A node has accelerators of one maker as a rule; where it has two, numbers of both would meet. The PCI bus decides, since
it stays what it is when a driver or an agent comes or goes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Maker:
    """How a maker's accelerators are known on the PCI bus: vendor, start of the class, device numbers (any if none)."""

    vendor: str
    kind: str = ""
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
MAKERS: Mapping[str, Maker] = {
    # in the order of precedence; numbers from the PCI ID list, Neuron's driver and Google's tpu-info
    "nvidia": Maker("0x10de", "0x03"),
    "amd": Maker("0x1002", "0x12"),
    "gaudi": Maker("0x1da3"),
    "neuron": Maker("0x1d0f", devices=_NEURON),  # Amazon's disks and network cards have the same vendor
    "tpu": Maker("0x1ae0", devices=_TPU),  # so has Google's network card
}
_OLDER_AMD = "0x0380"
"""Class of AMD's accelerators up to the MI200 (display controller without a screen); graphics cards are 0x0300."""


@dataclass(frozen=True, slots=True)
class Found:
    """One accelerator on the bus: its address and the maker's name for its device number."""

    address: str
    model: str


def fitted(maker: str, pci: Path = PCI) -> tuple[Found, ...]:
    """A maker's accelerators in the order of their addresses; none where the kernel does not tell."""
    try:
        folders = sorted(os.scandir(pci), key=lambda folder: folder.name)
    except OSError:  # no PCI bus, or not for us to see
        return ()
    known = MAKERS[maker]
    return tuple(
        Found(folder.name, model) for folder in folders if (model := _model(Path(folder.path), known)) is not None
    )


def prefix(maker: str, pci: Path = PCI) -> str:
    """What stands before a number in the names of this maker's accelerators; nothing for a node's first maker."""
    earlier = list(MAKERS)[: list(MAKERS).index(maker)]
    return maker if any(fitted(other, pci) for other in earlier) else ""


def _model(folder: Path, known: Maker) -> str | None:
    try:
        if (folder / "vendor").read_text().strip() != known.vendor:
            return None
        kind = (folder / "class").read_text().strip() if known.kind else ""
        device = (folder / "device").read_text().strip() if known.devices is not None else ""
    except OSError:  # unplugged between two reads
        return None
    if known.devices is not None:
        return known.devices.get(device)
    older = known is MAKERS["amd"] and kind.startswith(_OLDER_AMD)
    return "" if kind.startswith(known.kind) or older else None
