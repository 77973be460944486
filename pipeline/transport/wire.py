"""Wire format: encodes and decodes messages. Only this file has the encoding; tests keep golden bytes of each version.

A message is an envelope and one zstd frame:

    envelope (48 bytes, little endian)
      magic "FPW"  version u8  kind u8 (1 telemetry, 2 events)  flags u8 (bit 0: simulated)  zero u16
      epoch 16 bytes  sequence u64  sent i64 (UTC us)  length u32 of the zstd frame  crc u32 (zlib.crc32 of all else)
    zstd frame, decompressed at most MAX_BODY bytes
      boot id 16 bytes  layout length u32  ticks u32
      layout  JSON: site, node and, for telemetry, [class, entities, [[signal, type], ...]] per block
      telemetry: ticks x i64 times, then per block per signal ticks x devices values
      events:    one JSON object per line: time, entity, kind, data

The layout is the same in every message of a sender, so decoders cache it by its bytes and parse it once.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.model.errors import NewerWireError, WireError
from pipeline.model.records import Batch, Block, Event, EventBatch, Origin
from pipeline.model.signals import TYPES

VERSION = 1
TELEMETRY_KIND, EVENTS_KIND = 1, 2
MAX_BODY = 16 << 20
"""Maximum decompressed body: 16 MiB is 80 times an agent's largest batch (60 ticks x 16 GPUs x 50 signals)."""
MAX_MESSAGE = 4 << 20
"""Maximum message; also Kafka's max_request_size."""
MAX_LAYOUT = 256 << 10
"""Maximum layout: 256 KiB is 100 times that of a node with 16 GPUs and 16 ports."""
MAX_TIME = 253_402_300_800_000_000
"""First microsecond of the year 10000, which datetime cannot represent."""
MAX_SEQUENCE = 1 << 62
"""Maximum sequence number, so that following numbers fit into the store's 64 bits."""
_TICK_COUNTS = 256  # row layouts kept per shape
LAYOUTS_BYTES = 512 << 20
"""Maximum total text of cached layouts, which take about twice as much when parsed. A node of 8 GPUs has 18 kB (the
signals of each interval have their own layout), 12,500 such nodes 226 MB. Without the cache each message is parsed
again: 0.2 ms instead of 0.02 ms for a layout of 10 kB."""
_SHAPES = 4096  # cached; nodes with equal hardware and the same agent share a shape

MAGIC, EPOCH_AT = b"FPW", 8
"""First bytes of a message, and the position of the 16-byte epoch."""
_ENVELOPE = struct.Struct("<3sBBBH16sQqI")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<16sII")
ENVELOPE_BYTES = _ENVELOPE.size + _CRC.size
_I64 = struct.Struct("<q")
_TIME = np.dtype("<i8")
_per_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Envelope:
    """Header of a message, before decompression. (topic, node, epoch, sequence) is the deduplication key."""

    kind: int
    simulated: bool
    epoch: bytes
    sequence: int
    sent: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Names and types of one block."""

    device_class: str
    entities: tuple[str, ...]
    signals: tuple[tuple[str, str], ...]


class Shape:
    """Determines the layout of values in a body for a number of ticks. Interned: compared by identity.

    blocks: per block its class, number of devices, and (signal, type) pairs.
    """

    def __init__(self, blocks: tuple[tuple[str, int, tuple[tuple[str, str], ...]], ...]) -> None:
        self.blocks = blocks
        self.samples = sum(devices * len(signals) for _, devices, signals in blocks)
        self._dtypes: dict[int, np.dtype[Any]] = {}

    def dtype(self, ticks: int) -> np.dtype[Any]:
        """Structured type of times and values. Raises WireError if there can be no such body."""
        if ticks not in self._dtypes:
            if len(self._dtypes) >= _TICK_COUNTS:
                self._dtypes.clear()
            self._dtypes[ticks] = _dtype(self.blocks, ticks)
        return self._dtypes[ticks]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Layout:
    """Everything about a telemetry body except its values. Parsed once, so compared by identity."""

    site: str
    node: str
    blocks: tuple[BlockLayout, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Body:
    """A checked, decompressed telemetry message; its values are still bytes (`data` begins with the times)."""

    envelope: Envelope
    boot_id: bytes
    layout: Layout
    ticks: int
    data: memoryview

    @property
    def newest_time(self) -> int:
        """Time of the last tick (UTC us)."""
        return int(_I64.unpack_from(self.data, 8 * (self.ticks - 1))[0])


# --- writing -------------------------------------------------------------------------------------------------------


def encode(batch: Batch) -> bytes:
    """Body of a telemetry message, compressed; `seal` makes it a message. Raises WireError on unequal shapes."""
    layout = [
        [b.device_class, list(b.entities), [[name, _type_code(values)] for name, values in b.columns.items()]]
        for b in batch.blocks
    ]
    names = _json({"site": batch.origin.site, "node": batch.origin.node, "blocks": layout})
    if len(names) > MAX_LAYOUT:
        raise WireError(f"layout of {len(names)} bytes, expected at most {MAX_LAYOUT}: send fewer devices per batch")
    ticks = len(batch.times)
    parts = [_HEAD.pack(batch.origin.boot_id, len(names), ticks), names, batch.times.astype(_TIME).tobytes()]
    for block in batch.blocks:
        for name, values in block.columns.items():
            if values.shape != (ticks, len(block.entities)):
                shape = (ticks, len(block.entities))
                raise WireError(f"{name}: values have shape {values.shape}, expected {shape} (ticks, devices)")
            parts.append(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes())
    return _compress(b"".join(parts))


def encode_events(batch: EventBatch) -> bytes:
    """Body of an events message, compressed."""
    names = _json({"site": batch.origin.site, "node": batch.origin.node})
    lines = [_json({"time": e.time, "entity": e.entity, "kind": e.kind, "data": dict(e.data)}) for e in batch.events]
    return _compress(_HEAD.pack(batch.origin.boot_id, len(names), len(lines)) + names + b"\n".join(lines))


def seal(body: bytes, kind: int, epoch: bytes, sequence: int, sent: int, simulated: bool = False) -> bytes:
    """The message: envelope with checksum, then the body."""
    head = _ENVELOPE.pack(b"FPW", VERSION, kind, int(simulated), 0, epoch, sequence, sent, len(body))
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def _compress(raw: bytes) -> bytes:
    if len(raw) > MAX_BODY:
        raise WireError(f"body of {len(raw)} bytes, expected at most {MAX_BODY}: send fewer ticks per batch")
    return zstandard.ZstdCompressor(level=1).compress(raw)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _type_code(values: NDArray[Any]) -> str:
    code = values.dtype.kind + str(values.dtype.itemsize)
    if code not in TYPES:
        raise WireError(f"values of type {values.dtype}, expected one of {', '.join(TYPES)}")
    return code


# --- reading -------------------------------------------------------------------------------------------------------


def open_envelope(message: bytes | memoryview) -> Envelope:
    """Envelope of a message with a valid checksum. Raises WireError otherwise."""
    if len(message) < ENVELOPE_BYTES:
        raise WireError(f"message of {len(message)} bytes, expected at least {ENVELOPE_BYTES}: truncated")
    magic, version, kind, flags, _, epoch, sequence, sent, length = _ENVELOPE.unpack_from(message)
    if magic != b"FPW":
        raise WireError(f"message begins with {magic!r}, expected b'FPW': not written by Fleetpulse")
    check_not_newer(message)
    if version != VERSION:
        raise WireError(f"wire version {version}, expected {VERSION}: upgrade the older side")
    if length != len(message) - ENVELOPE_BYTES:
        raise WireError(f"body of {len(message) - ENVELOPE_BYTES} bytes, expected {length}: truncated or joined")
    wanted = _CRC.unpack_from(message, _ENVELOPE.size)[0]
    view = memoryview(message)
    if zlib.crc32(view[ENVELOPE_BYTES:], zlib.crc32(view[: _ENVELOPE.size])) != wanted:
        raise WireError("checksum does not match: the message was damaged in transit")
    if kind not in (TELEMETRY_KIND, EVENTS_KIND) or flags > 1:
        raise WireError(f"kind {kind} with flags {flags}, expected kind 1 or 2 with flags 0 or 1")
    if not 0 <= sent < MAX_TIME or sequence > MAX_SEQUENCE:
        raise WireError(f"sent {sent} us, sequence {sequence}: expected years 1970 to 9999 and at most {MAX_SEQUENCE}")
    return Envelope(kind, bool(flags & 1), epoch, sequence, sent)


def check_not_newer(message: bytes | memoryview) -> None:
    """Raises NewerWireError for a message of a newer version, of which only magic and version are known."""
    if message[:3] == b"FPW" and len(message) > 3 and message[3] > VERSION:
        raise NewerWireError(
            f"wire version {message[3]}, expected at most {VERSION}: the agent is newer; upgrade the pipeline"
        )


def unpack_envelope(message: bytes | memoryview) -> Envelope:
    """Envelope without checks of magic, version or checksum. Raises WireError if it is truncated."""
    if len(message) < ENVELOPE_BYTES:
        raise WireError(f"message of {len(message)} bytes, expected at least {ENVELOPE_BYTES}: truncated")
    _, _, kind, flags, _, epoch, sequence, sent, _ = _ENVELOPE.unpack_from(message)
    return Envelope(kind, bool(flags & 1), epoch, sequence, sent)


def read_checksum(message: bytes | memoryview) -> int:
    """The checksum in the envelope of a valid message."""
    return int(_CRC.unpack_from(message, _ENVELOPE.size)[0])


def open_telemetry(message: bytes | memoryview) -> Body:
    """A checked telemetry message whose lengths match its layout. Raises WireError."""
    envelope = open_envelope(message)
    if envelope.kind != TELEMETRY_KIND:
        raise WireError(f"message of kind {envelope.kind}, expected {TELEMETRY_KIND} (telemetry)")
    boot_id, names, ticks, data = _decompress(message)
    layout = _layouts.get_layout(names)
    wanted = layout.shape.dtype(ticks).itemsize if 0 < ticks <= MAX_BODY // 8 else -1
    if len(data) != wanted:
        raise WireError(f"{len(data)} bytes of values for {ticks} ticks, expected {wanted} by the layout")
    _check_times(data, ticks)
    return Body(envelope, boot_id, layout, ticks, data)


def _check_times(data: memoryview, ticks: int) -> None:
    if ticks == 1:  # the usual message: avoids building an array
        sound = 0 <= _I64.unpack_from(data)[0] < MAX_TIME
    else:
        times = np.frombuffer(data, _TIME, ticks)
        sound = bool(times[0] >= 0 and times[-1] < MAX_TIME and (times[1:] >= times[:-1]).all())
    if not sound:
        raise WireError("times are not ascending or are outside the years 1970 to 9999")


def decode(message: bytes | memoryview) -> Batch:
    """A telemetry message as a Batch of read-only arrays. Raises WireError."""
    body = open_telemetry(message)
    record = np.frombuffer(body.data, body.layout.shape.dtype(body.ticks))
    blocks = []
    for b, block in enumerate(body.layout.blocks):
        shape = (body.ticks, len(block.entities))
        columns = {name: record[f"{b}/{name}"][0].reshape(shape) for name, _ in block.signals}
        blocks.append(Block(block.device_class, block.entities, columns))
    origin = Origin(body.layout.site, body.layout.node, body.boot_id, body.envelope.simulated)
    return Batch(origin, record["time"][0], tuple(blocks))


def decode_events(message: bytes | memoryview) -> EventBatch:
    """An events message. Raises WireError."""
    envelope = open_envelope(message)
    if envelope.kind != EVENTS_KIND:
        raise WireError(f"message of kind {envelope.kind}, expected {EVENTS_KIND} (events)")
    boot_id, names, count, data = _decompress(message)
    layout = _layouts.get_layout(names)
    try:
        lines = [json.loads(line) for line in bytes(data).splitlines()]
        events = tuple(Event(e["time"], e["entity"], e["kind"], e["data"]) for e in lines)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"events are not one JSON object with time, entity, kind and data per line: {error}") from error
    if len(events) != count:
        raise WireError(f"{len(events)} events, expected {count}: truncated")
    if bad := next((e for e in events if not _is_valid_event(e)), None):
        raise WireError(f"event {bad}: expected time (int, UTC us), entity (kind:name), kind (string), data (object)")
    for event in events:
        _check_text(event.entity + event.kind + json.dumps(event.data, ensure_ascii=False))
    return EventBatch(Origin(layout.site, layout.node, boot_id, envelope.simulated), events)


def _check_text(text: str) -> None:
    """Raises WireError on unpaired surrogates: valid in JSON, but they cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WireError(f"text is not valid Unicode: {error.reason} at position {error.start}") from error


def _is_valid_event(event: Event) -> bool:
    return (
        type(event.time) is int
        and 0 <= event.time < MAX_TIME
        and isinstance(event.entity, str)
        and ":" in event.entity
        and isinstance(event.kind, str)
        and isinstance(event.data, dict)
    )


@dataclass(frozen=True, slots=True)
class DecodedGroup:
    """Telemetry bodies of equal shape, decoded together: M messages of T ticks and D devices.

    times: (M, T).  blocks: per block its class, (M,) tuple of entity tuples, and signal -> (M, T * D) values.
    """

    bodies: Sequence[Body]
    times: NDArray[np.int64]
    blocks: tuple[tuple[str, tuple[tuple[str, ...], ...], dict[str, NDArray[Any]]], ...]


def decode_together(bodies: Sequence[Body]) -> Iterator[DecodedGroup]:
    """Decodes many bodies without a loop over samples: one structured view per shape and number of ticks."""
    alike: dict[tuple[int, Shape], list[Body]] = {}
    for body in bodies:
        alike.setdefault((body.ticks, body.layout.shape), []).append(body)
    for (ticks, shape), group in alike.items():
        record = np.frombuffer(b"".join([b.data for b in group]), shape.dtype(ticks))
        yield DecodedGroup(
            group,
            record["time"],
            tuple(
                (
                    device_class,
                    tuple(g.layout.blocks[b].entities for g in group),
                    {name: record[f"{b}/{name}"] for name, _ in signals},
                )
                for b, (device_class, _, signals) in enumerate(shape.blocks)
            ),
        )


def _decompress(message: bytes | memoryview) -> tuple[bytes, bytes, int, memoryview]:
    """(boot id, layout bytes, ticks or events, values). Never allocates more than MAX_BODY."""
    frame = memoryview(message)[ENVELOPE_BYTES:]
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > MAX_BODY:  # an unknown size is the highest u64, which is refused too
            raise WireError(f"body of {size} bytes when decompressed, expected at most {MAX_BODY}")
        raw = _decompressor().decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise WireError(f"body is not a valid zstd frame: {error}") from error
    if len(raw) < _HEAD.size:
        raise WireError(f"body of {len(raw)} bytes, expected at least {_HEAD.size}")
    boot_id, length, count = _HEAD.unpack_from(raw)
    if length > MAX_LAYOUT or _HEAD.size + length > len(raw):
        raise WireError(f"layout of {length} bytes in a body of {len(raw)}, expected at most {MAX_LAYOUT}")
    view = memoryview(raw)
    return boot_id, bytes(view[_HEAD.size : _HEAD.size + length]), count, view[_HEAD.size + length :]


def _decompressor() -> zstandard.ZstdDecompressor:
    """The decompressor of this thread; it reuses its context and is not thread-safe."""
    if not hasattr(_per_thread, "decompressor"):
        _per_thread.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_BODY)
    found: zstandard.ZstdDecompressor = _per_thread.decompressor
    return found


class LayoutCache:
    """LRU cache of parsed layouts by digest of their texts, limited to `most` bytes of text."""

    def __init__(self, most: int) -> None:
        self._max_bytes, self._size = most, 0
        self._known: OrderedDict[bytes, tuple[Layout, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get_layout(self, text: bytes) -> Layout:
        """The parsed layout of a text. Raises WireError."""
        from hashlib import sha256  # here: agents only encode, and save 3 MiB for OpenSSL

        key = sha256(text).digest()  # the text itself would take most of the memory
        with self._lock:
            if found := self._known.get(key):
                self._known.move_to_end(key)
                return found[0]
        layout = _parse_layout(text)
        with self._lock:
            if key not in self._known:
                self._known[key] = layout, len(text)
                self._size += len(text)
            while self._size > self._max_bytes:
                _, (_, size) = self._known.popitem(last=False)
                self._size -= size
        return layout

    def __len__(self) -> int:
        return len(self._known)


_layouts = LayoutCache(LAYOUTS_BYTES)


def _parse_layout(text: bytes) -> Layout:
    """Parses a layout. Shares what many layouts have in common: shapes are cached, entity names interned."""
    try:
        found = json.loads(text)
        site, node = found["site"], found["node"]
        blocks = [
            (c, tuple(map(sys.intern, entities)), tuple((name, code) for name, code in signals))
            for c, entities, signals in found.get("blocks", ())
        ]
        shape = _intern_shape(tuple((c, len(entities), signals) for c, entities, signals in blocks))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"layout is not a valid JSON object: {error}") from error
    _check_texts([site, node, *(entity for _, entities, _ in blocks for entity in entities)])
    for _, entities, _ in blocks:
        if len(set(entities)) != len(entities) or not all(":" in entity for entity in entities):
            raise WireError("layout names an entity twice in one block, or one that is not kind:name")
    named = zip(blocks, shape.blocks, strict=True)
    return Layout(site, node, tuple(BlockLayout(c, e, signals) for (_, e, _), (c, _, signals) in named), shape)


def _check_texts(texts: list[str]) -> None:
    if not all(isinstance(text, str) for text in texts):
        raise WireError("layout has names or types that are not text")
    _check_text("".join(texts))


@lru_cache(_SHAPES)
def _intern_shape(blocks: tuple[tuple[str, int, tuple[tuple[str, str], ...]], ...]) -> Shape:
    """The shape of blocks. Raises WireError on non-text, unknown types or a signal twice in one block."""
    _check_texts([c for c, _, _ in blocks] + [text for _, _, signals in blocks for pair in signals for text in pair])
    for _, _, signals in blocks:
        if any(code not in TYPES for _, code in signals):
            raise WireError(f"layout has types other than {', '.join(TYPES)}")
        if len({name for name, _ in signals}) != len(signals):
            raise WireError("layout names a signal twice in one block")
    return Shape(blocks)


def _dtype(blocks: tuple[tuple[str, int, tuple[tuple[str, str], ...]], ...], ticks: int) -> np.dtype[Any]:
    fields: list[Any] = [("time", _TIME, (ticks,))]
    for b, (_, devices, signals) in enumerate(blocks):
        if devices * ticks > MAX_BODY:
            raise WireError(f"{devices} devices x {ticks} ticks, expected at most {MAX_BODY} values per signal")
        fields += [(f"{b}/{name}", f"<{code}", (ticks * devices,)) for name, code in signals]
    try:
        return np.dtype(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"layout cannot be represented: {error}") from error
