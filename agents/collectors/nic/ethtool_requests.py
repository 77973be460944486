"""Requests to a network driver through the kernel: the ioctl SIOCETHTOOL, and ethtool netlink for module memory.

Numbers and layouts are those of linux/ethtool.h and linux/ethtool_netlink.h. Only module memory needs a privilege
(CAP_NET_ADMIN). The ioctl reads only modules of the older standards: drivers refuse it for CMIS modules, with a line in
the kernel log. Netlink reads them page by page; it needs Linux 5.13.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIOCETHTOOL = 0x8946  # linux/sockios.h
_GDRVINFO, _GSTRINGS, _GSTATS, _GSSET_INFO = 0x03, 0x1B, 0x1D, 0x37
_GMODULEINFO, _GMODULEEEPROM, _GFECPARAM = 0x42, 0x43, 0x50
_SS_STATS = 1  # enum ethtool_stringset
_NAME = 32  # ETH_GSTRING_LEN
_IFREQ = struct.Struct("=16sQ16x")  # linux/if.h: struct ifreq of a 64-bit kernel; its union is 24 bytes
_DRVINFO = struct.Struct("=I32s32s32s32s32s12sIIIII")
_FEC = struct.Struct("=IIII")
_EEPROM = struct.Struct("=IIII")
MAX_STATISTICS = 1 << 16
"""Most statistics of one driver. Chosen: mlx5 with 128 queues has 10,000."""
EXTRA_STATISTICS = 4096
"""Room for statistics that are added between two calls, since the kernel writes as many as there are. Chosen: 100
queues."""
MAX_EEPROM = 4096
"""Most bytes of a module's memory; ETH_MODULE_SFF_8636_MAX_LEN of linux/ethtool.h is 640."""


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """Result of ETHTOOL_GDRVINFO; empty if the driver does not provide it."""

    driver: str = ""
    version: str = ""
    firmware: str = ""
    bus: str = ""


class EthtoolIoctl:
    """A socket for the ioctl. Every method raises the kernel's OSError: EOPNOTSUPP, EPERM, ENODEV, EINVAL."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._statistics = np.zeros(1 + EXTRA_STATISTICS, np.uint64)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def driver_info(self, interface: str) -> DriverInfo:
        """Returns name and versions of the driver."""
        found = self._request(interface, _DRVINFO.pack(_GDRVINFO, *([b""] * 6), *([0] * 5)))
        return decode_driver_info(found.tobytes())

    def statistics_count(self, interface: str) -> int:
        """Returns the number of statistics that the driver has now."""
        found = self._request(interface, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _SS_STATS, 0) + bytes(4))
        count = decode_statistics_count(found.tobytes())
        if count > MAX_STATISTICS:
            raise OSError(
                errno.E2BIG, f"{interface}: its driver has {count} statistics; expected at most {MAX_STATISTICS}"
            )
        return count

    def statistics_names(self, interface: str, count: int) -> list[str]:
        """Returns the names of the statistics, in order."""
        found = self._request(
            interface, struct.pack("=III", _GSTRINGS, _SS_STATS, count), (count + EXTRA_STATISTICS) * _NAME
        )
        return decode_names(found.tobytes(), count)

    def read_statistics(self, interface: str, count: int) -> NDArray[np.uint64]:
        """Returns the values of the statistics. The array is valid until the next call."""
        words = 1 + count + EXTRA_STATISTICS
        if len(self._statistics) < words:
            self._statistics = np.zeros(words, np.uint64)
        buffer = self._statistics
        buffer.view(np.uint32)[:2] = _GSTATS, count
        self._ioctl(interface, buffer)
        return buffer[1 : 1 + min(count, int(buffer.view(np.uint32)[1]))]

    def active_fec(self, interface: str) -> int:
        """Returns the bits of the active forward error correction (enum ethtool_fec_config_bits)."""
        active: int = _FEC.unpack(self._request(interface, _FEC.pack(_GFECPARAM, 0, 0, 0)).tobytes()[: _FEC.size])[1]
        return active

    def read_module(self, interface: str) -> tuple[int, bytes]:
        """Returns standard (ETH_MODULE_SFF_...) and memory of the module in one piece."""
        found = self._request(interface, struct.pack("=III", _GMODULEINFO, 0, 0) + bytes(32))
        _, kind, length = struct.unpack_from("=III", found.tobytes())
        length = min(length, MAX_EEPROM)
        whole = self._request(interface, _EEPROM.pack(_GMODULEEEPROM, 0, 0, length), length)
        return kind, whole.tobytes()[_EEPROM.size : _EEPROM.size + length]

    def _request(self, interface: str, request: bytes, room: int = 0) -> NDArray[np.uint8]:
        """Returns the request as the kernel filled it, with `room` bytes after it."""
        buffer = np.zeros(len(request) + room, np.uint8)
        buffer[: len(request)] = np.frombuffer(request, np.uint8)
        self._ioctl(interface, buffer)
        return buffer

    def _ioctl(self, interface: str, buffer: NDArray[np.uint8] | NDArray[np.uint64]) -> None:
        fcntl.ioctl(
            self._socket, SIOCETHTOOL, _IFREQ.pack(interface.encode()[:15], buffer.__array_interface__["data"][0])
        )


def decode_driver_info(answer: bytes) -> DriverInfo:
    """Decodes struct ethtool_drvinfo."""
    _, driver, version, firmware, bus, *_ = _DRVINFO.unpack(answer[: _DRVINFO.size].ljust(_DRVINFO.size, b"\0"))
    return DriverInfo(*(_decode_text(part) for part in (driver, version, firmware, bus)))


def decode_statistics_count(answer: bytes) -> int:
    """Decodes struct ethtool_sset_info: 0 if the mask is empty, that is, the driver has no statistics."""
    _, _, mask, count = struct.unpack_from("=IIQI", answer.ljust(20, b"\0"))
    return int(count) if mask & 1 << _SS_STATS else 0


def decode_names(answer: bytes, count: int) -> list[str]:
    """Decodes struct ethtool_gstrings: at most as many names as both sides expect."""
    _, _, reported = struct.unpack_from("=III", answer.ljust(12, b"\0"))
    parts = range(12, 12 + min(reported, count, MAX_STATISTICS) * _NAME, _NAME)
    return [_decode_text(answer[at : at + _NAME]) for at in parts if at < len(answer)]


def fec_mode_of_bits(active: int) -> float:
    """Returns the number of the lowest set bit, which is the state of nic.fec_mode; NaN if none is set."""
    return float((active & -active).bit_length() - 1) if active else np.nan


def _decode_text(part: bytes) -> str:
    return part.split(b"\0", 1)[0].decode("ascii", "replace").strip()


def positions_of(names: Sequence[str], wanted: Sequence[str]) -> NDArray[np.intp]:
    """Returns the positions of the wanted names."""
    place = {name: i for i, name in enumerate(names)}
    return np.array([place[name] for name in wanted if name in place], np.intp)


_GENERIC = 16  # linux/netlink.h: NETLINK_GENERIC
_REQUEST, _ACK = 1, 4  # NLM_F_REQUEST, NLM_F_ACK
_ERROR = 2  # NLMSG_ERROR
_CONTROL, _GETFAMILY = 16, 3  # linux/genetlink.h: GENL_ID_CTRL, CTRL_CMD_GETFAMILY
_FAMILY_ID, _FAMILY_NAME = 1, 2  # CTRL_ATTR_...
_EEPROM_GET = 31  # ETHTOOL_MSG_MODULE_EEPROM_GET
_HEADER, _OFFSET, _LENGTH, _PAGE, _BANK, _ADDRESS, _DATA = 1, 2, 3, 4, 5, 6, 7  # ETHTOOL_A_MODULE_EEPROM_...
_DEV_NAME = 2  # ETHTOOL_A_HEADER_DEV_NAME
_NESTED = 0x8000  # NLA_F_NESTED
_MESSAGE = struct.Struct("=IHHII")  # struct nlmsghdr
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
TIMEOUT_S = 3.0
"""Seconds that one response may take. Chosen: 128 bytes over a module's two-wire bus take 20 ms; below the deadline."""
_MAX_ANSWER = 1 << 15


class EthtoolNetlink:
    """A netlink socket. Raises the kernel's OSError; ENOENT if it has no such family."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = connection or socket.socket(socket.AF_NETLINK, kind, _GENERIC)
        try:
            self._socket.settimeout(TIMEOUT_S)
            self._sequence = 0
            body = struct.pack("=BBH", _GETFAMILY, 1, 0) + encode_attribute(_FAMILY_NAME, b"ethtool\0")
            self._family = struct.unpack_from("=H", dict(decode_attributes(self._request(_CONTROL, body)))[_FAMILY_ID])[
                0
            ]
        except (OSError, KeyError, struct.error) as error:
            self._socket.close()
            raise error if isinstance(error, OSError) else OSError(errno.EPROTO, "no netlink family ethtool") from error

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def read_page(self, interface: str, page: int, address: int = 0x50, offset: int = 128, bank: int = 0) -> bytes:
        """Returns 128 bytes of a module's memory: the lower half (offset 0, page 0) or an upper page (offset 128)."""
        name = encode_attribute(_DEV_NAME, interface.encode()[:15] + b"\0")
        body = struct.pack("=BBH", _EEPROM_GET, 1, 0) + encode_attribute(_HEADER | _NESTED, name)
        body += encode_attribute(_OFFSET, struct.pack("=I", offset)) + encode_attribute(_LENGTH, struct.pack("=I", 128))
        for kind, value in ((_PAGE, page), (_BANK, bank), (_ADDRESS, address)):
            body += encode_attribute(kind, struct.pack("=B", value))
        return dict(decode_attributes(self._request(self._family, body))).get(_DATA, b"")

    def _request(self, family: int, body: bytes) -> bytes:
        """Returns the attributes of the response. A late response to an earlier request is skipped."""
        self._sequence += 1
        size = _MESSAGE.size + len(body)
        self._socket.send(_MESSAGE.pack(size, family, _REQUEST | _ACK, self._sequence, 0) + body)
        found = b""
        while True:
            for kind, sequence, payload in decode_messages(self._socket.recv(_MAX_ANSWER)):
                if sequence != self._sequence:
                    continue
                if kind == _ERROR:
                    raise_netlink_error(payload)
                    return found
                found = payload[4:]  # after struct genlmsghdr


def raise_netlink_error(payload: bytes) -> None:
    """Raises the OSError in a struct nlmsgerr, if there is one: 0 is an acknowledgement."""
    code = -struct.unpack_from("=i", payload.ljust(4, b"\0"))[0]
    if code:
        raise OSError(code, os.strerror(code))


def encode_attribute(kind: int, value: bytes) -> bytes:
    """Encodes a struct nlattr, padded to 4 bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def decode_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (kind, value) of each attribute; stops at one that is longer than the rest."""
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= size <= len(data):
            return
        yield kind & 0x3FFF, data[_ATTRIBUTE.size : size]  # NLA_TYPE_MASK
        data = data[size + -size % 4 :]


def decode_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields (type, sequence, payload) of each message of one response."""
    while len(data) >= _MESSAGE.size:
        size, kind, _, sequence, _ = _MESSAGE.unpack_from(data)
        if not _MESSAGE.size <= size <= len(data):
            return
        yield kind, sequence, data[_MESSAGE.size : size]
        data = data[size + -size % 4 :]
