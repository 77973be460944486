"""Quality of the clock: the kernel's adjtimex, chronyd's own report if chronyd runs, and clock jumps.

chronyd is queried over its command port, one datagram each way. Layout: candm.h of chrony 4 (protocol version 6):
CMD_Request, CMD_Reply, RPY_Tracking; numbers are big-endian.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule
from pipeline.model.records import SECOND, Event

CHRONY_PORT = 323  # DEFAULT_CANDM_PORT; open only to this host unless chrony.conf allows more
_VERSION, _REQUEST, _REPLY = 6, 1, 2
_TRACKING, _TRACKING_REPLY = 33, 5  # REQ_TRACKING, RPY_TRACKING
_REPLY_BYTES = 104  # a request must be as long as its reply, so that chronyd cannot be used to flood others
_HEAD = struct.Struct("!BBBBHHHHHHIII")
_BODY = struct.Struct("!I20sHHIII9I")
_EXPONENT_BITS, _FRACTION_BITS = 7, 25  # of candm.h's Float


@dataclass(frozen=True, slots=True)
class ChronyTracking:
    """chronyd's tracking report. offset: seconds by which the clock is behind."""

    reference: int
    stratum: int
    leap: int
    offset: float
    root_delay: float
    root_dispersion: float


def encode_request(sequence: int) -> bytes:
    """Returns a request for the tracking report."""
    return struct.pack("!BBBBHHI", _VERSION, _REQUEST, 0, 0, _TRACKING, 0, sequence).ljust(_REPLY_BYTES, b"\0")


def decode_tracking(reply: bytes, sequence: int) -> ChronyTracking:
    """Returns the report. Raises ValueError if it is not the reply to the request of that number."""
    if len(reply) < _HEAD.size + _BODY.size:
        raise ValueError(f"reply of {len(reply)} bytes; expected {_HEAD.size + _BODY.size}")
    version, packet, _, _, command, code, status, _, _, _, number, _, _ = _HEAD.unpack_from(reply)
    if (version, packet, command, code, status) != (_VERSION, _REPLY, _TRACKING, _TRACKING_REPLY, 0):
        raise ValueError(f"version {version}, packet {packet}, command {command}, reply {code}, status {status}")
    if number != sequence:
        raise ValueError(f"reply to request {number}; expected {sequence}")
    body = _BODY.unpack_from(reply, _HEAD.size)
    current, delay, dispersion = decode_float(body[7]), decode_float(body[13]), decode_float(body[14])
    return ChronyTracking(body[0], body[2], body[3], current, delay, dispersion)


def decode_float(word: int) -> float:
    """Decodes candm.h's Float: 7 bits of exponent, 25 of coefficient, both signed."""
    exponent, coefficient = word >> _FRACTION_BITS, word & ((1 << _FRACTION_BITS) - 1)
    if exponent >= 1 << (_EXPONENT_BITS - 1):
        exponent -= 1 << _EXPONENT_BITS
    if coefficient >= 1 << (_FRACTION_BITS - 1):
        coefficient -= 1 << _FRACTION_BITS
    return float(coefficient) * 2.0 ** (exponent - _FRACTION_BITS)


def query_chronyd(port: int, patience: float) -> ChronyTracking | None:
    """Returns the report of this host's chronyd; None if none responds in time."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.settimeout(patience)
        sequence = int.from_bytes(os.urandom(4), "big")
        try:
            link.connect(("127.0.0.1", port))
            link.send(encode_request(sequence))
            return decode_tracking(link.recv(512), sequence)
        except (OSError, ValueError):  # no chronyd (ECONNREFUSED), no permission, or another protocol
            return None


_REPORT_S = 60.0
_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000  # linux/timex.h
_TIME_ERROR = 5  # adjtimex's return value for "not synchronized"
_PPM = 1 << 16  # `freq` is in units of 2^-16 ppm
_PATIENCE_S = 0.5  # chosen: chronyd responds within a millisecond; no thread of the agent waits longer


class _Timex(ctypes.Structure):
    """struct timex of linux/timex.h."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "microseconds")),
        *((name, ctypes.c_long) for name in ("tick", "ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        *(("tai", ctypes.c_int), ("unused", ctypes.c_int * 11)),
    )


@dataclass(frozen=True, slots=True)
class KernelClock:
    """The kernel's view of the clock, from adjtimex."""

    state: int
    offset: int
    frequency: int
    error_max: int
    status: int


def adjtimex() -> KernelClock:
    """Reads the kernel's clock state and changes nothing (modes = 0), which needs no privilege. Raises OSError."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return KernelClock(state, timex.offset, timex.freq, timex.maxerror, timex.status)


def clock_values(kept: KernelClock, tracking: ChronyTracking | None) -> dict[str, float]:
    """Returns values by signal. chronyd steers only by frequency, so the kernel's offset is 0 and chronyd's own is
    used.
    """
    offset = kept.offset / (1e9 if kept.status & _STA_NANO else 1e6)
    free = kept.state == _TIME_ERROR or bool(kept.status & _STA_UNSYNC)
    return {
        "node.clock_offset": offset if tracking is None else tracking.offset,
        "node.clock_error_max": kept.error_max / 1e6,
        "node.clock_synchronized": float(not free),
        "node.clock_frequency": kept.frequency / _PPM,
        "node.clock_stratum": np.nan if tracking is None else tracking.stratum,
    }


def read_clocks() -> tuple[int, int]:
    """Returns (wall clock, time since boot including sleep) in microseconds."""
    return time.time_ns() // 1000, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


@dataclass
class Clock(Collector):
    """node.clock_*. A step of the wall clock by more than `jump` seconds between two reads is an event.

    chrony_port: UDP port of chronyd's commands on this host; 0 = do not query it.
    """

    name: ClassVar[str] = "clock"
    signals: ClassVar[tuple[str, ...]] = (
        *("node.clock_offset", "node.clock_error_max", "node.clock_synchronized"),
        *("node.clock_frequency", "node.clock_stratum"),
    )
    events: ClassVar[tuple[str, ...]] = ("clock_jump",)
    interval: float = 10.0
    jump: float = 0.5
    chrony_port: int = CHRONY_PORT
    _clocks: Callable[[], tuple[int, int]] = field(default_factory=lambda: read_clocks, init=False, repr=False)
    _adjtimex: Callable[[], KernelClock] = field(default_factory=lambda: adjtimex, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _difference: int | None = field(default=None, init=False, repr=False)
    _keeper: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        """Checks that the kernel permits reading the clock's state. Raises NoData if not."""
        self._node, self._schedule = node, SamplingSchedule(node)
        try:
            self._adjtimex()
        except OSError as failed:
            raise NoData(
                f"adjtimex: {os.strerror(failed.errno or 0)}; expected a kernel that permits reading it"
            ) from failed

    def read(self) -> tuple[Reading, ...]:
        """Returns the state of the clock if due, and an event if it was set."""
        columns = {}
        if self._schedule.due(_REPORT_S):
            tracking = query_chronyd(self.chrony_port, _PATIENCE_S) if self.chrony_port else None
            self._keeper = "" if tracking is None else "chronyd"
            columns = {signal: np.array([value]) for signal, value in clock_values(self._adjtimex(), tracking).items()}
        return (Reading("node", (f"node:{self._node}",), columns, self._jump_events()),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the node with the program that keeps its clock, if known."""
        return {f"node:{self._node}": Device((), {"clock_keeper": self._keeper} if self._keeper else {})}

    def _jump_events(self) -> tuple[Event, ...]:
        """Returns an event if the clock was set. Slewing changes both clocks alike; only setting the clock, or a leap
        second, changes their difference.
        """
        wall, since_boot = self._clocks()
        before, self._difference = self._difference, wall - since_boot
        if before is None or abs(self._difference - before) <= self.jump * SECOND:
            return ()
        return (Event(wall, f"node:{self._node}", "clock_jump", {"seconds": (self._difference - before) / SECOND}),)
