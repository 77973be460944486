"""What network drivers tell beyond sysfs: physical layer, pause, PCIe stalls, error correction, the cable's module.

The driver's statistics that are taken: signal, names, how often. Names are those of mlx5.

Source: the kernel's Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst. Where several names
stand, the signal is their sum: of the eight priorities of a port (IEEE 802.1Q), each of which counts by itself, and of
pauses without a priority, which a port uses instead.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, Rhythm
from agents.collectors.nic.ethtool_requests import Driver, Ethtool, chosen, fec_mode
from agents.collectors.nic.modules import Module, ModuleReader
from agents.collectors.nic.ports import MAX_PORTS, SOFTWARE, is_virtual_function, owners, wanted
from agents.collectors.nic.sysfs import LASTING, REST_S, TRANSIENT_REST_S, names_in


@dataclass(frozen=True, slots=True)
class Statistic:
    """One signal. gauge: a share of time in %, no counter."""

    signal: str
    names: tuple[str, ...]
    every: float = 5.0
    gauge: bool = False


def _one(signal: str, name: str, every: float = 5.0, gauge: bool = False) -> Statistic:
    return Statistic(f"nic.{signal}", (name,), every, gauge)


def _priorities(signal: str, name: str) -> Statistic:
    names = (name.replace("prioN", f"prio{priority}") for priority in range(8))
    return Statistic(f"nic.{signal}", (*names, name.replace("prioN", "global")))


STATISTICS: tuple[Statistic, ...] = (
    _one("phy_symbol_errors", "rx_pcs_symbol_err_phy"),
    _one("phy_corrected_bits", "rx_corrected_bits_phy"),
    _one("phy_bits", "rx_bits_phy"),
    *(_one(f"lane{lane}_errors", f"rx_err_lane_{lane}_phy") for lane in range(4)),
    _one("phy_crc_errors", "rx_crc_errors_phy"),
    _one("phy_rx_discards", "rx_discards_phy"),
    _one("phy_tx_discards", "tx_discards_phy"),
    _one("phy_tx_errors", "tx_errors_phy"),
    _one("phy_link_downs", "link_down_events_phy"),
    _priorities("rx_pause", "rx_prioN_pause"),
    _priorities("tx_pause", "tx_prioN_pause"),
    _priorities("rx_pause_duration", "rx_prioN_pause_duration"),
    _priorities("tx_pause_duration", "tx_prioN_pause_duration"),
    _one("pause_storm_warnings", "tx_pause_storm_warning_events"),
    _one("pause_storm_errors", "tx_pause_storm_error_events"),
    _one("pcie_stalled_reads", "outbound_pci_stalled_rd", 10.0, gauge=True),
    _one("pcie_stalled_writes", "outbound_pci_stalled_wr", 10.0, gauge=True),
    _one("pcie_stall_read_events", "outbound_pci_stalled_rd_events", 10.0),
    _one("pcie_stall_write_events", "outbound_pci_stalled_wr_events", 10.0),
    _one("pcie_rx_integrity", "rx_pci_signal_integrity", 10.0),
    _one("pcie_tx_integrity", "tx_pci_signal_integrity", 10.0),
    _one("pcie_buffer_overflows", "outbound_pci_buffer_overflow", 10.0),
)


_MISSING = np.iinfo(np.uint64).max
_MODULE = ("nic.module_temperature", "nic.module_voltage", "nic.rx_power_min", "nic.tx_power_min", "nic.bias_max")
_MODULE_S, RESCAN_S = 60.0, 30.0
_RHYTHMS = sorted({_MODULE_S, RESCAN_S, *(s.every for s in STATISTICS)})
_LASTING = LASTING | {errno.E2BIG}  # a driver with more statistics than are read


class _Interface:
    """One interface: what its driver can tell, and until when it is not asked what it refused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = Driver()
        self.module = Module()
        self.count = 0
        self.places: dict[str, NDArray[np.intp]] = {}
        self.rests: dict[str, float] = {}


@dataclass
class EthtoolStatistics(Collector):
    """nic.*: interfaces that are hardware, under the name of their RDMA port if there is one (ports.py).

    `include` wins over `exclude`, both are shell patterns of interfaces; `rdma_exclude` is `exclude` of infiniband.
    """

    name: ClassVar[str] = "ethtool"
    signals: ClassVar[tuple[str, ...]] = (*(s.signal for s in STATISTICS), "nic.fec_mode", *_MODULE)
    root: Path = Path("/sys/class/net")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rdma_exclude: tuple[str, ...] = SOFTWARE
    modules: bool = True
    interval: float = 5.0
    _monotonic: Callable[[], float] = field(default_factory=lambda: time.monotonic, init=False, repr=False)
    _calls: Ethtool | None = field(default=None, init=False, repr=False)
    _reader: ModuleReader | None = field(default=None, init=False, repr=False)
    _ports: dict[str, _Interface] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._rhythm = node, Rhythm(node)
        self._calls = Ethtool()
        self._reader = ModuleReader.opened(self._calls) if self.modules else None
        self._scan()

    def read(self) -> tuple[Reading, ...]:
        due = {every: every <= self.interval or self._rhythm.due(every) for every in _RHYTHMS}
        if due[RESCAN_S]:
            self._scan()
        if not self._ports:
            raise NoData(f"no network interface below {self.root} is hardware")
        columns = self._statistics(due)
        if due[_MODULE_S]:
            columns |= self._slow()
        return (Reading("nic", tuple(self._ports), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {entity: Device((f"node:{self._node}",), self._facts(port)) for entity, port in self._ports.items()}

    def close(self) -> None:
        for opened in (self._reader, self._calls):
            if opened is not None:
                opened.close()
        self._calls = self._reader = None
        self._ports = {}

    def _scan(self) -> None:
        """Takes interfaces that came and lets go those that went."""
        rdma = owners(self.root.parent / "infiniband", self.root, self.rdma_exclude)
        found: dict[str, _Interface] = {}
        for name in names_in(self.root):
            device = self.root / name / "device"
            if not wanted(name, self.include, self.exclude, device.exists() and not is_virtual_function(device)):
                continue
            entity = f"port:{self._node}.{rdma[name].name if name in rdma else name}"
            known = self._ports.get(entity)
            found[entity] = known if known and known.name == name else self._taken(name)
        self._ports = dict(list(found.items())[:MAX_PORTS])

    def _taken(self, name: str) -> _Interface:
        port = _Interface(name)
        if self._calls is not None:
            port.driver = self._ask(port, "driver", Ethtool.driver) or Driver()
        return port

    def _ask(self, port: _Interface, what: str, question: Callable[[Ethtool, str], Any]) -> Any:
        """The answer; None where the driver refused, now or not long ago."""
        if self._calls is None or self._monotonic() < port.rests.get(what, 0.0):
            return None
        try:
            answer = question(self._calls, port.name)
        except OSError as error:  # its signals are missing, which the store shows
            port.rests[what] = self._monotonic() + (REST_S if error.errno in _LASTING else TRANSIENT_REST_S)
            return None
        port.rests.pop(what, None)
        return answer

    def _statistics(self, due: Mapping[float, bool]) -> dict[str, Any]:
        """The signals of the table that are due and that some driver here knows."""
        answers = [self._values(port) for port in self._ports.values()]
        known = {signal for port in self._ports.values() for signal in port.places}
        columns: dict[str, Any] = {}
        for statistic in STATISTICS:
            if statistic.signal not in known or not due[statistic.every]:
                continue
            missing, kind = (np.nan, np.float64) if statistic.gauge else (_MISSING, np.uint64)
            column = np.full(len(self._ports), missing, kind)
            for i, (port, values) in enumerate(zip(self._ports.values(), answers, strict=True)):
                if values is not None and statistic.signal in port.places:
                    column[i] = values[port.places[statistic.signal]].sum()
            columns[statistic.signal] = column
        return columns

    def _values(self, port: _Interface) -> NDArray[np.uint64] | None:
        """All statistics of a driver that has one of ours; names are asked for when their number changes."""
        count = self._ask(port, "count", Ethtool.count)
        if count is None:
            return None
        if count != port.count:
            names = self._ask(port, "names", lambda calls, name: calls.names(name, count)) or []
            places = {s.signal: chosen(names, s.names) for s in STATISTICS}
            port.places = {signal: place for signal, place in places.items() if len(place)}
            port.count = count
        if not port.places:
            return None
        values = self._ask(port, "statistics", lambda calls, name: calls.statistics(name, count).copy())
        return values if values is not None and len(values) == count else None

    def _slow(self) -> dict[str, Any]:
        """Error correction and modules, where some driver here tells."""
        ports, reader, columns = self._ports.values(), self._reader, {}
        active = [self._ask(port, "fec", Ethtool.fec) for port in ports]
        if any(bits is not None for bits in active):
            columns["nic.fec_mode"] = np.array([np.nan if bits is None else fec_mode(bits) for bits in active])
        if reader is not None:
            for port in ports:
                port.module = self._ask(port, "module", lambda _, name: reader.read(name)) or Module()
            if any("module" not in port.rests for port in ports):
                values = np.array([port.module.values() for port in ports]).T
                columns |= dict(zip(_MODULE, values, strict=True))
        return columns

    def _facts(self, port: _Interface) -> dict[str, object]:
        facts: dict[str, object] = {"interface": port.name, **port.module.names}
        told = {"driver": port.driver.driver, "driver_version": port.driver.version, "firmware": port.driver.firmware}
        facts |= {name: text for name, text in told.items() if text and text != "N/A"}
        if self._reader is not None and self._reader.refusal and "module" in port.rests:
            facts["module_access"] = self._reader.refusal
        return facts
