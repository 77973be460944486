"""The thread that writes to the spools' disk, and the bounded queues in front of it: a slow disk delays no loop.

Only this thread opens, writes and closes the spools of a node and the small files beside them. Events are written
before telemetry. Each topic has a queue of at most `max_bytes` and `max_seconds` of messages. Beyond that the oldest
messages are dropped and counted. They keep their sequence numbers, as a gap, so that readers of the spool count them.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agents.node.spool import accepted_count
from agents.node.spool.accepted_count import AcceptedCount
from agents.node.spool.spool import Spool
from agents.node.workers.processes import HARMLESS
from pipeline.config.sections import Spool as Settings
from pipeline.model.errors import SpoolError
from pipeline.model.records import EVENTS, TELEMETRY, Origin
from pipeline.transport import segments

BITE = 1 << 20
"""Bytes that are taken from the queue at once, and so the most that is held beyond `max_bytes`; as spool.BUFFER."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wire body. made: UTC us; since: monotonic seconds at which it was queued."""

    body: bytes
    kind: int
    made: int
    since: float


class WaitingMessages:
    """The queue of one topic. For any thread.

    accepted: messages ever added.  given_up: those of them that were dropped for want of room or time.
    handled: messages that were written or given up, and that the spool has numbered.
    """

    def __init__(self, max_bytes: int, max_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.accepted = self.given_up = self.handled = 0
        self._max_bytes, self._max_seconds, self._monotonic = max_bytes, max_seconds, monotonic
        self._queue: deque[Waiting] = deque()
        self._bytes = self._dropped = self._in_hand = 0
        self._oldest_in_hand = 0.0
        self._lock = threading.Lock()

    def add(self, body: bytes, kind: int, made: int) -> None:
        """Queues one message; gives up the oldest ones if there are too many bytes or they waited too long."""
        now = self._monotonic()
        with self._lock:
            self.accepted += 1
            self._queue.append(Waiting(body, kind, made, now))
            self._bytes += len(body)
            while len(self._queue) > 1 and (
                self._bytes > self._max_bytes or now - self._queue[0].since > self._max_seconds
            ):
                self._bytes -= len(self._queue.popleft().body)
                self._dropped += 1
                self.given_up += 1

    def take(self) -> tuple[int, list[Waiting]]:
        """(messages given up before these, the oldest messages up to BITE bytes); `finish` says what became of them."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            taken: list[Waiting] = []
            size = 0
            while self._queue and (not taken or size + len(self._queue[0].body) <= BITE):
                taken.append(self._queue.popleft())
                size += len(taken[-1].body)
            self._bytes -= size
            self._in_hand = dropped + len(taken)
            self._oldest_in_hand = taken[0].since if taken else self._monotonic()
            return dropped, taken

    def finish(self) -> None:
        """What was taken last is durable, or counted as lost."""
        with self._lock:
            self.handled += self._in_hand
            self._in_hand = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is queued; what was taken may still be in hand."""
        return not self._queue and not self._dropped

    @property
    def count(self) -> int:
        """Messages that are neither durable nor given up."""
        return len(self._queue) + self._in_hand

    def age(self) -> float:
        """Seconds that the oldest message has waited for the disk; 0 if none waits."""
        with self._lock:
            oldest = [self._oldest_in_hand] if self._in_hand else [m.since for m in list(self._queue)[:1]]
            return self._monotonic() - oldest[0] if oldest else 0.0


TOPICS = (EVENTS, TELEMETRY)
SLOW = "the disk was too slow"
KILLED = "the agent ended while its disk was slow"
AGAIN_S = 1.0
"""How soon a spool that cannot be opened or written is tried again; chosen: the rhythm of the agent."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class Stream:
    """One topic: its queue, and its spool once that is open. For the thread alone, but for its queue.

    next_turn: monotonic time from which it may be written again.  refused: messages that no spool would take.
    """

    def __init__(self, topic: str, settings: Settings, origin: Origin, place: Path | None) -> None:
        self.topic = topic
        self.spool: Spool | None = None
        self.next_turn = 0.0
        self.queue = WaitingMessages(settings.queue_bytes, settings.queue_seconds)
        self.refused = self._skipped = 0
        self.trouble = ""
        home = settings.directory / segments.folder_name(origin.node) / segments.folder_name(topic)
        self.accepted = AcceptedCount(home, place)
        self._settings, self._origin = settings, origin

    @property
    def lost(self) -> int:
        """Messages given up since the agent started, in the queue and in the spool."""
        return self.queue.given_up - self._skipped + (0 if self.spool is None else self.spool.dropped)

    @property
    def why_lost(self) -> str:
        """Why the newest of the lost messages was given up."""
        if self.spool is None or self.queue.given_up > self._skipped:
            return self.trouble or SLOW
        return self.spool.why_lost

    def open(self) -> None:
        """Opens the spool; counts what an agent before it accepted and did not write. Raises OSError, SpoolError."""
        settings = self._settings
        spool = Spool(
            settings.directory,
            self._origin.node,
            self.topic,
            max_bytes=settings.max_bytes,
            segment_bytes=settings.segment_bytes,
            free_bytes=settings.free_bytes,
        )
        waited = self._waited(spool)
        if 0 < waited <= accepted_count.MOST:
            spool.skip(waited, KILLED)
        self.spool, self.trouble = spool, ""
        self._count(spool)

    def _waited(self, spool: Spool) -> int:
        """Messages that the agent before accepted and did not write; its epoch may not have been one to go on with."""
        left = self.accepted.left()
        if left is None:
            return 0
        epoch, behind = left
        if epoch == spool.epoch:
            return behind - spool.next
        folder = next((f for f in segments.epoch_folders(spool.home) if segments.epoch_of(f) == epoch), None)
        mark = None if folder is None else segments.read_mark(folder)
        return 0 if mark is None else behind - mark.sequence

    def flush(self, spool: Spool) -> None:
        """Writes what waits, up to one bite, and waits for the disk."""
        dropped, taken = self.queue.take()
        self._skipped += dropped  # before the spool counts them, too: `lost` never counts one twice
        try:
            spool.skip(dropped, SLOW)
            for message in taken:
                self._append(spool, message)
            spool.sync()
        finally:
            self.queue.finish()
            self._count(spool)

    def _append(self, spool: Spool, message: Waiting) -> None:
        try:
            spool.append(message.body, message.kind, message.made, self._origin.simulated)
        except SpoolError as error:  # longer than any message may be
            self.refused += 1
            self.trouble = f"a message is lost: {error}"

    def _count(self, spool: Spool) -> None:
        self.accepted.begin(spool.epoch, spool.next - self.queue.handled, self.queue.accepted)


class Flusher:
    """Begins its thread at once. `durable` is called from it whenever something new can be read.

    failure: why the spools can never be opened; None while they are, or may be.
    """

    def __init__(self, settings: Settings, origin: Origin, durable: Callable[[], object]) -> None:
        self.failure: SpoolError | None = None
        self.opened, self.closed = threading.Event(), threading.Event()
        place = accepted_count.folder()
        self.streams = {topic: Stream(topic, settings, origin, place) for topic in TOPICS}
        self._settings, self._durable = settings, durable
        self._files: dict[Path, Callable[[], object]] = {}
        self._stop, self._work = False, threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to write."""
        with self._work:
            self._work.notify()

    def later(self, path: Path, write: Callable[[], object]) -> None:
        """Has `write` called by the thread, which may wait for the disk; of several for one path only the newest."""
        with self._work:
            self._files[path] = write
            self._work.notify()

    def close(self, seconds: float) -> bool:
        """Writes all that waits and closes the spools; whether the disk allowed that within `seconds`."""
        with self._work:
            self._stop = True
            self._work.notify()
        self.closed.wait(seconds)
        done = self.closed.is_set()
        for stream in self.streams.values():
            stream.accepted.close(keep=not done or stream.queue.count > 0)
        return done

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Nothing here is needed by a forked worker: no lock of a library, no file; so it may be forked beside it."""
        HARMLESS.add(threading.get_native_id())
        try:
            self._open()
            self.opened.set()
            while self.failure is None and not self._idle():
                self._turn()
            for stream in self.streams.values():
                if stream.spool is not None:
                    stream.spool.close()
        finally:
            HARMLESS.discard(threading.get_native_id())
            self.opened.set()
            self.closed.set()

    def _idle(self) -> bool:
        """Waits for work; whether all is done and the thread shall end."""
        with self._work:
            while not self._stop and not self._files and (left := self._rest()) > 0:
                self._work.wait(None if left == float("inf") else left)
            return self._stop and not self._files and not any(s.spool and not s.queue.empty for s in self._all())

    def _rest(self) -> float:
        """Seconds until a queue may be written; infinity if all are empty."""
        waiting = [stream.next_turn for stream in self._all() if not stream.queue.empty]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else float("inf")

    def _turn(self) -> None:
        for stream in self._all():
            if not stream.queue.empty and (self._stop or time.monotonic() >= stream.next_turn):
                self._write(stream)
        with self._work:
            files, self._files = self._files, {}
        for write in files.values():
            write()

    def _write(self, stream: Stream) -> None:
        """Writes one bite of a stream; whatever goes wrong is told and tried again."""
        began = time.monotonic()
        try:
            if stream.spool is None:
                stream.open()
            if stream.spool is not None:
                stream.flush(stream.spool)
                stream.next_turn = began + self._settings.sync_seconds
                self._durable()
        except Exception as error:  # noqa: BLE001 - a thread that ends would leave every later message unwritten
            stream.trouble = f"cannot be written: {_reason(error)}; trying again"
            stream.next_turn = time.monotonic() + AGAIN_S

    def _open(self) -> None:
        """Opens all. A disk without room is tried again; what can never be written is `failure`."""
        for stream in self._all():
            try:
                stream.open()
            except SpoolError as error:
                self.failure = error
            except OSError as error:
                stream.trouble = f"cannot be opened: {error.strerror}; trying again"
                if error.errno not in _NO_ROOM:
                    wanted = "wanted a folder that the agent may write: set [spool] directory"
                    self.failure = SpoolError(f"{self._settings.directory}: {error.strerror}; {wanted}")

    def _all(self) -> tuple[Stream, ...]:
        return tuple(self.streams.values())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
