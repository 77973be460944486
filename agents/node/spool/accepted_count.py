"""How many messages a spool's agent has accepted, kept in memory that outlives the process but needs no disk.

When an agent is killed while its disk is slow, the next one finds here how many messages were waiting, and counts them
as a gap. After a reboot nothing is left of it: then only the silence of the node shows what was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory; used where the service manager gives no RUNTIME_DIRECTORY."""
MOST = 10_000_000
"""Messages that may have waited; a greater number is not ours. Chosen: four months of ticks of one second."""
_LAYOUT = struct.Struct("<4s16sqQ")
_MAGIC = b"FPA1"


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """A folder in memory; None where the system has none."""
    given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    found = Path(given) if given else MEMORY
    return found if found.is_dir() else None


class AcceptedCount:
    """The counter of the spool at `home`. Its calls never wait for a disk and never raise.

    epoch and base: the sequence that message number 0 of this process would have in that epoch of the spool.
    """

    def __init__(self, home: Path, place: Path | None) -> None:
        name = hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:24]
        self._path = None if place is None else place / f"fleetpulse-{name}.accepted"
        self._memory: mmap.mmap | None = None

    def left(self) -> tuple[bytes, int] | None:
        """Epoch, and the sequence behind everything that the process before accepted in it; None if not known."""
        if self._path is None:
            return None
        try:
            handle = _opened(self._path, os.O_RDONLY)
            with os.fdopen(handle, "rb") as file:
                magic, epoch, base, accepted = _LAYOUT.unpack(file.read(_LAYOUT.size))
        except (OSError, struct.error):
            return None
        return (epoch, base + accepted) if magic == _MAGIC else None

    def begin(self, epoch: bytes, base: int, accepted: int) -> None:
        """Counts from now on in `epoch`."""
        if self._memory is None and self._path is not None:
            with contextlib.suppress(OSError, ValueError):  # no such memory: a kill is then counted by its silence
                self._memory = _mapped(self._path)
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, _MAGIC, epoch, base, accepted)

    def set(self, accepted: int) -> None:
        """So many messages were accepted by this process."""
        if self._memory is not None:
            struct.pack_into("<Q", self._memory, _LAYOUT.size - 8, accepted)

    def close(self, keep: bool) -> None:
        """Lets go of the memory; `keep` it for the next process if something was not written."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            if not keep and self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()


def _opened(path: Path, flags: int) -> int:
    """An open file of our own user. Raises OSError if it is another's: any user may write to MEMORY."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(handle)
        raise PermissionError(f"{path}: belongs to another user")
    return handle


def _mapped(path: Path) -> mmap.mmap:
    """The file in memory, made if need be. Raises OSError."""
    handle = _opened(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(handle, _LAYOUT.size)
        return mmap.mmap(handle, _LAYOUT.size)
    finally:
        os.close(handle)
