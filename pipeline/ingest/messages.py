"""Decodes one message: checks it, corrects its times and builds its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.ingest.columns import ColumnLimits
from pipeline.model.errors import NewerWireError, Rejected, WireError
from pipeline.model.records import Event, EventBatch, Rows, select_rows
from pipeline.store.devices import EXCLUDED, Devices
from pipeline.transport import Message, wire

if TYPE_CHECKING:
    from pipeline.foreign.plan import NodeSamples

EARLIEST = 946_684_800_000_000
"""Year 2000 (us); an earlier clock is broken."""
NEWER = "newer"  # rule of messages that only an upgraded pipeline can read


class Arrival(NamedTuple):
    """Arrival time of a message (us).

    latest: upper bound of its event times: arrival plus the clock bound.
    exact: whether `time` is exact. Otherwise the message may have waited for us.
    """

    time: int
    latest: int
    exact: bool


MeasureClock = Callable[[str, int, int, bool], int]
"""(node, sent, arrived, exact) -> how far the times of a message are moved back (Senders.measure_clock)."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that cannot be stored whole, with the reason and the admission rule that rejected it."""

    message: Message
    reason: str
    rule: str = "wire"


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    """The samples of one message. faults: reasons of rejections.  counts: of samples that were not kept.

    gateway: the node whose spool it comes from; "" for a message without an envelope.
    """

    nodes: tuple[NodeSamples, ...]
    faults: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    excluded: Mapping[int, frozenset[str]] = field(default_factory=dict)  # by position in `nodes`
    gateway: str = ""


class Item(NamedTuple):
    """A fetched message: its content, and what the merge needs.

    rows: class -> number of rows.  excluded: entities whose rows are not stored (admission.py).
    arrived: arrival time (us).  shift: how far its times were shifted back, because of a wrong clock.
    size: bytes of the message and of its decompressed body.
    """

    message: Message
    body: wire.Body | EventBatch | ForeignBatch | DeadLetter
    time: int
    newest: int | None
    rows: Mapping[str, int]
    samples: int
    size: int
    arrived: int = 0
    shift: int = 0
    excluded: frozenset[str] = frozenset()

    @property
    def is_letter(self) -> bool:
        """Whether it comes from the stored dead letters (load_newer_letters), not from a transport."""
        return not self.message.partition.incarnation

    @property
    def tick(self) -> int:
        """Event time between the ticks of telemetry (us); 0 if it has one."""
        if not isinstance(self.body, wire.Body) or self.body.ticks == 1 or self.newest is None:
            return 0
        return (self.newest - self.time) // (self.body.ticks - 1)

    @classmethod
    def from_dead_letter(cls, letter: DeadLetter) -> Item:
        """An item without content."""
        return cls(letter.message, letter, 0, None, {}, 0, len(letter.message.value))


def decode_item(
    message: Message,
    columns: ColumnLimits,
    sound: set[wire.Shape],
    arrival: Arrival,
    measure: MeasureClock,
    confirm: Callable[[Message, str | None], None],
) -> Item:
    """Decodes and checks a message and corrects its times; the body is a DeadLetter if that fails.

    columns: checks new signals.  sound: shapes that passed before; valid ones are added.
    confirm: raises Rejected unless the message comes from that node; None if the node is unreadable.
    """
    try:
        envelope = open_envelope(message, confirm)
        if envelope.kind == wire.EVENTS_KIND:
            batch = wire.decode_events(message.value)
            confirm(message, batch.origin.node)
            return _build_event_item(message, batch, envelope.sent, arrival, measure)
        body = wire.open_telemetry(message.value, envelope)
        confirm(message, body.layout.node)
        if body.layout.shape not in sound:
            columns.check_signals(body.layout.node, body.layout.shape)
            sound.add(body.layout.shape)
        return _build_telemetry_item(message, body, arrival, measure)
    except NewerWireError as error:
        return Item.from_dead_letter(DeadLetter(message, str(error), NEWER))
    except Rejected as error:
        return Item.from_dead_letter(DeadLetter(message, str(error), error.rule))
    except WireError as error:
        return Item.from_dead_letter(DeadLetter(message, str(error)))


def open_envelope(message: Message, confirm: Callable[[Message, str | None], None]) -> wire.Envelope:
    """The checked envelope. The sender of a message of a newer version is confirmed: the message is kept whole."""
    try:
        return wire.open_envelope(message.value)
    except NewerWireError:
        confirm(message, None)
        raise


def _build_event_item(message: Message, batch: EventBatch, sent: int, arrival: Arrival, measure: MeasureClock) -> Item:
    """An item of events; each event time is limited to `latest`, since an event may announce a future time."""
    shift = measure(batch.origin.node, sent, arrival.time, arrival.exact)
    events = tuple(_shift_event(event, shift, arrival.latest) for event in batch.events)
    stamps = [event.time for event in events] or [EARLIEST]
    _check_times(min(stamps))
    batch = replace(batch, events=events)
    rows, size = {"events": len(events)}, len(message.value)
    return Item(message, batch, stamps[0], None, rows, 0, size, arrival.time, shift)


def _shift_event(event: Event, shift: int, latest: int) -> Event:
    """The event with `time` corrected, and `since` in its data, which edge rules send."""
    time = min(event.time - shift, latest)
    if time == event.time:
        return event
    since = event.data.get("since")
    data = {**event.data, "since": since - (event.time - time)} if type(since) is int else event.data
    return replace(event, time=time, data=data)


def _build_telemetry_item(message: Message, body: wire.Body, arrival: Arrival, measure: MeasureClock) -> Item:
    """An item of telemetry; all ticks are shifted by the same amount, to keep their distances."""
    arrived, latest, exact = arrival
    first = body.oldest_time
    last = body.newest_time if body.ticks > 1 else first
    shift = max(measure(body.layout.node, body.envelope.sent, arrived, exact), last - latest)
    if shift:
        stamps = np.frombuffer(body.data, "<i8", body.ticks)
        body = body._replace(data=(stamps - shift).tobytes() + body.data[stamps.nbytes :])
        first, last = first - shift, last - shift
    _check_times(first)
    plan, size = body.plan, len(message.value) + len(body.data)
    return Item(message, body, first, last, plan.rows, plan.samples, size, arrived, shift)


def _check_times(first: int) -> None:
    if first < EARLIEST:
        raise WireError(f"event time {first} us, expected the year 2000 or later: the node's clock is broken")


def build_rows(bodies: Sequence[wire.Body], devices: Devices, excluded: Collection[str] = ()) -> list[Rows]:
    """Builds rows from bodies: one Rows per block of each shape; values are copied once, into contiguous columns.

    excluded: entities without id and rows.
    """
    out = []
    for group in wire.decode_together(bodies):
        messages, ticks = group.times.shape
        for device_class, names, columns in group.blocks:
            width = len(names[0])
            if not width:
                continue
            place_of: dict[wire.Layout, int] = {}
            found: list[NDArray[np.int32]] = []
            for b, entities in zip(group.bodies, names, strict=True):
                if (layout := b.layout) not in place_of:
                    place_of[layout] = len(found)
                    about = device_class, layout.site, layout.node, b.envelope.simulated
                    found.append(devices.assign_ids(*about, entities, excluded))
            ids = np.stack(found)[[place_of[b.layout] for b in group.bodies]]
            time = np.repeat(group.times.reshape(-1), width)
            device = np.broadcast_to(ids.reshape(messages, 1, width), (messages, ticks, width)).reshape(-1)
            rows = Rows(device_class, time, device, {n: v.reshape(-1) for n, v in columns.items()})
            out.append(rows if not excluded else select_rows(rows, device != EXCLUDED))
    return [rows for rows in out if len(rows.time)]


def list_times(items: Iterable[Item]) -> list[tuple[str, int, int]]:
    """(node, newest event time, append time or 0) of telemetry in its order, without that of letters."""
    found: list[tuple[str, int, int]] = []
    for item in items:
        body, newest = item.body, item.newest
        if newest is None or item.is_letter:
            continue
        if isinstance(body, wire.Body):
            found.append((body.layout.node, newest, item.message.appended))
        elif isinstance(body, ForeignBatch):
            found += [(samples.part.layout.node, int(samples.times[-1]), 0) for samples in body.nodes]
    return found
