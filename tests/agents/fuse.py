"""A file system through /dev/fuse that answers statvfs or hangs, on the real kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_INIT, _STATFS, _FORGET = 26, 17, 2  # enum fuse_opcode of linux/fuse.h
_HEAD = struct.Struct("<IIQQIIII")  # struct fuse_in_header
_MNT_FORCE, _MNT_DETACH = 1, 2  # linux/fs.h
_READ = 1 << 17  # more than FUSE_MIN_READ_BUFFER


@dataclass
class Fuse:
    """A mounted file system of 1000 blocks of 4096 bytes. `hangs`: it leaves statvfs unanswered."""

    point: Path
    hangs: bool = False
    asked: threading.Event = field(default_factory=threading.Event)

    def mount(self) -> None:
        """Skips where mounting is not ours to do."""
        try:
            self._handle = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as refused:
            pytest.skip(f"no FUSE here: {refused}")
        options = f"fd={self._handle},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"fleetpulse-test", bytes(self.point), b"fuse.stuck", 0, options.encode()):
            os.close(self._handle)
            pytest.skip(f"mounting is not permitted: {os.strerror(ctypes.get_errno())}")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def unmount(self) -> None:
        """Unmounts the file system, also while a call waits: force aborts the connection."""
        libc = ctypes.CDLL(None)
        libc.umount2(bytes(self.point), _MNT_FORCE)
        libc.umount2(bytes(self.point), _MNT_DETACH)
        self._thread.join()
        os.close(self._handle)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._handle, _READ)
            except OSError as ended:
                if ended.errno in (errno.ENODEV, errno.ECONNABORTED):
                    return
                raise
            _, operation, unique, *_ = _HEAD.unpack_from(request)
            if operation == _INIT:
                major, minor = struct.unpack_from("<II", request, _HEAD.size)
                flags = (0, 0, 0, 0, 4096, 1, 0, 0, 0)  # struct fuse_init_out after the version
                self._answer(unique, struct.pack("<IIIIHHIIHHI28x", major, min(minor, 31), *flags))
            elif operation == _STATFS:
                self.asked.set()
                if not self.hangs:
                    self._answer(unique, struct.pack("<QQQQQIIII24x", 1000, 400, 300, 50, 20, 4096, 255, 4096, 0))
            elif operation != _FORGET:
                self._answer(unique, b"", -errno.ENOSYS)

    def _answer(self, unique: int, body: bytes, error: int = 0) -> None:
        os.write(self._handle, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
