"""The few system calls on which durability rests: locking, writing all, waiting for the disk, cutting back."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.model.errors import SpoolError
from pipeline.runtime import private_files
from pipeline.transport import segments

_LEAST_CAP = 1 << 16
"""Chosen: a handful of messages; on a disk so small that 5 % are less, the disk is full first, and is met as such."""


class SmallFiles(Protocol):
    """Who writes small files beside the spools. answers: whether the disk answered at the start, so can be read."""

    answers: bool

    def later(self, path: Path, write: Callable[[], object]) -> None: ...


class AtOnce:
    """Writes them in the calling thread, which then waits for the disk."""

    answers = True

    def later(self, path: Path, write: Callable[[], object]) -> None:
        write()


def boot_id() -> bytes:
    """The kernel's boot id; 16 zero bytes where the system has none."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def locked(path: Path) -> int:
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
    """Writes until all is written; a short write goes on and so meets the error that cut it short."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def sync_data(handle: int) -> None:
    getattr(os, "fdatasync", os.fsync)(handle)  # macOS has no fdatasync


def cut(path: Path, size: int) -> None:
    """Cuts a file, and makes what stays durable: the process that wrote it may have died before its own sync."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.ftruncate(handle, size)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_mark(path: Path, mark: segments.Mark) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, private_files.FILE)
    try:
        os.pwrite(handle, segments.pack_mark(mark), 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def cap(path: Path) -> int:
    """Bytes of one spool unless configured: 1 GiB, or 5 % of its file system if that is less.

    Chosen: about a day of a node with 8 GPUs, and never what fills a small system disk.
    """
    found = os.statvfs(next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()))
    return max(_LEAST_CAP, min(1 << 30, found.f_blocks * found.f_frsize // 20))
