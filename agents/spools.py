"""The agent's spools, one per topic: opened when there is room, written durably, and what they lose is said."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Protocol

from agents.spool import Spool
from pipeline.config import Spool as Settings
from pipeline.errors import SpoolError
from pipeline.records import EVENTS, TELEMETRY, Origin

QUIET_S = 600.0
"""A spool that lost nothing for so long is well again; chosen: longer than a 4 MiB segment takes to fill."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
Say = Callable[[str, str], None]


class Clock(Protocol):
    """What a spool asks of the agent's clock: UTC microseconds, and seconds that never jump."""

    def now(self) -> int: ...
    def monotonic(self) -> float: ...


class Spools:
    """Both streams of one node. Raises SpoolError if they can never be written; a disk without room is tried again."""

    def __init__(self, settings: Settings, origin: Origin, say: Say, clock: Clock) -> None:
        self._settings, self._origin, self._say, self._clock = settings, origin, say, clock
        self._open: dict[str, Spool] = {}
        self._losing: dict[str, float] = {}
        self._synced: dict[str, float] = {}
        self.refused = self.gaps = 0
        self._open_all()

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(spool.size for spool in self._open.values())

    @property
    def lost(self) -> int:
        """Messages given up or never taken since the agent started."""
        return self.refused + sum(spool.dropped for spool in self._open.values())

    def put(self, topic: str, encode: Callable[[], bytes], kind: int) -> None:
        """Spools one message, durably within sync_seconds; says when that begins or ceases to cost data."""
        if topic not in self._open:
            self._open_all()
        spool = self._open.get(topic)
        if spool is None:
            self.refused += 1
            return
        dropped = spool.dropped
        try:
            spool.append(encode(), kind, self._clock.now(), self._origin.simulated)
        except Exception as error:  # noqa: BLE001 - a message that cannot be made or kept must not end the agent
            self.refused += 1
            self._say(f"spool {topic}", f"a message is lost: {error}")
            return
        self._sync(topic, spool)
        self._say_losses(topic, spool, spool.dropped > dropped)

    def close(self) -> None:
        """Makes everything spooled durable."""
        for spool in self._open.values():
            spool.close()

    def _sync(self, topic: str, spool: Spool) -> None:
        """Waits for the disk, unless the last time is less than sync_seconds ago: what waits is lost with the power."""
        now = self._clock.monotonic()
        if now - self._synced.get(topic, float("-inf")) >= self._settings.sync_seconds:
            spool.sync()
            self._synced[topic] = now

    def _open_all(self) -> None:
        settings = self._settings
        for topic in (TELEMETRY, EVENTS):
            if topic not in self._open:
                try:
                    self._open[topic] = Spool(
                        settings.directory,
                        self._origin.node,
                        topic,
                        max_bytes=settings.max_bytes,
                        segment_bytes=settings.segment_bytes,
                        free_bytes=settings.free_bytes,
                    )
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise SpoolError(
                            f"{settings.directory}: {error.strerror}; wanted a folder that the agent may write: "
                            "set [spool] directory"
                        ) from error
                    self._say(f"spool {topic}", f"cannot be opened: {error.strerror}; trying again")

    def _say_losses(self, topic: str, spool: Spool, losing: bool) -> None:
        """Says when a spool begins to lose data, and when it has not for QUIET_S; a full one loses once per segment."""
        now = self._clock.monotonic()
        self.gaps += losing
        if losing:
            if topic not in self._losing:
                self._say(f"spool {topic}", f"losing data: {spool.trouble}; the newest is kept, gaps are counted")
            self._losing[topic] = now
        elif now - self._losing.get(topic, now) > QUIET_S:
            del self._losing[topic]
            self._say(f"spool {topic}", f"no loss for {QUIET_S:g} s; {spool.dropped} messages lost since the start")
