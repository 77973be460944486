"""What a module's memory says: SFF-8472 (SFP), SFF-8636 and 8436 (QSFP), CMIS (QSFP-DD, OSFP).

Bytes -> values, without asking anything. Powers in mW, currents in mA; NaN where the module does not measure: copper
cables have no optics, and many have no thermometer.

Reads the modules of ports: through netlink where the kernel has it, else through the ioctl.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass, field

from agents.collectors.nic.ethtool_requests import Ethtool, EthtoolNetlink

_TEMPERATURE = 1 / 256  # degrees per step, all three standards
_VOLTAGE = 1e-4  # V per step: 100 uV
_POWER = 1e-4  # mW per step: 0.1 uW
_BIAS = 2e-3  # mA per step: 2 uA
NAN = float("nan")
# SFF-8024 table 4-1: identifiers
SFP, QSFPS, CMIS_MODULES = (0x03,), (0x0C, 0x0D, 0x11), (0x18, 0x19, 0x1E)
PAGE = 128


@dataclass(frozen=True, slots=True)
class Module:
    """One module. rx_power, tx_power, bias: per lane; empty where there are no such monitors."""

    temperature: float = NAN
    voltage: float = NAN
    rx_power: tuple[float, ...] = ()
    tx_power: tuple[float, ...] = ()
    bias: tuple[float, ...] = ()
    names: dict[str, str] = field(default_factory=dict)

    def values(self) -> tuple[float, ...]:
        """Temperature, voltage, least power received and sent, most current: the worst lane."""
        least, most = (min(p, default=NAN) for p in (self.rx_power, self.tx_power)), max(self.bias, default=NAN)
        return (self.temperature, self.voltage, *least, most)


def parse(memory: bytes, page_1: bytes = b"", page_11: bytes = b"") -> Module:
    """A module from its first 256 bytes (SFF-8472: 512) and, for CMIS, its pages 01h and 11h; by its identifier."""
    if len(memory) < 2 * PAGE:
        return Module()
    if memory[0] in SFP:
        return sff8472(memory)
    if memory[0] in QSFPS:
        return sff8636(memory)
    return cmis(memory, page_1, page_11) if memory[0] in CMIS_MODULES else Module()


def sff8472(memory: bytes) -> Module:
    """SFP: A0h, then A2h with the diagnostics. Those that want outer calibration are left out (byte 92, bit 4)."""
    names = _names(memory, vendor=20, part=40, serial=68)
    measured = len(memory) >= 4 * PAGE and memory[92] & 0x60 == 0x60  # diagnostics are there, calibrated inside
    if not measured:
        return Module(names=names)
    temperature, voltage, bias, sent, received = struct.unpack_from(">hHHHH", memory, 256 + 96)
    return Module(
        temperature * _TEMPERATURE,
        voltage * _VOLTAGE,
        (received * _POWER,),
        (sent * _POWER,),
        (bias * _BIAS,),
        names,
    )


def sff8636(memory: bytes) -> Module:
    """QSFP: lower page 00h with the monitors, upper page 00h with the names."""
    names = _names(memory, vendor=148, part=168, serial=196)
    (temperature,), (voltage,) = struct.unpack_from(">h", memory, 22), struct.unpack_from(">H", memory, 26)
    lanes = struct.unpack_from(">12H", memory, 34)
    optical = memory[147] >> 4 < 0x0A  # device technology: from 1010b on the medium is copper
    ready = voltage > 0 and not memory[2] & 1  # no module runs on 0 V: then nothing is measured; bit 0: not ready
    return Module(
        temperature * _TEMPERATURE if ready else NAN,
        voltage * _VOLTAGE if ready else NAN,
        _scaled(lanes[:4], _POWER) if ready and optical else (),
        _scaled(lanes[8:], _POWER) if ready and optical and memory[220] & 0x04 else (),  # sent power is optional
        _scaled(lanes[4:8], _BIAS) if ready and optical else (),
        names,
    )


def cmis(memory: bytes, page_1: bytes, page_11: bytes) -> Module:
    """QSFP-DD and OSFP: page 01h says what is measured, page 11h holds the lanes; a flat memory has neither."""
    names = _names(memory, vendor=129, part=148, serial=166)
    flat = bool(memory[2] & 0x80) or len(page_1) < PAGE
    adverts, lanes_adverts = (0, 0) if flat else (page_1[159 - PAGE], page_1[160 - PAGE])
    temperature, voltage = struct.unpack_from(">hH", memory, 14)
    found = Module(
        temperature * _TEMPERATURE if adverts & 1 else NAN, voltage * _VOLTAGE if adverts & 2 else NAN, names=names
    )
    if flat or len(page_11) < PAGE:
        return found
    sent, bias, received = (struct.unpack_from(">8H", page_11, at - PAGE) for at in (154, 170, 186))
    lit = _activated(page_11)
    step = _BIAS * (1, 2, 4, 1)[lanes_adverts >> 3 & 3]
    return Module(
        found.temperature,
        found.voltage,
        _scaled([received[i] for i in lit], _POWER) if lanes_adverts & 4 else (),
        _scaled([sent[i] for i in lit], _POWER) if lanes_adverts & 2 else (),
        _scaled([bias[i] for i in lit], step) if lanes_adverts & 1 else (),
        names,
    )


def _activated(page_11: bytes) -> list[int]:
    """The lanes whose data path is activated (4, bytes 128-131, a nibble each); all eight where none is."""
    nibbles = [page_11[lane // 2] >> 4 * (lane % 2) & 0x0F for lane in range(8)]
    return [lane for lane, state in enumerate(nibbles) if state == 4] or list(range(8))


def _scaled(steps: tuple[int, ...] | list[int], step: float) -> tuple[float, ...]:
    return tuple(value * step for value in steps)


def _names(memory: bytes, **places: int) -> dict[str, str]:
    """The 16 letters each of vendor, part number and serial number; those that are empty are left out."""
    found = {f"module_{name}": memory[at : at + 16].decode("ascii", "replace") for name, at in places.items()}
    clean = {name: "".join(c for c in text if c.isprintable()).strip() for name, text in found.items()}
    return {name: text for name, text in clean.items() if text}


_DIAGNOSTICS = 0x51  # SFF-8472: A2h on the bus, without the bit for reading


class ModuleReader:
    """Asks for one module at a time. `refusal` names the right that is missing, once the kernel said so."""

    def __init__(self, calls: Ethtool, netlink: EthtoolNetlink | None) -> None:
        self._calls, self._netlink = calls, netlink
        self.refusal = ""

    @classmethod
    def opened(cls, calls: Ethtool) -> ModuleReader:
        """A reader with what this kernel has."""
        try:
            return cls(calls, EthtoolNetlink())
        except OSError:  # before Linux 5.6, or a sandbox without netlink: the ioctl is left
            return cls(calls, None)

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    def read(self, interface: str) -> Module:
        """Raises OSError where there is no module, the driver cannot read it or we may not."""
        try:
            return self._by_netlink(self._netlink, interface) if self._netlink else self._by_ioctl(interface)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                self.refusal = "module memory not readable: add CAP_NET_ADMIN"
            raise

    def _by_ioctl(self, interface: str) -> Module:
        _, memory = self._calls.module(interface)
        return parse(memory)

    @staticmethod
    def _by_netlink(netlink: EthtoolNetlink, interface: str) -> Module:
        memory = netlink.page(interface, 0, offset=0)
        if memory[:1] and memory[0] in SFP:
            memory += netlink.page(interface, 0)
            if len(memory) == 256 and memory[92] & 0x40:  # SFF-8472 table 8-5: diagnostics are there
                memory += netlink.page(interface, 0, _DIAGNOSTICS, offset=0) + bytes(128)
            return parse(memory)
        memory += netlink.page(interface, 0)
        if memory[:1] and memory[0] in CMIS_MODULES and len(memory) == 256 and not memory[2] & 0x80:
            return parse(memory, netlink.page(interface, 1), netlink.page(interface, 0x11))
        return parse(memory)
