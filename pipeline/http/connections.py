"""Connections of uvicorn with deadlines and a limit, so that callers that send or read nothing use no resources.

uvicorn waits forever for the head or body of a request, and its limit_concurrency refuses callers only after it has
accepted and parsed them.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""Limit for receiving a whole request (s). Chosen: heads have at most 16 KiB, bodies 256 KiB."""
WRITE_SECONDS = 60.0
"""Limit for draining a full write buffer (s). Chosen: a caller that reads less than 1 KiB/s is gone or hostile."""
RESERVED_FILES = 512
"""File descriptors reserved for the rest of the process. Chosen: brokers, spool and store need fewer than 100, and each
query may have 32 scans."""
MIN_CONNECTIONS = 16
"""Connections that are always served. Chosen."""


def raise_file_limit() -> int:
    """Raises the limit of open files to the hard limit and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def limit_connections(wanted: int, files: int) -> int:
    """Returns the limit of connections: `wanted`, or the number of files without the reserve."""
    return wanted if files == resource.RLIM_INFINITY else max(MIN_CONNECTIONS, min(wanted, files - RESERVED_FILES))


def make_protocol(most: int) -> type[H11Protocol]:
    """Returns the uvicorn protocol class of a server with at most `most` connections."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"most": most})


class _BoundedProtocol(H11Protocol):
    """One connection. `most`: the server's limit. `since`: time of the connection or of the start of the last
    request."""

    most = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.since = 0.0
        self._request: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None
        self._upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the deadline of the first request and enforces the limit."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.since = self.loop.time()
        self._request = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        if len(self.connections) > self.most:
            _drop_oldest(self.connections, self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        self._request = _cancel(self._request)
        self._write = _cancel(self._write)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Starts or ends the deadline of a request."""
        if self._request is None:
            self.since = self.loop.time()
        super().data_received(data)
        if self._upgraded or not self.waits_for_caller():
            self._request = _cancel(self._request)
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Ends the deadlines of requests, since a WebSocket stays open; `data_received` calls this and goes on."""
        self._upgraded = True
        self._request = _cancel(self._request)
        super().handle_websocket_upgrade(event)

    def waits_for_caller(self) -> bool:
        """Returns whether the server waits for more of a request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def pause_writing(self) -> None:
        """Starts the deadline of the write buffer."""
        super().pause_writing()
        if self._write is None:
            self._write = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Ends the deadline of the write buffer."""
        super().resume_writing()
        self._write = _cancel(self._write)


def _drop_oldest(connections: set[Any], newest: _BoundedProtocol) -> None:
    """Aborts the connection that has waited longest for a request."""
    waiting = [
        one
        for one in connections
        if isinstance(one, _BoundedProtocol)
        and one is not newest
        and one.waits_for_caller()
        and not one.transport.is_closing()
    ]
    oldest = min(waiting, key=lambda one: one.since, default=newest)
    oldest.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancels a timer and returns None."""
    if timer is not None:
        timer.cancel()
    return None
