"""Messages between the pipeline and its query processes: JSON objects over a Unix socket, with an open file or none."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

_HEAD = struct.Struct(">I")
MESSAGE_BYTES = 4 << 20
"""Longest message (chosen: a query of 65,536 characters as JSON has at most 400 kB, all schemas together 200 kB)."""
WHOLE_TIMEOUT = 600.0
"""Seconds without a deadline given (chosen: no query may run that long)."""


class Channel:
    """One end. Sends are safe from several threads; one thread receives.

    Raises EOFError where the other end is closed, TimeoutError past a deadline (of time.monotonic), OSError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], handle: int | None = None, parts: Iterable[bytes] = ()) -> None:
        """One message; with it a file of this process, or bytes that the other end reads with `read`."""
        body = json.dumps(message).encode()
        with self._lock:
            socket.send_fds(self.socket, [_HEAD.pack(len(body))], [] if handle is None else [handle])
            self.socket.sendall(body)
            for part in parts:
                self.socket.sendall(part)

    def receive(self, deadline: float | None = None) -> tuple[dict[str, Any], int | None]:
        """The next message, and the file that came with it, which the caller closes."""
        self._wait_until(deadline)
        head, handles, _, _ = socket.recv_fds(self.socket, _HEAD.size, 1)
        handle = handles[0] if handles else None
        try:
            head += self.read(_HEAD.size - len(head), deadline)
            (size,) = _HEAD.unpack(head)
            if size > MESSAGE_BYTES:
                raise EOFError(f"a message of {size} bytes; expected at most {MESSAGE_BYTES}")
            message: dict[str, Any] = json.loads(self.read(size, deadline))
        except BaseException:
            if handle is not None:
                os.close(handle)
            raise
        return message, handle

    def read(self, size: int, deadline: float | None = None) -> bytes:
        """Exactly `size` bytes."""
        body = bytearray(size)
        view, done = memoryview(body), 0
        while done < size:
            self._wait_until(deadline)
            count = self.socket.recv_into(view[done:])
            if not count:
                raise EOFError("the other end closed the channel")
            done += count
        return bytes(body)

    def close(self) -> None:
        """Ends the channel, also for a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end was first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _wait_until(self, deadline: float | None) -> None:
        left = WHOLE_TIMEOUT if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("past the deadline")
        self.socket.settimeout(left)
