"""The thread that writes to the spools' disk, and the bounded queues in front of it: a slow disk delays no loop.

Only this thread opens, writes and closes the spools of a node and the small files beside them. Events are written
before telemetry. Each topic has a queue of at most `max_bytes` and `max_seconds` of messages. Beyond that the oldest
messages are dropped and counted. They keep their sequence numbers, as a gap, so that readers of the spool count them.

The number of accepted messages is kept in memory that outlives the process but needs no disk. If an agent is killed
while its disk is slow, the next one reads there how many messages were waiting, and counts them as a gap. So it does
with the ticks that were being joined (agents/node/joining.py): they would have been the next message. A reboot clears
it: then only the silence of the node shows the loss. A container that is restarted has new memory: RUNTIME_DIRECTORY
must then be on a volume of the pod.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agents.node.spool.spool import Spool
from agents.node.workers.processes import FORK_SAFE_THREADS
from pipeline.config.sections import Spool as Settings
from pipeline.model.errors import SpoolError
from pipeline.model.records import EVENTS, TELEMETRY, Origin
from pipeline.transport import segments

SHARED_MEMORY = Path("/dev/shm")
"""Files in memory on Linux; used if the service manager sets no RUNTIME_DIRECTORY."""
MAX_WAITING = 10_000_000
"""Messages that may have waited; a greater number is not ours. Chosen: four months of ticks of one second."""
_LAYOUT = struct.Struct("<4s4x16sqQ")
"""Magic, epoch, base, and in one aligned word, which a kill cannot tear, accepted messages and ticks being joined."""
_MAGIC = b"FPA2"
_OLD_LAYOUT, _OLD_MAGIC = struct.Struct("<4s16sqQ"), b"FPA1"  # of agents that did not join ticks
_TICK_BITS = 16
_MAX_TICKS = (1 << _TICK_BITS) - 1


def memory_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """A folder in memory; None if the system has none."""
    given = environment.get("RUNTIME_DIRECTORY", "").split(":")[0]
    found = Path(given) if given else SHARED_MEMORY
    return found if found.is_dir() else None


@dataclass(frozen=True, slots=True)
class PreviousCount:
    """What the previous process accepted. end: the sequence after its last message; ticks: those it was joining."""

    epoch: bytes
    end: int
    ticks: int


class AcceptedCount:
    """The counter of the spool at `home`. Its calls never wait for a disk and never raise. For any thread.

    epoch and base: the sequence that message number 0 of this process would have in that epoch of the spool.
    """

    def __init__(self, home: Path, folder: Path | None) -> None:
        name = hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:24]
        self._path = None if folder is None else folder / f"fleetpulse-{name}.accepted"
        self._memory: mmap.mmap | None = None
        self._accepted = self._ticks = 0
        self._lock = threading.Lock()

    def read_previous(self) -> PreviousCount | None:
        """What the previous process accepted; None if unknown."""
        if self._path is None:
            return None
        try:
            handle = _open_own_file(self._path, os.O_RDONLY)
            with os.fdopen(handle, "rb") as file:
                data = file.read(_LAYOUT.size)
            if data[:4] == _OLD_MAGIC:
                _, epoch, base, accepted = _OLD_LAYOUT.unpack_from(data)
                return PreviousCount(epoch, base + accepted, 0)
            magic, epoch, base, word = _LAYOUT.unpack(data)
        except (OSError, struct.error):
            return None
        return PreviousCount(epoch, base + (word >> _TICK_BITS), word & _MAX_TICKS) if magic == _MAGIC else None

    def start_count(self, epoch: bytes, base: int, accepted: int) -> None:
        """Counts in `epoch` from now on."""
        with self._lock:
            if self._memory is None and self._path is not None:
                with contextlib.suppress(OSError, ValueError):  # no such memory: only silence shows what a kill lost
                    self._memory = _map_file(self._path)
            self._accepted = max(self._accepted, accepted)  # another thread may have set more since it was read
            if self._memory is not None:
                _LAYOUT.pack_into(self._memory, 0, _MAGIC, epoch, base, self._word())

    def set_accepted(self, accepted: int) -> None:
        """Sets how many messages this process has accepted; no tick is being joined then."""
        with self._lock:
            self._accepted, self._ticks = accepted, 0
            self._write_word()

    def set_joining(self, ticks: int) -> None:
        """Sets how many ticks this process is joining into its next message."""
        with self._lock:
            self._ticks = min(ticks, _MAX_TICKS)
            self._write_word()

    def _word(self) -> int:
        return self._accepted << _TICK_BITS | self._ticks

    def _write_word(self) -> None:
        if self._memory is not None:
            struct.pack_into("<Q", self._memory, _LAYOUT.size - 8, self._word())

    def close(self, keep: bool) -> None:
        """Releases the memory. `keep` leaves the file for the next process, if a message was not written."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            if not keep and self._path is not None:
                with contextlib.suppress(OSError):
                    self._path.unlink()


def _open_own_file(path: Path, flags: int) -> int:
    """Opens a file of our own user. Raises OSError if it belongs to another: any user may write to SHARED_MEMORY."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(handle)
        raise PermissionError(f"{path}: belongs to another user")
    return handle


def _map_file(path: Path) -> mmap.mmap:
    """Maps the file, and creates it if needed. Raises OSError."""
    handle = _open_own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(handle, _LAYOUT.size)
        return mmap.mmap(handle, _LAYOUT.size)
    finally:
        os.close(handle)


WRITE_BYTES = 1 << 20
"""Bytes taken from a queue in one step: the most that is held beyond `max_bytes`; equal to spool.BUFFER_BYTES."""
TOPICS = (EVENTS, TELEMETRY)
DISK_SLOW = "the disk was too slow"
AGENT_KILLED = "the agent ended while its disk was slow"
KILLED_JOINING = "the agent was killed while it joined ticks"
"""Cause of a gap of one message, which would have had up to [agent] linger seconds of telemetry."""
RETRY_S = 1.0
"""Pause before a spool that cannot be opened or written is tried again; chosen: the agent's interval."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """One wire body. made: UTC us; since: monotonic seconds at which it was queued."""

    body: bytes
    kind: int
    made: int
    since: float


class MessageQueue:
    """The queue of one topic. For any thread.

    accepted: messages ever added.  dropped: those of them that were dropped for lack of room or because of their age.
    handled: messages that were written or dropped, and have a sequence number of the spool.
    """

    def __init__(self, max_bytes: int, max_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.accepted = self.dropped = self.handled = 0
        self._max_bytes, self._max_seconds, self._monotonic = max_bytes, max_seconds, monotonic
        self._queue: deque[QueuedMessage] = deque()
        self._bytes = self._dropped_before_next = self._in_hand = 0
        self._oldest_in_hand = 0.0
        self._lock = threading.Lock()

    def add(self, body: bytes, kind: int, made: int) -> None:
        """Queues one message; drops the oldest ones if there are too many bytes or they waited too long."""
        now = self._monotonic()
        with self._lock:
            self.accepted += 1
            self._queue.append(QueuedMessage(body, kind, made, now))
            self._bytes += len(body)
            while len(self._queue) > 1 and (
                self._bytes > self._max_bytes or now - self._queue[0].since > self._max_seconds
            ):
                self._bytes -= len(self._queue.popleft().body)
                self._dropped_before_next += 1
                self.dropped += 1

    def take_oldest(self) -> tuple[int, list[QueuedMessage]]:
        """(messages dropped before these, the oldest messages up to WRITE_BYTES); then call `mark_handled`."""
        with self._lock:
            dropped, self._dropped_before_next = self._dropped_before_next, 0
            taken: list[QueuedMessage] = []
            size = 0
            while self._queue and (not taken or size + len(self._queue[0].body) <= WRITE_BYTES):
                taken.append(self._queue.popleft())
                size += len(taken[-1].body)
            self._bytes -= size
            self._in_hand = dropped + len(taken)
            self._oldest_in_hand = taken[0].since if taken else self._monotonic()
            return dropped, taken

    def mark_handled(self) -> None:
        """Counts the messages taken last as durable or lost."""
        with self._lock:
            self.handled += self._in_hand
            self._in_hand = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is queued; messages that were taken may not be handled yet."""
        return not self._queue and not self._dropped_before_next

    @property
    def count(self) -> int:
        """Messages that are neither durable nor dropped."""
        return len(self._queue) + self._in_hand

    def oldest_age(self) -> float:
        """Seconds that the oldest message has waited for the disk; 0 if none waits."""
        with self._lock:
            oldest = [self._oldest_in_hand] if self._in_hand else [m.since for m in list(self._queue)[:1]]
            return self._monotonic() - oldest[0] if oldest else 0.0


class TopicWriter:
    """One topic: its queue, and its spool once that is open. Only the queue may be used by other threads.

    next_write: monotonic time of the next write.  refused: messages that are too large for any spool.
    """

    def __init__(self, topic: str, settings: Settings, origin: Origin, memory: Path | None) -> None:
        self.topic = topic
        self.spool: Spool | None = None
        self.next_write = 0.0
        self.queue = MessageQueue(settings.queue_bytes, settings.queue_seconds)
        self.refused = self._skipped = 0
        self.problem = ""
        home = settings.directory / segments.folder_name(origin.node) / segments.folder_name(topic)
        self.accepted = AcceptedCount(home, memory)
        self._settings, self._origin = settings, origin

    @property
    def lost(self) -> int:
        """Messages lost since the agent started, in the queue and in the spool."""
        return self.queue.dropped - self._skipped + (0 if self.spool is None else self.spool.dropped)

    @property
    def loss_reason(self) -> str:
        """Why the newest of the lost messages was lost."""
        if self.spool is None or self.queue.dropped > self._skipped:
            return self.problem or DISK_SLOW
        return self.spool.loss_reason

    def open(self) -> None:
        """Opens the spool; counts what the previous agent accepted and did not write. Raises OSError, SpoolError."""
        settings = self._settings
        spool = Spool(
            settings.directory,
            self._origin.node,
            self.topic,
            max_bytes=settings.max_bytes,
            segment_bytes=settings.segment_bytes,
            free_bytes=settings.free_bytes,
        )
        unwritten, joining = self._count_unwritten(spool)
        if 0 < unwritten <= MAX_WAITING:
            spool.skip_sequences(unwritten, AGENT_KILLED)
        if joining:
            spool.skip_sequences(1, KILLED_JOINING)
        self.spool, self.problem = spool, ""
        self._save_accepted(spool)

    def _count_unwritten(self, spool: Spool) -> tuple[int, bool]:
        """Messages that the previous agent accepted and did not write, and whether it was joining ticks then.

        Its epoch may not be the current one.
        """
        previous = self.accepted.read_previous()
        if previous is None:
            return 0, False
        if previous.epoch == spool.epoch:
            return previous.end - spool.next, previous.ticks > 0
        folders = segments.epoch_folders(spool.home)
        folder = next((f for f in folders if segments.parse_epoch(f) == previous.epoch), None)
        mark = None if folder is None else segments.read_mark(folder)
        return (0, False) if mark is None else (previous.end - mark.sequence, previous.ticks > 0)

    def write_queued(self, spool: Spool) -> None:
        """Writes up to WRITE_BYTES of the queue, and waits for the disk."""
        dropped, taken = self.queue.take_oldest()
        self._skipped += dropped  # before the spool counts them too: `lost` never counts one twice
        try:
            spool.skip_sequences(dropped, DISK_SLOW)
            for message in taken:
                self._append(spool, message)
            spool.sync()
        finally:
            self.queue.mark_handled()
            self._save_accepted(spool)

    def _append(self, spool: Spool, message: QueuedMessage) -> None:
        try:
            spool.append(message.body, message.kind, message.made, self._origin.simulated)
        except SpoolError as error:  # longer than the longest message
            self.refused += 1
            self.problem = f"a message is lost: {error}"

    def _save_accepted(self, spool: Spool) -> None:
        self.accepted.start_count(spool.epoch, spool.next - self.queue.handled, self.queue.accepted)


class SpoolWriter:
    """The writing thread, started by the constructor. It calls `on_durable` whenever readers can read something new.

    failure: why the spools can never be opened; None while they are open, or may be. file_problems: why small files
    were not written the last time that this failed.
    """

    def __init__(self, settings: Settings, origin: Origin, on_durable: Callable[[], object]) -> None:
        self.failure: SpoolError | None = None
        self.opened, self.closed = threading.Event(), threading.Event()
        memory = memory_folder()
        self.topics = {topic: TopicWriter(topic, settings, origin, memory) for topic in TOPICS}
        self._settings, self._on_durable = settings, on_durable
        self._files: dict[Path, Callable[[], object]] = {}
        self.file_problems: dict[Path, str] = {}
        self._stop, self._work = False, threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    # --- for other threads -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wakes the thread: a message was queued."""
        with self._work:
            self._work.notify()

    def write_later(self, path: Path, write: Callable[[], object]) -> None:
        """Lets the thread call `write`, which may wait for the disk; of several for one path only the newest."""
        with self._work:
            self._files[path] = write
            self._work.notify()

    def close(self, seconds: float) -> bool:
        """Writes everything queued and closes the spools; whether the disk completed that within `seconds`."""
        with self._work:
            self._stop = True
            self._work.notify()
        self.closed.wait(seconds)
        done = self.closed.is_set()
        for topic in self.topics.values():
            topic.accepted.close(keep=not done or topic.queue.count > 0)
        return done

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The thread. It holds no lock of a library and no file that a forked worker needs, so it is fork-safe."""
        FORK_SAFE_THREADS.add(threading.get_native_id())
        try:
            self._open_topics()
            self.opened.set()
            while self.failure is None and not self._wait_for_work():
                self._write_due()
            for topic in self.topics.values():
                if topic.spool is not None:
                    topic.spool.close()
        finally:
            FORK_SAFE_THREADS.discard(threading.get_native_id())
            self.opened.set()
            self.closed.set()

    def _wait_for_work(self) -> bool:
        """Waits for work; whether everything is done and the thread should end."""
        with self._work:
            while not self._stop and not self._files and (left := self._seconds_until_due()) > 0:
                self._work.wait(None if left == float("inf") else left)
            unwritten = any(t.spool and not t.queue.empty for t in self._topic_writers())
            return self._stop and not self._files and not unwritten

    def _seconds_until_due(self) -> float:
        """Seconds until a queue may be written; infinity if all are empty."""
        waiting = [topic.next_write for topic in self._topic_writers() if not topic.queue.empty]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else float("inf")

    def _write_due(self) -> None:
        for topic in self._topic_writers():
            if not topic.queue.empty and (self._stop or time.monotonic() >= topic.next_write):
                self._write_topic(topic)
        with self._work:
            files, self._files = self._files, {}
        for path, write in files.items():
            try:
                write()
            except Exception as error:  # noqa: BLE001 - if the thread ended, every later message would stay unwritten
                self.file_problems[path] = f"cannot be written: {_describe_error(error)}; retried at its next change"

    def _write_topic(self, topic: TopicWriter) -> None:
        """Writes a part of a queue; any error is reported and the write retried."""
        began = time.monotonic()
        try:
            if topic.spool is None:
                topic.open()
            if topic.spool is not None:
                topic.write_queued(topic.spool)
                topic.next_write = began + self._settings.sync_seconds
                self._on_durable()
        except Exception as error:  # noqa: BLE001 - if the thread ended, every later message would stay unwritten
            topic.problem = f"cannot be written: {_describe_error(error)}; retrying"
            topic.next_write = time.monotonic() + RETRY_S

    def _open_topics(self) -> None:
        """Opens all spools. A full disk is retried; a permanent error becomes `failure`."""
        for topic in self._topic_writers():
            try:
                topic.open()
            except SpoolError as error:
                self.failure = error
            except OSError as error:
                topic.problem = f"cannot be opened: {error.strerror}; retrying"
                if error.errno not in _NO_ROOM:
                    expected = "expected a folder that the agent may write: set [spool] directory"
                    self.failure = SpoolError(f"{self._settings.directory}: {error.strerror}; {expected}")

    def _topic_writers(self) -> tuple[TopicWriter, ...]:
        return tuple(self.topics.values())


def _describe_error(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
