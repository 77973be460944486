"""Streams: each epoch of a node's spool of one topic, read ahead a little and sent in order, at a limited rate.

If a message fails, nothing more of its stream is sent until all messages in flight have returned; then it continues
from the first unacknowledged one. Ingest drops the duplicates.

The rate limit prevents a fleet from overloading brokers that have just recovered. It is measured in message time: a
stream may be sent `catch_up` times as fast as it was produced. While the link has a problem, and for a random part of
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

WINDOW_BYTES = 512 << 10
"""Bytes of one stream in flight, unless one message is larger: two batches. At most so much is sent twice."""
AHEAD_MESSAGES, AHEAD_BYTES = 64, 64 << 10
"""One read of a stream; chosen: about ten messages of a node, so that reading costs little beside sending."""
BURST_S = 2.0
"""Seconds of its rate that a stream may save up. Chosen: the sender runs at least once a second."""
MAX_GAP_S = 60.0
"""Message time that one message counts at most; chosen: a gap, in which no agent ran, is not waited for."""


@dataclass(slots=True)
class RateAllowance:
    """What the rate limit knows of a stream.

    seconds: message time that may be sent.  updated: monotonic time of the last update.  newest: newest message sent.
    """

    seconds: float = 0.0
    updated: float = 0.0
    newest: int = 0


@dataclass(eq=False, slots=True)
class SendStream:
    """One partition of a spool on its way to Kafka.

    in_flight: offset -> bytes, ascending.  known_gaps: ranges gone from the spool, ascending.
    retry_from: offset to continue from, once nothing is in flight.
    send_alone_until: messages before this offset are sent one by one: one of them was refused in a batch with others.
    not_before: monotonic time before which nothing is sent; `pause`: length of the last such pause.
    error: why the last message failed; None if one was acknowledged since.
    last_progress: time of the last acknowledgement, or of a send with nothing in flight.
    """

    partition: Partition
    position: int
    ahead: deque[Message] = field(default_factory=deque)
    in_flight: dict[int, int] = field(default_factory=dict)
    in_flight_bytes: int = 0
    at_end: bool = False
    known_gaps: list[tuple[int, int]] = field(default_factory=list)
    retry_from: int | None = None
    send_alone_until: int = -1
    not_before: float = 0.0
    pause: float = 0.0
    last_progress: float = 0.0
    error: Exception | None = None
    allowance: RateAllowance = field(default_factory=RateAllowance)

    @property
    def acknowledged(self) -> int:
        """The offset before which everything is acknowledged, refused or gone."""
        first = next(iter(self.in_flight), self.position)
        return first if self.retry_from is None else min(first, self.retry_from)

    @property
    def next_offset(self) -> int:
        """Offset of the next message to send, if there is one."""
        return self.ahead[0].offset

    @property
    def next_time(self) -> int:
        """When the next message was made, by its node's clock: the order in which streams are merged."""
        try:
            return wire.unpack_envelope(self.ahead[0].value).sent
        except WireError:  # not one of our messages; ingest reports it
            return 0

    @property
    def settled(self) -> bool:
        """Whether it is read to its end and nothing of it is in flight."""
        return self.at_end and not self.ahead and not self.in_flight and self.retry_from is None

    def fits_window(self, size: int) -> bool:
        """Whether `size` more bytes may be in flight."""
        return not self.in_flight or self.in_flight_bytes + size <= WINDOW_BYTES

    def mark_sent(self, now: float) -> None:
        """Moves the next message into flight."""
        message = self.ahead.popleft()
        if not self.in_flight:
            self.last_progress = now
        self.in_flight[message.offset] = len(message.value)
        self.in_flight_bytes += len(message.value)
        self.position = message.offset + 1

    def skip_next(self) -> None:
        """Drops the next message: it is never sent."""
        self.position = self.ahead.popleft().offset + 1

    def mark_returned(self, offset: int) -> int:
        """Removes a message from those in flight; returns its bytes."""
        size = self.in_flight.pop(offset)
        self.in_flight_bytes -= size
        return size

    def request_retry(self, offset: int) -> None:
        """Sends the message again, with all after it, once nothing is in flight."""
        self.retry_from = offset if self.retry_from is None else min(self.retry_from, offset)

    def add_gap(self, first: int, end: int) -> list[tuple[int, int]]:
        """Records that [first, end) is gone from the spool; the parts of it that were not recorded before."""
        new, at = [], first
        for known, known_end in self.known_gaps:
            if at < known < end:
                new.append((at, known))
            at = max(at, known_end)
        if at < end:
            new.append((at, end))
        self.known_gaps = sorted([*(known for known in self.known_gaps if known[1] > self.acknowledged), *new])
        return new

    def rewind(self) -> None:
        """Returns to the first unacknowledged message, whatever was in flight."""
        self.position = self.acknowledged
        self.in_flight.clear()
        self.ahead.clear()
        self.in_flight_bytes, self.retry_from, self.at_end = 0, None, False


class SendStreams:
    """All streams of some nodes. Calls `on_gap(partition, first, end, cause)` for lost messages. For one thread."""

    def __init__(self, transport: SpoolTransport, on_gap: Callable[[Partition, int, int, str], None]) -> None:
        self._transport, self._on_gap = transport, on_gap
        self._streams: dict[Partition, SendStream] = {}

    def __iter__(self) -> Iterator[SendStream]:
        return iter(self._streams.values())

    def refresh(self) -> None:
        """Adds new streams and removes those that are gone; all may have new messages."""
        found = self._transport.partitions()
        for partition in self._streams.keys() - set(found):
            if not self._streams[partition].in_flight:
                del self._streams[partition]
        for partition in found:
            if partition not in self._streams:
                self._streams[partition] = SendStream(partition, self._transport.stored_offset(partition) or 0)
            self._streams[partition].at_end = False
            self.commit_progress(self._streams[partition])

    def count_unsent(self) -> tuple[int, float]:
        """Durable messages that are not acknowledged, and the age in s of the oldest that is not in flight."""
        count = sum(max(0, self._transport.bounds(p)[1] - stream.acknowledged) for p, stream in self._streams.items())
        made = [stream.next_time for stream in self._streams.values() if stream.ahead]
        return count, max(0.0, time.time() - min(made) / 1e6) if made else 0.0

    def read_ahead(self, stream: SendStream) -> bool:
        """Reads the next messages if needed; whether there is one to send."""
        while not stream.ahead and not stream.at_end:
            try:
                found = self._transport.read(stream.partition, stream.position, AHEAD_MESSAGES, AHEAD_BYTES)
            except GapError as gap:
                new = stream.add_gap(gap.first, gap.next_offset)
                if gap.first > 0 or gap.cause != "unlinked":  # unlinked before this reader started: read by another
                    for first, end in new:
                        self._on_gap(stream.partition, first, end, gap.cause)
                stream.position = gap.next_offset
                continue
            stream.ahead.extend(found)
            stream.at_end = not found
        return bool(stream.ahead)

    def commit_progress(self, stream: SendStream) -> None:
        """Lets the spool's writer unlink acknowledged messages."""
        if stream.acknowledged > 0:
            self._transport.commit_offset(stream.partition, stream.acknowledged)


class CatchUpLimiter:
    """Limits the rate of streams. For one thread. Without arguments it allows everything."""

    def __init__(
        self, catch_up: float = math.inf, jitter: float = 0.0, draw: Callable[[], float] = random.random
    ) -> None:
        self._catch_up, self._jitter, self._draw = catch_up, jitter, draw
        self._held_until = 0.0
        self._troubled: bool | None = None

    def update_link(self, now: float, troubled: bool) -> None:
        """Sets whether the link has a problem at monotonic time `now`."""
        if self._troubled is not False and not troubled:
            self._held_until = now + self._jitter * self._draw()
        self._troubled = troubled

    def allow(self, stream: SendStream, now: float) -> bool:
        """Whether the stream's next message may be sent now, which is then counted. A retry costs nothing."""
        if math.isinf(self._catch_up):
            return True
        rate = 1.0 if self._troubled is not False or now < self._held_until else self._catch_up
        allowance = stream.allowance
        allowance.seconds = min(allowance.seconds + rate * (now - allowance.updated), rate * BURST_S)
        allowance.updated = now
        if allowance.seconds <= 0:
            return False
        made = stream.next_time
        if made > allowance.newest:
            first = allowance.newest == 0
            allowance.seconds -= 0.0 if first else min((made - allowance.newest) / 1e6, MAX_GAP_S)
            allowance.newest = made
        return True
