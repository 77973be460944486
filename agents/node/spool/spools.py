"""The agent's two spools, as its loop sees them: messages are queued, a thread writes them, nothing here waits.

What goes wrong with the disk is reported by `mind`: slow or silent (event `disk_slow`), full, or not writable at all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agents.node.spool.writer import SLOW, Flusher, Stream
from pipeline.config.sections import Spool as Settings
from pipeline.model.records import Event, Origin

QUIET_S = 600.0
"""A spool that lost nothing for so long is well again; chosen: longer than a 4 MiB segment takes to fill."""
SLOW_S = 5.0
"""A message that waited so long for the disk makes it slow; chosen: five ticks, well within the 30 s promised."""
SOUND_S = 60.0
"""A slow disk is sound again when no message has waited SLOW_S for so long; chosen: above a controller's stalls."""
WAIT_S = 10.0
"""Over which `wait` is the longest; the rhythm of the agent's own telemetry."""
OPEN_S = 10.0
"""How long the start waits for the disk before the agent goes on without it; chosen."""
CLOSE_S = 0.5
"""How long the end waits for the disk; chosen: with the rest the agent ends within 2 s."""
Say = Callable[[str, str], None]


class Clock(Protocol):
    """What a spool asks of the agent's clock: UTC microseconds, and seconds that never jump."""

    def now(self) -> int: ...
    def monotonic(self) -> float: ...


class Spools:
    """Both streams of one node. Raises SpoolError if they can never be written; a disk without room is tried again.

    answers: whether the disk answered at the start: only then may what lies there be read.
    """

    def __init__(
        self, settings: Settings, origin: Origin, say: Say, clock: Clock, durable: Callable[[], object] = lambda: None
    ) -> None:
        self._origin, self._say, self._clock = origin, say, clock
        self._losing: dict[str, float] = {}
        self._known: dict[str, int] = {}
        self._slow_since: int | None = None
        self._slow_last = self._slow_most = self._wait = self._wait_at = 0.0
        self._refused = self.gaps = 0
        self._flusher = Flusher(settings, origin, durable)
        self.answers = self._flusher.opened.wait(OPEN_S)
        if self._flusher.failure is not None:
            raise self._flusher.failure
        if not self.answers:
            say("spool", f"{settings.directory}: its disk has not answered for {OPEN_S:g} s; starting without it")

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(stream.spool.size for stream in self._streams if stream.spool is not None)

    @property
    def lost(self) -> int:
        """Messages given up or never taken since the agent started."""
        return self.refused + sum(self._known.values())

    @property
    def refused(self) -> int:
        """Those of them that could not be made, or were too large."""
        return self._refused + sum(stream.refused for stream in self._streams)

    @property
    def waiting(self) -> int:
        """Messages that are not durable yet."""
        return sum(stream.queue.count for stream in self._streams)

    def put(self, topic: str, encode: Callable[[], bytes], kind: int) -> None:
        """Queues one message for the disk; it is durable within sync_seconds and the time that the disk takes."""
        try:
            body = encode()
        except Exception as error:  # noqa: BLE001 - a message that cannot be made must not end the agent
            self._refused += 1
            self._say(f"spool {topic}", f"a message is lost: {error}")
            return
        stream = self._flusher.streams[topic]
        stream.queue.add(body, kind, self._clock.now())
        stream.accepted.set(stream.queue.accepted)
        self._flusher.wake()

    def later(self, path: Path, write: Callable[[], object]) -> None:
        """Has a small file beside the spools written without waiting for its disk."""
        self._flusher.later(path, write)

    def mind(self) -> list[Event]:
        """What changed with the disk since the last call, also said on stderr; to be called at every tick."""
        for stream in self._streams:
            if stream.trouble:
                self._say(f"spool {stream.topic}", stream.trouble)
            self._say_losses(stream)
        age = max(stream.queue.age() for stream in self._streams)
        now = self._clock.monotonic()
        if age >= self._wait or now - self._wait_at > WAIT_S:
            self._wait, self._wait_at = age, now
        return self._slowness(age)

    @property
    def wait(self) -> float:
        """Longest time in s that a message waited for the disk, within about WAIT_S."""
        return self._wait

    def close(self) -> None:
        """Makes everything spooled durable; what the disk does not take within CLOSE_S is counted at the next start."""
        if not self._flusher.close(CLOSE_S):
            self._say("spool", f"its disk does not answer: {self.waiting} messages are lost, counted at the next start")
        for stream in self._streams:
            self._say_losses(stream)

    @property
    def _streams(self) -> tuple[Stream, ...]:
        return tuple(self._flusher.streams.values())

    def _slowness(self, age: float) -> list[Event]:
        """The event with which a disk becomes slow, or is sound again."""
        now = self._clock.monotonic()
        if age >= SLOW_S:
            self._slow_last, self._slow_most = now, max(self._slow_most, age)
            if self._slow_since is None:
                self._slow_since = self._clock.now()
                self._say("disk", f"slow: a message has waited {age:.0f} s; {self.waiting} wait in memory")
                return [self._slow("active", age)]
        elif self._slow_since is not None and now - self._slow_last >= SOUND_S:
            most, self._slow_most = self._slow_most, 0.0
            self._say(
                "disk", f"no message waited {SLOW_S:g} s for {SOUND_S:g} s; the longest before waited {most:.0f} s"
            )
            event = self._slow("cleared", most)
            self._slow_since = None
            return [event]
        return []

    def _slow(self, state: str, seconds: float) -> Event:
        since, waiting = self._slow_since, self.waiting
        data = {"state": state, "since": since, "seconds": round(seconds, 1), "waiting": waiting, "lost": self.lost}
        return Event(self._clock.now(), f"node:{self._origin.node}", "disk_slow", data)

    def _say_losses(self, stream: Stream) -> None:
        """Says when a spool begins to lose data, and when it has not for QUIET_S; a full one loses once per segment."""
        now, topic, before = self._clock.monotonic(), stream.topic, self._known.get(stream.topic, 0)
        lost = self._known[topic] = max(before, stream.lost)
        losing = lost > before
        self.gaps += losing
        if losing:
            if topic not in self._losing:
                self._say(f"spool {topic}", f"losing data: {_why(stream)}; the newest is kept, gaps are counted")
            self._losing[topic] = now
        elif now - self._losing.get(topic, now) > QUIET_S:
            del self._losing[topic]
            self._say(f"spool {topic}", f"no loss for {QUIET_S:g} s; {lost} messages lost since the start")


def _why(stream: Stream) -> str:
    why = stream.why_lost
    return why if why != SLOW else f"{SLOW}: more waited than [spool] queue_bytes and queue_seconds allow"
