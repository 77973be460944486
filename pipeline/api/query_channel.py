"""Messages between the pipeline and its query processes: JSON objects, and open files, over a Unix socket."""

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
"""Longest message (chosen: a query of 65,536 characters is at most 400 kB of JSON, all schemas are 200 kB)."""
WHOLE_TIMEOUT = 600.0
"""Timeout of calls without a deadline (s). Chosen: no query may run that long."""


class Channel:
    """One end of the channel. Several threads may send; one may receive.

    Raises EOFError if the other end is closed, TimeoutError past a deadline (time.monotonic), OSError.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], handle: int | None = None, parts: Iterable[bytes] = ()) -> None:
        """Sends a message, with an open file or with bytes that the other end reads with `read`."""
        body = json.dumps(message).encode()
        with self._lock:
            socket.send_fds(self.socket, [_HEAD.pack(len(body))], [] if handle is None else [handle])
            self.socket.sendall(body)
            for part in parts:
                self.socket.sendall(part)

    def receive(self, deadline: float | None = None) -> tuple[dict[str, Any], int | None]:
        """Returns the next message and the file that came with it, which the caller must close."""
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
        """Reads exactly `size` bytes."""
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
        """Closes the channel; wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end closed it first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _wait_until(self, deadline: float | None) -> None:
        left = WHOLE_TIMEOUT if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("past the deadline")
        self.socket.settimeout(left)
