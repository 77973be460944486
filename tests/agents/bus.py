"""A real D-Bus daemon in a folder, and a service on it that simulates systemd, byte by byte."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CONFIGURATION = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow receive_sender="*"/>
<allow own="*"/></policy></busconfig>
"""
SYSTEMD = "org.freedesktop.systemd1"


@dataclass
class Service:
    """The state of one unit in systemd."""

    active: str = "active"
    load: str = "loaded"
    restarts: int | None = 0
    changed: int = 1_700_000_000_000_000


class Writer:
    """Bytes of a D-Bus message, little-endian."""

    def __init__(self) -> None:
        self.data = bytearray()

    def pad(self, to: int) -> Writer:
        self.data += bytes(-len(self.data) % to)
        return self

    def number(self, code: str, value: int) -> Writer:
        self.pad(struct.calcsize(code)).data += struct.pack(f"<{code}", value)
        return self

    def text(self, value: str) -> Writer:
        self.number("I", len(value.encode())).data += value.encode() + b"\0"
        return self

    def signature(self, value: str) -> Writer:
        self.data += bytes((len(value),)) + value.encode() + b"\0"
        return self

    def field(self, code: int, kind: str, value: str | int) -> Writer:
        self.pad(8).data += bytes((code,))
        self.signature(kind)
        if isinstance(value, int):
            return self.number("I", value)
        return self.signature(value) if kind == "g" else self.text(value)


def packed(kind: int, serial: int, fields: Writer, body: bytes = b"") -> bytes:
    head = Writer()
    head.data += struct.pack("<cBBBIII", b"l", kind, 0, 1, len(body), serial, len(fields.data)) + fields.data
    return bytes(head.pad(8).data + body)


@dataclass
class Systemd:
    """Answers ListUnitsByNames and Properties.Get on a bus; `units` may be changed at any time."""

    units: dict[str, Service] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    silent: bool = False
    _serial: int = 0

    def start(self, path: Path) -> None:
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(10)
        self.link.connect(str(path))
        self.link.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
        self.link.recv(512)
        self.link.sendall(b"BEGIN\r\n")
        self._call("Hello", "", b"")
        name = Writer().text(SYSTEMD).number("I", 4)  # DBUS_NAME_FLAG_DO_NOT_QUEUE
        self._call("RequestName", "su", bytes(name.data))
        self.link.settimeout(None)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def stop(self) -> None:
        self.link.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.link.close()

    def _call(self, member: str, signature: str, body: bytes) -> None:
        fields = Writer().field(1, "o", "/org/freedesktop/DBus").field(6, "s", "org.freedesktop.DBus")
        fields.field(2, "s", "org.freedesktop.DBus").field(3, "s", member)
        if signature:
            fields.field(8, "g", signature)
        self._serial += 1
        self.link.sendall(packed(1, self._serial, fields, body))
        while True:
            kind, header, _ = self._receive()
            if kind in (2, 3) and header.get(5) == self._serial:
                assert kind == 2, header
                return

    def _serve(self) -> None:
        try:
            while True:
                kind, header, body = self._receive()
                if kind == 1 and not self.silent:
                    self._answer(header, body)
        except ConnectionError:
            return

    def _answer(self, header: Mapping[int, str | int], body: bytes) -> None:
        member, path = str(header[3]), str(header[1])
        self.asked.append(member)
        fields = Writer().field(6, "s", header[7]).field(5, "u", header[-1])
        handlers: dict[str, Callable[[], tuple[str, Writer] | None]] = {
            "ListUnitsByNames": lambda: self._list(texts(body)),
            "Get": lambda: self._get(path, texts(body)[1]),
        }
        found = handlers[member]()
        self._serial += 1
        if found is None:
            fields.field(4, "s", "org.freedesktop.DBus.Error.UnknownProperty")
            self.link.sendall(packed(3, self._serial, fields))
        else:
            self.link.sendall(packed(2, self._serial, fields.field(8, "g", found[0]), bytes(found[1].data)))

    def _list(self, names: list[str]) -> tuple[str, Writer]:
        rows = Writer()
        for name in names:
            unit = self.units.get(name, Service("inactive", "not-found", None))
            rows.pad(8).text(name).text(f"The {name}").text(unit.load).text(unit.active).text("running").text("")
            rows.text(f"/unit/{name.encode().hex()}").number("I", 0).text("").text("/")
        message = Writer().number("I", len(rows.data)).pad(8)
        message.data += rows.data
        return "a(ssssssouso)", message

    def _get(self, path: str, name: str) -> tuple[str, Writer] | None:
        unit = self.units[bytes.fromhex(path.removeprefix("/unit/")).decode()]
        if name == "NRestarts" and unit.restarts is not None:
            return "v", Writer().signature("u").number("I", unit.restarts)
        if name == "StateChangeTimestamp":
            return "v", Writer().signature("t").number("Q", unit.changed)
        return None

    def _receive(self) -> tuple[int, dict[int, str | int], bytes]:
        """Kind, header fields (-1: the message's own serial) and body."""
        head = self._read_bytes(16)
        body, serial, size = struct.unpack_from("<III", head, 4)
        raw = head + self._read_bytes((size + 7) // 8 * 8)
        fields: dict[int, str | int] = {-1: serial}
        at = 16
        while at < 16 + size:
            at += -at % 8
            code, kind = raw[at], raw[at + 2 : at + 3]
            at += 4
            if kind == b"g":
                fields[code] = raw[at + 1 : at + 1 + raw[at]].decode()
                at += raw[at] + 2
            else:
                (number,) = struct.unpack_from("<I", raw, at)
                fields[code] = number if kind == b"u" else raw[at + 4 : at + 4 + number].decode()
                at += 4 if kind == b"u" else number + 5
        return head[1], fields, self._read_bytes(body)

    def _read_bytes(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            if not (piece := self.link.recv(size - len(found))):
                raise ConnectionError
            found += piece
        return found


def texts(body: bytes) -> list[str]:
    """The texts of a body of `as` or `ss`."""
    found, at = [], 0
    (size,) = struct.unpack_from("<I", body, 0)
    if size == len(body) - 4:
        at = 4
    while at < len(body):
        at += -at % 4
        (size,) = struct.unpack_from("<I", body, at)
        found.append(body[at + 4 : at + 4 + size].decode())
        at += size + 5
    return found


def is_listening(path: Path) -> bool:
    """Whether a process listens; the socket's file exists a moment earlier."""
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(path)) == 0


def daemon(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts a separate bus; skips if no dbus-daemon is installed."""
    program = shutil.which("dbus-daemon")
    if program is None:
        pytest.skip("no dbus-daemon here: apt-get install dbus-daemon")
    path = folder / "bus"
    (folder / "bus.conf").write_text(CONFIGURATION.format(path=path))
    words = [program, "--nofork", "--nopidfile", f"--config-file={folder / 'bus.conf'}"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    until = time.monotonic() + 10
    while not is_listening(path):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "dbus-daemon does not start"
        time.sleep(0.02)
    return process, path
