"""What ingest makes of one message: is it sound, when does it belong, which rows does it bring."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline import wire
from pipeline.errors import WireError
from pipeline.records import EventBatch, Rows
from pipeline.signals import CATALOGUE, CLASSES, column_of
from pipeline.store.devices import Devices
from pipeline.transport import Message

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_EARLIEST, _LATEST = 946_684_800_000_000, 7_258_118_400_000_000  # years 2000 to 2200: else a clock is broken
_COLUMNS = 512  # bound of columns of one class
Types = Callable[[str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that can never be stored, with the reason."""

    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Item:
    """A fetched message: its content, and what the merge needs to know of it. `rows`: class -> number of rows."""

    message: Message
    body: wire.Body | EventBatch | DeadLetter
    time: int
    newest: int | None
    rows: Mapping[str, int]
    samples: int

    @property
    def size(self) -> int:
        """Bytes of the message and of what it holds."""
        return len(self.message.value) + (len(self.body.data) if isinstance(self.body, wire.Body) else 0)

    @classmethod
    def dead(cls, letter: DeadLetter) -> Item:
        return cls(letter.message, letter, 0, None, {}, 0)


def decode_item(message: Message, types: Types, sound: set[wire.Shape]) -> Item:
    """The message opened and checked; a DeadLetter if that fails.

    types: class -> wire types of its columns.  sound: shapes that passed before; those found sound are added.
    """
    try:
        if wire.peek(message.value).kind == wire.EVENTS_KIND:
            return _event_item(message, wire.decode_events(message.value))
        body = wire.open_telemetry(message.value)
        if body.layout.shape not in sound:
            _check_shape(body.layout.shape, types)
            sound.add(body.layout.shape)
        return _telemetry_item(message, body)
    except WireError as error:
        return Item.dead(DeadLetter(message, str(error)))


def _event_item(message: Message, batch: EventBatch) -> Item:
    stamps = [event.time for event in batch.events] or [0]
    _check_times(min(stamps) if batch.events else _EARLIEST, max(stamps) if batch.events else _EARLIEST)
    return Item(message, batch, stamps[0], None, {"events": len(batch.events)}, 0)


def _check_shape(shape: wire.Shape, types: Types) -> None:
    for device_class, _, signals in shape.blocks:
        _check_block(device_class, signals, types(device_class) if device_class in CLASSES else {})


def _telemetry_item(message: Message, body: wire.Body) -> Item:
    shape = body.layout.shape
    stamps = np.frombuffer(body.data, "<i8", body.ticks)
    first, last = int(stamps.min()), int(stamps.max())
    _check_times(first, last)
    rows = {device_class: devices * body.ticks for device_class, devices, _ in shape.blocks}
    return Item(message, body, first, last, rows, shape.samples * body.ticks)


def _check_times(first: int, last: int) -> None:
    if first < _EARLIEST or last > _LATEST:
        raise WireError(f"event times from {first} to {last} us, wanted years 2000 to 2200: the node's clock is broken")


def _check_block(device_class: str, signals: Sequence[tuple[str, str]], known: Mapping[str, str]) -> None:
    """The class must be ours, names fit for columns, and a signal must have the type of its column."""
    if device_class not in CLASSES:
        raise WireError(f"device class {device_class!r}: wanted one of {', '.join(CLASSES)}: upgrade the pipeline")
    if len({column_of(name, device_class) for name, _ in signals}) < len(signals):
        raise WireError(f"class {device_class}: two signals would share one column")
    for name, code in signals:
        wanted = known.get(column_of(name, device_class))
        if wanted is None and not _NAME.fullmatch(name):
            raise WireError(f"signal {name!r}: wanted lower-case words and dots, at most 64 characters")
        if wanted is not None and wanted != code:
            raise WireError(f"{name}: values of type {code}, wanted {wanted}: upgrade the older side")
        if column_of(name, device_class) in ("time", "entity", "device"):
            raise WireError(f"signal {name!r}: this name is taken by the store")
    if len(known) + len(signals) > _COLUMNS + len(CATALOGUE):
        raise WireError(f"class {device_class}: more than {_COLUMNS} columns")


def to_rows(bodies: Sequence[wire.Body], devices: Devices) -> list[Rows]:
    """Rows of the bodies, one Rows per block of each shape; values are copied once, into contiguous columns."""
    out = []
    for joined in wire.join(bodies):
        messages, ticks = joined.times.shape
        for device_class, names, columns in joined.blocks:
            width = len(names[0])
            if not width:
                continue
            ids = np.stack(
                [
                    devices.ids(device_class, b.layout.site, b.layout.node, b.envelope.simulated, entities)
                    for b, entities in zip(joined.bodies, names, strict=True)
                ]
            )
            time = np.repeat(joined.times.reshape(-1), width)
            device = np.broadcast_to(ids[:, None, :], (messages, ticks, width)).reshape(-1)
            out.append(Rows(device_class, time, device, {n: v.reshape(-1) for n, v in columns.items()}))
    return out
