"""PCI address -> GPU index, from the NVIDIA driver's /proc tree: logs name GPUs by address, entities by index."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.sources.xids.text import normal_pci

AGAIN_S = 60.0
"""How soon the tree is read again for an address that is not known; chosen: a driver that was loaded late is found."""
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.I)


@dataclass
class GpuPlaces:
    """Where each GPU is: address and UUID -> index. Read when nothing is wrong yet, and kept when the driver hangs.

    NVML counts GPUs in the order of their PCI addresses and leaves out those that the driver was told to exclude, as
    `nvidia-smi` and CUDA_DEVICE_ORDER=PCI_BUS_ID do (CUDA programming guide, environment variables). The minor number
    of /dev/nvidiaN is another order.
    """

    root: Path
    by_pci: Mapping[str, int] = field(default_factory=dict)
    by_uuid: dict[str, str] = field(default_factory=dict)
    branch: int | None = None
    _read: float = field(default=0.0, init=False, repr=False)

    def read(self, patience: float = 1.0) -> None:
        """Reads the tree anew. The names of its folders need no driver; its files may hang, so they get `patience`."""
        self._read, self.branch = time.monotonic(), self._driver_branch()
        addresses = self._addresses()
        if not addresses:
            return
        facts: dict[str, dict[str, str]] = {}
        reader = threading.Thread(target=self._facts, args=(addresses, facts), daemon=True)
        reader.start()
        reader.join(patience)
        known = dict(facts)
        listed = [a for a in addresses if known.get(a, {}).get("GPU Excluded", "No") != "Yes"]
        self.by_pci = {normal_pci(address): index for index, address in enumerate(listed)}
        self.by_uuid |= {f["GPU UUID"]: normal_pci(a) for a, f in known.items() if f.get("GPU UUID")}

    def index(self, pci: str | None) -> int | None:
        """The index of the GPU at an address without function; None where that is not known."""
        if pci is not None and pci not in self.by_pci and time.monotonic() - self._read > AGAIN_S:
            self.read()
        return None if pci is None else self.by_pci.get(pci)

    def _driver_branch(self) -> int | None:
        """575 of 575.57.08; None where no driver says."""
        try:
            text = (self.root / "version").read_text("utf-8", "replace")
        except OSError:  # no driver, or not its tree: the branch is not known
            return None
        found = re.search(r"\b(\d{3})\.\d{1,3}(?:\.\d{1,3})?\b", text)
        return int(found[1]) if found else None

    def _addresses(self) -> list[str]:
        try:
            names = [path.name for path in (self.root / "gpus").iterdir()]
        except OSError:  # no driver
            return []
        return sorted((n for n in names if _ADDRESS.fullmatch(n)), key=lambda n: (int(n.split(":")[0], 16), n.lower()))

    def _facts(self, addresses: list[str], facts: dict[str, dict[str, str]]) -> None:
        for address in addresses:
            try:
                text = (self.root / "gpus" / address / "information").read_text("utf-8", "replace")
            except OSError:  # went away between the two looks
                continue
            pairs = (line.partition(":") for line in text.splitlines())
            facts[address] = {key.strip(): value.strip() for key, _, value in pairs}
