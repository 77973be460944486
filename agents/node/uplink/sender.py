"""From the spool to Kafka: a thread that reads the spools of nodes (as reader `kafka`) and sends their messages.

The spool is the buffer: a message leaves it after the brokers have acknowledged it; at most a few MiB are in memory.
Failed sends are retried forever, except messages that the brokers always refuse. The streams of all nodes are merged by
the time of their messages, so that a backlog arrives in about its original order: the watermark over all nodes then
advances. Sent node by node, most of the backlog would be late. Lost messages become `gap` events.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue

from agents.node.uplink.client import Client, Outcome, Times, for_good, keys_of
from agents.node.uplink.link_state import Outlook
from agents.node.uplink.streams import Pace, Stream, Streams
from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event
from pipeline.transport import Partition, kafka_clients
from pipeline.transport.spool import SpoolTransport

WAITING = 64
"""Gaps of one stream and cause that may wait; chosen: 64 events are 15 kB, which fit even where the brokers take
little. Beyond that the oldest is left to ingest, which sees its hole from the messages behind it, without the cause."""


class Losses:
    """Gaps by stream and cause; those that touch are one. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gaps: dict[tuple[Partition, str], deque[tuple[int, int, int]]] = {}  # (time, first, next)

    def add(self, partition: Partition, first: int, behind: int, cause: str) -> None:
        """Messages [first, behind) will never arrive."""
        now = time.time_ns() // 1000
        with self._lock:
            gaps = self._gaps.setdefault((partition, cause), deque(maxlen=WAITING))
            if gaps and gaps[-1][2] == first:
                _, first, _ = gaps.pop()
            gaps.append((now, first, behind))

    def take(self) -> list[Event]:
        """All that came since the last call."""
        with self._lock:
            taken, self._gaps = self._gaps, {}
        return [
            Event(now, f"node:{partition.name}", "gap", _data(partition, first, behind, cause))
            for (partition, cause), gaps in taken.items()
            for now, first, behind in gaps
        ]


def _data(partition: Partition, first: int, behind: int, cause: str) -> dict[str, object]:
    return {"topic": partition.topic, "epoch": partition.incarnation, "first": first, "next": behind, "cause": cause}


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


READER = "kafka"
LOOK_S = 1.0
"""Seconds between two looks for news in the spools, for writers that do not call `wake`; agents write once a second."""
STALLED = 3
"""Delivery times without an acknowledgement, while something is in flight, after which the client is made anew. It
should fail after one; kafka-python's were seen to do neither, and none finds brokers that all moved."""
GRACE_S = 0.5
"""How long ending waits for what is in flight, so that it need not be sent again; an answer takes milliseconds."""


class Sender:
    """Sends the spools of `nodes` below `directory`. All is done by one daemon thread, begun by `start`.

    lost: messages that were gone from the spool before they could be sent.  clients: how many were made.
    `say` gets one line when the state changes, from that thread.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Iterable[str],
        kafka: Kafka,
        say: Callable[[str], object],
        role: str = "agent",
        times: Times | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Raises ConfigError on bad credentials, and where a node has no key though [kafka] node_keys is set."""
        nodes = tuple(nodes)
        self.lost = self.clients = 0
        self._kafka, self._role, self._times = kafka, role, times or Times()
        self._inbox: SimpleQueue[Outcome | None] = SimpleQueue()
        self._losses = Losses()
        self._asked = self._seen = self._settled = 0
        self._looked, self._well = float("-inf"), time.monotonic()
        self._stop = threading.Event()
        kafka_clients.client_settings(kafka, role)
        if keys := keys_of(kafka):
            for node in nodes:
                keys.signing(node)
        self._transport = SpoolTransport(directory, READER, nodes=nodes)
        self._streams = Streams(self._transport, self._gap)
        self._outlook = Outlook(kafka, say)
        self.unsent, self.lag = 0, 0.0
        self.flow = Flow(self._streams, self._outlook, self._losses, self._inbox, pace or Pace())
        self._thread = threading.Thread(target=self._run, name=f"kafka-{role}", daemon=True)

    # --- for other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def wake(self) -> None:
        """Something was spooled: looks at once instead of within LOOK_S."""
        self._asked += 1
        self._inbox.put(None)

    def ask(self) -> int:
        """Wakes, and gives a ticket for `settled`."""
        self.wake()
        return self._asked

    def settled(self, ticket: int) -> bool:
        """Whether everything that was in the spools when the ticket was given is acknowledged, refused or gone."""
        return self._settled >= ticket

    def trouble(self) -> str | None:
        """Why messages do not get through; None when all is well or nothing was tried yet."""
        return self._outlook.trouble

    def take_events(self) -> list[Event]:
        """Gaps since the last call, with their causes: they belong into the node's own stream of events."""
        return self._losses.take()

    def stop(self) -> None:
        """Asks for the end, without waiting for it."""
        self._stop.set()
        self._inbox.put(None)

    def close(self, seconds: float = 2.0) -> None:
        """Ends within `seconds`, broker or not. What is not acknowledged is in the spool."""
        self.stop()
        if self._thread.ident is None:
            self._end()
        elif self._thread.is_alive():
            self._thread.join(seconds)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - whatever it is: all is in the spool, and silence is worse
                self._outlook.broken(error)
                self._abandon()
                self._stop.wait(PAUSE_MAX_S)
        self._end()

    def _turn(self) -> None:
        """Looks when it is time, sends what may be sent, and waits for outcomes."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S or self._seen != self._asked:
            self._looked, self._seen = now, self._asked
            self._streams.look()
            self.unsent, self.lag = self._streams.unsent()
            self._mind(now)
        self.flow.fill()
        if all(stream.settled for stream in self._streams) and self._transport.readable():
            self._well = now
            if self._settled != self._seen:
                self._transport.write_cursors()
                self._settled = self._seen
        self._take(max(0.0, self._looked + LOOK_S - time.monotonic()))

    def _take(self, seconds: float) -> None:
        """Waits up to `seconds` for outcomes or a wake, and takes all that are there."""
        try:
            outcome = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                if outcome is not None:
                    self.flow.came_back(outcome)
                outcome = self._inbox.get_nowait()
        except Empty:
            return

    def _end(self) -> None:
        until = time.monotonic() + (0.0 if self._outlook.trouble else GRACE_S)
        while self.flow.in_flight and (left := until - time.monotonic()) > 0:
            self._take(left)
        for stream in self._streams:
            self._streams.report(stream)
        self._transport.close()
        if self.flow.client is not None:
            self.flow.client.close(force=self.flow.in_flight > 0 or self._outlook.trouble is not None)
        self._outlook.close()

    def _gap(self, partition: Partition, first: int, behind: int, cause: str) -> None:
        self.lost += behind - first
        self._losses.add(partition, first, behind, cause)

    # --- the client --------------------------------------------------------------------------------------------------

    def _mind(self, now: float) -> None:
        """Says what changed, and makes a client anew that does nothing any more."""
        self._outlook.weigh(self._streams, now, self._unread())
        if self.flow.client is not None:
            well = max(self._well, self.flow.good)
            stalled = self.flow.in_flight > 0 and now - well > STALLED * self._times.delivery
            helpless = self.flow.in_flight == 0 and self._outlook.helpless and now - well > self._times.helpless
            mended = self._outlook.trouble is not None and self.flow.client.outdated
            if stalled or helpless or mended or self._outlook.raving or not self.flow.client.alive:
                self._abandon()
        if self.flow.client is None:
            self._make()

    def _unread(self) -> str | None:
        return self._transport.reachable() if any(True for _ in self._streams) else None

    def _abandon(self) -> None:
        """Gives the client up, with all it holds, which is in the spool."""
        client, self.flow.client = self.flow.client, None
        self.flow.abandon()
        if client is not None:
            client.close(force=True)

    def _make(self) -> None:
        """A new client, with the credentials as their files have them now."""
        self._well = time.monotonic()
        self._outlook.afresh()
        try:
            self.flow.client = Client(self._kafka, self._role, self._times, self._inbox)
        except ConfigError as error:  # the file of the password is being replaced
            self._outlook.broken(error)
            return
        self.clients += 1
