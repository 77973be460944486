"""chronyd's own report of the clock, over its command port: one datagram each way.

Layout: candm.h of chrony 4 (protocol version 6): CMD_Request, CMD_Reply, RPY_Tracking; numbers are big-endian.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

PORT = 323  # DEFAULT_CANDM_PORT; open to this host alone unless chrony.conf says otherwise
_VERSION, _REQUEST, _REPLY = 6, 1, 2
_TRACKING, _TRACKING_REPLY = 33, 5  # REQ_TRACKING, RPY_TRACKING
_REPLY_BYTES = 104  # a request must be as long as its reply, so that nobody is flooded through chronyd
_HEAD = struct.Struct("!BBBBHHHHHHIII")
_BODY = struct.Struct("!I20sHHIII9I")
_EXPONENT_BITS, _FRACTION_BITS = 7, 25  # of candm.h's Float


@dataclass(frozen=True, slots=True)
class Tracking:
    """What chronyd knows of its clock. offset: seconds that the clock has still to gain to be right."""

    reference: int
    stratum: int
    leap: int
    offset: float
    root_delay: float
    root_dispersion: float


def request(sequence: int) -> bytes:
    """Asks for the tracking report."""
    return struct.pack("!BBBBHHI", _VERSION, _REQUEST, 0, 0, _TRACKING, 0, sequence).ljust(_REPLY_BYTES, b"\0")


def tracking(reply: bytes, sequence: int) -> Tracking:
    """The report. Raises ValueError on anything but the answer to the request of that number."""
    if len(reply) < _HEAD.size + _BODY.size:
        raise ValueError(f"reply of {len(reply)} bytes; wanted {_HEAD.size + _BODY.size}")
    version, packet, _, _, command, code, status, _, _, _, number, _, _ = _HEAD.unpack_from(reply)
    if (version, packet, command, code, status) != (_VERSION, _REPLY, _TRACKING, _TRACKING_REPLY, 0):
        raise ValueError(f"version {version}, packet {packet}, command {command}, reply {code}, status {status}")
    if number != sequence:
        raise ValueError(f"reply to request {number}; wanted {sequence}")
    body = _BODY.unpack_from(reply, _HEAD.size)
    current, delay, dispersion = number_of(body[7]), number_of(body[13]), number_of(body[14])
    return Tracking(body[0], body[2], body[3], current, delay, dispersion)


def number_of(word: int) -> float:
    """candm.h's Float: 7 bits of exponent, 25 of coefficient, both signed."""
    exponent, coefficient = word >> _FRACTION_BITS, word & ((1 << _FRACTION_BITS) - 1)
    if exponent >= 1 << (_EXPONENT_BITS - 1):
        exponent -= 1 << _EXPONENT_BITS
    if coefficient >= 1 << (_FRACTION_BITS - 1):
        coefficient -= 1 << _FRACTION_BITS
    return float(coefficient) * 2.0 ** (exponent - _FRACTION_BITS)


def ask(port: int, patience: float) -> Tracking | None:
    """The report of this host's chronyd; None if there is none that answers in time."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
        link.settimeout(patience)
        sequence = int.from_bytes(os.urandom(4), "big")
        try:
            link.connect(("127.0.0.1", port))
            link.send(request(sequence))
            return tracking(link.recv(512), sequence)
        except (OSError, ValueError):  # no chronyd (ECONNREFUSED), one that does not tell us, or not its protocol
            return None
