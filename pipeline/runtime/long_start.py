"""A start that may take long, such as one that copies a store: the service manager gets its progress, so that it
does not end it, and a stop ends it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.model.errors import Interrupted
from pipeline.runtime.heartbeat import Heartbeat
from pipeline.runtime.systemd import SystemdNotifier

EXTENSION_S, EXTEND_EVERY_S = 300.0, 30.0
"""Time that each message asks for, and between two of them (s). Chosen: nine may be lost."""
STEP_LIMIT_S = 7200.0
"""Time without progress after which no more is asked for (s). Chosen: 219 GB, the store of 1,000 nodes in
docs/sizing.md, are read and written at 100 MB/s in 4,400 s, within one statement."""
_TICK_S = 0.5  # between two looks at the stop; chosen: a stop is seen by people


class LongStart:
    """One start, until it is ready. manager: None reports nowhere.  stop: None is never set."""

    def __init__(self, stop: threading.Event | None = None, manager: SystemdNotifier | None = None) -> None:
        self._stop, self._manager = stop or threading.Event(), manager
        self._heartbeat = Heartbeat()
        self._interrupt: Callable[[], None] = lambda: None

    def tell(self, doing: str = "") -> None:
        """Notes progress. doing: what is done from now on; empty: the same. Raises Interrupted if it must stop."""
        self._heartbeat.beat(doing or self._heartbeat.doing)
        if self._stop.is_set():
            raise Interrupted(f"stopped while starting: {self._heartbeat.doing}")

    @contextlib.contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Lets a stop call `interrupt`, repeatedly, from another thread, for work that does not call `tell`."""
        self._interrupt = interrupt
        try:
            yield
        finally:
            self._interrupt = lambda: None

    @contextlib.contextmanager
    def extended(self) -> Iterator[None]:
        """Extends the manager's time limit, of a start and of a stop, while there is progress."""
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="long start", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        told, asked_at = "", float("-inf")
        while not ended.wait(_TICK_S):
            if self._stop.is_set():
                self._interrupt()
            doing, now = self._heartbeat.doing, time.monotonic()
            is_due = doing != told or now - asked_at >= EXTEND_EVERY_S
            if is_due and self._manager is not None and self._heartbeat.age_s < STEP_LIMIT_S:
                self._manager.extend(EXTENSION_S, doing)
                told, asked_at = doing, now
