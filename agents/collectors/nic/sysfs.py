"""A sysfs file that is read repeatedly, and not read for a while after it failed.

Some drivers log an error at every read of a counter that they do not support (mlx5: ACCESS_REG failures of internal
ports). After a failure the file is therefore not read for an hour if the error is permanent, and for a minute if it may
pass, for example while a NIC resets.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from agents.collectors.kernel_files import KernelFile

MAX_READ = 4096
"""Most bytes of one read. sysfs returns at most a page."""
PAUSE_S = 3600.0
"""Seconds without reads after a permanent error. Chosen: one line per hour in the kernel log is harmless."""
TRANSIENT_PAUSE_S = 60.0
"""Seconds without reads after an error that may pass. Chosen: a reset of the NIC firmware takes 10 to 60 s, and one
line a minute is not a flood."""
LASTING_ERRORS = frozenset(
    (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.ENOENT)
)  # not supported by the driver, or no permission; all others may pass: EIO, EBUSY, EAGAIN, ENODEV, ...
_IGNORED_ERRORS = (errno.EMFILE, errno.ENFILE, errno.EINTR)  # unrelated to the file
_REMOVED_ERRORS = (errno.ENODEV, errno.ENOENT)


class SysfsFile(KernelFile):
    """A file whose `text` and `number` return None if it does not exist, cannot be read or is paused.

    keep: whether it stays open between reads. pause: seconds without reads after a permanent error. `gone`: the device
    was removed since it was opened.
    """

    __slots__ = ("_keep", "_monotonic", "_path", "_pause_s", "_paused_until", "_was_readable", "gone")

    def __init__(
        self, path: Path, keep: bool = True, rest: float = PAUSE_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._keep, self._pause_s, self._monotonic = str(path), keep, rest, monotonic
        self._handle = None
        self._paused_until = 0.0
        self._was_readable = False  # whether it could be read before; otherwise it cannot have been removed
        self.gone = False

    def text(self) -> str | None:
        """Returns the content now."""
        if self._paused_until and self._monotonic() < self._paused_until:
            return None
        try:
            if self._handle is None:
                self._handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.pread(self._handle, MAX_READ, 0).decode("ascii", "replace")
        except OSError as error:  # the signal is missing, which the store shows
            self._pause(error.errno or 0)
            return None
        self._was_readable = True
        if not self._keep:
            self.close()
        return found

    def _pause(self, reason: int) -> None:
        self.close()
        if reason not in _IGNORED_ERRORS:
            self.gone = self._was_readable and reason in _REMOVED_ERRORS
            lasts = reason in LASTING_ERRORS
            self._paused_until = self._monotonic() + (self._pause_s if lasts else min(self._pause_s, TRANSIENT_PAUSE_S))


def read_sysfs_text(path: Path) -> str:
    """Returns the content of a file without surrounding white space; empty if it does not exist or cannot be read."""
    file = SysfsFile(path, keep=False)
    return (file.text() or "").strip().replace("\0", "")


def list_names(folder: Path) -> list[str]:
    """Returns the sorted names in a folder; empty if it does not exist. Names that cannot be printed are skipped."""
    try:
        return sorted(name for name in os.listdir(folder) if name.isprintable())
    except OSError:  # missing, or removed during the read
        return []
