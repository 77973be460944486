"""Runs a checked SELECT in a process of its own, within limits of time, rows, bytes, memory and company.

DuckDB in this process could hold none of them: it looks at its interrupt between vectors only, does not count what a
function builds, and shares one memory limit with whoever writes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import duckdb

from pipeline.api.query_channel import Channel
from pipeline.api.query_host import QueryHost
from pipeline.api.query_process import KINDS
from pipeline.api.query_scan import Scans
from pipeline.config.sections import Api
from pipeline.model.errors import OverLimit, Retryable

ANSWER_BYTES = 64 << 20
"""Bytes of one answer at most (chosen: 100,000 rows of 80 columns as Arrow); beyond that it is truncated."""
GRACE = 0.5
"""Seconds past the limit after which the kernel ends a query by itself, and the caller is answered whatever else is
still under way. Chosen: the pipeline does so before."""
START_SECONDS = 30.0
"""How long the process that forks may be silent before it is given up. Chosen: it starts within 0.8 s, and within 8 s
on a busy machine."""


class Answer:
    """The body of one answer. Its query's slot stays taken until `release`, or until nobody holds the answer."""

    def __init__(self, body: bytes, truncated: bool, release: Callable[[], None]) -> None:
        self.body, self.truncated = body, truncated
        self.release = weakref.finalize(self, release)


@dataclass
class _Running:
    """One query under way, in a thread of its own. `channel` is there once it has a process."""

    scans: Scans
    deadline: float
    outcome: Future[Answer] = field(default_factory=Future)
    channel: Channel | None = None


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
        running = _Running(Scans(self._cursor), time.monotonic() + self._api.sql_seconds)
        try:
            threading.Thread(target=self._work, args=(running, query, arrow), name="query", daemon=True).start()
        except BaseException:
            self._slots.release()
            raise
        return self._outcome(running)

    def _outcome(self, running: _Running) -> Answer:
        """Waits no longer than the limit and GRACE: a lock of the store, or a process that is slow to fork or to end,
        is its thread's to wait for, which keeps the slot meanwhile."""
        try:
            return running.outcome.result(running.deadline + GRACE - time.monotonic())
        except TimeoutError as error:
            if running.channel is None:
                raise Retryable(
                    f"no process for the query within {self._api.sql_seconds:g} s: the machine is too busy", after_s=5.0
                ) from error
            raise self._too_long() from error

    def _work(self, running: _Running, query: str, arrow: bool) -> None:
        """One query from its process to its outcome, which nobody may be waiting for any more."""
        try:
            body, truncated = self._run(running, query, arrow)
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            self._slots.release()
            running.outcome.set_exception(error)
            return
        running.outcome.set_result(Answer(body, truncated, self._slots.release))

    def _too_long(self) -> OverLimit:
        return OverLimit(f"the query ran for {self._api.sql_seconds:g} s, which is the limit")

    def prepare(self) -> None:
        """Starts what the first query would have to wait for; it takes a second, and nobody waits for it here."""
        self._host.start()

    def close(self) -> None:
        """Ends every running query, so that the process can end."""
        self._closed.set()
        for channel in list(self._running):
            channel.close()
        self._host.close()

    def _run(self, running: _Running, query: str, arrow: bool) -> tuple[bytes, bool]:
        self._refuse_if_closed()
        pid, running.channel = self._host.fork(time.monotonic() + START_SECONDS)
        self._running.add(running.channel)
        try:
            self._refuse_if_closed()
            return self._follow(running, running.channel, query, arrow)
        except TimeoutError as error:
            raise self._too_long() from error
        except (EOFError, OSError) as error:
            self._refuse_if_closed()
            limit = f"it may use {self._api.sql_memory_bytes >> 20} MiB and nest as deep as its stack allows"
            raise OverLimit(f"the process of the query ended without an answer; {limit}") from error
        finally:
            self._host.end(pid)
            running.channel.close()
            self._running.discard(running.channel)
            running.scans.end()

    def _follow(self, running: _Running, channel: Channel, query: str, arrow: bool) -> tuple[bytes, bool]:
        """Answers what the process asks for until it has the result."""
        scans, api = running.scans, self._api
        limits = {"rows": api.sql_rows, "bytes": ANSWER_BYTES, "memory": api.sql_memory_bytes}
        channel.send({"query": query, "arrow": arrow, "seconds": api.sql_seconds + GRACE, **limits})
        while True:
            message, handle = channel.receive(running.deadline)
            if handle is not None:
                scans.start(message, handle)
            elif "tables" in message:
                channel.send(scans.schemas(message["tables"]))
            else:
                return self._result(message, running, channel)

    def _result(self, message: dict[str, Any], running: _Running, channel: Channel) -> tuple[bytes, bool]:
        if running.scans.failure is not None:
            raise running.scans.failure
        if "error" in message:
            raise KINDS[message["error"]](message["detail"])
        return channel.read(message["bytes"], running.deadline), message["truncated"]

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise Retryable("the pipeline is stopping", after_s=5.0)
