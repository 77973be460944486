"""Transceiver modules of ports: reads their memory and decodes SFF-8472 (SFP), SFF-8636 and 8436 (QSFP), CMIS (QSFP-DD,
OSFP).

Powers in mW, currents in mA; NaN for what a module does not measure: copper cables have no optics, and many have no
thermometer.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field

from agents.collectors.nic.ethtool_requests import EthtoolIoctl, EthtoolNetlink

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
    """Decodes QSFP-DD and OSFP: page 01h lists what is measured, page 11h has the lanes; a flat memory has neither."""
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
