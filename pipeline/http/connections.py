"""uvicorn's HTTP connections with deadlines and a cap, so that callers who send or read nothing cost nothing.

uvicorn itself waits for ever for a request's head or body, and its limit_concurrency refuses callers only after it has
accepted and parsed them.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""Within which a request has to arrive whole. Chosen: heads have at most 16 KiB, bodies 256 KiB."""
WRITE_SECONDS = 60.0
"""How long a full write buffer may take to drain. Chosen: who reads less than 1 KiB/s is gone or means harm."""
RESERVED_FILES = 512
"""Descriptors that connections leave to the rest of the process. Chosen: brokers, spool and store need fewer than 100,
and each query may have 32 scans."""
FEWEST = 16
"""Connections that are served however few descriptors there are (chosen)."""


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, and returns how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def affordable(wanted: int, files: int) -> int:
    """How many connections there may be: `wanted`, or what the reserve leaves."""
    return wanted if files == resource.RLIM_INFINITY else max(FEWEST, min(wanted, files - RESERVED_FILES))


def protocol(most: int) -> type[H11Protocol]:
    """uvicorn's protocol for a server of at most `most` connections."""
    return type("BoundedProtocol", (_Bounded,), {"most": most})


class _Bounded(H11Protocol):
    """One connection. `most` is the server's limit, `since` when its caller connected or began its last request: a byte
    now and then makes nobody young."""

    most = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.since = 0.0
        self._request: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.since = self.loop.time()
        self._request = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)
        if len(self.connections) > self.most:
            _drop_one(self.connections, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._request = _cancelled(self._request)
        self._write = _cancelled(self._write)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._request is None:
            self.since = self.loop.time()
        super().data_received(data)
        if not self.waits_for_caller():
            self._request = _cancelled(self._request)
        elif self._request is None:
            self._request = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._request = _cancelled(self._request)
        super().handle_websocket_upgrade(event)

    def waits_for_caller(self) -> bool:
        """Whether the next thing that has to happen is that the caller sends more of a request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write is None:
            self._write = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write = _cancelled(self._write)


def _drop_one(connections: set[Any], newest: _Bounded) -> None:
    """Makes room: whose request is owed for longest goes, so that those who send theirs are served."""
    waiting = [
        one
        for one in connections
        if isinstance(one, _Bounded) and one is not newest and one.waits_for_caller() and not one.transport.is_closing()
    ]
    oldest = min(waiting, key=lambda one: one.since, default=newest)
    oldest.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, in place of one that is no longer needed."""
    if timer is not None:
        timer.cancel()
    return None
