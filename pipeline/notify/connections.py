"""Connections to checked addresses: their deadline, and those that are kept open while a queue is sent.

A socket timeout restarts with every byte, so that only a timer ends a slow receiver. All connections share one.
"""

from __future__ import annotations

import contextlib
import heapq
import http.client
import io
import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

log = logging.getLogger("fleetpulse.notify")
MAX_IDLE = 16
"""Connections that are kept open for one receiver. Chosen: twice the messages at a time."""


class _Lines(io.BufferedReader):
    """A buffered reader that remembers the last line that was read."""

    last = b""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Returns the next line."""
        self.last = super().readline(size)
        return self.last


class WholeResponse(http.client.HTTPResponse):
    """A response with a whole head: the standard library takes one that was cut anywhere for a whole one, so that a
    receiver that died after its status line would count as one that accepted."""

    def begin(self) -> None:
        """Reads the head. Raises IncompleteRead if the connection ended before the empty line below it."""
        self.fp = lines = _Lines(self.fp.detach())
        super().begin()
        if lines.last not in (b"\r\n", b"\n"):
            raise http.client.IncompleteRead(b"")


class CheckedConnection(http.client.HTTPConnection):
    """Connects to the first checked address that accepts; `Host` and certificate name are those of the URL.

    reused: whether it has carried a request before, so that the receiver may have closed it since.
    """

    response_class = WholeResponse

    def __init__(self, host: str, port: int, addresses: Sequence[str], tls: bool, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.timeout_s, self.aborted, self.reused = timeout_s, False, False
        self._parts: list[bytes] | None = None
        self._addresses, self._tls = addresses, tls
        self.default_port = 443 if tls else 80  # so that `Host` contains only a non-default port

    @property
    def key(self) -> tuple[str, int, bool]:
        """What a connection must have in common with a request."""
        return self.host, self.port, self._tls

    def connect(self) -> None:
        """Connects to one of the checked addresses, without resolving the name again."""
        self.sock = self._connect_any()
        self.sock.settimeout(self.timeout_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the end of a long body is not held back
        if self._tls:
            context = ssl.create_default_context()
            # the handshake comes after the assignment, so that abort() can end a slow one
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock.do_handshake()

    def _connect_any(self) -> socket.socket:
        share = self.timeout_s / len(self._addresses)
        for address in self._addresses[:-1]:
            with contextlib.suppress(OSError):  # the next address may accept; the error of the last one is reported
                return socket.create_connection((address, self.port), share)
        return socket.create_connection((self._addresses[-1], self.port), share)

    def request(  # type: ignore[override]
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Sends head and body in one packet: apart, each message costs a system call and wakes the receiver twice."""
        self._parts = []
        super().request(method, url, body, headers)
        whole, self._parts = b"".join(self._parts), None
        super().send(whole)

    def send(self, data: bytes) -> None:  # type: ignore[override]
        """Collects the parts of a request."""
        if self._parts is None:
            super().send(data)
        else:
            self._parts.append(data)

    def acknowledge_quickly(self) -> None:
        """Confirms the next bytes immediately: a receiver that writes head and body apart else waits 40 ms for it."""
        if self.sock is not None and hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):  # a socket that failed: reading the response reports it
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def abort(self) -> None:
        """Makes the thread that waits on the socket fail immediately."""
        self.aborted = True
        if (sock := self.sock) is not None:  # read once: the thread that waits may close the connection now
            with contextlib.suppress(OSError):  # it may already be closed
                sock.shutdown(socket.SHUT_RDWR)


class ConnectionPool:
    """Idle connections to one receiver, which the next requests use. Thread-safe.

    It lives as long as one pass over the queue: an address that was checked is used for seconds, not for days.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CheckedConnection] = []

    def borrow(self, host: str, port: int, tls: bool) -> CheckedConnection | None:
        """Returns an idle connection, None if there is none."""
        with self._lock:
            found = next((c for c in reversed(self._idle) if c.key == (host, port, tls)), None)
            if found is not None:
                self._idle.remove(found)
        return found

    def give_back(self, connection: CheckedConnection) -> None:
        """Keeps a connection of which the whole response was read, for the next request."""
        connection.reused = True
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Closes all idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class DeadlineTimer:
    """Aborts connections at their deadline, with one thread for all of them; it starts with the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._connections: dict[int, CheckedConnection] = {}
        self._numbers = itertools.count()
        self._started = False

    def start(self, connection: CheckedConnection) -> int:
        """Aborts the connection after its timeout, unless `cancel` is called with the number that is returned."""
        with self._changed:
            number, end = next(self._numbers), time.monotonic() + connection.timeout_s
            self._connections[number] = connection
            earliest = not self._waiting or end < self._waiting[0][0]
            heapq.heappush(self._waiting, (end, number))
            if not self._started:
                threading.Thread(target=self._run, name="notify-deadlines", daemon=True).start()
                self._started = True
            elif earliest:
                self._changed.notify()
        return number

    def cancel(self, number: int) -> None:
        """The connection needs no deadline any more."""
        with self._changed:
            self._connections.pop(number, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting and self._waiting[0][1] not in self._connections:
                    heapq.heappop(self._waiting)
                wait = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                late = self._connections.pop(heapq.heappop(self._waiting)[1])
            try:
                late.abort()
            except Exception:  # a thread that ends leaves all later requests without a deadline
                log.exception("a connection to %s was not aborted at its deadline", late.host)


DEADLINES = DeadlineTimer()
"""The timer of this process."""
