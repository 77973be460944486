"""Health of NVMe disks: the log page 02h through the kernel's admin command, state and identity from sysfs.

Each disk is asked in a thread of its own, so that one that does not answer costs only its own values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.sources import nvme_log
from agents.sources.calls import Answer, Calls
from agents.sources.procfile import number_of, text_of
from agents.sources.rows import count_column

_CONTROLLER = re.compile(r"nvme\d+")
_STATES = ("new", "live", "resetting", "connecting", "deleting", "dead")  # drivers/nvme/host/sysfs.c
_OTHER = len(_STATES)
_FACTS = {"model": "model", "serial": "serial", "firmware": "firmware_rev", "address": "address"}
_HEALTH_S = 600.0
MAX_DISKS = 128
"""Most disks of one node, and so most threads; chosen: a storage server holds 24 to 60."""


@dataclass
class Nvme(Collector):
    """disk.*: one entity per NVMe controller on PCIe. Without the right to ask disks, their temperature and state.

    patience: seconds within which the disks must answer.
    """

    name: ClassVar[str] = "nvme"
    signals: ClassVar[tuple[str, ...]] = ("disk.state", *nvme_log.GAUGES, *nvme_log.COUNTERS)
    interval: float = 30.0
    deadline: float = 15.0
    root: Path = Path("/sys/class/nvme")
    devices: Path = Path("/dev")
    patience: float = 6.0
    _ask: Callable[[Path], bytes] = field(default_factory=lambda: nvme_log.ask, init=False, repr=False)
    _calls: Calls[bytes] = field(default_factory=Calls, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _disks: tuple[str, ...] = field(default=(), init=False, repr=False)
    _refused: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._rhythm, self._refused = node, Rhythm(node), ""
        self._follow()

    def read(self) -> tuple[Reading, ...]:
        self._follow()
        columns: dict[str, NDArray[Any]] = {"disk.state": np.array([self._state(disk) for disk in self._disks])}
        if self._rhythm.due(_HEALTH_S):
            columns |= self._health()
        return (Reading("disk", self._entities(), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {entity: Device((f"node:{self._node}",), self._facts(d)) for entity, d in self._named().items()}

    def _named(self) -> dict[str, str]:
        return dict(zip(self._entities(), self._disks, strict=True))

    def _entities(self) -> tuple[str, ...]:
        return tuple(f"disk:{self._node}.{disk}" for disk in self._disks)

    def _follow(self) -> None:
        """Controllers that are there now; those of disks across a network are not this node's."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        found = sorted((n for n in names if _CONTROLLER.fullmatch(n)), key=lambda n: int(n[4:]))
        local = [n for n in found if (text_of(self.root / n / "transport") or "pcie") == "pcie"]
        self._disks = tuple(local[:MAX_DISKS])
        if not self._disks:
            raise NoData(f"{self.root}: no NVMe disk; wanted a controller on PCIe")

    def _state(self, disk: str) -> float:
        text = text_of(self.root / disk / "state")
        if text is None:
            return np.nan
        word = text.partition(" ")[0]  # "deleting (no IO)" is deleting
        return _STATES.index(word) if word in _STATES else _OTHER

    def _health(self) -> dict[str, NDArray[Any]]:
        answers = self._calls.ask({d: partial(self._ask, self.devices / d) for d in self._disks}, self.patience)
        logs = [self._log(answers[disk]) for disk in self._disks]
        temperatures = [log.get("disk.temperature", self._warmth(d)) for d, log in zip(self._disks, logs, strict=True)]
        gauges = {s: np.array([log.get(s, np.nan) for log in logs]) for s in nvme_log.GAUGES}
        counters = {s: count_column(_whole(log.get(s)) for log in logs) for s in nvme_log.COUNTERS}
        return {**gauges, **counters, "disk.temperature": np.array(temperatures)}

    def _log(self, answer: Answer[bytes]) -> dict[str, float | int]:
        """Nothing of a disk that failed or does not answer: its values are missing."""
        if isinstance(answer.error, PermissionError):
            self._refused = f"{answer.error.filename or self.devices}: not permitted: add CAP_SYS_ADMIN"
        return nvme_log.health(answer.value) if answer.value is not None else {}

    def _warmth(self, disk: str) -> float:
        """Temperature from the driver's hwmon, which needs no right; in thousandths of a degree."""
        files = [*self.root.glob(f"{disk}/hwmon*/temp1_input"), *self.root.glob(f"{disk}/hwmon/hwmon*/temp1_input")]
        number = number_of(files[0]) if files else None
        return np.nan if number is None else number / 1000

    def _facts(self, disk: str) -> dict[str, object]:
        told = {name: text_of(self.root / disk / file) for name, file in _FACTS.items()}
        return {name: text for name, text in {**told, "health_log": self._refused}.items() if text}


def _whole(value: float | None) -> int | None:
    return value if isinstance(value, int) else None
