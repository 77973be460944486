"""Counts the messages that a spool's agent has accepted, in memory that outlives the process but needs no disk.

If an agent is killed while its disk is slow, the next one reads here the number of waiting messages, and counts them as
a gap. A reboot clears it: then only the silence of the node shows what was lost.
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

SHARED_MEMORY = Path("/dev/shm")
"""Files in memory on Linux; used if the service manager sets no RUNTIME_DIRECTORY."""
MAX_WAITING = 10_000_000
"""Messages that may have waited; a greater number is not ours. Chosen: four months of ticks of one second."""
_LAYOUT = struct.Struct("<4s16sqQ")
_MAGIC = b"FPA1"


def memory_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """A folder in memory; None if the system has none."""
    given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    found = Path(given) if given else SHARED_MEMORY
    return found if found.is_dir() else None


class AcceptedCount:
    """The counter of the spool at `home`. Its calls never wait for a disk and never raise.

    epoch and base: the sequence that message number 0 of this process would have in that epoch of the spool.
    """

    def __init__(self, home: Path, folder: Path | None) -> None:
        name = hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:24]
        self._path = None if folder is None else folder / f"fleetpulse-{name}.accepted"
        self._memory: mmap.mmap | None = None

    def read_previous(self) -> tuple[bytes, int] | None:
        """Epoch, and the sequence after the last message that the previous process accepted in it; None if unknown."""
        if self._path is None:
            return None
        try:
            handle = _open_own_file(self._path, os.O_RDONLY)
            with os.fdopen(handle, "rb") as file:
                magic, epoch, base, accepted = _LAYOUT.unpack(file.read(_LAYOUT.size))
        except (OSError, struct.error):
            return None
        return (epoch, base + accepted) if magic == _MAGIC else None

    def start_count(self, epoch: bytes, base: int, accepted: int) -> None:
        """Counts in `epoch` from now on."""
        if self._memory is None and self._path is not None:
            with contextlib.suppress(OSError, ValueError):  # no such memory: only silence then shows what a kill lost
                self._memory = _map_file(self._path)
        if self._memory is not None:
            _LAYOUT.pack_into(self._memory, 0, _MAGIC, epoch, base, accepted)

    def set_accepted(self, accepted: int) -> None:
        """Sets how many messages this process has accepted."""
        if self._memory is not None:
            struct.pack_into("<Q", self._memory, _LAYOUT.size - 8, accepted)

    def close(self, keep: bool) -> None:
        """Releases the memory. `keep` leaves the file for the next process, if a message was not written."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            if not keep and self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()


def _open_own_file(path: Path, flags: int) -> int:
    """Opens a file of our own user. Raises OSError if it belongs to another: any user may write to SHARED_MEMORY."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(handle)
        raise PermissionError(f"{path}: belongs to another user")
    return handle


def _map_file(path: Path) -> mmap.mmap:
    """Maps the file, and creates it if needed. Raises OSError."""
    handle = _open_own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(handle, _LAYOUT.size)
        return mmap.mmap(handle, _LAYOUT.size)
    finally:
        os.close(handle)
