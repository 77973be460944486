"""Network ports from /sys/class/net: state, speed, traffic and error counters of each interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading
from agents.collectors.procfile import ProcFile

_COUNTERS = {
    "nic.rx_bytes": "statistics/rx_bytes",
    "nic.tx_bytes": "statistics/tx_bytes",
    "nic.rx_packets": "statistics/rx_packets",
    "nic.tx_packets": "statistics/tx_packets",
    "nic.rx_errors": "statistics/rx_errors",
    "nic.tx_errors": "statistics/tx_errors",
    "nic.rx_dropped": "statistics/rx_dropped",
    "nic.tx_dropped": "statistics/tx_dropped",
    "nic.crc_errors": "statistics/rx_crc_errors",
    "nic.carrier_changes": "carrier_changes",
}
_MISSING = np.iinfo(np.uint64).max


@dataclass
class Network(Collector):
    """nic.*: one port per interface that is hardware, or carries traffic and matches none of `exclude`.

    `include` wins over `exclude`; both are shell patterns of interface names.
    """

    name: ClassVar[str] = "network"
    signals: ClassVar[tuple[str, ...]] = ("nic.state", "nic.speed", *_COUNTERS)
    root: Path = Path("/sys/class/net")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = (
        "lo",
        *("veth*", "docker*", "br-*", "virbr*", "cni*", "flannel*", "cali*", "cilium*", "lxc*", "kube-*"),
        *("tap*", "tun*", "vnet*", "dummy*", "ifb*", "vxlan*", "podman*"),
    )
    _ports: dict[str, dict[str, ProcFile]] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        if not self.root.is_dir():
            raise NoData(f"no network interfaces below {self.root}")

    def read(self) -> tuple[Reading, ...]:
        self._follow(set(os.listdir(self.root)))
        if not self._ports:
            raise NoData(f"no network interface below {self.root} is hardware or carries traffic")
        ports = list(self._ports.values())
        columns: dict[str, Any] = {
            "nic.state": np.array([_state(port) for port in ports]),
            "nic.speed": np.array([_or_nan(port["speed"].number()) for port in ports]),
        }
        for signal, path in _COUNTERS.items():
            found = [port[path].number() for port in ports]
            columns[signal] = np.array([_MISSING if f is None or f < 0 else f for f in found], np.uint64)
        return (Reading("nic", tuple(f"port:{self._node}.{name}" for name in self._ports), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {f"port:{self._node}.{name}": Device((f"node:{self._node}",), self._facts(name)) for name in self._ports}

    def close(self) -> None:
        for name in list(self._ports):
            self._let_go(name)

    def _follow(self, names: set[str]) -> None:
        """Opens interfaces that came and closes those that went; one that was taken stays until it goes."""
        for name in [n for n in self._ports if n not in names or self._ports[n]["operstate"].text() is None]:
            self._let_go(name)
        for name in sorted(names - self._ports.keys()):
            if self._wanted(name):
                paths = ("operstate", "carrier", "speed", *_COUNTERS.values())
                self._ports[name] = {path: ProcFile(self.root / name / path) for path in paths}
        self._ports = dict(sorted(self._ports.items()))

    def _wanted(self, name: str) -> bool:
        if any(fnmatch(name, pattern) for pattern in self.include):
            return True
        if any(fnmatch(name, pattern) for pattern in self.exclude):
            return False
        if (self.root / name / "device").exists():
            return True
        carrier = ProcFile(self.root / name / "carrier")
        found = carrier.number()
        carrier.close()
        return found == 1

    def _let_go(self, name: str) -> None:
        for file in self._ports.pop(name).values():
            file.close()

    def _facts(self, name: str) -> dict[str, object]:
        """What tells this port from others: its address, the driver that its peers share, and whether it is radio."""
        facts: dict[str, object] = {"interface": name}
        address = ProcFile(self.root / name / "address")
        if text := (address.text() or "").strip():
            facts["address"] = text
        address.close()
        driver = self.root / name / "device" / "driver"
        if driver.exists():
            facts["driver"] = os.path.basename(os.path.realpath(driver))
        if (self.root / name / "wireless").exists():
            facts["wireless"] = True
        return facts


def _state(port: dict[str, ProcFile]) -> float:
    """1 up, 0 down; drivers that never set operstate say `unknown`, then the carrier decides."""
    text = (port["operstate"].text() or "").strip()
    if text == "unknown":
        return _or_nan(port["carrier"].number())
    return float(text == "up") if text else np.nan


def _or_nan(found: int | None) -> float:
    return np.nan if found is None else found
