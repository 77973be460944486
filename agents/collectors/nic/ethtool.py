"""Driver statistics of network interfaces beyond sysfs: physical layer, pause, PCIe stalls, error correction,
transceiver modules.

The statistics table has the names of mlx5. Source: the kernel's
Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst. A signal with several names is their sum:
of the eight priorities of a port (IEEE 802.1Q), which count separately, and of pauses without priority, which a port
uses instead.
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

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.nic.ethtool_requests import DriverInfo, EthtoolIoctl, fec_mode_of_bits, positions_of
from agents.collectors.nic.modules import ModuleReader, TransceiverModule
from agents.collectors.nic.ports import (
    MAX_PORTS,
    SOFTWARE_RDMA,
    is_selected,
    is_virtual_function,
    rdma_ports_by_interface,
)
from agents.collectors.nic.sysfs import LASTING_ERRORS, PAUSE_S, TRANSIENT_PAUSE_S, list_names


@dataclass(frozen=True, slots=True)
class DriverStatistic:
    """One signal. gauge: a share of time in %, not a counter."""

    signal: str
    names: tuple[str, ...]
    interval: float = 5.0
    gauge: bool = False


def _single(signal: str, name: str, every: float = 5.0, gauge: bool = False) -> DriverStatistic:
    return DriverStatistic(f"nic.{signal}", (name,), every, gauge)


def _sum_of_priorities(signal: str, name: str) -> DriverStatistic:
    names = (name.replace("prioN", f"prio{priority}") for priority in range(8))
    return DriverStatistic(f"nic.{signal}", (*names, name.replace("prioN", "global")))


STATISTICS: tuple[DriverStatistic, ...] = (
    _single("phy_symbol_errors", "rx_pcs_symbol_err_phy"),
    _single("phy_corrected_bits", "rx_corrected_bits_phy"),
    _single("phy_bits", "rx_bits_phy"),
    *(_single(f"lane{lane}_errors", f"rx_err_lane_{lane}_phy") for lane in range(4)),
    _single("phy_crc_errors", "rx_crc_errors_phy"),
    _single("phy_rx_discards", "rx_discards_phy"),
    _single("phy_tx_discards", "tx_discards_phy"),
    _single("phy_tx_errors", "tx_errors_phy"),
    _single("phy_link_downs", "link_down_events_phy"),
    _sum_of_priorities("rx_pause", "rx_prioN_pause"),
    _sum_of_priorities("tx_pause", "tx_prioN_pause"),
    _sum_of_priorities("rx_pause_duration", "rx_prioN_pause_duration"),
    _sum_of_priorities("tx_pause_duration", "tx_prioN_pause_duration"),
    _single("pause_storm_warnings", "tx_pause_storm_warning_events"),
    _single("pause_storm_errors", "tx_pause_storm_error_events"),
    _single("pcie_stalled_reads", "outbound_pci_stalled_rd", 10.0, gauge=True),
    _single("pcie_stalled_writes", "outbound_pci_stalled_wr", 10.0, gauge=True),
    _single("pcie_stall_read_events", "outbound_pci_stalled_rd_events", 10.0),
    _single("pcie_stall_write_events", "outbound_pci_stalled_wr_events", 10.0),
    _single("pcie_rx_integrity", "rx_pci_signal_integrity", 10.0),
    _single("pcie_tx_integrity", "tx_pci_signal_integrity", 10.0),
    _single("pcie_buffer_overflows", "outbound_pci_buffer_overflow", 10.0),
)


_MISSING = np.iinfo(np.uint64).max
_MODULE_SIGNALS = (
    "nic.module_temperature",
    "nic.module_voltage",
    "nic.rx_power_min",
    "nic.tx_power_min",
    "nic.bias_max",
)
_MODULE_S, RESCAN_S = 60.0, 30.0
_RHYTHMS = sorted({_MODULE_S, RESCAN_S, *(s.interval for s in STATISTICS)})
_LASTING = LASTING_ERRORS | {errno.E2BIG}  # a driver with more statistics than the limit


class _Interface:
    """One interface: what its driver supports, and until when refused requests are paused."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = DriverInfo()
        self.module = TransceiverModule()
        self.count = 0
        self.positions: dict[str, NDArray[np.intp]] = {}
        self.paused_until: dict[str, float] = {}


@dataclass
class EthtoolStatistics(Collector):
    """nic.*: hardware interfaces, under the name of their RDMA port if there is one (ports.py).

    `include` takes precedence over `exclude`, both are shell patterns of interfaces. `rdma_exclude` is `exclude` of
    infiniband.
    """

    name: ClassVar[str] = "ethtool"
    signals: ClassVar[tuple[str, ...]] = (*(s.signal for s in STATISTICS), "nic.fec_mode", *_MODULE_SIGNALS)
    root: Path = Path("/sys/class/net")
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rdma_exclude: tuple[str, ...] = SOFTWARE_RDMA
    modules: bool = True
    interval: float = 5.0
    _monotonic: Callable[[], float] = field(default_factory=lambda: time.monotonic, init=False, repr=False)
    _ethtool: EthtoolIoctl | None = field(default=None, init=False, repr=False)
    _module_reader: ModuleReader | None = field(default=None, init=False, repr=False)
    _ports: dict[str, _Interface] = field(default_factory=dict, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _schedule: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)

    def open(self, node: str) -> None:
        self._node, self._schedule = node, SamplingSchedule(node)
        self._ethtool = EthtoolIoctl()
        self._module_reader = ModuleReader.open(self._ethtool) if self.modules else None
        self._update_interfaces()

    def read(self) -> tuple[Reading, ...]:
        due = {every: every <= self.interval or self._schedule.due(every) for every in _RHYTHMS}
        if due[RESCAN_S]:
            self._update_interfaces()
        if not self._ports:
            raise NoData(f"no network interface below {self.root} is hardware")
        columns = self._statistics_columns(due)
        if due[_MODULE_S]:
            columns |= self._read_fec_and_modules()
        return (Reading("nic", tuple(self._ports), columns),)

    def inventory(self) -> Mapping[str, Device]:
        return {entity: Device((f"node:{self._node}",), self._attributes(port)) for entity, port in self._ports.items()}

    def close(self) -> None:
        for opened in (self._module_reader, self._ethtool):
            if opened is not None:
                opened.close()
        self._ethtool = self._module_reader = None
        self._ports = {}

    def _update_interfaces(self) -> None:
        """Adds new interfaces and drops removed ones."""
        rdma = rdma_ports_by_interface(self.root.parent / "infiniband", self.root, self.rdma_exclude)
        found: dict[str, _Interface] = {}
        for name in list_names(self.root):
            device = self.root / name / "device"
            if not is_selected(name, self.include, self.exclude, device.exists() and not is_virtual_function(device)):
                continue
            entity = f"port:{self._node}.{rdma[name].name if name in rdma else name}"
            known = self._ports.get(entity)
            found[entity] = known if known and known.name == name else self._make_interface(name)
        self._ports = dict(list(found.items())[:MAX_PORTS])

    def _make_interface(self, name: str) -> _Interface:
        port = _Interface(name)
        if self._ethtool is not None:
            port.driver = self._query(port, "driver", EthtoolIoctl.driver_info) or DriverInfo()
        return port

    def _query(self, port: _Interface, what: str, question: Callable[[EthtoolIoctl, str], Any]) -> Any:
        """Returns the result of a request; None if the driver refused it now or recently."""
        if self._ethtool is None or self._monotonic() < port.paused_until.get(what, 0.0):
            return None
        try:
            answer = question(self._ethtool, port.name)
        except OSError as error:  # its signals are missing, which the store shows
            port.paused_until[what] = self._monotonic() + (PAUSE_S if error.errno in _LASTING else TRANSIENT_PAUSE_S)
            return None
        port.paused_until.pop(what, None)
        return answer

    def _statistics_columns(self, due: Mapping[float, bool]) -> dict[str, Any]:
        """Returns the columns of the table's signals that are due and that some driver here supports."""
        answers = [self._read_values(port) for port in self._ports.values()]
        known = {signal for port in self._ports.values() for signal in port.positions}
        columns: dict[str, Any] = {}
        for statistic in STATISTICS:
            if statistic.signal not in known or not due[statistic.interval]:
                continue
            missing, kind = (np.nan, np.float64) if statistic.gauge else (_MISSING, np.uint64)
            column = np.full(len(self._ports), missing, kind)
            for i, (port, values) in enumerate(zip(self._ports.values(), answers, strict=True)):
                if values is not None and statistic.signal in port.positions:
                    column[i] = values[port.positions[statistic.signal]].sum()
            columns[statistic.signal] = column
        return columns

    def _read_values(self, port: _Interface) -> NDArray[np.uint64] | None:
        """Returns all statistics of a driver that has some of ours. Names are read again when their number changes."""
        count = self._query(port, "count", EthtoolIoctl.statistics_count)
        if count is None:
            return None
        if count != port.count:
            names = self._query(port, "names", lambda calls, name: calls.statistics_names(name, count)) or []
            places = {s.signal: positions_of(names, s.names) for s in STATISTICS}
            port.positions = {signal: place for signal, place in places.items() if len(place)}
            port.count = count
        if not port.positions:
            return None
        values = self._query(port, "statistics", lambda calls, name: calls.read_statistics(name, count).copy())
        return values if values is not None and len(values) == count else None

    def _read_fec_and_modules(self) -> dict[str, Any]:
        """Returns the columns of error correction and modules, if some driver here supports them."""
        ports, reader, columns = self._ports.values(), self._module_reader, {}
        active = [self._query(port, "fec", EthtoolIoctl.active_fec) for port in ports]
        if any(bits is not None for bits in active):
            columns["nic.fec_mode"] = np.array([np.nan if bits is None else fec_mode_of_bits(bits) for bits in active])
        if reader is not None:
            for port in ports:
                port.module = self._query(port, "module", lambda _, name: reader.read(name)) or TransceiverModule()
            if any("module" not in port.paused_until for port in ports):
                values = np.array([port.module.worst_lane_values() for port in ports]).T
                columns |= dict(zip(_MODULE_SIGNALS, values, strict=True))
        return columns

    def _attributes(self, port: _Interface) -> dict[str, object]:
        facts: dict[str, object] = {"interface": port.name, **port.module.names}
        reported = {
            "driver": port.driver.driver,
            "driver_version": port.driver.version,
            "firmware": port.driver.firmware,
        }
        facts |= {name: text for name, text in reported.items() if text and text != "N/A"}
        if self._module_reader is not None and self._module_reader.missing_privilege and "module" in port.paused_until:
            facts["module_access"] = self._module_reader.missing_privilege
        return facts
