"""The memory of a port's module page by page, through the kernel's ethtool netlink (linux/ethtool_netlink.h).

The ioctl gives modules of the older standards alone: drivers refuse it for CMIS modules, with a line in the kernel log.
This needs CAP_NET_ADMIN and Linux 5.13.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

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
"""How long one answer may take; chosen: 128 bytes over a module's two-wire bus take 20 ms, and below the deadline."""
_MAX_ANSWER = 1 << 15


class EthtoolNetlink:
    """A socket to ask by. Raises OSError as the kernel answers; ENOENT where it has no such family."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = connection or socket.socket(socket.AF_NETLINK, kind, _GENERIC)
        try:
            self._socket.settimeout(TIMEOUT_S)
            self._sequence = 0
            body = struct.pack("=BBH", _GETFAMILY, 1, 0) + attribute(_FAMILY_NAME, b"ethtool\0")
            self._family = struct.unpack_from("=H", dict(attributes(self._ask(_CONTROL, body)))[_FAMILY_ID])[0]
        except (OSError, KeyError, struct.error) as error:
            self._socket.close()
            raise error if isinstance(error, OSError) else OSError(errno.EPROTO, "no netlink family ethtool") from error

    def close(self) -> None:
        self._socket.close()

    def page(self, interface: str, page: int, address: int = 0x50, offset: int = 128, bank: int = 0) -> bytes:
        """128 bytes of a module's memory: the lower half (offset 0, page 0) or an upper page (offset 128)."""
        name = attribute(_DEV_NAME, interface.encode()[:15] + b"\0")
        body = struct.pack("=BBH", _EEPROM_GET, 1, 0) + attribute(_HEADER | _NESTED, name)
        body += attribute(_OFFSET, struct.pack("=I", offset)) + attribute(_LENGTH, struct.pack("=I", 128))
        for kind, value in ((_PAGE, page), (_BANK, bank), (_ADDRESS, address)):
            body += attribute(kind, struct.pack("=B", value))
        return dict(attributes(self._ask(self._family, body))).get(_DATA, b"")

    def _ask(self, family: int, body: bytes) -> bytes:
        """The answer's attributes. A late answer to a question that was given up is passed over."""
        self._sequence += 1
        size = _MESSAGE.size + len(body)
        self._socket.send(_MESSAGE.pack(size, family, _REQUEST | _ACK, self._sequence, 0) + body)
        found = b""
        while True:
            for kind, sequence, payload in messages(self._socket.recv(_MAX_ANSWER)):
                if sequence != self._sequence:
                    continue
                if kind == _ERROR:
                    refused(payload)
                    return found
                found = payload[4:]  # behind struct genlmsghdr


def refused(payload: bytes) -> None:
    """Raises the OSError that a struct nlmsgerr tells, if it is one: 0 is an acknowledgement."""
    code = -struct.unpack_from("=i", payload.ljust(4, b"\0"))[0]
    if code:
        raise OSError(code, os.strerror(code))


def attribute(kind: int, value: bytes) -> bytes:
    """A struct nlattr, padded to 4 bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, value) of each attribute; ends where one is longer than what is left."""
    while len(data) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(data)
        if not _ATTRIBUTE.size <= size <= len(data):
            return
        yield kind & 0x3FFF, data[_ATTRIBUTE.size : size]  # NLA_TYPE_MASK
        data = data[size + -size % 4 :]


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(type, sequence, payload) of each message of one answer."""
    while len(data) >= _MESSAGE.size:
        size, kind, _, sequence, _ = _MESSAGE.unpack_from(data)
        if not _MESSAGE.size <= size <= len(data):
            return
        yield kind, sequence, data[_MESSAGE.size : size]
        data = data[size + -size % 4 :]
