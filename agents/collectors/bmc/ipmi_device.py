"""Requests to the BMC through the kernel's /dev/ipmi0: one request and its response at a time, with a time limit."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_LASTING = frozenset((0xC1, 0xC2, 0xC9, 0xCB, 0xCC, 0xCD, 0xD4, 0xD5, 0xD6))
"""Completion codes of what a BMC does not have or allow (IPMI 2.0, table 5-2)."""

_BUSY = frozenset((0xC0, 0xC3, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3))
"""Completion codes of a BMC that is busy, slow, starting or updating (ibid.)."""


class IpmiError(Exception):  # a response of the BMC, not our failure
    """The BMC responded with a completion code other than 0 (IPMI 2.0, table 5-2)."""

    def __init__(self, code: int, netfn: int, command: int) -> None:
        super().__init__(f"BMC returned {code:02x}h for command {command:02x}h of function {netfn:02x}h")
        self.code = code

    @property
    def is_lasting(self) -> bool:
        """Whether the same request will be refused again. A BMC that is busy or starting answers it later."""
        return self.code in _LASTING

    @property
    def is_busy(self) -> bool:
        """Whether the BMC only has no time for it now."""
        return self.code in _BUSY


class IpmiTimeout(Exception):  # noqa: N818 - a normal outcome, not a fault
    """The BMC did not respond in time."""


class IpmiTransport(Protocol):
    """Anything that answers requests as a BMC does."""

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        """Returns the response without its completion code. Raises IpmiError or IpmiTimeout."""

    def close(self) -> None:
        """Closes the device."""


# --- <linux/ipmi.h> --------------------------------------------------------------------------------------------------


class SystemInterface(ctypes.Structure):
    """struct ipmi_system_interface_addr"""

    _fields_ = (("addr_type", ctypes.c_int), ("channel", ctypes.c_short), ("lun", ctypes.c_ubyte))


class Message(ctypes.Structure):
    """struct ipmi_msg"""

    _fields_ = (
        *(("netfn", ctypes.c_ubyte), ("cmd", ctypes.c_ubyte)),
        *(("data_len", ctypes.c_ushort), ("data", ctypes.c_void_p)),
    )


class Request(ctypes.Structure):
    """struct ipmi_req"""

    _fields_ = (
        *(("addr", ctypes.c_void_p), ("addr_len", ctypes.c_uint)),
        *(("msgid", ctypes.c_long), ("msg", Message)),
    )


class Received(ctypes.Structure):
    """struct ipmi_recv"""

    _fields_ = (
        *(("recv_type", ctypes.c_int), ("addr", ctypes.c_void_p), ("addr_len", ctypes.c_uint)),
        *(("msgid", ctypes.c_long), ("msg", Message)),
    )


def _ioctl(direction: int, number: int, size: int) -> int:
    """_IOC of <asm-generic/ioctl.h>, magic 'i': direction 2 = _IOR, 3 = _IOWR."""
    return direction << 30 | size << 16 | ord("i") << 8 | number


SEND_COMMAND = _ioctl(2, 13, ctypes.sizeof(Request))
RECEIVE_MSG_TRUNC = _ioctl(3, 11, ctypes.sizeof(Received))
_SYSTEM_INTERFACE, _BMC_CHANNEL = 0x0C, 0x0F
_RESPONSE = 1  # IPMI_RESPONSE_RECV_TYPE
_MAX_ADDRESS = 40  # sizeof(struct ipmi_addr): IPMI_MAX_ADDR_SIZE and what stands before it, rounded up
_MAX_MESSAGE = 272  # IPMI_MAX_MSG_LENGTH of <linux/ipmi_msgdefs.h>


class KernelIpmi:
    """The BMC behind a device file. A late response is recognised by its number and dropped."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._timeout, self._number = timeout, 0
        self._ready = select.poll()
        self._ready.register(self._handle, select.POLLIN)

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        """See `IpmiTransport.request`."""
        end = time.monotonic() + self._timeout
        self._number = self._number % 0x7FFF_FFFF + 1  # fits a long of 32 bits
        self._send(netfn, command, data, lun)
        while (answer := self._receive(netfn | 1, command)) is None:
            left = end - time.monotonic()
            if left <= 0 or not self._ready.poll(left * 1000):
                raise IpmiTimeout(f"BMC did not respond to command {command:02x}h within {self._timeout:g} s")
        if answer[0] != 0:
            raise IpmiError(answer[0], netfn, command)
        return answer[1:]

    def close(self) -> None:
        """Closes the device."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _send(self, netfn: int, command: int, data: bytes, lun: int) -> None:
        address = SystemInterface(_SYSTEM_INTERFACE, _BMC_CHANNEL, lun)
        buffer = ctypes.create_string_buffer(data, max(len(data), 1))
        message = Message(netfn, command, len(data), ctypes.addressof(buffer))
        request = Request(ctypes.addressof(address), ctypes.sizeof(address), self._number, message)
        fcntl.ioctl(self._handle, SEND_COMMAND, request)

    def _receive(self, netfn: int, command: int) -> bytes | None:
        """Returns the response to the last request if it has arrived. Earlier messages in the queue are dropped."""
        while True:
            address, buffer = ctypes.create_string_buffer(_MAX_ADDRESS), ctypes.create_string_buffer(_MAX_MESSAGE)
            message = Message(0, 0, _MAX_MESSAGE, ctypes.addressof(buffer))
            received = Received(0, ctypes.addressof(address), _MAX_ADDRESS, 0, message)
            try:
                fcntl.ioctl(self._handle, RECEIVE_MSG_TRUNC, received)
            except BlockingIOError:  # nothing more in the queue
                return None
            except OSError as error:
                if (
                    error.errno != errno.EMSGSIZE
                ):  # truncated to our buffer, which has the length of the driver's longest message
                    raise
            ours = received.recv_type == _RESPONSE and received.msgid == self._number
            if ours and (received.msg.netfn, received.msg.cmd) == (netfn, command) and received.msg.data_len > 0:
                return buffer.raw[: min(received.msg.data_len, _MAX_MESSAGE)]


class RequestBudget:
    """A BMC with the limits of one read: after the end of the read or after MAX_TIMEOUTS, requests fail immediately."""

    MAX_TIMEOUTS = 2  # chosen: one request without response must not prevent all others

    def __init__(self, bmc: IpmiTransport, end: float, monotonic: Callable[[], float]) -> None:
        self._bmc, self._end, self._monotonic = bmc, end, monotonic
        self.answers = self.timeouts = 0
        self.last_error = ""

    @property
    def is_spent(self) -> bool:
        """Whether no further request is sent in this read."""
        return self.timeouts >= self.MAX_TIMEOUTS or self._monotonic() >= self._end

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        """See `IpmiTransport.request`."""
        if self.is_spent:
            raise IpmiTimeout("no time is left in this look")
        try:
            answer = self._bmc.request(netfn, command, data, lun)
        except IpmiTimeout as why:
            self.timeouts, self.last_error = self.timeouts + 1, str(why)
            raise
        except IpmiError:
            self.answers += 1
            raise
        self.answers += 1
        return answer

    def close(self) -> None:
        """Closes the device."""
        self._bmc.close()
