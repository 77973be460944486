"""Files of /proc and /sys that are opened once and read repeatedly: one system call per read."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

MAX_READ = 1 << 16
"""Most bytes of one read. The processor lines of /proc/stat stay below it up to 800 processors."""

MAX_FULL_READ = 1 << 20
"""Most bytes of a list, plus one read. Chosen: 10,000 lines of /proc/diskstats."""


class KernelFile(ABC):
    """A file of the kernel that may be open. It is closed with its owner."""

    __slots__ = ("_handle",)
    _handle: int | None

    @abstractmethod
    def text(self) -> str | None:
        """Returns the content; None if it cannot be read."""

    def number(self) -> int | None:
        """Returns the content as a whole number; None if it is not one."""
        text = self.text()
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def close(self) -> None:
        """Closes the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


class ProcFile(KernelFile):
    """An open file, or a missing one: `text` and `number` return None if it does not exist or cannot be read now."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # not on this kernel, or no permission: the signal is missing, which the store shows
            self._handle = None

    @property
    def present(self) -> bool:
        """Whether the file could be opened."""
        return self._handle is not None

    def text(self) -> str | None:
        """Returns the content now."""
        if self._handle is None:
            return None
        try:
            return os.pread(self._handle, MAX_READ, 0).decode("ascii", "replace")
        except OSError:  # such as the speed of a link that is down (EINVAL), or disabled pressure counters (EOPNOTSUPP)
            return None

    def full_text(self) -> str | None:
        """Returns a long list. The kernel returns lists one page (4 KiB) at a time (fs/seq_file.c)."""
        if self._handle is None:
            return None
        found = bytearray()
        try:
            os.lseek(self._handle, 0, os.SEEK_SET)
            while len(found) < MAX_FULL_READ and (piece := os.read(self._handle, MAX_READ)):
                found += piece
        except OSError:  # see text()
            return None
        return found.decode("ascii", "replace")


def read_text(path: Path) -> str | None:
    """Returns the content of a file without surrounding white space; None if it cannot be read. The file is not kept
    open.
    """
    file = ProcFile(path)
    text = file.text()
    file.close()
    return None if text is None else text.strip()


def read_number(path: Path) -> int | None:
    """Returns the whole number in a file; None if there is none. The file is not kept open."""
    file = ProcFile(path)
    number = file.number()
    file.close()
    return number
