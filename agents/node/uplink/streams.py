"""Streams: each epoch of a node's spool of one topic, read ahead a little and sent in order, at a limited rate.

If a message fails, nothing more of its stream is sent until all messages in flight have returned; then it continues
from the first unacknowledged one. Ingest drops the duplicates.

The rate limit prevents a fleet from overloading brokers that have just recovered. It is measured in message time: a
stream may be sent `catch_up` times as fast as it was produced. While the link is down, and for a random part of
`jitter` seconds after recovery or start, it is sent at the rate at which it was produced. Order is always kept.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pipeline.model.errors import GapError, WireError
from pipeline.transport import Message, Partition, wire
from pipeline.transport.spool import SpoolTransport

WINDOW = 512 << 10
"""Bytes of one stream in flight at most, unless one message is larger: two batches. So much is sent again at most."""
AHEAD_MESSAGES, AHEAD_BYTES = 64, 64 << 10
"""Read at once from one stream; chosen: about ten messages of a node, a read's cost is then small beside a send's."""


@dataclass(eq=False, slots=True)
class Stream:
    """One partition of a spool on its way to Kafka.

    alone:  messages before this offset are sent by themselves: one of them was refused in a batch with others.
    until:  monotonic time before which nothing is sent; `pause`, how long the last such pause was.
    trouble: why the last message failed; None when one was acknowledged since.
    since:  when something was last acknowledged, or sent with nothing in flight.
    allowance, counted, reached: what its Pace keeps: s of messages that may go, when that was counted, the newest gone.
    """

    partition: Partition
    position: int
    ahead: deque[Message] = field(default_factory=deque)
    waiting: dict[int, int] = field(default_factory=dict)  # offset -> bytes, ascending
    size: int = 0
    ended: bool = False
    lost: list[tuple[int, int]] = field(default_factory=list)  # what is known to be gone, ascending
    failed: int | None = None
    alone: int = -1
    until: float = 0.0
    pause: float = 0.0
    since: float = 0.0
    trouble: Exception | None = None
    allowance: float = 0.0
    counted: float = 0.0
    reached: int = 0

    @property
    def done(self) -> int:
        """Everything before this is acknowledged, refused or gone."""
        first = next(iter(self.waiting), self.position)
        return first if self.failed is None else min(first, self.failed)

    @property
    def next(self) -> int:
        """Offset of the next message to hand out, if there is one."""
        return self.ahead[0].offset

    @property
    def made(self) -> int:
        """When the next message was made, by its sender's clock: what streams are merged by."""
        try:
            return wire.peek(self.ahead[0].value).sent
        except WireError:  # no message of ours; ingest will say so
            return 0

    @property
    def settled(self) -> bool:
        """Read to its end, and nothing of it in flight."""
        return self.ended and not self.ahead and not self.waiting and self.failed is None

    def admits(self, size: int) -> bool:
        """Whether `size` more bytes fit into the window."""
        return not self.waiting or self.size + size <= WINDOW

    def hand_out(self, now: float) -> None:
        """The next message is in flight."""
        message = self.ahead.popleft()
        if not self.waiting:
            self.since = now
        self.waiting[message.offset] = len(message.value)
        self.size += len(message.value)
        self.position = message.offset + 1

    def skip(self) -> None:
        """The next message will never be sent."""
        self.position = self.ahead.popleft().offset + 1

    def came_back(self, offset: int) -> int:
        """The message is in flight no longer; returns its bytes."""
        size = self.waiting.pop(offset)
        self.size -= size
        return size

    def fail(self, offset: int) -> None:
        """The message has to be sent again, with all behind it, once nothing is in flight."""
        self.failed = offset if self.failed is None else min(self.failed, offset)

    def gone(self, first: int, behind: int) -> list[tuple[int, int]]:
        """[first, behind) is gone from the spool: the parts of it that were not known to be, which now are."""
        new, at = [], first
        for known, end in self.lost:
            if at < known < behind:
                new.append((at, known))
            at = max(at, end)
        if at < behind:
            new.append((at, behind))
        self.lost = sorted([*(known for known in self.lost if known[1] > self.done), *new])
        return new

    def rewind(self) -> None:
        """Goes back to the first message that is not acknowledged, whatever was in flight."""
        self.position = self.done
        self.waiting.clear()
        self.ahead.clear()
        self.size, self.failed, self.ended = 0, None, False


class Streams:
    """All streams of some nodes. `lost(partition, first, behind, cause)` is told of what is gone. For one thread."""

    def __init__(self, transport: SpoolTransport, lost: Callable[[Partition, int, int, str], None]) -> None:
        self._transport, self._lost = transport, lost
        self._streams: dict[Partition, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def look(self) -> None:
        """Finds new streams and forgets those that are gone; everything may have more again."""
        found = self._transport.partitions()
        for partition in self._streams.keys() - set(found):
            if not self._streams[partition].waiting:
                del self._streams[partition]
        for partition in found:
            if partition not in self._streams:
                self._streams[partition] = Stream(partition, self._transport.cursor(partition) or 0)
            self._streams[partition].ended = False
            self.report(self._streams[partition])

    def unsent(self) -> tuple[int, float]:
        """Durable messages that are not acknowledged, and the age in s of the oldest that was not handed out."""
        count = sum(max(0, self._transport.bounds(p)[1] - stream.done) for p, stream in self._streams.items())
        made = [stream.made for stream in self._streams.values() if stream.ahead]
        return count, max(0.0, time.time() - min(made) / 1e6) if made else 0.0

    def read_ahead(self, stream: Stream) -> bool:
        """Whether there is a message to hand out now."""
        while not stream.ahead and not stream.ended:
            try:
                found = self._transport.read(stream.partition, stream.position, AHEAD_MESSAGES, AHEAD_BYTES)
            except GapError as gap:
                new = stream.gone(gap.first, gap.next_offset)
                if gap.first > 0 or gap.cause != "unlinked":  # what was unlinked before we came, another reader had
                    for first, behind in new:
                        self._lost(stream.partition, first, behind, gap.cause)
                stream.position = gap.next_offset
                continue
            stream.ahead.extend(found)
            stream.ended = not found
        return bool(stream.ahead)

    def report(self, stream: Stream) -> None:
        """Lets the spool's writer unlink what is acknowledged."""
        if stream.done > 0:
            self._transport.committed(stream.partition, stream.done)


BURST_S = 2.0
"""Seconds of its rate that a stream may save up. Chosen: the sender's turns come at least once a second."""
HOLE_S = 60.0
"""What one message costs at most, in s of its own time; chosen: a hole, when no agent ran, is not waited for."""


class Pace:
    """Admits messages of streams. For one thread. Without arguments it admits everything."""

    def __init__(
        self, catch_up: float = math.inf, jitter: float = 0.0, draw: Callable[[], float] = random.random
    ) -> None:
        self._catch_up, self._jitter, self._draw = catch_up, jitter, draw
        self._held = 0.0
        self._troubled: bool | None = None

    def turn(self, now: float, trouble: bool) -> None:
        """Whether messages get through at monotonic time `now`."""
        if self._troubled is not False and not trouble:
            self._held = now + self._jitter * self._draw()
        self._troubled = trouble

    def admits(self, stream: Stream, now: float) -> bool:
        """Whether the stream's next message may go out now, which is then counted. Sending one again costs nothing."""
        if math.isinf(self._catch_up):
            return True
        rate = 1.0 if self._troubled is not False or now < self._held else self._catch_up
        stream.allowance = min(stream.allowance + rate * (now - stream.counted), rate * BURST_S)
        stream.counted = now
        if stream.allowance <= 0:
            return False
        made = stream.made
        if made > stream.reached:
            first = stream.reached == 0
            stream.allowance -= 0.0 if first else min((made - stream.reached) / 1e6, HOLE_S)
            stream.reached = made
        return True
