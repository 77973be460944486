"""Calls that may hang, for several devices in parallel, with a common time limit.

Each call runs in its own thread. A device is not called again before its last call returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class CallResult(Generic[T]):
    """Result of a call, or the OSError that it raised. `seconds` is None while the call is running."""

    started: float
    seconds: float | None = None
    value: T | None = None
    error: OSError | None = None


class TimedCalls(Generic[T]):
    """Runs calls in threads. Only the threads of calls that hang outlive a read."""

    def __init__(self) -> None:
        self._running: dict[str, CallResult[T]] = {}
        self._finished = threading.Condition()

    def run(self, calls: Mapping[str, Callable[[], T]], patience: float) -> dict[str, CallResult[T]]:
        """Starts all calls and waits up to `patience` seconds for them together. Calls that still hang are not started
        again.
        """
        with self._finished:
            requested = {name: self._running[name] for name in calls if name in self._running}
        for name, call in calls.items():
            if name not in requested:
                requested[name] = self._start(name, call)
        with self._finished:
            self._finished.wait_for(lambda: all(a.seconds is not None for a in requested.values()), patience)
            return {name: CallResult(a.started, a.seconds, a.value, a.error) for name, a in requested.items()}

    @staticmethod
    def elapsed(answer: CallResult[T]) -> float:
        """Returns the seconds that a call has been running, or took."""
        return time.monotonic() - answer.started if answer.seconds is None else answer.seconds

    def _start(self, name: str, call: Callable[[], T]) -> CallResult[T]:
        answer: CallResult[T] = CallResult(time.monotonic())
        with self._finished:
            self._running[name] = answer
        thread = threading.Thread(target=self._run, args=(name, call, answer), name=f"call {name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread could be started: nothing is running that would ever return
            with self._finished:
                del self._running[name]
            raise
        return answer

    def _run(self, name: str, call: Callable[[], T], answer: CallResult[T]) -> None:
        value, error = None, None
        try:
            value = call()
        except OSError as failed:
            error = failed
        with self._finished:
            answer.value, answer.error, answer.seconds = value, error, time.monotonic() - answer.started
            del self._running[name]
            self._finished.notify_all()
