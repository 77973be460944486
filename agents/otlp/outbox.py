"""A bounded queue of requests and one thread that delivers them, with exponential backoff and counters.

Nothing here makes the agent wait: if the queue is full, the oldest request is dropped.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from pipeline.model.errors import Permanent, Retryable

MAX_BYTES = 4 << 20
"""Most bytes in the queue. Chosen: of a node with 8 GPUs about 15 requests, 2.5 minutes at the usual interval."""
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Backoff after the first failure, and its maximum; it doubles, and is reduced at random by up to half, so that a fleet
does not call a recovered collector all at once. Chosen; OTLP requires exponential backoff with jitter."""


class Outbox:
    """sent, dropped: requests since the start. `deliver` raises Retryable or Permanent.

    `log` gets changes of state; `end` is called last, by the delivering thread.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[bytes], None],
        log: Callable[[str], object],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent = self.dropped = 0
        self._on_end = end
        self._deliver, self._log = deliver, log
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._pause = 0.0
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def enqueue(self, request: bytes) -> None:
        """Queues a request; never waits."""
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._waiting.append(request)
            self._size += len(request)
            while self._size > MAX_BYTES:
                self._size -= len(self._waiting.popleft())
                self.dropped += 1
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`: queued requests are tried once more as long as deliveries succeed."""
        with self._changed:
            self._stop.set()
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._send()
        self._on_end()

    def _send(self) -> None:
        while (request := self._next()) is not None:
            while not self._try_delivery(request):
                if self._stop.is_set():
                    self.dropped += 1
                    return

    def _next(self) -> bytes | None:
        """Returns the oldest request; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stop.is_set())
            if not self._waiting:
                return None
            request = self._waiting.popleft()
            self._size -= len(request)
            return request

    def _try_delivery(self, request: bytes) -> bool:
        """Tries once, and waits after a failure; returns whether the request is delivered or dropped."""
        try:
            self._deliver(request)
        except Retryable as error:
            self._wait(error)
            return False
        except Permanent as error:
            self._drop(str(error))
        except Exception as error:  # noqa: BLE001 - an error of a library must not end the thread; it is logged
            self._drop(f"{type(error).__name__}: {error}")
        else:
            self.sent += 1
            if self._pause:
                self._log(f"sending works again; {self.dropped} requests dropped since the start")
                self._pause = 0.0
        return True

    def _drop(self, why: str) -> None:
        with self._changed:
            self.dropped += 1
        self._log(f"request dropped: {why}")

    def _wait(self, error: Retryable) -> None:
        if not self._pause:
            self._log(f"cannot send: {error}; retrying")
        self._pause = min(max(PAUSE_S, 2 * self._pause), PAUSE_MAX_S)
        self._stop.wait(max(error.after_s, self._pause * random.uniform(0.5, 1.0)))
