"""Where a kernel log was read up to, kept over restarts of the agent within one boot."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

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
