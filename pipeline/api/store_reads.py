"""Limits for reads of the store that may be heavy: threads of low priority, few at a time, each with a deadline.

DuckDB runs a statement of the store in the thread that calls it (pipeline/store/database.py), so the priority of that
thread is the priority of the read: ingest and evaluation go first, however much of history is asked for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import duckdb

from pipeline.model.errors import OverLimit, Retryable

NICENESS = 10
"""nice(2) of threads and processes that read for callers. Chosen: they get a tenth of a busy core."""
READS = 4
"""Heavy reads at a time. Chosen: as many as concurrent SQL queries; each holds memory of the store's own limit."""
QUEUE_SECONDS = 5.0
"""Longest wait for a free place (s). Chosen: a dashboard waits that long, then it shows that the pipeline is busy."""
GRACE = 0.5
"""Time that an interrupted read gets to end (s). Chosen: DuckDB looks for an interrupt after each vector of rows."""
T = TypeVar("T")


def lower_priority() -> None:
    """Lowers the priority of the calling thread to NICENESS, for good."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class StoreReads:
    """Runs heavy reads within the limits. cursor: opens a cursor on the store. seconds: time limit of one read."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection], seconds: float) -> None:
        self._cursor, self._seconds = cursor, seconds
        self._slots = threading.BoundedSemaphore(READS)

    def run(self, read: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        """Returns what `read` returns, with a cursor in a read-only transaction.

        Raises OverLimit after the time limit, Retryable if too many reads are running, and what `read` raises.
        """
        if not self._slots.acquire(timeout=QUEUE_SECONDS):
            raise Retryable(f"{READS} reads of history are running, the maximum; retry when one has ended", after_s=2.0)
        outcome: Future[T] = Future()
        try:
            cursor = self._cursor()
            work = threading.Thread(target=self._work, args=(cursor, read, outcome), name="store read", daemon=True)
            work.start()
        except BaseException:
            self._slots.release()
            raise
        return self._wait(cursor, outcome)

    def _wait(self, cursor: duckdb.DuckDBPyConnection, outcome: Future[T]) -> T:
        """Waits until the limit, then interrupts the read again and again: between statements that has no effect."""
        until, pause = time.monotonic() + self._seconds, self._seconds
        while True:
            try:
                return outcome.result(pause)
            except duckdb.InterruptException as error:
                raise self._too_long() from error
            except TimeoutError as error:
                if time.monotonic() >= until + GRACE:  # it ends later, and holds its place until then
                    raise self._too_long() from error
            with contextlib.suppress(duckdb.Error):  # it has just ended
                cursor.interrupt()
            pause = GRACE / 10

    def _too_long(self) -> OverLimit:
        return OverLimit(f"the read ran for {self._seconds:g} s, which is the limit; ask for a shorter time")

    def _work(
        self,
        cursor: duckdb.DuckDBPyConnection,
        read: Callable[[duckdb.DuckDBPyConnection], T],
        outcome: Future[T],
    ) -> None:
        lower_priority()
        try:
            with contextlib.closing(cursor):
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                outcome.set_result(read(cursor))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome.set_exception(error)
        finally:
            self._slots.release()
