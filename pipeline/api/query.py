"""Runs a checked SELECT within limits of time, rows, bytes and company, in a read-only transaction of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import duckdb
import pyarrow as pa

from pipeline.api import sandbox
from pipeline.errors import Refused, Retryable

TOGETHER = 4
"""Queries that run at once (chosen: DuckDB shares its threads among them; more only wait for each other)."""
BATCH_ROWS = 2048
"""Rows fetched at a time: DuckDB's own vector size, so that no more than one vector is computed past the limit."""
LOOK = 0.05
"""Seconds between looks at the clock (chosen: far below any limit of time, and 20 wake-ups a second cost nothing)."""
ANSWER_BYTES = 64 << 20
"""Arrow bytes of one answer at most (chosen: 100,000 rows of 80 columns); beyond that it is truncated."""


class Queries:
    """The gatekeeper of all SQL that callers send. `close` interrupts what runs and refuses what comes."""

    def __init__(self, cursor: Callable[[], duckdb.DuckDBPyConnection], seconds: float, rows: int) -> None:
        self._cursor, self._seconds, self._rows = cursor, seconds, rows
        self._slots = threading.BoundedSemaphore(TOGETHER)
        self._closed = threading.Event()

    def run(self, query: str) -> tuple[pa.Table, bool]:
        """The answer, and whether rows are missing from its end. Raises Refused (the caller's fault) or Retryable."""
        if not self._slots.acquire(blocking=False):
            raise Retryable(f"{TOGETHER} queries run already; wait for one to end", after_s=1.0)
        try:
            with self._limited() as (cursor, expired):
                try:
                    return self._read(cursor, query)
                except duckdb.InterruptException as error:
                    if expired.is_set():
                        raise Refused(f"the query ran for {self._seconds:g} s, which is the limit") from error
                    raise Retryable("the pipeline is stopping", after_s=5.0) from error
                except (duckdb.Error, UnicodeError) as error:
                    raise Refused(str(error)) from error
        finally:
            self._slots.release()

    def close(self) -> None:
        """Interrupts every running query, so that the process can end."""
        self._closed.set()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[tuple[duckdb.DuckDBPyConnection, threading.Event]]:
        """A cursor, and whether its time was up; a thread watches over it until the block ends."""
        if self._closed.is_set():
            raise Retryable("the pipeline is stopping", after_s=5.0)
        cursor, done, expired = self._cursor(), threading.Event(), threading.Event()
        watch = threading.Thread(target=self._watch, args=(cursor, done, expired), name="query watch", daemon=True)
        watch.start()
        try:
            yield cursor, expired
        finally:
            done.set()
            watch.join()  # nobody may interrupt a cursor that is closed
            cursor.close()

    def _watch(self, cursor: duckdb.DuckDBPyConnection, done: threading.Event, expired: threading.Event) -> None:
        """Interrupts again and again: DuckDB forgets an interrupt that comes just before a statement begins."""
        end = time.monotonic() + self._seconds
        while not done.wait(LOOK):
            if time.monotonic() >= end:
                expired.set()
            if expired.is_set() or self._closed.is_set():
                cursor.interrupt()

    def _read(self, cursor: duckdb.DuckDBPyConnection, query: str) -> tuple[pa.Table, bool]:
        """The first rows of the answer. The transaction is read-only, should the gate ever let a write pass."""
        statement = sandbox.check(cursor, query)
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        try:
            return self._fetch(cursor.sql(statement))
        finally:
            # an interrupted statement may have ended the transaction already
            with contextlib.suppress(duckdb.Error):
                cursor.execute("ROLLBACK")

    def _fetch(self, relation: duckdb.DuckDBPyRelation) -> tuple[pa.Table, bool]:
        """Batch by batch, so that never more is held than is answered."""
        reader = relation.to_arrow_reader(BATCH_ROWS)
        batches: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in reader:
            batches.append(batch)
            rows, size = rows + batch.num_rows, size + batch.nbytes
            if rows > self._rows or size > ANSWER_BYTES:
                break
        table = pa.Table.from_batches(batches, schema=reader.schema)
        truncated = rows > self._rows or size > ANSWER_BYTES
        return table.slice(0, min(self._rows, rows if size <= ANSWER_BYTES else rows - batches[-1].num_rows)), truncated
