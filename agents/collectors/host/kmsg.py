r"""/dev/kmsg: the kernel's log as records. Pure parsing, and a reader that never waits and counts what it missed.

Format: Documentation/ABI/testing/dev-kmsg of the kernel: `priority,sequence,microseconds,flags[,...];text`, then lines
` KEY=value`; bytes that are not printable are written \xNN. Each read gives one record.

Where a kernel log was read up to, kept over restarts of the agent within one boot.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

READ = 1 << 16
"""Bytes per read; the kernel's longest record is 8192 (CONSOLE_EXT_LOG_MAX), a FIFO may hold 65536."""
TEXT = 1024
"""Most characters of a record's text that are looked at and sent; the kernel's own lines end at 1024 (LOG_LINE_MAX)."""
PENDING = 1 << 16
"""Most bytes kept of a line that has not ended; chosen: eight of the longest records."""

_HEAD = re.compile(rb"(\d{1,10}),(\d{1,19}),(\d{1,19}),([^;]{0,200});")
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class Record:
    """One record. since_boot: microseconds of the kernel's log clock. facility: 0 = the kernel itself wrote it."""

    sequence: int
    since_boot: int
    priority: int
    facility: int
    text: str
    device: str = ""


def parse(line: bytes, rest: bytes = b"") -> Record | None:
    """A record's line and its ` KEY=value` lines; None if this is no record."""
    head = _HEAD.match(line)
    if head is None:
        return None
    level = int(head[1])
    device = ""
    for part in rest.split(b"\n"):
        if part.startswith(b" DEVICE="):
            device = part[8:72].decode("ascii", "replace")
    return Record(int(head[2]), int(head[3]), level & 7, level >> 3, text_of(line[head.end() :]), device)


def text_of(raw: bytes) -> str:
    """The text with its escapes undone, as far as they make UTF-8; control characters become spaces. Bounded."""
    text = raw[: 4 * TEXT].decode("utf-8", "replace")
    if "\\x" in text:
        with suppress(UnicodeError):  # bytes that are no text: the kernel's own form stays readable
            text = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text).encode("latin-1").decode("utf-8")
    text = text[:TEXT]
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


@dataclass
class Kmsg:
    """A log that is followed: /dev/kmsg, or a FIFO or file of the same format.

    missed: records that the kernel had overwritten before they were read, as their numbers tell. dropped: bytes of a
    line without end.
    """

    path: Path
    missed: int = 0
    dropped: int = 0
    next_sequence: int | None = None
    _handle: int | None = field(default=None, init=False, repr=False)
    _pending: bytes = field(default=b"", init=False, repr=False)

    def open(self) -> None:
        """At the first record that is still there. Raises OSError."""
        self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._pending = b""

    def records(self, most: int) -> Iterator[Record]:
        """The records that are there now, at most about `most`; never waits. Raises OSError if the log is gone."""
        given = 0
        while given < most:
            found = self._read()
            if found is None:
                return
            for line, rest in self._lines(found):
                record = parse(line, rest)
                if record is not None and self._fresh(record):
                    given += 1
                    yield record

    def _read(self) -> bytes | None:
        """The next bytes; None: no more now. Goes on behind records that were overwritten."""
        if self._handle is None:
            return None
        for _ in range(8):  # chosen: a writer that overruns eight reads in a row is given up on until the next look
            try:
                return os.read(self._handle, READ) or None
            except BlockingIOError:
                return None
            except BrokenPipeError:  # overrun (EPIPE): the next read gives the oldest record that is left
                continue
        return None

    def _lines(self, found: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Whole records of a chunk: (first line, lines that begin with a space); a line without end waits."""
        whole, newline, self._pending = (self._pending + found).rpartition(b"\n")
        if not newline:
            whole = b""
        if len(self._pending) > PENDING:
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

    def _fresh(self, record: Record) -> bool:
        """Counts a jump of the numbers; a record that was given before is not given again."""
        if self.next_sequence is not None:
            if record.sequence < self.next_sequence:
                return False
            self.missed += record.sequence - self.next_sequence
        self.next_sequence = record.sequence + 1
        return True


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class LogPlace:
    """A file with boot id and number of the next record. One process at a time owns it; the others keep no place."""

    path: Path
    boot_id: Path = BOOT_ID
    _handle: int | None = field(default=None, init=False, repr=False)
    _kept: int | None = field(default=None, init=False, repr=False)

    def open(self) -> int | None:
        """The number to go on at; None: nothing was kept in this boot, or somebody else owns the file."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:  # no such folder, or no right to write there: then no place is kept
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a running agent has it, and this is another command
            os.close(handle)
            return None
        self._handle = handle
        boot, _, number = os.pread(handle, 100, 0).decode("ascii", "replace").strip().partition(" ")
        same = boot == self._boot() and number.isascii() and number.isdecimal()
        self._kept = int(number) if same else None
        return self._kept

    def keep(self, number: int | None) -> None:
        """Writes where to go on."""
        if self._handle is None or number is None or number == self._kept:
            return
        text = f"{self._boot()} {number}\n".encode("ascii")
        os.pwrite(self._handle, text, 0)
        os.ftruncate(self._handle, len(text))
        self._kept = number

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _boot(self) -> str:
        return self.boot_id.read_text("ascii").strip()
