"""A file of /proc or /sys that is opened once and read again and again: one system call per look."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

MAX_READ = 1 << 16
"""Most bytes of one look; the processor lines of /proc/stat stay below it up to 800 processors."""

MAX_LIST = 1 << 20
"""Most bytes of a list, and one look more; chosen: 10,000 lines of /proc/diskstats."""


class KernelFile(ABC):
    """A file of the kernel that may be open, and goes with whoever held it."""

    __slots__ = ("_handle",)
    _handle: int | None

    @abstractmethod
    def text(self) -> str | None:
        """What the file says now; None where that cannot be had."""

    def number(self) -> int | None:
        """The whole number that the file consists of."""
        text = self.text()
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


class ProcFile(KernelFile):
    """An open file, or the lack of one: `text` and `number` give None where it is absent or cannot be read now."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # absent on this kernel, or not for us: the signal is missing, which the store shows
            self._handle = None

    @property
    def present(self) -> bool:
        return self._handle is not None

    def text(self) -> str | None:
        """What the file says now."""
        if self._handle is None:
            return None
        try:
            return os.pread(self._handle, MAX_READ, 0).decode("ascii", "replace")
        except OSError:  # such as the speed of a link that is down (EINVAL), or pressure switched off (EOPNOTSUPP)
            return None

    def whole(self) -> str | None:
        """What a long list says now: the kernel hands lists out a page (4 KiB) at a time (fs/seq_file.c)."""
        if self._handle is None:
            return None
        found = bytearray()
        try:
            os.lseek(self._handle, 0, os.SEEK_SET)
            while len(found) < MAX_LIST and (piece := os.read(self._handle, MAX_READ)):
                found += piece
        except OSError:  # as above
            return None
        return found.decode("ascii", "replace")


def text_of(path: Path) -> str | None:
    """What a file that is seldom looked at says now, without surrounding white space; it is not kept open."""
    file = ProcFile(path)
    text = file.text()
    file.close()
    return None if text is None else text.strip()


def number_of(path: Path) -> int | None:
    """The whole number that such a file consists of."""
    file = ProcFile(path)
    number = file.number()
    file.close()
    return number
