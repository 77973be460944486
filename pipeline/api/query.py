"""Runs a checked SELECT in a process of its own, within limits of time, rows, bytes, memory and company.

DuckDB in this process could hold none of them: it looks at its interrupt between vectors only, does not count what a
function builds, and shares one memory limit with whoever writes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.api.query_channel import Channel
from pipeline.api.query_host import QueryHost
from pipeline.api.query_process import KINDS
from pipeline.api.query_scan import Scans
from pipeline.config import Api
from pipeline.errors import OverLimit, Retryable

ANSWER_BYTES = 64 << 20
"""Bytes of one answer at most (chosen: 100,000 rows of 80 columns as Arrow); beyond that it is truncated."""
GRACE = 0.5
"""Seconds past the limit after which the kernel ends a query by itself. Chosen: the pipeline does so before."""
START_SECONDS = 30.0
"""How long the first query may wait for the process that forks. Chosen: measured 0.8 s, and 8 s on a busy machine."""


class Answer:
    """The body of one answer. Its query's slot stays taken until `release`, or until nobody holds the answer."""

    def __init__(self, body: bytes, truncated: bool, release: Callable[[], None]) -> None:
        self.body, self.truncated = body, truncated
        self.release = weakref.finalize(self, release)


@dataclass
class _Running:
    """One query under way."""

    channel: Channel
    scans: Scans
    deadline: float


class Queries:
    """The gatekeeper of all SQL that callers send. `close` ends what runs and refuses what comes."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection], api: Api) -> None:
        self._cursor, self._api, self._host = cursor, api, QueryHost()
        self._slots = threading.BoundedSemaphore(api.sql_queries)
        self._closed = threading.Event()
        self._running: set[Channel] = set()

    def run(self, query: str, arrow: bool = False) -> Answer:
        """The answer as JSON or an Arrow stream.

        Raises WrongQuery or Refused (the caller's fault), OverLimit (likewise) or Retryable.
        """
        if not self._slots.acquire(blocking=False):
            raise Retryable(f"{self._api.sql_queries} queries run already; wait for one to end", after_s=1.0)
        try:
            body, truncated = self._run(query, arrow)
        except BaseException:
            self._slots.release()
            raise
        return Answer(body, truncated, self._slots.release)

    def prepare(self) -> None:
        """Starts what the first query would have to wait for; it takes a second, and nobody waits for it here."""
        self._host.start()

    def close(self) -> None:
        """Ends every running query, so that the process can end."""
        self._closed.set()
        for channel in list(self._running):
            channel.close()
        self._host.close()

    def _run(self, query: str, arrow: bool) -> tuple[bytes, bool]:
        self._refuse_if_closed()
        pid, channel = self._host.fork(time.monotonic() + START_SECONDS)
        deadline = time.monotonic() + self._api.sql_seconds
        running = _Running(channel, Scans(self._cursor), deadline)
        self._running.add(channel)
        try:
            self._refuse_if_closed()
            return self._follow(running, query, arrow)
        except TimeoutError as error:
            raise OverLimit(f"the query ran for {self._api.sql_seconds:g} s, which is the limit") from error
        except (EOFError, OSError) as error:
            self._refuse_if_closed()
            limit = f"it may use {self._api.sql_memory_bytes >> 20} MiB and nest as deep as its stack allows"
            raise OverLimit(f"the process of the query ended without an answer; {limit}") from error
        finally:
            self._host.end(pid)
            channel.close()
            self._running.discard(channel)
            running.scans.end()

    def _follow(self, running: _Running, query: str, arrow: bool) -> tuple[bytes, bool]:
        """Answers what the process asks for until it has the result."""
        channel, scans, api = running.channel, running.scans, self._api
        limits = {"rows": api.sql_rows, "bytes": ANSWER_BYTES, "memory": api.sql_memory_bytes}
        channel.send({"query": query, "arrow": arrow, "seconds": api.sql_seconds + GRACE, **limits})
        while True:
            message, handle = channel.receive(running.deadline)
            if handle is not None:
                scans.start(message, handle)
            elif "tables" in message:
                channel.send(scans.schemas(message["tables"]))
            else:
                return self._result(message, running)

    def _result(self, message: dict[str, Any], running: _Running) -> tuple[bytes, bool]:
        if running.scans.failure is not None:
            raise running.scans.failure
        if "error" in message:
            raise KINDS[message["error"]](message["detail"])
        return running.channel.read(message["bytes"], running.deadline), message["truncated"]

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise Retryable("the pipeline is stopping", after_s=5.0)
