"""The system calls on which durability rests: locking, complete writes, syncing, truncating."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.model.errors import SpoolError
from pipeline.runtime import private_files
from pipeline.transport import segments

_MIN_CAP = 1 << 16
"""Chosen: a few messages. If 5 % of a disk are less than this, the full disk itself is the limit."""


class FileWriter(Protocol):
    """Writes small files beside the spools. disk_responds: whether the disk responded at start, so can be read."""

    disk_responds: bool

    def write_later(self, path: Path, write: Callable[[], object]) -> None:
        """Calls `write`, which writes `path`, now or later."""


class ImmediateFileWriter:
    """Writes small files in the calling thread, which then waits for the disk."""

    disk_responds = True

    def write_later(self, path: Path, write: Callable[[], object]) -> None:
        """Calls `write` now."""
        write()


def read_boot_id() -> bytes:
    """The kernel's boot id; 16 zero bytes if the system has none."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def lock_file(path: Path) -> int:
    """Opens a file and locks it; its descriptor. Raises SpoolError if another process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, private_files.FILE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if not isinstance(error, BlockingIOError):
            raise
        raise SpoolError(
            f"{path}: another process writes this spool; stop it, or set another [agent] node or [spool] directory"
        ) from None
    return handle


def write_all(handle: int, data: bytes, at: int) -> None:
    """Writes all of `data`: after a short write it continues, and so gets the error that caused it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def sync_data(handle: int) -> None:
    """Waits until the data of a file is on the disk."""
    getattr(os, "fdatasync", os.fsync)(handle)  # macOS has no fdatasync


def truncate_file(path: Path, size: int) -> None:
    """Truncates a file and syncs the rest: the process that wrote it may have died before its own sync."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(handle, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_mark(path: Path, mark: segments.Mark) -> None:
    """Writes a mark file durably."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, private_files.FILE)
    try:
        os.pwrite(handle, segments.pack_mark(mark), 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Free bytes of the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def default_max_bytes(path: Path) -> int:
    """Size limit of one spool unless configured: 1 GiB, or 5 % of its file system if that is less.

    Chosen: about ten days of a node with 8 GPUs, and not enough to fill a small system disk.
    """
    found = os.statvfs(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()))
    return max(_MIN_CAP, min(1 << 30, found.f_blocks * found.f_frsize // 20))
