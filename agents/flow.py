"""Which message goes to the brokers next, and what becomes of it.

The streams of all nodes are merged by the time at which messages were made, so that a backlog arrives in about the
order in which it arose: a watermark over all nodes then moves on, where node after node would make most of them late.
"""

from __future__ import annotations

import heapq
import time
from queue import SimpleQueue

from agents.losses import Losses
from agents.outlook import Outlook
from agents.pace import Pace
from agents.producer import Client, Outcome, for_good
from agents.streams import Stream, Streams

IN_FLIGHT = 4 << 20
"""Bytes handed to the client and not yet come back, over all streams: DESIGN.md's bound, as the client has none. The
largest message just fits."""
TOPIC_SHARE = IN_FLIGHT // 2
"""Of that for one topic, unless one message is larger: a topic without a leader leaves room to the other."""
PAUSE_S, PAUSE_MAX_S = 0.5, 2.0
"""First and longest pause of a stream or topic that failed (s); each is twice the one before. Chosen: so much later
at most does a backlog begin to flow when a broker is back; the client has pauses of its own between connections."""


class Flow:
    """Hands messages of `streams` to `client` and takes back its outcomes. For one thread.

    sent, refused: messages acknowledged, and given up because the brokers would refuse them for ever.
    good: monotonic time of the last acknowledgement.  client: None while there can be none.
    """

    def __init__(
        self, streams: Streams, outlook: Outlook, losses: Losses, inbox: SimpleQueue[Outcome | None], pace: Pace
    ) -> None:
        self.client: Client | None = None
        self.sent = self.refused = self.in_flight = self.most = 0
        self.good = 0.0
        self._streams, self._outlook, self._losses, self._inbox = streams, outlook, losses, inbox
        self._pace = pace
        self._by_topic: dict[str, int] = {}
        self._closed: dict[str, tuple[float, float]] = {}  # topic -> monotonic time until which, last pause
        self._alone = False

    def abandon(self) -> None:
        """Nothing will come back of what is in flight: it is to be sent again."""
        for stream in self._streams:
            stream.rewind()
            stream.until = stream.pause = 0.0  # the pauses were for the client that is given up
            stream.trouble = stream.trouble and TimeoutError("a client made anew had no acknowledgement yet")
        self.in_flight, self._alone = 0, False
        self._by_topic.clear()
        self._closed.clear()

    # --- there -------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Hands out messages, the oldest first, as far as they are admitted and until outcomes are there."""
        now = time.monotonic()
        self._pace.turn(now, self._outlook.trouble is not None)
        ready = [stream for stream in self._streams if self._open(stream, now) and self._streams.read_ahead(stream)]
        suspects = [stream for stream in ready if stream.next < stream.alone]
        if suspects or self._alone:
            self._alone = self._alone or (self.in_flight == 0 and self._hand_out(suspects[0], now))
            return
        heap = [(stream.made, number, stream) for number, stream in enumerate(ready)]
        heapq.heapify(heap)
        while heap and self._inbox.empty():
            _, number, stream = heap[0]
            if self._may_go(stream, now) and self._hand_out(stream, now) and self._streams.read_ahead(stream):
                heapq.heapreplace(heap, (stream.made, number, stream))
            else:
                heapq.heappop(heap)

    def _open(self, stream: Stream, now: float) -> bool:
        closed, _ = self._closed.get(stream.partition.topic, (0.0, 0.0))
        return stream.failed is None and stream.until <= now and closed <= now

    def _may_go(self, stream: Stream, now: float) -> bool:
        return self._open(stream, now) and self._pace.admits(stream, now)

    def _admits(self, stream: Stream, size: int) -> bool:
        own = self._by_topic.get(stream.partition.topic, 0)
        return stream.admits(size) and self.in_flight + size <= IN_FLIGHT and (own == 0 or own + size <= TOPIC_SHARE)

    def _hand_out(self, stream: Stream, now: float) -> bool:
        """Sends the next message of a stream; whether there is something in flight more than before."""
        from kafka.errors import KafkaError

        message, topic = stream.ahead[0], stream.partition.topic
        if self.client is None or not self._admits(stream, len(message.value)):
            return False
        try:
            self.client.send(stream, message.offset, message.value)
        except (KafkaError, ValueError) as error:  # ValueError: a topic that lost its partitions meanwhile
            if for_good(error):
                self._give_up(stream, message.offset, len(message.value), error)
                stream.skip()
            else:
                self._close(topic, error)
            return False
        self.in_flight += len(message.value)
        self.most = max(self.most, self.in_flight)
        self._by_topic[topic] = self._by_topic.get(topic, 0) + len(message.value)
        stream.hand_out(now)
        return True

    def _close(self, topic: str, error: Exception) -> None:
        """Nothing goes to a topic for a while: each try costs the other topics the time that a send may block."""
        if self.client is not None:
            error = self.client.meaning(topic, error)
        pause = _longer(self._closed.get(topic, (0.0, 0.0))[1])
        self._closed[topic] = time.monotonic() + pause, pause
        self._outlook.not_taken(topic, error)

    # --- and back ----------------------------------------------------------------------------------------------------

    def came_back(self, outcome: Outcome) -> None:
        """Takes one outcome; those of a client that was abandoned say nothing."""
        if outcome.client is not self.client:
            return
        stream, topic, error = outcome.stream, outcome.stream.partition.topic, outcome.error
        alone, self._alone = self._alone, False
        size = stream.came_back(outcome.offset)
        self.in_flight -= size
        self._by_topic[topic] -= size
        if error is None:
            self.sent += 1
            self.good = stream.since = time.monotonic()
            stream.pause, stream.trouble = 0.0, None
            self._closed.pop(topic, None)
            self._outlook.arrived(stream)
        elif for_good(error) and alone:
            self._give_up(stream, outcome.offset, size, error)
        else:
            self._failed(stream, outcome.offset, error)
        if stream.failed is not None and not stream.waiting:
            stream.rewind()
        self._streams.report(stream)

    def _failed(self, stream: Stream, offset: int, error: Exception) -> None:
        """The stream goes back to this message: after a pause, or alone, if it was refused in company."""
        stream.fail(offset)
        if for_good(error):
            stream.alone = max(stream.alone, offset + 1)
            return
        stream.pause = _longer(stream.pause)
        stream.until = time.monotonic() + stream.pause
        stream.trouble = error

    def _give_up(self, stream: Stream, offset: int, size: int, error: Exception) -> None:
        """Told as a gap, too: only a later message would show the hole, and there may never be one."""
        self.refused += 1
        self._losses.add(stream.partition, offset, offset + 1, f"refused by the brokers: {type(error).__name__}")
        self._outlook.refused(stream, size, error)


def _longer(pause: float) -> float:
    return min(max(pause * 2, PAUSE_S), PAUSE_MAX_S)
