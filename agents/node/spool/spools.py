"""The agent's two spools as its loop uses them: messages are queued, a thread writes them, no call waits.

Problems of the disk are reported by `check_disk`: slow or not responding (event `disk_slow`), full, or not writable.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agents.node.spool.writer import DISK_SLOW, SpoolWriter, TopicWriter
from pipeline.config.sections import Spool as Settings
from pipeline.model.records import Event, Origin

NO_LOSS_S = 600.0
"""A spool without loss for so long has recovered; chosen: longer than a 4 MiB segment takes to fill."""
SLOW_S = 5.0
"""A message that waited so long means a slow disk; chosen: five ticks, well within the promised 30 s."""
RECOVERED_S = 60.0
"""A slow disk has recovered if no message waited SLOW_S for so long; chosen: longer than stalls of controllers."""
WAIT_WINDOW_S = 10.0
"""Window of `longest_wait`: the interval of the agent's own telemetry."""
OPEN_S = 10.0
"""How long the start waits for the disk before the agent continues without it; chosen."""
CLOSE_S = 0.5
"""How long the end waits for the disk; chosen: in total the agent ends within 2 s."""
Log = Callable[[str, str], None]


class SpoolClock(Protocol):
    """The part of the agent's clock that spools need."""

    def now(self) -> int:
        """UTC microseconds."""

    def monotonic(self) -> float:
        """Seconds that never jump."""


class NodeSpools:
    """Both spools of one node. Raises SpoolError if they can never be written; a full disk is retried.

    disk_responds: whether the disk responded at start; only then may files on it be read.
    """

    def __init__(
        self,
        settings: Settings,
        origin: Origin,
        log: Log,
        clock: SpoolClock,
        on_durable: Callable[[], object] = lambda: None,
    ) -> None:
        self._origin, self._log, self._clock = origin, log, clock
        self._losing: dict[str, float] = {}
        self._lost_by_topic: dict[str, int] = {}
        self._slow_since: int | None = None
        self._slow_last = self._slow_most = self._wait = self._wait_at = 0.0
        self._refused = self.gaps = 0
        self._writer = SpoolWriter(settings, origin, on_durable)
        self.disk_responds = self._writer.opened.wait(OPEN_S)
        if self._writer.failure is not None:
            raise self._writer.failure
        if not self.disk_responds:
            log("spool", f"{settings.directory}: disk has not responded for {OPEN_S:g} s; starting without it")

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(topic.spool.size for topic in self._topics if topic.spool is not None)

    @property
    def lost(self) -> int:
        """Messages lost or refused since the agent started."""
        return self.refused + sum(self._lost_by_topic.values())

    @property
    def refused(self) -> int:
        """Messages that could not be encoded, or were too large."""
        return self._refused + sum(topic.refused for topic in self._topics)

    @property
    def waiting(self) -> int:
        """Messages that are not durable yet."""
        return sum(topic.queue.count for topic in self._topics)

    def put(self, topic: str, encode: Callable[[], bytes], kind: int) -> None:
        """Queues one message for the disk; it is durable within sync_seconds plus the time that the disk needs."""
        try:
            body = encode()
        except Exception as error:  # noqa: BLE001 - a message that cannot be encoded must not end the agent
            self._refused += 1
            self.set_joining(topic, 0)
            self._log(f"spool {topic}", f"a message is lost: {error}")
            return
        writer = self._writer.topics[topic]
        writer.queue.add(body, kind, self._clock.now())
        writer.accepted.set_accepted(writer.queue.accepted)
        self._writer.wake()

    def set_joining(self, topic: str, ticks: int) -> None:
        """Sets how many ticks wait for the next message of a topic; if the agent is killed they are a counted gap."""
        self._writer.topics[topic].accepted.set_joining(ticks)

    def write_later(self, path: Path, write: Callable[[], object]) -> None:
        """Lets the writing thread write a small file beside the spools."""
        self._writer.write_later(path, write)

    def check_disk(self) -> list[Event]:
        """Events of the disk since the last call, also logged; called at every tick."""
        for topic in self._topics:
            if topic.problem:
                self._log(f"spool {topic.topic}", topic.problem)
            self._log_losses(topic)
        for path, problem in tuple(self._writer.file_problems.items()):
            self._log(f"file {path}", problem)
        age = max(topic.queue.oldest_age() for topic in self._topics)
        now = self._clock.monotonic()
        if age >= self._wait or now - self._wait_at > WAIT_WINDOW_S:
            self._wait, self._wait_at = age, now
        return self._disk_events(age)

    @property
    def longest_wait(self) -> float:
        """Longest time in s that a message waited for the disk, within about WAIT_WINDOW_S."""
        return self._wait

    def close(self) -> None:
        """Makes everything queued durable; what the disk does not take within CLOSE_S is counted at the next start."""
        if not self._writer.close(CLOSE_S):
            self._log("spool", f"disk does not respond: {self.waiting} messages are lost, counted at the next start")
        for topic in self._topics:
            self._log_losses(topic)

    @property
    def _topics(self) -> tuple[TopicWriter, ...]:
        return tuple(self._writer.topics.values())

    def _disk_events(self, age: float) -> list[Event]:
        """The event that a disk became slow, or recovered."""
        now = self._clock.monotonic()
        if age >= SLOW_S:
            self._slow_last, self._slow_most = now, max(self._slow_most, age)
            if self._slow_since is None:
                self._slow_since = self._clock.now()
                self._log("disk", f"slow: a message has waited {age:.0f} s; {self.waiting} wait in memory")
                return [self._slow_event("active", age)]
        elif self._slow_since is not None and now - self._slow_last >= RECOVERED_S:
            most, self._slow_most = self._slow_most, 0.0
            self._log(
                "disk", f"recovered: no message waited {SLOW_S:g} s for {RECOVERED_S:g} s; longest wait {most:.0f} s"
            )
            event = self._slow_event("cleared", most)
            self._slow_since = None
            return [event]
        return []

    def _slow_event(self, state: str, seconds: float) -> Event:
        since, waiting = self._slow_since, self.waiting
        data = {"state": state, "since": since, "seconds": round(seconds, 1), "waiting": waiting, "lost": self.lost}
        return Event(self._clock.now(), f"node:{self._origin.node}", "disk_slow", data)

    def _log_losses(self, topic: TopicWriter) -> None:
        """Logs when a spool begins to lose data, and when it has not for NO_LOSS_S (a full one loses per segment)."""
        now, name, before = self._clock.monotonic(), topic.topic, self._lost_by_topic.get(topic.topic, 0)
        lost = self._lost_by_topic[name] = max(before, topic.lost)
        losing = lost > before
        self.gaps += losing
        if losing:
            if name not in self._losing:
                self._log(f"spool {name}", f"losing data: {_loss_text(topic)}; newest data is kept, gaps are counted")
            self._losing[name] = now
        elif now - self._losing.get(name, now) > NO_LOSS_S:
            del self._losing[name]
            self._log(f"spool {name}", f"no loss for {NO_LOSS_S:g} s; {lost} messages lost since the start")


def _loss_text(topic: TopicWriter) -> str:
    why = topic.loss_reason
    return why if why != DISK_SLOW else f"{DISK_SLOW}: the queue exceeded [spool] queue_bytes or queue_seconds"
