"""Driver statistics of network interfaces beyond sysfs, and the transceiver modules of their ports.

Statistics: physical layer, pause, PCIe stalls, error correction. The table has the names of mlx5. Source: the kernel's
Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst. A signal with several names is their sum:
of the eight priorities of a port (IEEE 802.1Q), which count separately, and of pauses without priority, which a port
uses instead.

Modules: their memory is decoded as SFF-8472 (SFP), SFF-8636 and 8436 (QSFP) or CMIS (QSFP-DD, OSFP). Powers in mW,
currents in mA; NaN for what a module does not measure: copper cables have no optics, and many have no thermometer.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from agents.collectors.nic.ethtool_requests import (
    DriverInfo,
    EthtoolIoctl,
    EthtoolNetlink,
    fec_mode_of_bits,
    positions_of,
)
from agents.collectors.nic.ports import (
    MAX_PORTS,
    SOFTWARE_RDMA,
    is_selected,
    is_virtual_function,
    rdma_ports_by_interface,
)
from agents.collectors.nic.sysfs import LASTING_ERRORS, PAUSE_S, TRANSIENT_PAUSE_S, list_names

_TEMPERATURE = 1 / 256  # degrees per step, all three standards
_VOLTAGE = 1e-4  # V per step: 100 uV
_POWER = 1e-4  # mW per step: 0.1 uW
_BIAS = 2e-3  # mA per step: 2 uA
NAN = float("nan")
# SFF-8024 table 4-1: identifiers
SFP, QSFPS, CMIS_MODULES = (0x03,), (0x0C, 0x0D, 0x11), (0x18, 0x19, 0x1E)
PAGE = 128


@dataclass(frozen=True, slots=True)
class TransceiverModule:
    """One module. rx_power, tx_power, bias: per lane; empty without such monitors."""

    temperature: float = NAN
    voltage: float = NAN
    rx_power: tuple[float, ...] = ()
    tx_power: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    names: dict[str, str] = field(default_factory=dict)

    def worst_lane_values(self) -> tuple[float, ...]:
        """Returns temperature, voltage, lowest power received and sent, highest current: the worst lane of each."""
        least, most = (min(p, default=NAN) for p in (self.rx_power, self.tx_power)), max(self.bias, default=NAN)
        return (self.temperature, self.voltage, *least, most)


def parse_module(memory: bytes, page_1: bytes = b"", page_11: bytes = b"") -> TransceiverModule:
    """Decodes a module by its identifier, from its first 256 bytes (SFF-8472: 512) and, for CMIS, its pages 01h and
    11h.
    """
    if len(memory) < 2 * PAGE:
        return TransceiverModule()
    if memory[0] in SFP:
        return parse_sff8472(memory)
    if memory[0] in QSFPS:
        return parse_sff8636(memory)
    return parse_cmis(memory, page_1, page_11) if memory[0] in CMIS_MODULES else TransceiverModule()


def parse_sff8472(memory: bytes) -> TransceiverModule:
    """Decodes SFP: A0h, then A2h with the diagnostics. External calibration is not supported (byte 92, bit 4)."""
    names = _module_names(memory, vendor=20, part=40, serial=68)
    measured = len(memory) >= 4 * PAGE and memory[92] & 0x60 == 0x60  # has diagnostics, internally calibrated
    if not measured:
        return TransceiverModule(names=names)
    temperature, voltage, bias, sent, received = struct.unpack_from(">hHHHH", memory, 256 + 96)
    return TransceiverModule(
        temperature * _TEMPERATURE,
        voltage * _VOLTAGE,
        (received * _POWER,),
        (sent * _POWER,),
        (bias * _BIAS,),
        names,
    )


def parse_sff8636(memory: bytes) -> TransceiverModule:
    """Decodes QSFP: lower page 00h with the monitors, upper page 00h with the names."""
    names = _module_names(memory, vendor=148, part=168, serial=196)
    (temperature,), (voltage,) = struct.unpack_from(">h", memory, 22), struct.unpack_from(">H", memory, 26)
    lanes = struct.unpack_from(">12H", memory, 34)
    optical = memory[147] >> 4 < 0x0A  # device technology: copper from 1010b on
    ready = voltage > 0 and not memory[2] & 1  # 0 V means that nothing is measured; bit 0: not ready
    return TransceiverModule(
        temperature * _TEMPERATURE if ready else NAN,
        voltage * _VOLTAGE if ready else NAN,
        _scale(lanes[:4], _POWER) if ready and optical else (),
        _scale(lanes[8:], _POWER) if ready and optical and memory[220] & 0x04 else (),  # transmit power is optional
        _scale(lanes[4:8], _BIAS) if ready and optical else (),
        names,
    )


def parse_cmis(memory: bytes, page_1: bytes, page_11: bytes) -> TransceiverModule:
    """Decodes QSFP-DD and OSFP: page 01h lists the values, page 11h has the lanes; a flat memory has neither."""
    names = _module_names(memory, vendor=129, part=148, serial=166)
    flat = bool(memory[2] & 0x80) or len(page_1) < PAGE
    adverts, lanes_adverts = (0, 0) if flat else (page_1[159 - PAGE], page_1[160 - PAGE])
    temperature, voltage = struct.unpack_from(">hH", memory, 14)
    found = TransceiverModule(
        temperature * _TEMPERATURE if adverts & 1 else NAN, voltage * _VOLTAGE if adverts & 2 else NAN, names=names
    )
    if flat or len(page_11) < PAGE:
        return found
    sent, bias, received = (struct.unpack_from(">8H", page_11, at - PAGE) for at in (154, 170, 186))
    lit = _active_lanes(page_11)
    step = _BIAS * (1, 2, 4, 1)[lanes_adverts >> 3 & 3]
    return TransceiverModule(
        found.temperature,
        found.voltage,
        _scale([received[i] for i in lit], _POWER) if lanes_adverts & 4 else (),
        _scale([sent[i] for i in lit], _POWER) if lanes_adverts & 2 else (),
        _scale([bias[i] for i in lit], step) if lanes_adverts & 1 else (),
        names,
    )


def _active_lanes(page_11: bytes) -> list[int]:
    """Returns the lanes whose data path is activated (4, bytes 128-131, a nibble each); all eight if none is."""
    nibbles = [page_11[lane // 2] >> 4 * (lane % 2) & 0x0F for lane in range(8)]
    return [lane for lane, state in enumerate(nibbles) if state == 4] or list(range(8))


def _scale(steps: tuple[int, ...] | list[int], step: float) -> tuple[float, ...]:
    return tuple(value * step for value in steps)


def _module_names(memory: bytes, **places: int) -> dict[str, str]:
    """Returns vendor, part number and serial number, 16 characters each, without empty ones."""
    found = {f"module_{name}": memory[at : at + 16].decode("ascii", "replace") for name, at in places.items()}
    clean = {name: "".join(c for c in text if c.isprintable()).strip() for name, text in found.items()}
    return {name: text for name, text in clean.items() if text}


_DIAGNOSTICS = 0x51  # SFF-8472: A2h on the bus, without the bit for reading


class ModuleReader:
    """Reads one module at a time, through netlink if the kernel has it, else through the ioctl.

    `missing_privilege` names the missing privilege, once the kernel reported it.
    """

    def __init__(self, calls: EthtoolIoctl, netlink: EthtoolNetlink | None) -> None:
        self._calls, self._netlink = calls, netlink
        self.missing_privilege = ""

    @classmethod
    def open(cls, calls: EthtoolIoctl) -> ModuleReader:
        """Returns a reader with what this kernel supports."""
        try:
            return cls(calls, EthtoolNetlink())
        except OSError:  # before Linux 5.6, or a sandbox without netlink: only the ioctl
            return cls(calls, None)

    def close(self) -> None:
        """Closes the netlink socket."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def read(self, interface: str) -> TransceiverModule:
        """Reads a module. Raises OSError if there is none, the driver cannot read it or permission is missing."""
        try:
            return self._read_by_netlink(self._netlink, interface) if self._netlink else self._read_by_ioctl(interface)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                self.missing_privilege = "module memory not readable: add CAP_NET_ADMIN"
            raise

    def _read_by_ioctl(self, interface: str) -> TransceiverModule:
        _, memory = self._calls.read_module(interface)
        return parse_module(memory)

    @staticmethod
    def _read_by_netlink(netlink: EthtoolNetlink, interface: str) -> TransceiverModule:
        memory = netlink.read_page(interface, 0, offset=0)
        if memory[:1] and memory[0] in SFP:
            memory += netlink.read_page(interface, 0)
            if len(memory) == 256 and memory[92] & 0x40:  # SFF-8472 table 8-5: has diagnostics
                memory += netlink.read_page(interface, 0, _DIAGNOSTICS, offset=0) + bytes(128)
            return parse_module(memory)
        memory += netlink.read_page(interface, 0)
        if memory[:1] and memory[0] in CMIS_MODULES and len(memory) == 256 and not memory[2] & 0x80:
            return parse_module(memory, netlink.read_page(interface, 1), netlink.read_page(interface, 0x11))
        return parse_module(memory)


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
        """Opens the sockets of ethtool and finds the interfaces."""
        self._node, self._schedule = node, SamplingSchedule(node)
        self._ethtool = EthtoolIoctl()
        self._module_reader = ModuleReader.open(self._ethtool) if self.modules else None
        self._update_interfaces()

    def read(self) -> tuple[Reading, ...]:
        """Returns the statistics of the interfaces that are due, and FEC and modules every few minutes."""
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
        """Returns the ports with driver and module attributes."""
        return {entity: Device((f"node:{self._node}",), self._attributes(port)) for entity, port in self._ports.items()}

    def close(self) -> None:
        """Closes the sockets."""
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
            names = self._query(port, "names", lambda calls, name: calls.statistics_names(name, count))
            if names is None:  # asked again at the next read, or after the pause
                port.positions, port.count = {}, 0
                return None
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
