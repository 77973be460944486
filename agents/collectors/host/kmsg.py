r"""/dev/kmsg: reads the kernel log as records without waiting, counts lost records, and keeps the position across
restarts.

Format: Documentation/ABI/testing/dev-kmsg of the kernel: `priority,sequence,microseconds,flags[,...];text`, then lines
` KEY=value`. Bytes that are not printable are written \\xNN. Each system call returns one record.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES = 1 << 16
"""Bytes per system call. The kernel's longest record is 8192 (CONSOLE_EXT_LOG_MAX), a FIFO may hold 65536."""
MAX_TEXT = 1024
"""Most characters of a record's text that are evaluated and sent. The kernel's own lines end at 1024 (LOG_LINE_MAX)."""
MAX_PENDING = 1 << 16
"""Most bytes kept of an incomplete line. Chosen: eight of the longest records."""

_HEAD = re.compile(rb"(\d{1,10}),(\d{1,19}),(\d{1,19}),([^;]{0,200});")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class KmsgRecord:
    """One record. since_boot: microseconds of the kernel's log clock. facility: 0 = written by the kernel itself."""

    sequence: int
    since_boot: int
    priority: int
    facility: int
    text: str
    device: str = ""


def parse_record(line: bytes, rest: bytes = b"") -> KmsgRecord | None:
    """Parses a record's line and its ` KEY=value` lines; None if it is not a record."""
    head = _HEAD.match(line)
    if head is None:
        return None
    level = int(head[1])
    device = ""
    for part in rest.split(b"\n"):
        if part.startswith(b" DEVICE="):
            device = part[8:72].decode("ascii", "replace")
    return KmsgRecord(int(head[2]), int(head[3]), level & 7, level >> 3, decode_text(line[head.end() :]), device)


def decode_text(raw: bytes) -> str:
    """Returns the text with its escapes decoded if they are UTF-8, control characters as spaces, cut to MAX_TEXT."""
    text = raw[: 4 * MAX_TEXT].decode("utf-8", "replace")
    if "\\x" in text:
        with suppress(UnicodeError):  # not text: the kernel's escaped form stays readable
            text = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text).encode("latin-1").decode("utf-8")
    text = text[:MAX_TEXT]
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


@dataclass
class KmsgReader:
    """Follows a log: /dev/kmsg, or a FIFO or file of the same format.

    missed: records that the kernel overwrote before they were read, by their numbers. dropped: bytes of a line without
    end.
    """

    path: Path
    missed: int = 0
    dropped: int = 0
    next_sequence: int | None = None
    _handle: int | None = field(default=None, init=False, repr=False)
    _pending: bytes = field(default=b"", init=False, repr=False)

    def open(self) -> None:
        """Opens the log at the first record that still exists. Raises OSError."""
        self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the log."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._pending = b""

    def read_records(self, most: int) -> Iterator[KmsgRecord]:
        """Yields the records that exist now, about `most` of them at most; never waits. Raises OSError if the log is
        gone.
        """
        given = 0
        while given < most:
            found = self._read()
            if found is None:
                return
            for line, rest in self._lines(found):
                record = parse_record(line, rest)
                if record is not None and self._is_new(record):
                    given += 1
                    yield record

    def _read(self) -> bytes | None:
        """Returns the next bytes; None if there are no more now. Continues after overwritten records."""
        if self._handle is None:
            return None
        for _ in range(8):  # chosen: after eight overruns in a row, continue at the next read
            try:
                return os.read(self._handle, READ_BYTES) or None
            except BlockingIOError:
                return None
            except BrokenPipeError:  # overrun (EPIPE): the next call returns the oldest record that is left
                continue
        return None

    def _lines(self, found: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields complete records of a chunk: (first line, lines that start with a space).

        An incomplete line is kept.
        """
        whole, newline, self._pending = (self._pending + found).rpartition(b"\n")
        if not newline:
            whole = b""
        if len(self._pending) > MAX_PENDING:
            self.dropped += len(self._pending)
            self._pending = b""
        line, rest = b"", []
        for part in whole.split(b"\n"):
            if part.startswith(b" ") and line:
                rest.append(part)
                continue
            if line:
                yield line, b"\n".join(rest)
            line, rest = part, []
        if line:
            yield line, b"\n".join(rest)

    def _is_new(self, record: KmsgRecord) -> bool:
        """Counts gaps in the record numbers. Returns False for a record that was already returned."""
        if self.next_sequence is not None:
            if record.sequence < self.next_sequence:
                return False
            self.missed += record.sequence - self.next_sequence
        self.next_sequence = record.sequence + 1
        return True


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class KmsgPosition:
    """A file with boot id and number of the next record. One process at a time owns it; others save nothing.

    problem: why the number could not be saved the last time; empty if it was.
    """

    path: Path
    boot_id: Path = BOOT_ID
    problem: str = field(default="", init=False)
    _handle: int | None = field(default=None, init=False, repr=False)
    _saved: int | None = field(default=None, init=False, repr=False)

    def open(self) -> int | None:
        """Returns the number to continue at; None if none was saved in this boot or another process owns the file."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # no such folder, or no write permission: then no position is saved
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a running agent owns it, and this is another command
            os.close(handle)
            return None
        self._handle = handle
        boot, _, number = os.pread(handle, 100, 0).decode("ascii", "replace").strip().partition(" ")
        same = boot == self._boot_id() and number.isascii() and number.isdecimal()
        self._saved = int(number) if same else None
        return self._saved

    def save(self, number: int | None) -> None:
        """Writes the number to continue at. If the disk refuses it, the next call tries again: events matter more."""
        if self._handle is None or number is None or number == self._saved:
            return
        try:
            text = f"{self._boot_id()} {number}\n".encode("ascii")
            os.pwrite(self._handle, text, 0)
            os.ftruncate(self._handle, len(text))
        except OSError as error:
            self.problem = f"{self.path}: cannot be written: {error.strerror}; a restart may repeat records"
            return
        self._saved, self.problem = number, ""

    def close(self) -> None:
        """Closes the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _boot_id(self) -> str:
        return self.boot_id.read_text("ascii").strip()
