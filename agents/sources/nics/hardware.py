"""The PCIe link and the temperature of the device below a port, from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agents.sources.nics.attribute import Attribute, names_in, once

SIGNALS = ("nic.pcie_speed", "nic.pcie_speed_max", "nic.pcie_width", "nic.pcie_width_max", "nic.temperature")
EVERY_S = 30.0
_LINK = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
_NUMBER = re.compile(r"\s*(\d{1,6}(?:\.\d{1,6})?)")


def link_value(text: str) -> float:
    """`32.0 GT/s PCIe` -> 32, `16` -> 16; NaN for `Unknown` and a width of 0 or 255, which say the same."""
    found = _NUMBER.match(text)
    value = float(found[1]) if found else np.nan
    return np.nan if value in (0, 255) else value


class Hardware:
    """Reads the device at `folder` (the PCI function). What it does not tell is NaN."""

    def __init__(self, folder: Path) -> None:
        self._link = [Attribute(folder / name, keep=False) for name in _LINK]
        self._heat = _thermometer(folder)

    def read(self) -> tuple[float, ...]:
        """One value per name of SIGNALS."""
        heat = self._heat.number() if self._heat else None
        return (*(link_value(file.text() or "") for file in self._link), np.nan if heat is None else heat / 1000)


def columns(devices: Iterable[Hardware]) -> dict[str, NDArray[np.float64]]:
    """What is read of all devices; no column for what none of them tells."""
    values = np.array([device.read() for device in devices]).T
    return {name: column for name, column in zip(SIGNALS, values, strict=True) if not np.isnan(column).all()}


def _thermometer(folder: Path) -> Attribute | None:
    """The chip's own sensor: the one labelled so (mlx5: asic), else the first."""
    files = [
        folder / "hwmon" / chip / name
        for chip in names_in(folder / "hwmon")
        for name in names_in(folder / "hwmon" / chip)
        if name.startswith("temp") and name.endswith("_input")
    ]
    labelled = [f for f in files if "asic" in once(f.with_name(f.name.replace("_input", "_label"))).lower()]
    return Attribute((labelled or files)[0], keep=False) if files else None
