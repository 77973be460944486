"""A BMC for tests: answers IPMI requests from records, readings and log entries that a test gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from agents.collectors.bmc.ipmi_device import IpmiError, IpmiTimeout

FIRMWARE = bytes.fromhex("20 01 03 42 02 df a2 02 00 34 12 00000000")
DEGREES, VOLTS, AMPERES, WATTS, RPM = 1, 4, 5, 6, 18  # base units


def full(number: int, name: str, unit: int, **how: int) -> bytes:
    """A full record (type 01h); the id in front is the board's to give."""
    m, b, k1, k2 = (how.get(key, default) & 0x3FF for key, default in (("m", 1), ("b", 0), ("k1", 0), ("k2", 0)))
    units1 = how.get("data_format", 0) << 6 | how.get("units1", 0)
    body = bytes((how.get("owner", 0x20), how.get("lun", 0), number, 3, 1, 0x7F, 0x68))
    body += bytes((how.get("kind", 1), how.get("event_type", 1), 0, 0, 0, 0, how.get("readable", 0), 0))
    body += bytes((units1, unit, 0, how.get("curve", 0)))
    body += bytes((m & 0xFF, m >> 2 & 0xC0, b & 0xFF, b >> 2 & 0xC0, 0, (k2 & 0xF) << 4 | k1 & 0xF))
    thresholds = (how.get(key, 0) for key in ("emergency", "crit", "max", "lnr", "lcrit", "min"))
    body += bytes((0, 0, 0, 0, 0, 0, *thresholds, 0, 0, 0, 0, 0))
    return record(1, body + bytes((0xC0 | len(name),)) + name.encode("latin-1"))


def compact(number: int, name: str, kind: int, event_type: int = 0x6F, share: int = 1, modifier: int = 0) -> bytes:
    """A compact record (type 02h). share: how many consecutive sensors it describes."""
    body = bytes((0x20, 0, number, 10, 1, 0x67, 0x40, kind, event_type, 0, 0, 0, 0, 0x0F, 0, 0xC0, 0, 0))
    body += bytes((share, modifier, 0, 0, 0, 0, 0, 0))
    return record(2, body + bytes((0xC0 | len(name),)) + name.encode("latin-1"))


def record(kind: int, body: bytes) -> bytes:
    return bytes((0, 0, 0x51, kind, len(body))) + body


def event(timestamp: int, kind: int, number: int, event_type: int, data: bytes, generator: int = 0x20) -> bytes:
    """A log record (type 02h) without its id."""
    written = timestamp.to_bytes(4, "little") + generator.to_bytes(2, "little")
    return b"\x02" + written + bytes((4, kind, number, event_type)) + data.ljust(3, b"\xff")


@dataclass
class Board:
    """Answers as a BMC does: completion code first. `silent` and `refuse` name (netfn, command) that get no answer."""

    records: list[bytes] = field(default_factory=list)
    readings: dict[int, bytes] = field(default_factory=dict)
    log: dict[int, bytes] = field(default_factory=dict)
    watts: int | None = 640
    clock: int = 1_700_000_000
    added: int = 1
    erased: int = 0
    largest: int = 0xFF
    silent: set[tuple[int, int]] = field(default_factory=set)
    refuse: dict[tuple[int, int], int] = field(default_factory=dict)
    asked: list[tuple[int, int, bytes]] = field(default_factory=list)
    chassis: bytes = b"\x21\0\0"
    reservation: int = 1
    busy: int = 0

    def answer(self, netfn: int, command: int, data: bytes, lun: int = 0) -> bytes | None:
        """The complete response; None: no response."""
        self.asked.append((netfn, command, data))
        if (netfn, command) in self.silent:
            return None
        if (netfn, command) in self.refuse:
            return bytes((self.refuse[netfn, command],))
        handlers: dict[tuple[int, int], Callable[[bytes], bytes]] = {
            (0x00, 0x01): lambda _: b"\0" + self.chassis,
            (0x06, 0x01): lambda _: b"\0" + FIRMWARE,
            (0x2C, 0x02): self._power,
            (0x0A, 0x20): lambda _: (
                b"\0\x51" + len(self.records).to_bytes(2, "little") + b"\0\0" + b"\1\0\0\0\0\0\0\0\0"
            ),
            (0x0A, 0x22): self._reserve,
            (0x0A, 0x23): self._sdr,
            (0x04, 0x2D): lambda d: b"\0" + self.readings[d[0]] if d[0] in self.readings else b"\xcb",
            (0x04, 0x23): lambda d: b"\0" + bytes((d[1] + 1, 2, 0, d[1], 0, 0, 0)),
            (0x0A, 0x40): self._log_info,
            (0x0A, 0x43): self._entry,
            (0x0A, 0x48): lambda _: b"\0" + self.clock.to_bytes(4, "little"),
        }
        handler = handlers.get((netfn, command))
        return handler(data) if handler else b"\xc1"

    def write(self, *entries: bytes) -> None:
        """Adds entries to the log."""
        for entry in entries:
            self.log[max(self.log, default=0) + 1] = entry
        self.added += 1

    def clear(self) -> None:
        self.log.clear()
        self.erased += 1

    def _power(self, _: bytes) -> bytes:
        if self.watts is None:
            return b"\xc1"
        low = self.watts.to_bytes(2, "little")
        return b"\0\xdc" + low * 4 + self.clock.to_bytes(4, "little") + b"\xe8\x03\0\0\x40"

    def _reserve(self, _: bytes) -> bytes:
        self.reservation += 1
        return b"\0" + self.reservation.to_bytes(2, "little")

    def _sdr(self, data: bytes) -> bytes:
        place, offset, count = int.from_bytes(data[2:4], "little"), data[4], data[5]
        if self.busy:
            self.busy -= 1
            return b"\xc0"
        if offset and int.from_bytes(data[:2], "little") != self.reservation:
            return b"\xc5"
        if count > self.largest:
            return b"\xca"
        if place >= len(self.records):
            return b"\xcb"
        whole = place.to_bytes(2, "little") + self.records[place][2:]
        following = place + 1 if place + 1 < len(self.records) else 0xFFFF
        return b"\0" + following.to_bytes(2, "little") + whole[offset:][:count]

    def _log_info(self, _: bytes) -> bytes:
        count, stamps = len(self.log).to_bytes(2, "little"), (self.added, self.erased)
        return b"\0\x51" + count + b"\0\x40" + b"".join(s.to_bytes(4, "little") for s in stamps) + b"\x02"

    def _entry(self, data: bytes) -> bytes:
        ids, wanted = sorted(self.log), int.from_bytes(data[2:4], "little")
        found = {0: ids[0], 0xFFFF: ids[-1]}.get(wanted, wanted) if ids else -1
        if found not in self.log:
            return b"\xcb"
        later = [number for number in ids if number > found]
        following = later[0] if later else 0xFFFF
        return b"\0" + following.to_bytes(2, "little") + found.to_bytes(2, "little") + self.log[found]


class DirectBmc:
    """A Board without a device between."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def request(self, netfn: int, command: int, data: bytes = b"", lun: int = 0) -> bytes:
        answer = self.board.answer(netfn, command, data, lun)
        if answer is None:
            raise IpmiTimeout(f"BMC gave no answer to command {command:02x}h in 5 s")
        if answer[0]:
            raise IpmiError(answer[0], netfn, command)
        return answer[1:]

    def close(self) -> None:
        """There is nothing to let go of."""


def server() -> Board:
    """A server with two power supplies, fans and a few sensors of each kind."""
    return Board(
        records=[
            full(0x01, "CPU1 Temp", DEGREES, readable=0b011000, max=85, crit=95),
            full(0x02, "Inlet Temp", DEGREES, data_format=2, readable=0b11, min=0xFB, lcrit=0xF6),
            full(0x10, "P12V", VOLTS, m=63, k2=-3, kind=2),
            full(0x20, "Fan 1", RPM, m=100, kind=4),
            full(0x21, "Fan 1 Duty", 0, units1=1, kind=4),
            full(0x30, "PS1 Input", WATTS, m=8, b=5, k1=1, kind=8),
            full(0x31, "PS1 Curve", AMPERES, curve=0x70, kind=3),
            compact(0x40, "PS Status-", 0x08, share=2, modifier=1),
            compact(0x50, "OS Boot", 0x1F),
            full(0x60, "Satellite", DEGREES, owner=0x2C),
            record(0x11, b"\x20" * 11),
        ],
        readings={
            0x01: bytes((90, 0xC0, 0xC8)),
            0x02: bytes((0xF0, 0xC0, 0xC3)),
            0x10: bytes((192, 0xC0, 0xC0)),
            0x20: bytes((84, 0xC0, 0xC0)),
            0x21: bytes((35, 0xC0, 0xC0)),
            0x30: bytes((100, 0xC0, 0xC0)),
            0x31: bytes((7, 0xC0, 0xC0)),
            0x40: bytes((0, 0xC0, 0x01, 0x80)),
            0x41: bytes((0, 0xC0, 0x0B, 0x80)),
        },
    )
