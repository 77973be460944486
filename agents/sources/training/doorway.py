"""The agent's end of the socket: bound where scripts look for it, emptied by a thread.

The kernel queues few datagrams (net.unix.max_dgram_qlen), so one look a second would be too seldom. A thread that waits
for each datagram is woken by the script that sends it, which costs the script more than all else: so while scripts
report, the thread looks by itself, 5 times a second. It waits when all is silent, and where the queue is short.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from agents.collector import NoData
from agents.sources.training.datagram import MAX_DATAGRAM

MAX_AT_ONCE, PAUSE_S = 256, 0.2
"""At most so many datagrams in so many seconds, so that who floods the socket costs no more than 2 % of a core; chosen:
every rank that is known may end a step in the same instant."""
LINGER_S = 10.0
"""How long it looks by itself after the last datagram; chosen: above the step of any model, and 50 looks cost 5 ms."""
_QUEUE = Path("/proc/sys/net/unix/max_dgram_qlen")
"""10 by default, as in a pod's own network namespace; systemd makes it 512 on the host (systemd-system.conf(5))."""
STOP_S = 1.0
"""How long closing waits for the thread; it has nothing to do but return."""
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size)
_NOBODY = 65534  # how the kernel names a user that has no name in our user namespace

Receive = Callable[[bytes, int, int], None]
"""Takes a datagram, the process that sent it and its user, both as the kernel says."""


class Doorway:
    """A bound socket and its thread. Raises NoData where there cannot be one."""

    def __init__(self, path: Path, mode: int, receive: Receive) -> None:
        self.path, self._receive = path, receive
        self._stop = threading.Event()
        self._failed: Exception | None = None
        self._socket = _bound(path, mode)
        self._place = _identity(path)
        self._thread = threading.Thread(target=self._serve, name="training steps", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises NoData where scripts cannot find the socket any more, and whatever ended the thread."""
        if self._failed is not None:
            raise self._failed
        if _identity(self.path) != self._place:
            raise NoData(f"{self.path}: removed, or taken by another agent; wanted our socket")

    def close(self) -> None:
        """Removes the socket if it is still ours."""
        self._stop.set()
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(STOP_S)
        if _identity(self.path) == self._place is not None:
            with contextlib.suppress(OSError):  # the folder went away, or is not ours to write in any more
                self.path.unlink()
        self._socket.close()

    def _serve(self) -> None:
        """Receives until the end. A short sleep after each full measure bounds what it costs."""
        readable, looks_itself = select.poll(), _queue() >= MAX_AT_ONCE
        readable.register(self._socket, select.POLLIN)
        since, count, heard = time.monotonic(), 0, -LINGER_S
        try:
            while not self._stop.is_set():
                found, now = self._drain(MAX_AT_ONCE - count), time.monotonic()
                since, count = (since, count + found) if now - since < PAUSE_S else (now, found)
                heard = now if found else heard
                if count >= MAX_AT_ONCE or (looks_itself and now - heard < LINGER_S):
                    self._stop.wait(PAUSE_S)
                    since, count = time.monotonic(), 0
                else:
                    readable.poll()
        except Exception as failed:  # noqa: BLE001 - the next look tells it, and the socket is opened anew
            self._failed = failed

    def _drain(self, most: int) -> int:
        """Takes what waits. There is room for the sender's identity alone, so file handles sent along are dropped."""
        for taken in range(most):
            try:
                data, extra, flags, _ = self._socket.recvmsg(MAX_DATAGRAM, _ROOM, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return taken
            if self._stop.is_set():
                return taken
            pid, uid = 0, _NOBODY
            for level, kind, content in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, uid, _ = _CREDENTIALS.unpack(content)
            self._receive(b"" if flags & socket.MSG_TRUNC else data, pid, uid)
        return most


def _queue() -> int:
    """How many datagrams the kernel keeps for us."""
    try:
        return int(_QUEUE.read_text())
    except (OSError, ValueError):  # a kernel without it, or a /proc that hides it: then every datagram wakes us
        return 0


def _bound(path: Path, mode: int) -> socket.socket:
    """A socket at `path` that every process can send to; a file that a killed agent left is replaced."""
    if not path.parent.is_dir():
        raise NoData(f"{path.parent}: no such folder; wanted RuntimeDirectory=fleetpulse/agent in the agent's unit")
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anybody can send
        made.bind(str(path))
        path.chmod(mode)
    except OSError as failed:
        made.close()
        mend = "RuntimeDirectory=fleetpulse/agent in the agent's unit, or another `socket` of [collector.training]"
        raise NoData(f"{path}: {failed.strerror or failed}; wanted to make a socket there: {mend}") from failed
    return made


def _remove_stale(path: Path) -> None:
    """Removes a socket at which nobody listens. Raises NoData where somebody does, or where it is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise NoData(f"{path}: is no socket; wanted none, or one that an agent left")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
            trial.connect(str(path))
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):  # if it stays, binding says why
            path.unlink()
        return
    except OSError as failed:
        raise NoData(f"{path}: {failed.strerror or failed}; wanted to know whether an agent listens there") from failed
    raise NoData(
        f"{path}: the agent that runs on this node listens there and has the steps; "
        "for a second agent set `socket` of [collector.training]"
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is."""
    try:
        found = os.lstat(path)
    except OSError:  # gone
        return None
    return found.st_dev, found.st_ino
