"""What ingest makes of one message: is it sound, when does it belong, which rows does it bring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.ingest.columns import Columns
from pipeline.model.errors import NewerWireError, Rejected, WireError
from pipeline.model.records import Event, EventBatch, Rows, select_rows
from pipeline.store.devices import BARRED, Devices
from pipeline.transport import Message, wire

_EARLIEST = 946_684_800_000_000  # year 2000: before it a clock is broken
NEWER = "newer"  # the rule of messages that an upgrade of the pipeline can read


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a message arrived (us), and how its times are corrected.

    latest:  no event of it can have happened later: its arrival and the bound of clock errors.
    measure: (node, sent) -> by how much its times are to be moved back (Senders.measure).
    """

    time: int
    latest: int
    measure: Callable[[str, int], int]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that cannot be stored whole, with the reason and the admission rule that rejected it."""

    message: Message
    reason: str
    rule: str = "wire"


@dataclass(frozen=True, slots=True)
class Item:
    """A fetched message: its content, and what the merge needs to know of it.

    rows: class -> number of rows.  barred: entities whose rows are not stored (pipeline/ingest/admission.py).
    arrived: when it arrived (us).  moved: by how much its times were moved back, since the sender's clock is wrong.
    """

    message: Message
    body: wire.Body | EventBatch | DeadLetter
    time: int
    newest: int | None
    rows: Mapping[str, int]
    samples: int
    arrived: int = 0
    moved: int = 0
    barred: frozenset[str] = frozenset()

    @property
    def is_letter(self) -> bool:
        """Whether it comes from the dead letters of the store (letters.newer_letters), and from no transport."""
        return not self.message.partition.incarnation

    @property
    def size(self) -> int:
        """Bytes of the message and of what it holds."""
        return len(self.message.value) + (len(self.body.data) if isinstance(self.body, wire.Body) else 0)

    @classmethod
    def dead(cls, letter: DeadLetter) -> Item:
        return cls(letter.message, letter, 0, None, {}, 0)


def decode_item(
    message: Message,
    columns: Columns,
    sound: set[wire.Shape],
    arrival: Arrival,
    confirm: Callable[[Message, str | None], None],
) -> Item:
    """The message opened and checked, its times corrected; a DeadLetter if that fails.

    columns: which signals may have one.  sound: shapes that passed before; those found sound are added.
    confirm: raises Rejected unless the message comes from that node; None where it cannot be read.
    """
    try:
        _refuse_newer(message, confirm)
        envelope = wire.unpack_envelope(message.value)
        if envelope.kind == wire.EVENTS_KIND:
            batch = wire.decode_events(message.value)
            confirm(message, batch.origin.node)
            return _event_item(message, batch, envelope.sent, arrival)
        body = wire.open_telemetry(message.value)
        confirm(message, body.layout.node)
        if body.layout.shape not in sound:
            columns.check(body.layout.node, body.layout.shape)
            sound.add(body.layout.shape)
        return _telemetry_item(message, body, arrival)
    except NewerWireError as error:
        return Item.dead(DeadLetter(message, str(error), NEWER))
    except Rejected as error:
        return Item.dead(DeadLetter(message, str(error), error.rule))
    except WireError as error:
        return Item.dead(DeadLetter(message, str(error)))


def _refuse_newer(message: Message, confirm: Callable[[Message, str | None], None]) -> None:
    """Raises NewerWireError for a message of a later version. Without its signature it is none: it is kept whole."""
    try:
        wire.check_not_newer(message.value)
    except NewerWireError:
        confirm(message, None)
        raise


def _event_item(message: Message, batch: EventBatch, sent: int, arrival: Arrival) -> Item:
    """Each event by itself is at most as late as `latest`: one of them may announce what is to come."""
    moved = arrival.measure(batch.origin.node, sent)
    events = tuple(_moved_event(event, moved, arrival.latest) for event in batch.events)
    stamps = [event.time for event in events] or [_EARLIEST]
    _check_times(min(stamps))
    batch = replace(batch, events=events)
    return Item(message, batch, stamps[0], None, {"events": len(events)}, 0, arrival.time, moved)


def _moved_event(event: Event, moved: int, latest: int) -> Event:
    """The event with its time corrected, and that of `since`, which edge rules send."""
    time = min(event.time - moved, latest)
    if time == event.time:
        return event
    since = event.data.get("since")
    data = {**event.data, "since": since - (event.time - time)} if type(since) is int else event.data
    return replace(event, time=time, data=data)


def _telemetry_item(message: Message, body: wire.Body, arrival: Arrival) -> Item:
    """All ticks of a message are moved by the same, so that they keep their distances."""
    shape = body.layout.shape
    stamps = np.frombuffer(body.data, "<i8", body.ticks)
    first, last = int(stamps.min()), int(stamps.max())
    moved = max(arrival.measure(body.layout.node, body.envelope.sent), last - arrival.latest)
    if moved:
        body = replace(body, data=memoryview((stamps - moved).tobytes() + body.data[stamps.nbytes :]))
    _check_times(first - moved)
    rows = {device_class: devices * body.ticks for device_class, devices, _ in shape.blocks}
    samples = shape.samples * body.ticks
    return Item(message, body, first - moved, last - moved, rows, samples, arrival.time, moved)


def _check_times(first: int) -> None:
    if first < _EARLIEST:
        raise WireError(f"event time {first} us, wanted the year 2000 or later: the node's clock is broken")


def to_rows(bodies: Sequence[wire.Body], devices: Devices, barred: Collection[str] = ()) -> list[Rows]:
    """Rows of the bodies, one Rows per block of each shape; values are copied once, into contiguous columns.

    barred: entities that get no id and no rows.
    """
    out = []
    for joined in wire.decode_together(bodies):
        messages, ticks = joined.times.shape
        for device_class, names, columns in joined.blocks:
            width = len(names[0])
            if not width:
                continue
            ids = np.stack(
                [
                    devices.ids(device_class, b.layout.site, b.layout.node, b.envelope.simulated, entities, barred)
                    for b, entities in zip(joined.bodies, names, strict=True)
                ]
            )
            time = np.repeat(joined.times.reshape(-1), width)
            device = np.broadcast_to(ids[:, None, :], (messages, ticks, width)).reshape(-1)
            rows = Rows(device_class, time, device, {n: v.reshape(-1) for n, v in columns.items()})
            out.append(rows if not barred else select_rows(rows, device != BARRED))
    return [rows for rows in out if len(rows.time)]
