"""A file of sysfs that is read again and again, and left alone for a while once it cannot be read.

A driver that does not know a counter says so in the kernel log at every look (mlx5: ACCESS_REG failures of internal
ports), so that what failed once is not asked again soon: for an hour where the error will last, for a minute where it
may pass, as while a NIC resets.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from agents.collectors.kernel_files import KernelFile

MAX_READ = 4096
"""Most bytes of one look: sysfs gives no more than a page."""
REST_S = 3600.0
"""How long what will not be told is left alone; chosen: one line per hour in the kernel log harms nobody."""
TRANSIENT_REST_S = 60.0
"""How long after an error that may pass; chosen: a reset of the NIC's firmware takes 10 to 60 s, and one line a minute
is no flood."""
LASTING = frozenset(
    (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.ENOENT)
)  # the driver does not know the question, or we may not ask it; all else may pass: EIO, EBUSY, EAGAIN, ENODEV, ...
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EINTR)  # says nothing about the file
_GONE = (errno.ENODEV, errno.ENOENT)


class Attribute(KernelFile):
    """`text` and `number` give None where the file is absent, cannot be read or was left alone.

    keep: whether it stays open between looks. rest: seconds after an error that lasts. `gone` tells a device that was
    taken out since it was opened.
    """

    __slots__ = ("_keep", "_monotonic", "_path", "_rest", "_seen", "_until", "gone")

    def __init__(
        self, path: Path, keep: bool = True, rest: float = REST_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._keep, self._rest, self._monotonic = str(path), keep, rest, monotonic
        self._handle = None
        self._until = 0.0
        self._seen = False  # whether it could be read before: else it was never there to go
        self.gone = False

    def text(self) -> str | None:
        """What the file says now."""
        if self._until and self._monotonic() < self._until:
            return None
        try:
            if self._handle is None:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.pread(self._handle, MAX_READ, 0).decode("ascii", "replace")
        except OSError as error:  # the signal is missing, which the store shows
            self._give_up(error.errno or 0)
            return None
        self._seen = True
        if not self._keep:
            self.close()
        return found

    def _give_up(self, reason: int) -> None:
        self.close()
        if reason not in _NO_ROOM:
            self.gone = self._seen and reason in _GONE
            lasts = reason in LASTING
            self._until = self._monotonic() + (self._rest if lasts else min(self._rest, TRANSIENT_REST_S))


def once(path: Path) -> str:
    """What a file says, without blanks around it; empty where it is absent or cannot be read."""
    file = Attribute(path, keep=False)
    return (file.text() or "").strip().replace("\0", "")


def names_in(folder: Path) -> list[str]:
    """Sorted names in a folder; none where it is absent. A name that is no text cannot be told, so it is not."""
    try:
        return sorted(name for name in os.listdir(folder) if name.isprintable())
    except OSError:  # absent, or taken out while we looked: there is nothing in it
        return []
