"""Collectors with faults on command, for the storm: a file decides whether they recover."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading

MODES = ("fault", "exit", "garbage", "no data")
"""Contents of the mode file except `healthy`. A FIFO in its place hangs its reader in the kernel."""


@dataclass
class Trouble(Collector):
    """One temperature; its mode comes from a file."""

    name: ClassVar[str] = "trouble"
    signals: ClassVar[tuple[str, ...]] = ("disk.temperature",)
    mode: Path = Path("/dev/null")

    def read(self) -> tuple[Reading, ...]:
        mode = self.mode.read_text().strip()
        if mode == "fault":
            raise RuntimeError("ordered to fail")
        if mode == "exit":
            os._exit(7)
        if mode == "no data":
            raise NoData("ordered to have none")
        values = np.zeros(3) if mode == "garbage" else np.array([300.0])
        return (Reading("disk", (f"disk:n1.{self.name}",), {"disk.temperature": values}),)

    def inventory(self) -> Mapping[str, Device]:
        return {f"disk:n1.{self.name}": Device(("node:n1",))}


class Alone(Trouble):
    """Runs in a separate process."""

    name = "alone"
    lane = "alone"


class First(Trouble):
    """Shares a process with Second."""

    name = "first"
    lane = "shared"


class Second(Trouble):
    """Shares a process with First."""

    name = "second"
    lane = "shared"


class Neighbour(Trouble):
    """Shares a process with the collectors of the node."""

    name = "neighbour"


KINDS: tuple[type[Trouble], ...] = (Alone, First, Second, Neighbour)
