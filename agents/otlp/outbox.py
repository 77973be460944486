"""Requests on their way out: a bounded queue and one thread that delivers, waits longer after each failure, and counts.

Nothing here ever makes the agent wait: what does not fit pushes the oldest out.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from pipeline.model.errors import Permanent, Retryable

MAX_BYTES = 4 << 20
"""Waiting at most; chosen: of a node with 8 GPUs about 15 requests, 2.5 minutes at the usual interval."""
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0
"""Wait after the first failure and after many; it doubles, and is shortened at random by up to half, so that a fleet
whose collector comes back does not call it all at once. Chosen; OTLP wants exponential waits with jitter."""


class Outbox:
    """sent, dropped: requests since the start. `deliver` raises Retryable or Permanent.

    `say` gets changes of state; `end` is called last, by the thread that delivers.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[bytes], None],
        say: Callable[[str], object],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.sent = self.dropped = 0
        self._end = end
        self._deliver, self._say = deliver, say
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._pause = 0.0
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, request: bytes) -> None:
        """Queues a request; never waits."""
        if self._thread.ident is None:
            self._thread.start()
        with self._news:
            self._waiting.append(request)
            self._size += len(request)
            while self._size > MAX_BYTES:
                self._size -= len(self._waiting.popleft())
                self.dropped += 1
            self._news.notify()

    def close(self, seconds: float) -> None:
        """Ends within about `seconds`: what waits is tried once more as long as that goes well."""
        with self._news:
            self._stop.set()
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        self._send()
        self._end()

    def _send(self) -> None:
        while (request := self._next()) is not None:
            while not self._tried(request):
                if self._stop.is_set():
                    self.dropped += 1
                    return

    def _next(self) -> bytes | None:
        """Takes the oldest request; None at the end."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._stop.is_set())
            if not self._waiting:
                return None
            request = self._waiting.popleft()
            self._size -= len(request)
            return request

    def _tried(self, request: bytes) -> bool:
        """One try, and the wait after it if it failed; whether the request is delivered or lost for good."""
        try:
            self._deliver(request)
        except Retryable as error:
            self._wait(error)
            return False
        except Permanent as error:
            self._lose(str(error))
        except Exception as error:  # noqa: BLE001 - whatever a library does must not end the thread; it is said
            self._lose(f"{type(error).__name__}: {error}")
        else:
            self.sent += 1
            if self._pause:
                self._say(f"sending again; {self.dropped} requests lost since the start")
                self._pause = 0.0
        return True

    def _lose(self, why: str) -> None:
        with self._news:
            self.dropped += 1
        self._say(f"a request is lost: {why}")

    def _wait(self, error: Retryable) -> None:
        if not self._pause:
            self._say(f"cannot send: {error}; trying again")
        self._pause = min(max(PAUSE_S, 2 * self._pause), PAUSE_MAX_S)
        self._stop.wait(max(error.after_s, self._pause * random.uniform(0.5, 1.0)))
