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

from agents.node.uplink.client import ClientTimeouts, KafkaSendClient, SendOutcome, check_credentials, is_permanent
from agents.node.uplink.link_state import LinkState
from agents.node.uplink.streams import CatchUpLimiter, SendStream, SendStreams
from pipeline.config.sections import Kafka
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event
from pipeline.transport import Partition
from pipeline.transport.spool import SpoolTransport

READER = "kafka"
SCAN_S = 1.0
"""Interval (s) of scans for new messages, for writers that do not call `wake`; agents write once a second."""
STALLED_TIMEOUTS = 3
"""Delivery timeouts without an acknowledgement, while something is in flight, after which the client is replaced. It
should fail after one; kafka-python sometimes does not, and it does not find brokers that have all moved."""
GRACE_S = 0.5
"""How long ending waits for messages in flight, so that they need not be sent again; a response takes milliseconds."""
IN_FLIGHT = 4 << 20
"""Bytes in flight over all streams: the bound of DESIGN.md, as the client has none. The largest message just fits."""
TOPIC_SHARE = IN_FLIGHT // 2
"""Bytes in flight of one topic, unless one message is larger: a topic without a leader leaves room for the other."""
PAUSE_S, PAUSE_MAX_S = 0.5, 2.0
"""First and longest pause (s) of a stream or topic that failed; it doubles. Chosen: it delays a backlog by at
most that when a broker is back; the client has its own pauses between connections."""
MAX_GAPS = 64
"""Waiting gaps of one stream and cause; chosen: 64 events are 15 kB, which fit even if the brokers accept little.
Beyond that the oldest is left to ingest, which finds the gap from the messages after it, without the cause."""


class GapEvents:
    """Lost messages as `gap` events, by stream and cause; adjacent gaps are merged. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gaps: dict[tuple[Partition, str], deque[tuple[int, int, int]]] = {}  # (time, first, next)

    def add(self, partition: Partition, first: int, end: int, cause: str) -> None:
        """Records that messages [first, end) will never arrive."""
        now = time.time_ns() // 1000
        with self._lock:
            gaps = self._gaps.setdefault((partition, cause), deque(maxlen=MAX_GAPS))
            if gaps and gaps[-1][2] == first:
                _, first, _ = gaps.pop()
            gaps.append((now, first, end))

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        with self._lock:
            taken, self._gaps = self._gaps, {}
        return [
            Event(now, f"node:{partition.name}", "gap", _gap_data(partition, first, end, cause))
            for (partition, cause), gaps in taken.items()
            for now, first, end in gaps
        ]


def _gap_data(partition: Partition, first: int, end: int, cause: str) -> dict[str, object]:
    return {"topic": partition.topic, "epoch": partition.incarnation, "first": first, "next": end, "cause": cause}


class Dispatcher:
    """Sends messages of `streams` through `client` and handles the outcomes. For one thread.

    sent, refused: messages acknowledged, and dropped because the brokers always refuse them.
    last_acknowledged: monotonic time of the last acknowledgement.  client: None while there is none.
    """

    def __init__(
        self,
        streams: SendStreams,
        link: LinkState,
        gaps: GapEvents,
        inbox: SimpleQueue[SendOutcome | None],
        limiter: CatchUpLimiter,
    ) -> None:
        self.client: KafkaSendClient | None = None
        self.sent = self.refused = self.in_flight = self.peak_in_flight = 0
        self.last_acknowledged = 0.0
        self._streams, self._link, self._gaps, self._inbox = streams, link, gaps, inbox
        self._limiter = limiter
        self._by_topic: dict[str, int] = {}
        self._paused_topics: dict[str, tuple[float, float]] = {}  # topic -> monotonic end of the pause, its length
        self._alone = False

    def abandon(self) -> None:
        """Prepares everything in flight for another send: the client that held it is gone."""
        for stream in self._streams:
            stream.rewind()
            stream.not_before = stream.pause = 0.0  # the pauses were for the old client
            stream.error = stream.error and TimeoutError("a new client had no acknowledgement yet")
        self.in_flight, self._alone = 0, False
        self._by_topic.clear()
        self._paused_topics.clear()

    # --- sending -----------------------------------------------------------------------------------------------------

    def send_ready(self) -> None:
        """Sends messages, the oldest first, as far as the limits allow and until outcomes arrive."""
        now = time.monotonic()
        self._limiter.update_link(now, self._link.problem is not None)
        ready = [s for s in self._streams if self._can_send(s, now) and self._streams.read_ahead(s)]
        suspects = [stream for stream in ready if stream.next_offset < stream.send_alone_until]
        if suspects or self._alone:
            self._alone = self._alone or (self.in_flight == 0 and self._send_next(suspects[0], now))
            return
        heap = [(stream.next_time, number, stream) for number, stream in enumerate(ready)]
        heapq.heapify(heap)
        while heap and self._inbox.empty():
            _, number, stream = heap[0]
            if self._is_allowed(stream, now) and self._send_next(stream, now) and self._streams.read_ahead(stream):
                heapq.heapreplace(heap, (stream.next_time, number, stream))
            else:
                heapq.heappop(heap)

    def _can_send(self, stream: SendStream, now: float) -> bool:
        """Whether neither the stream nor its topic pauses."""
        paused, _ = self._paused_topics.get(stream.partition.topic, (0.0, 0.0))
        return stream.retry_from is None and stream.not_before <= now and paused <= now

    def _is_allowed(self, stream: SendStream, now: float) -> bool:
        return self._can_send(stream, now) and self._limiter.allow(stream, now)

    def _fits(self, stream: SendStream, size: int) -> bool:
        own = self._by_topic.get(stream.partition.topic, 0)
        share = own == 0 or own + size <= TOPIC_SHARE
        return stream.fits_window(size) and self.in_flight + size <= IN_FLIGHT and share

    def _send_next(self, stream: SendStream, now: float) -> bool:
        """Sends the next message of a stream; whether it is now in flight."""
        from kafka.errors import KafkaError

        message, topic = stream.ahead[0], stream.partition.topic
        if self.client is None or not self._fits(stream, len(message.value)):
            return False
        try:
            self.client.send(stream, message.offset, message.value)
        except (KafkaError, ValueError) as error:  # ValueError: a topic that has lost its partitions
            if is_permanent(error):
                self._drop_refused(stream, message.offset, len(message.value), error)
                stream.skip_next()
            else:
                self._pause_topic(topic, error)
            return False
        self.in_flight += len(message.value)
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self._by_topic[topic] = self._by_topic.get(topic, 0) + len(message.value)
        stream.mark_sent(now)
        return True

    def _pause_topic(self, topic: str, error: Exception) -> None:
        """Sends nothing to a topic for a while: each try may block for a time that other topics lose."""
        if self.client is not None:
            error = self.client.explain(topic, error)
        pause = _next_pause(self._paused_topics.get(topic, (0.0, 0.0))[1])
        self._paused_topics[topic] = time.monotonic() + pause, pause
        self._link.record_blocked(topic, error)

    # --- outcomes ----------------------------------------------------------------------------------------------------

    def handle_outcome(self, outcome: SendOutcome) -> None:
        """Handles one outcome; those of an abandoned client are ignored."""
        if outcome.client is not self.client:
            return
        stream, topic, error = outcome.stream, outcome.stream.partition.topic, outcome.error
        alone, self._alone = self._alone, False
        size = stream.mark_returned(outcome.offset)
        self.in_flight -= size
        self._by_topic[topic] -= size
        if error is None:
            self.sent += 1
            self.last_acknowledged = stream.last_progress = time.monotonic()
            stream.pause, stream.error = 0.0, None
            self._paused_topics.pop(topic, None)
            self._link.record_acknowledged(stream)
        elif is_permanent(error) and alone:
            self._drop_refused(stream, outcome.offset, size, error)
        else:
            self._retry_later(stream, outcome.offset, error)
        if stream.retry_from is not None and not stream.in_flight:
            stream.rewind()
        self._streams.commit_progress(stream)

    def _retry_later(self, stream: SendStream, offset: int, error: Exception) -> None:
        """Sends the message again: after a pause, or alone, if it was refused in a batch with others."""
        stream.request_retry(offset)
        if is_permanent(error):
            stream.send_alone_until = max(stream.send_alone_until, offset + 1)
            return
        stream.pause = _next_pause(stream.pause)
        stream.not_before = time.monotonic() + stream.pause
        stream.error = error

    def _drop_refused(self, stream: SendStream, offset: int, size: int, error: Exception) -> None:
        """Counts a refused message as a gap: otherwise only a later message would show it, and there may be none."""
        self.refused += 1
        self._gaps.add(stream.partition, offset, offset + 1, f"refused by the brokers: {type(error).__name__}")
        self._link.log_refused(stream, size, error)


def _next_pause(pause: float) -> float:
    return min(max(pause * 2, PAUSE_S), PAUSE_MAX_S)


class SpoolSender:
    """Sends the spools of `nodes` below `directory`, in one daemon thread that `start` starts.

    lost: messages gone from the spool before they could be sent.  clients: how many were made.
    unsent: durable messages not acknowledged.  lag: age in s of the oldest of them that is not in flight.
    `log` gets one line per change of state, from that thread.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Iterable[str],
        kafka: Kafka,
        log: Callable[[str], object],
        role: str = "agent",
        timeouts: ClientTimeouts | None = None,
        limiter: CatchUpLimiter | None = None,
    ) -> None:
        """Raises ConfigError on bad credentials, and if a node has no key though [kafka] node_keys is set."""
        nodes = tuple(nodes)
        self.lost = self.clients = 0
        self._kafka, self._role, self._timeouts = kafka, role, timeouts or ClientTimeouts()
        self._inbox: SimpleQueue[SendOutcome | None] = SimpleQueue()
        self._gaps = GapEvents()
        self._wakes = self._scanned_wakes = self._flushed_wakes = 0
        self._last_scan, self._last_good = float("-inf"), time.monotonic()
        self._stop = threading.Event()
        check_credentials(kafka, role, nodes)
        self._transport = SpoolTransport(directory, READER, nodes=nodes)
        self._streams = SendStreams(self._transport, self._record_gap)
        self._link = LinkState(kafka, log)
        self.unsent, self.lag = 0, 0.0
        self.dispatcher = Dispatcher(self._streams, self._link, self._gaps, self._inbox, limiter or CatchUpLimiter())
        self._thread = threading.Thread(target=self._run, name=f"kafka-{role}", daemon=True)

    # --- for other threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts sending."""
        self._thread.start()

    def wake(self) -> None:
        """Scans the spools now instead of within SCAN_S: something was written."""
        self._wakes += 1
        self._inbox.put(None)

    def request_flush(self) -> int:
        """Wakes the thread, and returns a ticket for `is_flushed`."""
        self.wake()
        return self._wakes

    def is_flushed(self, ticket: int) -> bool:
        """Whether everything in the spools at the time of the ticket is acknowledged, refused or gone."""
        return self._flushed_wakes >= ticket

    def problem(self) -> str | None:
        """Why messages do not arrive; None if they do or none was sent yet."""
        return self._link.problem

    def take_events(self) -> list[Event]:
        """Gaps since the last call, with their causes, for the node's own stream of events."""
        return self._gaps.take_events()

    def stop(self) -> None:
        """Requests the end, without waiting for it."""
        self._stop.set()
        self._inbox.put(None)

    def close(self, seconds: float = 2.0) -> None:
        """Ends within `seconds`, with or without brokers. Unacknowledged messages stay in the spool."""
        self.stop()
        if self._thread.ident is None:
            self._shut_down()
        elif self._thread.is_alive():
            self._thread.join(seconds)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._run_once()
            except Exception as error:  # noqa: BLE001 - the spool has all messages, and a silent end would be worse
                self._link.record_failure(error)
                self._drop_client()
                self._stop.wait(PAUSE_MAX_S)
        self._shut_down()

    def _run_once(self) -> None:
        """Scans the spools if due, sends what may be sent, and waits for outcomes."""
        now = time.monotonic()
        if now - self._last_scan >= SCAN_S or self._scanned_wakes != self._wakes:
            self._last_scan, self._scanned_wakes = now, self._wakes
            self._streams.refresh()
            self.unsent, self.lag = self._streams.count_unsent()
            self._check_client(now)
        self.dispatcher.send_ready()
        if all(stream.settled for stream in self._streams) and self._transport.is_fully_readable():
            self._last_good = now
            if self._flushed_wakes != self._scanned_wakes:
                self._transport.write_cursors()
                self._flushed_wakes = self._scanned_wakes
        self._handle_outcomes(max(0.0, self._last_scan + SCAN_S - time.monotonic()))

    def _handle_outcomes(self, seconds: float) -> None:
        """Waits up to `seconds` for an outcome or a wake, and handles all outcomes that are there."""
        try:
            outcome = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
            while True:
                if outcome is not None:
                    self.dispatcher.handle_outcome(outcome)
                outcome = self._inbox.get_nowait()
        except Empty:
            return

    def _shut_down(self) -> None:
        until = time.monotonic() + (0.0 if self._link.problem else GRACE_S)
        while self.dispatcher.in_flight and (left := until - time.monotonic()) > 0:
            self._handle_outcomes(left)
        for stream in self._streams:
            self._streams.commit_progress(stream)
        self._transport.close()
        if self.dispatcher.client is not None:
            self.dispatcher.client.close(force=self.dispatcher.in_flight > 0 or self._link.problem is not None)
        self._link.close()

    def _record_gap(self, partition: Partition, first: int, end: int, cause: str) -> None:
        self.lost += end - first
        self._gaps.add(partition, first, end, cause)

    # --- the client --------------------------------------------------------------------------------------------------

    def _check_client(self, now: float) -> None:
        """Logs changes of the link, and replaces a client that no longer works."""
        self._link.update(self._streams, now, self._spool_problem())
        client, dispatcher = self.dispatcher.client, self.dispatcher
        if client is not None:
            good = max(self._last_good, dispatcher.last_acknowledged)
            stalled = dispatcher.in_flight > 0 and now - good > STALLED_TIMEOUTS * self._timeouts.delivery
            blocked = dispatcher.in_flight == 0 and self._link.blocked and now - good > self._timeouts.blocked
            fixed = self._link.problem is not None and client.credentials_changed
            if stalled or blocked or fixed or self._link.io_thread_failed or not client.is_alive:
                self._drop_client()
        if self.dispatcher.client is None:
            self._create_client()

    def _spool_problem(self) -> str | None:
        return self._transport.find_problem() if any(True for _ in self._streams) else None

    def _drop_client(self) -> None:
        """Abandons the client with everything it holds, which is also in the spool."""
        client, self.dispatcher.client = self.dispatcher.client, None
        self.dispatcher.abandon()
        if client is not None:
            client.close(force=True)

    def _create_client(self) -> None:
        """Creates a client, with the credentials that are now in their files."""
        self._last_good = time.monotonic()
        self._link.reset()
        try:
            self.dispatcher.client = KafkaSendClient(self._kafka, self._role, self._timeouts, self._inbox)
        except ConfigError as error:  # the password file is being replaced
            self._link.record_failure(error)
            return
        self.clients += 1
