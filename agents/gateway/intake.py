"""Makes requests durable before they are acknowledged: one thread writes all that wait, with one wait for the disk.

A request is refused while too many bytes wait, or while the spool or its disk is nearly full: its sender keeps it and
tries again, which loses nothing; a spool that is full would drop its oldest messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agents.node.spool import disk
from agents.node.spool.spool import Spool
from pipeline.model.errors import SpoolError, WireError
from pipeline.model.records import Origin
from pipeline.transport import segments, wire

MAX_WAITING = 64 << 20
"""Most bytes that wait for the disk. Chosen: 16 of the largest messages."""
REPEATS = 65_536
"""Digests of the newest acknowledged requests, 6 MB. Chosen: ten minutes of 100 requests a second."""
REREAD_SEGMENTS = 2
"""Newest segments whose requests are known again after a restart, 0.1 s. Chosen: a kill prevents the answers to the
last requests only, and the newest segment may have just begun."""
WAIT_S = 20.0
"""Longest wait of a request for the disk; chosen: below the timeout of OpenTelemetry's clients (30 s)."""


class Overloaded(Exception):  # noqa: N818 - it describes the state, not an error of this program
    """Nothing can be accepted now; the message says why. `busy`: only because of other requests."""

    def __init__(self, why: str, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


class TooLarge(Exception):  # noqa: N818
    """The request can never be accepted."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """One request. failure: why it is not durable; None if it is, once `done` is set."""

    body: bytes
    made: int
    digest: bytes
    done: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None


class DurableIntake:
    """The queue in front of one spool, and its thread. `store` may be called from any thread.

    stored, repeated, refused: requests so far.
    """

    def __init__(
        self, spool: Spool, on_durable: Callable[[], object] = lambda: None, max_waiting: int = MAX_WAITING
    ) -> None:
        self.stored = self.repeated = self.refused = 0
        self._spool, self._on_durable, self._max_waiting = spool, on_durable, max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._known: OrderedDict[bytes, None] = OrderedDict.fromkeys(read_newest_digests(spool))
        self._work, self._stop = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="gateway-spool", daemon=True)
        self._thread.start()

    def store(self, request: bytes, format_: str, origin: Origin, made: int, local: bool = False) -> None:
        """Returns when the request is durable. Raises Overloaded or TooLarge. local: it is of `origin.node` itself.

        A request that was acknowledged before is not stored again: its sender did not get the answer.
        """
        digest = _digest(request)
        try:
            item = _Waiting(wire.encode_request(request, format_, origin, local), made, digest)
        except WireError as error:
            raise TooLarge(str(error)) from error
        with self._work:
            if digest in self._known:
                self.repeated += 1
                return
            if self._stop or (self._bytes and self._bytes + len(item.body) > self._max_waiting):
                self.refused += 1
                raise Overloaded(f"{self._bytes} bytes wait for the disk", busy=not self._stop)
            self._waiting.append(item)
            self._bytes += len(item.body)
            self._work.notify()
        if not item.done.wait(WAIT_S):
            self.refused += 1
            raise Overloaded(f"the disk has not responded for {WAIT_S:g} s")
        if item.failure is not None:
            self.refused += 1
            raise item.failure

    def close(self, seconds: float = WAIT_S) -> None:
        """Makes everything that waits durable, and closes the spool; waits at most `seconds` for the disk."""
        with self._work:
            self._stop = True
            self._work.notify()
        self._thread.join(seconds)

    def find_problem(self) -> str | None:
        """Why nothing can be stored; None if it can."""
        spool = self._spool
        if spool.size + 2 * spool.segment_bytes > spool.max_bytes:
            return f"the spool is full: {spool.size} of {spool.max_bytes} bytes: is the pipeline or Kafka unreachable?"
        try:
            free = disk.free_bytes(spool.home)
        except OSError:  # such as a folder that was removed: the write makes it again, or says what is wrong
            return None
        return "the disk of the spool is nearly full" if free < spool.free_bytes + 2 * spool.segment_bytes else None

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._waiting and not self._stop:
                    self._work.wait()
                taken, self._waiting = list(self._waiting), deque()
                self._bytes = 0
            if not taken:
                break
            try:
                self._write(taken)
            except Exception as error:  # noqa: BLE001 - without its thread every later request would wait in vain
                for item in taken:
                    item.failure = item.failure or Overloaded(f"the spool cannot be written: {error}")
            for item in taken:
                item.done.set()
        self._spool.close()

    def _write(self, taken: list[_Waiting]) -> None:
        if problem := self.find_problem():
            for item in taken:
                item.failure = Overloaded(problem)
            return
        lost = self._spool.dropped
        for item in taken:
            try:
                self._spool.append(item.body, wire.REQUEST_KIND, item.made)
            except SpoolError as error:
                item.failure = TooLarge(str(error))
        self._spool.sync()
        if self._spool.dropped > lost:
            raise OSError(self._spool.problem or "write failed")
        good = [item for item in taken if item.failure is None]
        with self._work:
            self.stored += len(good)
            for item in good:
                self._known[item.digest] = None
            while len(self._known) > REPEATS:
                self._known.popitem(last=False)
        self._on_durable()


def read_newest_digests(spool: Spool) -> list[bytes]:
    """Digests of the requests in the newest segments, oldest first: some of them may not have been answered."""
    found: list[bytes] = []
    for folder in segments.epoch_folders(spool.home)[-1:]:
        for first in segments.list_segments(folder)[-REREAD_SEGMENTS:]:
            try:
                data = segments.segment_path(folder, first).read_bytes()
            except OSError:  # unlinked, or not readable: its requests would only be stored again
                continue
            bodies, _, _ = segments.read_records(data, 0, first, len(data), len(data) + 1)
            for body in bodies:
                with contextlib.suppress(WireError):
                    found.append(_digest(wire.open_request(body).data))
    return found[-REPEATS:]


def _digest(request: bytes | memoryview) -> bytes:
    return hashlib.blake2b(request, digest_size=16).digest()
