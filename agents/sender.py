"""From the spool to Kafka: a thread that reads nodes' spools as their reader `kafka` and sends what is there.

The spool stays the buffer: a message leaves it when the brokers have acknowledged it, and no more than a few MiB are
anywhere else. Whatever fails is sent again for ever, but for what the brokers would refuse for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue

from agents.flow import PAUSE_MAX_S, Flow
from agents.losses import Losses
from agents.outlook import Outlook
from agents.pace import Pace
from agents.producer import Client, Outcome, Times, keys_of
from agents.streams import Streams
from pipeline.config import Kafka
from pipeline.errors import ConfigError
from pipeline.records import Event
from pipeline.transport import Partition, brokers
from pipeline.transport.spool import SpoolTransport

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
        brokers.settings(kafka, role)
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
