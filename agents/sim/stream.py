"""Sends chunks of a simulated fleet to spools and Kafka: telemetry and events of each node, at a chosen speed.

A tick is due at `begin + max(0, seconds - backfill) / speed`; the back-fill is due immediately. A chunk has about a
second of real time, at most BLOCK ticks. Events are sent with their chunk; telemetry as agents send it, at any speed: a
message per node and window of [agent] linger. Only the back-fill is sent in messages of whole chunks.
"""

from __future__ import annotations

import hashlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agents.node.joining import join_batches, window_of
from agents.node.spool import disk
from agents.node.spool.spool import Spool
from agents.sim.chunk import Chunk
from agents.sim.fleet import BLOCK, FleetSimulator
from pipeline.config.sections import Spool as SpoolSettings
from pipeline.model.errors import SpoolError
from pipeline.model.records import EVENTS, SECOND, TELEMETRY, Batch, Block, Event, EventBatch, Origin
from pipeline.transport import wire

if TYPE_CHECKING:
    from agents.node.uplink.sender import SpoolSender


BACKLOG = 32 << 20
"""Unacknowledged bytes in the spools after which a simulation waits for the brokers; chosen: what one core makes in a
second. At most a quarter of a small spool: acknowledged data frees space only segment by segment."""
POLL_S = 0.02
"""Seconds between two checks whether everything is acknowledged; chosen: the sender itself needs milliseconds."""

GRACE_S = 0.5
"""Seconds that a simulation waits for a healthy broker before it ends; chosen: a response takes milliseconds."""


class BrokerFlush:
    """Waits until the brokers have everything. backlog: bytes by which a simulation may be ahead of them;
    `wait(seconds)` returns True when the simulation must stop."""

    def __init__(self, sender: SpoolSender, spool: SpoolSettings, wait: Callable[[float], bool]) -> None:
        self.sender, self.backlog = (
            sender,
            min(BACKLOG, (spool.max_bytes or disk.default_max_bytes(spool.directory)) // 4),
        )
        self._wait = wait

    def wait(self) -> bool:
        """Waits until everything spooled is acknowledged, however long the brokers are down; False if stopped."""
        ticket = self.sender.request_flush()
        while not self.sender.is_flushed(ticket):
            if self._wait(POLL_S):
                return self._wait_grace(ticket)
        return True

    def _wait_grace(self, ticket: int) -> bool:
        end = time.monotonic() + GRACE_S
        while not self.sender.is_flushed(ticket) and not self.sender.problem() and time.monotonic() < end:
            time.sleep(POLL_S)
        return self.sender.is_flushed(ticket)


LAYOUTS_PER_NODE = 4
"""Layouts of a node that are remembered; chosen: its job changes its ranks a few times."""
SYNC_EVERY = SECOND
"""Minimum time between two syncs of all spools (us): each costs a disk flush per spool. Chosen."""
_FILES_PER_NODE, _FILES_BESIDE = 8, 64  # open files: two spools with lock, mark, segment and folder; chosen with room


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """When a tick is due. `begin` in UTC us; speed 0: immediately."""

    begin: int
    speed: float
    interval: float
    backfill: float = 0.0

    @property
    def group(self) -> int:
        """Returns the ticks in a message: about a second of real time."""
        return BLOCK if self.speed == 0 else min(max(round(self.speed / self.interval), 1), BLOCK)

    def due(self, tick: int) -> int:
        """Returns the UTC us at which a tick may be sent."""
        late = max(0.0, tick * self.interval - self.backfill)
        return self.begin if self.speed == 0 else self.begin + int(late / self.speed * SECOND)

    def ready(self, tick: int, now: int) -> int:
        """Returns how many ticks to send together from `tick` on: a group, or all that are due if that is more."""
        count = self.group
        while count < BLOCK and self.due(tick + count) <= now:
            count += 1
        return count


class NodeSpools:
    """The spools of all simulated nodes; counts what it sends."""

    def __init__(
        self,
        simulator: FleetSimulator,
        settings: SpoolSettings,
        site: str,
        now: Callable[[], int],
        broker: BrokerFlush | None = None,
        linger: float = 0.0,
    ) -> None:
        self._simulator, self._now, self._broker = simulator, now, broker
        self._interval = round(simulator.scenario.interval * SECOND)
        self._window = max(round(linger * SECOND), self._interval)
        self._waiting: list[Chunk] = []
        self._encoder = wire.Encoder(LAYOUTS_PER_NODE * len(simulator.layout.sender_names))
        sender_names = simulator.layout.sender_names
        _allow_files(_FILES_PER_NODE * len(sender_names) + _FILES_BESIDE)
        self._origins = [Origin(site, node, _boot_id(simulator, node), True) for node in sender_names]
        self._stack, self._synced, self._written = ExitStack(), now(), 0
        try:
            self._events = [self._open(node, EVENTS, settings) for node in sender_names]
            self._telemetry = [self._open(node, TELEMETRY, settings) for node in sender_names]
        except BaseException:
            self.close()
            raise
        if broker:
            broker.sender.start()

    @property
    def dropped(self) -> int:
        """Number of messages that did not fit."""
        return sum(spool.dropped for spool in (*self._events, *self._telemetry))

    @property
    def refused(self) -> int:
        """Number of messages that the brokers refused."""
        return self._broker.sender.dispatcher.refused if self._broker else 0

    def send(self, chunk: Chunk, bulk: bool = False) -> None:
        """Appends a chunk: its events immediately, its telemetry when its window ends; syncs at most every SYNC_EVERY.

        bulk: one message per node, whatever its windows.
        """
        sent = self._now()
        events: dict[int, list[Event]] = defaultdict(list)
        for number, event in (*chunk.events, *self._gaps()):
            events[number].append(event)
        self._append(events, sent)
        for piece in [chunk] if bulk else split_windows(chunk, self._window):
            self._waiting.append(piece)
            last = int(piece.times[-1])
            if bulk or window_of(last + self._interval, self._window) != window_of(last, self._window):
                self._send_waiting(sent)
        if self._broker and self._written > self._broker.backlog:
            self._wait_for_broker()
        elif self._now() - self._synced >= SYNC_EVERY:
            self.sync()

    def _send_waiting(self, sent: int) -> None:
        """Appends the telemetry of the chunks that wait, one message per node."""
        found: dict[int, list[Batch]] = defaultdict(list)
        for chunk in self._waiting:
            for batch, number in batches(chunk, self._origins):
                found[number].append(batch)
        self._waiting.clear()
        for number, parts in found.items():
            body = self._encoder.encode(join_batches(parts))
            self._telemetry[number].append(body, wire.TELEMETRY_KIND, sent, True)
            self._written += len(body)

    def sync(self) -> None:
        """Makes everything sent durable, events first: a reader then knows the entities before their rows."""
        for spool in (*self._events, *self._telemetry):
            spool.sync()
        self._synced = self._now()
        if self._broker:
            self._broker.sender.wake()

    def flush(self) -> bool:
        """Sends what waits and syncs; with Kafka waits until the brokers have everything. False if it was stopped."""
        self._send_waiting(self._now())
        return self._wait_for_broker()

    def _wait_for_broker(self) -> bool:
        """Syncs, and with Kafka waits until the brokers have everything; False if it was stopped."""
        self.sync()
        self._written = 0
        if self._broker is None:
            return True
        arrived = self._broker.wait()
        if not (gaps := self._gaps()):
            return arrived
        events: dict[int, list[Event]] = defaultdict(list)
        for number, event in gaps:  # no later message will follow that reveals the gaps
            events[number].append(event)
        self._append(events, self._now())
        self.sync()
        return arrived and self._broker.wait()

    def close(self) -> None:
        """Syncs and closes all spools, and stops the Kafka sender; may be called twice."""
        self._stack.close()
        if self._broker:
            self._broker.sender.close()

    def _append(self, events: Mapping[int, Sequence[Event]], sent: int) -> None:
        for number, found in events.items():
            body = wire.encode_events(EventBatch(self._origins[number], tuple(found)))
            self._events[number].append(body, wire.EVENTS_KIND, sent, True)
            self._written += len(body)

    def _gaps(self) -> list[tuple[int, Event]]:
        """Returns the gaps that the sender found, each with the number of its node."""
        found = self._broker.sender.take_events() if self._broker else []
        numbers = {f"node:{origin.node}": number for number, origin in enumerate(self._origins)} if found else {}
        return [(numbers[event.entity], event) for event in found]

    def _open(self, node: str, topic: str, settings: SpoolSettings) -> Spool:
        sizes = {"max_bytes": settings.max_bytes, "segment_bytes": settings.segment_bytes}
        try:
            spool = Spool(settings.directory, node, topic, **sizes, free_bytes=settings.free_bytes)
        except OSError as error:
            raise SpoolError(
                f"{settings.directory}: {error.strerror}; expected a writable folder: set [spool] directory"
            ) from error
        self._stack.callback(spool.close)
        return spool


def split_windows(chunk: Chunk, window: int) -> Iterator[Chunk]:
    """Yields the parts of a chunk that are in different windows of `window` us, without events."""
    windows = window_of(chunk.times, window)
    bounds = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(windows)]
    for begin, end in pairwise(bounds):
        yield chunk.between(begin, end, int(chunk.times[-1]))


def batches(chunk: Chunk, origins: Sequence[Origin]) -> Iterator[tuple[Batch, int]]:
    """Yields the chunk as its senders send it: (batch, number of the sender).

    A row that does not exist is not sent: a new batch starts where the devices of a sender change between ticks."""
    parts = {c: _parts(home, len(origins)) for c, home in chunk.senders.items() if c in chunk.columns}
    for number, origin in enumerate(origins):
        mine = {c: part[number] for c, part in parts.items() if len(part[number])}
        there = {c: chunk.present[c][:, part] for c, part in mine.items()}
        for run in _runs(there, len(chunk.times)):
            blocks = tuple(
                Block(c, *_cut(chunk, c, mine[c][rows[run.start]], run))
                for c, rows in there.items()
                if rows[run.start].any()
            )
            if blocks:
                yield Batch(origin, chunk.times[run] + chunk.late[run, number], blocks), number


def _cut(
    chunk: Chunk, device_class: str, devices: NDArray[np.intp], run: slice
) -> tuple[tuple[str, ...], dict[str, NDArray[Any]]]:
    """Returns names and columns of some devices in some ticks."""
    names = chunk.entities[device_class]
    first, last = int(devices[0]), int(devices[-1])
    cut = slice(first, last + 1) if last - first + 1 == len(devices) else devices
    columns = {n: values[run, cut] for n, values in chunk.columns[device_class].items()}
    return tuple(names[i] for i in devices.tolist()), columns


def _parts(home: NDArray[np.intp], senders: int) -> list[NDArray[np.intp]]:
    """Returns the devices of each sender, in their order."""
    order = np.argsort(home, kind="stable")
    return np.split(order, np.searchsorted(home[order], np.arange(1, senders)))


def _runs(there: Mapping[str, NDArray[np.bool_]], ticks: int) -> list[slice]:
    """Yields runs of ticks with the same devices."""
    changes = np.zeros(ticks, np.bool_)
    for rows in there.values():
        changes[1:] |= (rows[1:] != rows[:-1]).any(axis=1)
    bounds = [0, *np.flatnonzero(changes).tolist(), ticks]
    return [slice(a, b) for a, b in pairwise(bounds)]


def _boot_id(simulator: FleetSimulator, node: str) -> bytes:
    """Returns a simulated kernel's boot id, different for every run."""
    return hashlib.blake2b(f"{simulator.seed} {simulator.start} {node}".encode(), digest_size=16).digest()


def _allow_files(wanted: int) -> None:
    """Raises the soft limit of open files if a large fleet needs it and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < top:
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
