"""Services that must run, from systemd over D-Bus: state, restarts, and an event at each change of state.

The bus is a local socket with a timeout for every read and write, so no read can hang. The D-Bus client is minimal:
method calls and replies as bytes. Layout and names: D-Bus Specification 0.43, "Message Protocol" and "Authentication
Protocol".
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, wall_clock
from agents.collectors.columns import count_column
from pipeline.model.records import SECOND, Event, iso

_CALL, _RETURN, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _ERROR_NAME, _REPLY_SERIAL, _DESTINATION, _SIGNATURE = 1, 2, 3, 4, 5, 6, 8
_FIXED_HEADER = 16  # bytes of a message before its header fields, including their length
_MAX_NESTING = 32  # nesting of values; the specification allows 32 arrays and 32 structs
MAX_MESSAGE = 1 << 20
"""Most bytes of one message. Chosen: systemd's reply about a dozen units is 4 KB, and the bus itself allows 128 MiB."""
_NUMBERS = {"y": "B", "b": "I", "n": "h", "q": "H", "i": "i", "u": "I", "x": "q", "t": "Q", "d": "d"}


class DBusError(Exception):  # the reply of the called side, not a fault of the connection
    """The method returned an error; the message is its name."""


def encode_call(
    serial: int, destination: str, path: str, interface: str, member: str, arguments: Sequence[Any]
) -> bytes:
    """Encodes a method call whose arguments are texts and lists of texts."""
    body, signature = bytearray(), ""
    for argument in arguments:
        listed = not isinstance(argument, str)
        signature += "as" if listed else "s"
        _append_list(body, argument) if listed else _append_text(body, argument)
    fields = bytearray()
    reported = (
        (_PATH, "o", path),
        (_DESTINATION, "s", destination),
        (_INTERFACE, "s", interface),
        (_MEMBER, "s", member),
    )
    for code, kind, text in reported:
        _pad(fields, 8)
        fields += bytes((code, 1)) + kind.encode() + b"\0"
        _append_text(fields, text)
    if signature:
        _pad(fields, 8)
        fields += bytes((_SIGNATURE, 1)) + b"g\0" + bytes((len(signature),)) + signature.encode() + b"\0"
    head = bytearray(struct.pack("<cBBBIII", b"l", _CALL, 0, 1, len(body), serial, len(fields))) + fields
    _pad(head, 8)
    return bytes(head + body)


def message_length(fixed: bytes) -> int:
    """Returns the length of the whole message from its first 16 bytes. Raises ValueError if they are not a message
    header.
    """
    order = {b"l": "<", b"B": ">"}.get(fixed[:1])
    if order is None or len(fixed) < _FIXED_HEADER or fixed[3] != 1:
        raise ValueError(f"{fixed[:_FIXED_HEADER].hex()}: expected the header of a D-Bus message")
    body, _, fields = struct.unpack_from(f"{order}III", fixed, 4)
    whole = _FIXED_HEADER + (fields + 7) // 8 * 8 + body
    if whole > MAX_MESSAGE:
        raise ValueError(f"D-Bus message of {whole} bytes; expected at most {MAX_MESSAGE}")
    return int(whole)


def decode_reply(whole: bytes) -> tuple[int | None, list[Any]]:
    """Returns (serial of the answered call, its values). Raises DBusError for an error, ValueError if it is not a
    message.
    """
    if len(whole) < _FIXED_HEADER or message_length(whole[:_FIXED_HEADER]) != len(whole):
        raise ValueError(f"{len(whole)} bytes; expected a complete D-Bus message")
    try:
        reader = _Reader(whole, "<" if whole[:1] == b"l" else ">", 12)
        fields = dict(reader.read_value("a(yv)"))
        reader.align(8)
        serial, kind = fields.get(_REPLY_SERIAL), whole[1]
        if kind == _ERROR:
            raise DBusError(str(fields.get(_ERROR_NAME, "error without a name")))
        if kind != _RETURN:
            return None, []
        return serial, reader.read_values(str(fields.get(_SIGNATURE, "")))
    except (struct.error, IndexError, TypeError) as broken:
        raise ValueError(f"broken D-Bus message: {broken}") from broken


class _Reader:
    """Reads values of a message one by one. Raises ValueError, IndexError or struct.error if it is broken."""

    def __init__(self, data: bytes, order: str, at: int) -> None:
        self._data, self._order, self._offset = data, order, at

    def align(self, to: int) -> None:
        """Skips to the next multiple of `to` bytes."""
        self._offset += -self._offset % to

    def read_values(self, signature: str, depth: int = 0) -> list[Any]:
        """Reads one value per type of the signature."""
        found = []
        while signature:
            end = _first_type_length(signature)
            found.append(self.read_value(signature[:end], depth))
            signature = signature[end:]
        return found

    def read_value(self, kind: str, depth: int = 0) -> Any:
        """Reads one value of this type."""
        if depth > _MAX_NESTING:
            raise ValueError("values nested too deep")
        if kind[0] in _NUMBERS:
            return self._read_number(_NUMBERS[kind[0]])
        if kind[0] in "so":
            return self._read_text(self._read_number("I"))
        if kind[0] == "g":
            return self._read_text(self._read_number("B"))
        if kind[0] == "v":
            return self.read_values(self._read_text(self._read_number("B")), depth + 1)[0]
        if kind[0] == "a":
            return self._read_list(kind[1:], depth + 1)
        if kind[0] in "({":
            self.align(8)
            return tuple(self.read_values(kind[1:-1], depth + 1))
        raise ValueError(f"unknown type {kind!r}")

    def _read_number(self, code: str) -> Any:
        self.align(struct.calcsize(code))
        (number,) = struct.unpack_from(self._order + code, self._data, self._offset)
        self._offset += struct.calcsize(code)
        return number

    def _read_text(self, size: int) -> str:
        if self._offset + size >= len(self._data):
            raise ValueError("text beyond the message")
        text = self._data[self._offset : self._offset + size].decode("utf-8", "replace")
        self._offset += size + 1
        return text

    def _read_list(self, kind: str, depth: int) -> list[Any]:
        end = self._read_number("I")
        self.align(8 if kind[0] in "({" else 1)
        end += self._offset
        if end > len(self._data):
            raise ValueError("list beyond the message")
        found = []
        while self._offset < end:
            before = self._offset
            found.append(self.read_value(kind, depth))
            if self._offset == before:  # an empty struct would never end
                raise ValueError("value without bytes")
        return found


class DBusConnection:
    """A connection to the bus at a Unix socket. No call waits longer than `patience` seconds. Raises OSError."""

    def __init__(self, path: str, patience: float) -> None:
        self._patience, self._serial = patience, 0
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._link.settimeout(patience)
            self._link.connect(path)
            self._authenticate()
            self.call("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "Hello")
        except BaseException:
            self.close()
            raise

    def call(self, destination: str, path: str, interface: str, member: str, *arguments: Any) -> list[Any]:
        """Calls a method and returns its result. Raises DBusError, or OSError if the bus fails or takes too long."""
        self._serial += 1
        until = time.monotonic() + self._patience
        self._link.settimeout(self._patience)
        self._link.sendall(encode_call(self._serial, destination, path, interface, member, arguments))
        while True:
            fixed = self._receive(_FIXED_HEADER, until)
            try:
                serial, values = decode_reply(fixed + self._receive(message_length(fixed) - _FIXED_HEADER, until))
            except ValueError as broken:
                raise ConnectionError(str(broken)) from broken
            if serial == self._serial:
                return values

    def close(self) -> None:
        """Closes the connection."""
        self._link.close()

    def _authenticate(self) -> None:
        """Authenticates with EXTERNAL: the kernel passes our user id to the bus."""
        self._link.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        reported, until = b"", time.monotonic() + self._patience
        while not reported.endswith(b"\r\n") and len(reported) < 512:
            reported += self._receive(1, until)
        if not reported.startswith(b"OK "):
            raise PermissionError(f"the bus refuses user {os.getuid()}: {reported[:80]!r}")
        self._link.sendall(b"BEGIN\r\n")

    def _receive(self, size: int, until: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._link.settimeout(left)
            if not (piece := self._link.recv(size - len(found))):
                raise ConnectionResetError("the bus closed the connection")
            found += piece
        return bytes(found)


def _first_type_length(signature: str) -> int:
    """Returns the length of the first complete type of a signature. Raises IndexError if there is none."""
    if signature[0] == "a":
        return 1 + _first_type_length(signature[1:])
    if signature[0] not in "({":
        return 1
    depth, at = 0, 0
    while True:
        depth += (signature[at] in "({") - (signature[at] in ")}")
        at += 1
        if not depth:
            return at


def _pad(data: bytearray, to: int) -> None:
    data += bytes(-len(data) % to)


def _append_text(data: bytearray, text: str) -> None:
    _pad(data, 4)
    raw = text.encode()
    data += struct.pack("<I", len(raw)) + raw + b"\0"


def _append_list(data: bytearray, texts: Sequence[str]) -> None:
    _pad(data, 4)
    inner = bytearray()
    for text in texts:
        _append_text(inner, text)
    data += struct.pack("<I", len(inner)) + inner


_SYSTEMD, _ROOT = "org.freedesktop.systemd1", "/org/freedesktop/systemd1"
_MANAGER, _PROPERTIES = "org.freedesktop.systemd1.Manager", "org.freedesktop.DBus.Properties"
_ABSENT = "absent"
_STATES = ("inactive", "active", "reloading", "failed", "activating", "deactivating", "maintenance", _ABSENT)
_SUFFIXES = (".service", ".socket", ".target", ".timer", ".mount", ".path", ".slice", ".scope", ".swap", ".automount")
_MAX_TIME = 253402300800 * SECOND  # the year 10000, the end of times that can be written
MAX_UNITS = 64
"""Most units of one node. Chosen: each costs two calls of systemd at every read."""


@dataclass(frozen=True, slots=True)
class SystemdUnit:
    """One unit as systemd lists it. state: its ActiveState, or `absent`; path: its object on the bus."""

    state: str
    path: str


def parse_unit_list(rows: object) -> dict[str, SystemdUnit]:
    """Parses the result of ListUnitsByNames, by full name: name, description, load state, active state, sub state, ...,
    path.

    Rows in another format are skipped.
    """
    found = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, tuple) and len(row) > 6 and all(isinstance(word, str) for word in row[:7]):
            found[row[0]] = SystemdUnit(_ABSENT if row[2] == "not-found" else row[3], row[6])
    return found


@dataclass
class Services(Collector):
    """service.*: one entity per installed unit of `units`, and per unit of `required` in any case.

    bus: socket of the system bus. patience: seconds that systemd may take for one response.
    """

    name: ClassVar[str] = "services"
    signals: ClassVar[tuple[str, ...]] = ("service.state", "service.restarts")
    events: ClassVar[tuple[str, ...]] = ("service",)
    interval: float = 15.0
    bus: str = "/run/dbus/system_bus_socket"
    units: tuple[str, ...] = (
        *("nvidia-fabricmanager", "nvidia-persistenced", "nvidia-imex", "nvidia-dcgm"),
        *("slurmd", "kubelet"),
    )
    required: tuple[str, ...] = ()
    patience: float = 1.0
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)
    _bus: DBusConnection | None = field(default=None, init=False, repr=False)
    _last_units: dict[str, SystemdUnit] = field(default_factory=dict, init=False, repr=False)

    def open(self, node: str) -> None:
        """Connects to the system bus. Raises NoData without systemd."""
        self.close()
        self._node = node
        self._required = tuple(map(_full_unit_name, self.required))
        self._names = list(dict.fromkeys((*self._required, *map(_full_unit_name, self.units))))[:MAX_UNITS]
        try:
            self._bus = DBusConnection(self.bus, self.patience)
        except (OSError, DBusError) as failed:
            raise NoData(f"{self.bus}: {failed}; expected the system bus of a host with systemd") from failed

    def read(self) -> tuple[Reading, ...]:
        """Returns state and restarts of the units, and an event for each that changed."""
        if self._bus is None:
            raise NoData(f"{self.bus}: closed; expected an open system bus")
        try:
            units = self._list_units(self._bus)
            restarts = [_read_restarts(self._bus, name, unit) for name, unit in units.items()]
            events = tuple(self._state_event(self._bus, n, u) for n, u in units.items() if self._has_changed(n, u))
        except (OSError, DBusError) as failed:
            raise NoData(f"{self.bus}: {failed}; expected a response of systemd") from failed
        self._last_units |= units
        if not units:
            raise NoData(f"none of these is installed: {', '.join(self._names)}")
        states = [_STATES.index(u.state) if u.state in _STATES else np.nan for u in units.values()]
        columns = {"service.state": np.array(states), "service.restarts": count_column(restarts)}
        return (Reading("service", tuple(map(self._service_entity, units)), columns, events),)

    def inventory(self) -> Mapping[str, Device]:
        """Returns the units, and whether each is required."""
        units = {name: unit for name, unit in self._last_units.items() if self._is_reported(name, unit)}
        facts = {name: {"unit": name, "required": name in self._required} for name in units}
        return {self._service_entity(name): Device((f"node:{self._node}",), facts[name]) for name in units}

    def close(self) -> None:
        """Closes the connection to the bus."""
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _list_units(self, bus: DBusConnection) -> dict[str, SystemdUnit]:
        """Returns units in the order of configuration, without those that are neither installed nor required."""
        (rows,) = bus.call(_SYSTEMD, _ROOT, _MANAGER, "ListUnitsByNames", self._names)
        found = parse_unit_list(rows)
        self._last_units = {
            n: unit for n, unit in self._last_units.items() if n in found and self._is_reported(n, found[n])
        }
        return {name: found[name] for name in self._names if name in found and self._is_reported(name, found[name])}

    def _is_reported(self, name: str, unit: SystemdUnit) -> bool:
        return unit.state != _ABSENT or name in self._required

    def _has_changed(self, name: str, unit: SystemdUnit) -> bool:
        return name in self._last_units and self._last_units[name].state != unit.state

    def _state_event(self, bus: DBusConnection, name: str, unit: SystemdUnit) -> Event:
        since = None if unit.state == _ABSENT else _read_property(bus, unit.path, "Unit", "StateChangeTimestamp")
        began = iso(since) if isinstance(since, int) and 0 < since < _MAX_TIME else None
        data = {"unit": name, "from": self._last_units[name].state, "to": unit.state, "since": began}
        return Event(self._now(), self._service_entity(name), "service", data)

    def _service_entity(self, name: str) -> str:
        return f"service:{self._node}.{name.removesuffix('.service')}"


def _read_restarts(bus: DBusConnection, name: str, unit: SystemdUnit) -> int | None:
    """Returns systemd's count. It is 0 again after `systemctl reset-failed` or a manual start."""
    if unit.state == _ABSENT or not name.endswith(".service"):
        return None
    found = _read_property(bus, unit.path, "Service", "NRestarts")
    return found if isinstance(found, int) else None


def _read_property(bus: DBusConnection, path: str, interface: str, name: str) -> object:
    """Returns a property of a unit; None if this systemd does not have it (NRestarts came with 235)."""
    try:
        (found,) = bus.call(_SYSTEMD, path, _PROPERTIES, "Get", f"{_SYSTEMD}.{interface}", name)
    except DBusError:
        return None
    return found


def _full_unit_name(name: str) -> str:
    """Returns the full name of the unit. Without a suffix it is a service, as in systemctl."""
    return name if name.endswith(_SUFFIXES) else f"{name}.service"
