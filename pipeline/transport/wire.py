"""Wire format: encodes and decodes messages. Only this file has the encoding; tests keep golden bytes of each version.

A message is an envelope and one zstd frame:

    envelope (48 bytes, little endian)
      magic "FPW"  version u8  kind u8 (1 telemetry, 2 events, 3 request)  flags u8 (bit 0: simulated)  zero u16
      epoch 16 bytes  sequence u64  sent i64 (UTC us)  length u32 of the zstd frame  crc u32 (zlib.crc32 of all else)
    zstd frame, decompressed at most MAX_BODY bytes
      boot id 16 bytes  layout length u32  ticks u32
      layout  JSON: site, node and, for telemetry, the class, entities, signals and types of each block (layouts.py)
      telemetry: ticks x i64 times, then
        version 1: per block per signal ticks x devices values
        version 2: per block a bit mask of its ticks, (ticks + 7) // 8 bytes
                   per block per signal with floats its mode u8, then per block per type the packed columns (packing.py)
      events:    one JSON object per line: time, entity, kind, data
      request:   the bytes of another sender's request, as a gateway received it; the layout has its format, and whether
                 it is telemetry of that very node

Telemetry is written as version 2, whose frame is compressed with the dictionary wire-2.dictionary, which must never
change. Events are written as version 1, so that an older pipeline reads the events of a newer agent; so are requests.

In version 2 the blocks of one class may have different ticks: a message joins readings of several intervals. It
has the rows of one message per tick: a device has one row per tick, with the signals of all blocks of that tick.

The layout is the same in every message of a sender, so decoders cache it by its bytes and parse it once.
"""

from __future__ import annotations

import json
import operator
import struct
import threading
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.model.errors import NewerWireError, WireError
from pipeline.model.records import Batch, Block, Event, EventBatch, Origin
from pipeline.model.signals import TYPES
from pipeline.transport import packing
from pipeline.transport.bodies import I64, Plan, find_plan, split_types
from pipeline.transport.bodies import MAX_BODY as MAX_BODY
from pipeline.transport.bodies import Body as Body
from pipeline.transport.bodies import DecodedGroup as DecodedGroup
from pipeline.transport.bodies import Envelope as Envelope
from pipeline.transport.layouts import LAYOUTS_BYTES, MAX_LAYOUT, Signals, check_text, format_json, format_layout
from pipeline.transport.layouts import BlockLayout as BlockLayout
from pipeline.transport.layouts import Layout as Layout
from pipeline.transport.layouts import LayoutCache as LayoutCache
from pipeline.transport.layouts import Shape as Shape

VERSION, EVENTS_VERSION = 2, 1
"""Versions in which telemetry and events are written; all from 1 on are read."""
TELEMETRY_KIND, EVENTS_KIND, REQUEST_KIND = 1, 2, 3
MAX_MESSAGE = 4 << 20
"""Maximum message; also Kafka's max_request_size."""
MAX_TIME = 253_402_300_800_000_000
"""First microsecond of the year 10000, which datetime cannot represent."""
MAX_SEQUENCE = 1 << 62
"""Maximum sequence number, so that following numbers fit into the store's 64 bits."""
LEVEL = 3
"""zstd level: 3 % smaller than level 1 for 20 us a message; level 5 is 3 % smaller still, for 150 us."""
REMEMBERED = 720
"""Messages after which an encoder forgets the decimals of columns and learns them again; chosen: an hour at 5 s."""
OPENINGS_BYTES = 16 << 20
"""Maximum text of layouts that a thread compares messages with, instead of computing their digest. Chosen: those of 500
nodes of 8 GPUs in a minute; more nodes cost 4 us a message more."""
_ABOUT = 128
"""First bytes of a body: boot id, site and node, and so enough to find what it is like; chosen."""
LAYOUTS = 256
"""Texts that an encoder keeps; chosen: ten times the combinations of intervals that an agent sends."""

MAGIC, EPOCH_AT, _VERSION_AT = b"FPW", 8, 3
"""First bytes of a message, and the position of the 16-byte epoch."""
_ENVELOPE = struct.Struct("<3sBBBH16sQqI")
_SEALED = struct.Struct(_ENVELOPE.format + "I")
_CRC = struct.Struct("<I")
_HEAD = struct.Struct("<16sII")
ENVELOPE_BYTES = _ENVELOPE.size + _CRC.size
_FRAME, _SMALL = b"\x28\xb5\x2f\xfd", (1, 2, 3)
"""First bytes of a zstd frame, and how the next one begins if the frame has the size of its content in one or two
bytes: at most 65,791 bytes (RFC 8878, 3.1.1.1)."""
_TIME = np.dtype("<i8")
_FEW_TICKS = 64  # up to so many, numbers are compared faster than arrays; measured
_CODES = {np.dtype(order + code): code for code in TYPES for order in "<>"}
_DICTIONARY = zstandard.ZstdCompressionDict(
    Path(__file__).with_name("wire-2.dictionary").read_bytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT
)
_per_thread = threading.local()


# --- writing -------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes batches of one thread. It remembers the decimals of each column and the texts of `layouts` layouts."""

    def __init__(self, layouts: int = LAYOUTS) -> None:
        self._most = layouts
        self._layouts: dict[Hashable, bytes] = {}
        self._modes: dict[Hashable, list[int]] = {}
        self._left = REMEMBERED

    def encode(self, batch: Batch) -> bytes:
        """Body of a telemetry message, compressed; `seal` makes it a message. Raises WireError on unequal shapes."""
        self._left -= 1
        if len(self._layouts) >= self._most:
            self._layouts.clear()
        if self._left < 0:
            self._modes.clear()
            self._left = REMEMBERED
        ticks = len(batch.times)
        described = [(b.device_class, b.entities, _describe_signals(b, ticks)) for b in batch.blocks]
        key = (batch.origin.site, batch.origin.node, *described)
        if key not in self._layouts:
            self._layouts[key] = format_layout(batch.origin.site, batch.origin.node, described)
        names = self._layouts[key]
        masks = b"".join(_mask_ticks(block, ticks) for block in batch.blocks)
        modes, parts = bytearray(), []
        for block, (_, _, signals) in zip(batch.blocks, described, strict=True):
            columns = list(block.columns.values())
            for code, places in split_types(signals).items():
                packed, found = self._pack([columns[i] for i in places], code, (block.device_class, signals))
                parts.append(packed)
                modes += bytes(found)
        head = _HEAD.pack(batch.origin.boot_id, len(names), ticks)
        times = batch.times.astype(_TIME).tobytes()
        return _compress(b"".join((head, names, times, masks, bytes(modes), *parts)), packed=True)

    def _pack(self, columns: list[NDArray[Any]], code: str, block: Hashable) -> tuple[bytes, list[int]]:
        """The packed columns of one type of a block, and their modes."""
        known: Sequence[int | None] = self._modes.get((block, code)) or [None] * len(columns)
        packed, modes = packing.pack_columns(columns, known)
        if modes:
            self._modes[block, code] = modes
        return packed, modes


def encode(batch: Batch) -> bytes:
    """Body of a telemetry message, as by a new Encoder. Raises WireError on unequal shapes."""
    return Encoder().encode(batch)


def _describe_signals(block: Block, ticks: int) -> Signals:
    """Names and types of the columns. Raises WireError on ticks and shapes that do not fit."""
    own = range(ticks) if block.ticks is None else block.ticks
    if not own or own[0] < 0 or own[-1] >= ticks or any(a >= b for a, b in pairwise(own)):
        raise WireError(f"{block.device_class}: ticks {own}, expected ascending numbers of the {ticks} of the batch")
    shape = (len(own), len(block.entities))
    for name, values in block.columns.items():
        if values.shape != shape:
            raise WireError(f"{name}: values have shape {values.shape}, expected {shape} (ticks, devices)")
    return tuple((name, _type_code(values)) for name, values in block.columns.items())


def _mask_ticks(block: Block, ticks: int) -> bytes:
    """The ticks of a block as bits."""
    has = np.zeros(ticks, np.uint8)
    has[slice(None) if block.ticks is None else list(block.ticks)] = 1
    return np.packbits(has, bitorder="little").tobytes()


def encode_events(batch: EventBatch) -> bytes:
    """Body of an events message, compressed."""
    names = format_json({"site": batch.origin.site, "node": batch.origin.node})
    lines = [
        format_json({"time": e.time, "entity": e.entity, "kind": e.kind, "data": dict(e.data)}) for e in batch.events
    ]
    return _compress(_HEAD.pack(batch.origin.boot_id, len(names), len(lines)) + names + b"\n".join(lines))


def encode_request(request: bytes, format_: str, origin: Origin, local: bool = False) -> bytes:
    """Body of a message with another sender's request, compressed. origin: of the gateway that received it.

    local: an agent received it from its own node. Pipelines that do not know this look for the node in the request.
    """
    about = {"site": origin.site, "node": origin.node, "format": format_}
    names = format_json({**about, "local": True} if local else about)
    return _compress(_HEAD.pack(origin.boot_id, len(names), 1) + names + request)


def seal(body: bytes, kind: int, epoch: bytes, sequence: int, sent: int, simulated: bool = False) -> bytes:
    """The message: envelope with checksum, then the body."""
    version = VERSION if kind == TELEMETRY_KIND else EVENTS_VERSION
    head = _ENVELOPE.pack(MAGIC, version, kind, int(simulated), 0, epoch, sequence, sent, len(body))
    return head + _CRC.pack(zlib.crc32(body, zlib.crc32(head))) + body


def _compress(raw: bytes, packed: bool = False) -> bytes:
    """The zstd frame of a body. packed: of version 2, with the dictionary."""
    if len(raw) > MAX_BODY:
        raise WireError(f"body of {len(raw)} bytes, expected at most {MAX_BODY}: send fewer ticks per batch")
    return _codecs().compressor.compress(raw) if packed else zstandard.ZstdCompressor(level=1).compress(raw)


def _type_code(values: NDArray[Any]) -> str:
    code = _CODES.get(values.dtype)
    if code is None:
        raise WireError(f"values of type {values.dtype}, expected one of {', '.join(TYPES)}")
    return code


# --- reading -------------------------------------------------------------------------------------------------------


def open_envelope(message: bytes | memoryview) -> Envelope:
    """Envelope of a message with a valid checksum. Raises WireError otherwise, NewerWireError for a newer version."""
    if len(message) < ENVELOPE_BYTES:
        check_not_newer(message)
        raise WireError(f"message of {len(message)} bytes, expected at least {ENVELOPE_BYTES}: truncated")
    magic, version, kind, flags, _, epoch, sequence, sent, length, wanted = _SEALED.unpack_from(message)
    if magic != MAGIC:
        raise WireError(f"message begins with {magic!r}, expected b'FPW': not written by Fleetpulse")
    if not 0 < version <= (VERSION if kind == TELEMETRY_KIND else EVENTS_VERSION):
        check_not_newer(message)
        raise WireError(f"wire version {version} of kind {kind}, expected 1 to {VERSION}: upgrade the older side")
    if length != len(message) - ENVELOPE_BYTES:
        raise WireError(f"body of {len(message) - ENVELOPE_BYTES} bytes, expected {length}: truncated or joined")
    if zlib.crc32(message[ENVELOPE_BYTES:], zlib.crc32(message[: _ENVELOPE.size])) != wanted:
        raise WireError("checksum does not match: the message was damaged in transit")
    if kind not in (TELEMETRY_KIND, EVENTS_KIND, REQUEST_KIND) or flags > 1:
        raise WireError(f"kind {kind} with flags {flags}, expected kind 1 to 3 with flags 0 or 1")
    if not 0 <= sent < MAX_TIME or sequence > MAX_SEQUENCE:
        raise WireError(f"sent {sent} us, sequence {sequence}: expected years 1970 to 9999 and at most {MAX_SEQUENCE}")
    return Envelope(kind, flags == 1, epoch, sequence, sent)


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


@dataclass(frozen=True, slots=True)
class _Opening:
    """How a telemetry body begins: bodies that begin alike have the same layout and plan.

    start: boot id, ticks and layout, as in the body.  size: of the body.  masks: those of the plan, and where they are.
    """

    version: int
    start: bytes
    boot_id: bytes
    layout: Layout
    ticks: int
    plan: Plan
    size: int
    masks: tuple[bytes, int]

    @classmethod
    def read(cls, version: int, raw: bytes) -> _Opening:
        """The opening of a decompressed body. Raises WireError unless its length matches its layout."""
        boot_id, names, ticks, data = _split(raw)
        layout = _layouts.get_layout(names)
        plan = find_plan(layout.shape, version, ticks, data)
        if len(data) != plan.size:
            raise WireError(f"{len(data)} bytes of values for {ticks} ticks, expected {plan.size} by the layout")
        start = raw[: len(raw) - plan.size]
        return cls(version, start, boot_id, layout, ticks, plan, len(raw), (plan.masks, len(start) + 8 * ticks))

    def fits(self, version: int, raw: bytes) -> bool:
        """Whether a decompressed body begins like this, and has this length."""
        return (
            len(raw) == self.size
            and version == self.version
            and raw.startswith(self.start)
            and raw.startswith(*self.masks)
        )


def open_telemetry(message: bytes | memoryview, envelope: Envelope | None = None) -> Body:
    """A checked telemetry message whose lengths match its layout. Raises WireError.

    envelope: that of the message, if it was opened before.
    """
    envelope = envelope or open_envelope(message)
    if envelope.kind != TELEMETRY_KIND:
        raise WireError(f"message of kind {envelope.kind}, expected {TELEMETRY_KIND} (telemetry)")
    version, codecs = message[_VERSION_AT], _codecs()
    raw = _decompress(message, codecs.packed if version > 1 else codecs.plain)
    opening = codecs.openings.get(raw[:_ABOUT])
    if opening is None or not opening.fits(version, raw):
        opening = _Opening.read(version, raw)
        codecs.keep_opening(raw[:_ABOUT], opening)
    data = raw[len(opening.start) :]
    _check_times(data, opening.ticks)
    opening.plan.check(data)
    return Body(envelope, opening.boot_id, opening.layout, opening.ticks, data, opening.plan)


def _check_times(data: bytes, ticks: int) -> None:
    if ticks == 1:
        sound = 0 <= I64.unpack_from(data)[0] < MAX_TIME
    elif ticks <= _FEW_TICKS:
        few = struct.unpack_from(f"<{ticks}q", data)
        sound = few[0] >= 0 and few[-1] < MAX_TIME and all(map(operator.le, few, few[1:]))
    else:
        times = np.frombuffer(data, _TIME, ticks)
        sound = bool(times[0] >= 0 and times[-1] < MAX_TIME and (times[1:] >= times[:-1]).all())
    if not sound:
        raise WireError("times are not ascending or are outside the years 1970 to 9999")


def decode(message: bytes | memoryview) -> Batch:
    """A telemetry message as a Batch of read-only arrays. Raises WireError."""
    body = open_telemetry(message)
    origin = Origin(body.layout.site, body.layout.node, body.boot_id, body.envelope.simulated)
    return Batch(origin, np.frombuffer(body.data, _TIME, body.ticks), body.plan.read_blocks(body))


def decode_events(message: bytes | memoryview) -> EventBatch:
    """An events message. Raises WireError."""
    envelope = open_envelope(message)
    if envelope.kind != EVENTS_KIND:
        raise WireError(f"message of kind {envelope.kind}, expected {EVENTS_KIND} (events)")
    boot_id, names, count, data = _split(_decompress(message, _codecs().plain))
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
        check_text(event.entity + event.kind + json.dumps(event.data, ensure_ascii=False))
    return EventBatch(Origin(layout.site, layout.node, boot_id, envelope.simulated), events)


@dataclass(frozen=True, slots=True)
class Request:
    """Another sender's request, as the gateway `node` received it. format: otlp, prometheus1 or prometheus2.

    local: `node` is an agent's, which received it from its own node.
    """

    node: str
    format: str
    data: memoryview
    local: bool = False


def open_request(message: bytes | memoryview, envelope: Envelope | None = None) -> Request:
    """A checked message with a request. Raises WireError. envelope: as in `open_telemetry`."""
    envelope = envelope or open_envelope(message)
    if envelope.kind != REQUEST_KIND:
        raise WireError(f"message of kind {envelope.kind}, expected {REQUEST_KIND} (request)")
    _, names, _, data = _split(_decompress(message, _codecs().plain))
    try:
        found = json.loads(names)
        node, form = found["node"], found["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"request without node and format: {error}") from error
    if not isinstance(node, str) or not isinstance(form, str):
        raise WireError("request whose node and format are not text")
    return Request(node, form, data, found.get("local") is True)


def _is_valid_event(event: Event) -> bool:
    return (
        type(event.time) is int
        and 0 <= event.time < MAX_TIME
        and isinstance(event.entity, str)
        and ":" in event.entity
        and isinstance(event.kind, str)
        and isinstance(event.data, dict)
    )


def decode_together(bodies: Sequence[Body]) -> Iterator[DecodedGroup]:
    """Decodes many bodies without a loop over samples: those with the same plan together."""
    alike: dict[int, list[Body]] = {}
    for body in bodies:
        alike.setdefault(id(body.plan), []).append(body)
    for group in alike.values():
        yield from group[0].plan.decode(group)


def _decompress(message: bytes | memoryview, decompressor: zstandard.ZstdDecompressor) -> bytes:
    """The decompressed body. Never allocates more than MAX_BODY."""
    frame = message[ENVELOPE_BYTES:]
    try:
        if frame[:4] != _FRAME or len(frame) < 5 or frame[4] >> 5 not in _SMALL:
            size = zstandard.get_frame_parameters(frame).content_size
            if size > MAX_BODY:  # an unknown size is the highest u64, which is refused too
                raise WireError(f"body of {size} bytes when decompressed, expected at most {MAX_BODY}")
        return decompressor.decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise WireError(f"body is not a valid zstd frame: {error}") from error


def _split(raw: bytes) -> tuple[bytes, bytes, int, memoryview]:
    """(boot id, layout bytes, ticks or events, values) of a decompressed body. Raises WireError."""
    if len(raw) < _HEAD.size:
        raise WireError(f"body of {len(raw)} bytes, expected at least {_HEAD.size}")
    boot_id, length, count = _HEAD.unpack_from(raw)
    if length > MAX_LAYOUT or _HEAD.size + length > len(raw):
        raise WireError(f"layout of {length} bytes in a body of {len(raw)}, expected at most {MAX_LAYOUT}")
    view = memoryview(raw)
    return boot_id, bytes(view[_HEAD.size : _HEAD.size + length]), count, view[_HEAD.size + length :]


@dataclass(slots=True)
class _Codecs:
    """zstd contexts of one thread, which reuse their memory.

    packed: decompressor of version 2, with the dictionary; plain: of version 1.
    openings: of recent telemetry by its first bytes, at most OPENINGS_BYTES.
    """

    compressor: zstandard.ZstdCompressor
    packed: zstandard.ZstdDecompressor
    plain: zstandard.ZstdDecompressor
    openings: dict[bytes, _Opening] = field(default_factory=dict)
    _size: int = 0

    def keep_opening(self, first: bytes, opening: _Opening) -> None:
        """Keeps an opening for the next message that begins with these bytes; drops all if there is no space."""
        size = len(opening.start)
        if self._size + size > OPENINGS_BYTES:
            self.openings.clear()
            self._size = 0
        self._size += size
        self.openings[first] = opening


def _codecs() -> _Codecs:
    """The contexts of this thread."""
    try:
        found: _Codecs = _per_thread.codecs
    except AttributeError:
        found = _per_thread.codecs = _Codecs(
            zstandard.ZstdCompressor(level=LEVEL, dict_data=_DICTIONARY),
            zstandard.ZstdDecompressor(dict_data=_DICTIONARY, max_window_size=MAX_BODY),
            zstandard.ZstdDecompressor(max_window_size=MAX_BODY),
        )
    return found


_layouts = LayoutCache(LAYOUTS_BYTES)
