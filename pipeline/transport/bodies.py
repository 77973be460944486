"""Checked telemetry bodies: where their values lie, and decoding many of them together without a loop over samples.

A plan describes all bodies with the same shape, number of ticks and, in version 2, the same ticks of each block.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.model.errors import WireError
from pipeline.model.records import Block
from pipeline.model.signals import column_of
from pipeline.transport import packing
from pipeline.transport.layouts import Layout, Shape, Signals

MAX_BODY = 16 << 20
"""Maximum decompressed body: 16 MiB is 80 times an agent's largest batch (60 ticks x 16 GPUs x 50 signals)."""
MAX_ROW_GROUPS = 4096
"""Maximum sets of rows with the same class, ticks and signals in one message; chosen: an agent's have 20."""
_PLANS = 256  # kept per shape
_TIME = np.dtype("<i8")
I64 = struct.Struct("<q")
"""A time or another whole number in a body."""
_MODES = bytes(range(len(packing.SCALES)))
"""All modes of columns."""
_SIZES = {"u1": 1, "u2": 2, "u4": 4, "u8": 8, "f4": 4, "f8": 8}


class Envelope(NamedTuple):
    """Header of a message, before decompression. (topic, node, epoch, sequence) is the deduplication key."""

    kind: int
    simulated: bool
    epoch: bytes
    sequence: int
    sent: int


class Body(NamedTuple):
    """A checked, decompressed telemetry message; its values are still bytes (`data` begins with the times)."""

    envelope: Envelope
    boot_id: bytes
    layout: Layout
    ticks: int
    data: bytes
    plan: Plan

    @property
    def oldest_time(self) -> int:
        """Time of the first tick (UTC us); times ascend."""
        return int(I64.unpack_from(self.data)[0])

    @property
    def newest_time(self) -> int:
        """Time of the last tick (UTC us)."""
        return int(I64.unpack_from(self.data, 8 * self.ticks - 8)[0])


@dataclass(frozen=True, slots=True)
class DecodedGroup:
    """Telemetry bodies with the same plan, decoded together: M messages of T ticks and D devices.

    times: (M, T).  blocks: per block its class, (M,) tuple of entity tuples, and signal -> (M, T * D) values.
    """

    bodies: Sequence[Body]
    times: NDArray[np.int64]
    blocks: tuple[tuple[str, tuple[tuple[str, ...], ...], Mapping[str, NDArray[Any]]], ...]


class Plan(Protocol):
    """Where the values of a body lie.

    size: bytes of times and values.  rows: class -> rows of one body.  samples: values of one body.
    masks: the ticks of each block, as in the body after its times; empty in version 1.
    """

    size: int
    masks: bytes
    rows: Mapping[str, int]
    samples: int

    def check(self, data: bytes) -> None:
        """Raises WireError if a body of the right size cannot be decoded."""

    def decode(self, bodies: Sequence[Body]) -> Iterator[DecodedGroup]:
        """Yields the rows of bodies with this plan. A device has one row per tick."""

    def read_blocks(self, body: Body) -> tuple[Block, ...]:
        """The blocks as they were sent, as read-only arrays."""


def find_plan(shape: Shape, version: int, ticks: int, data: memoryview) -> Plan:
    """The plan of a body, cached. data: from the times on. Raises WireError if there can be no such body."""
    if not 0 < ticks <= MAX_BODY // 8:
        raise WireError(f"{ticks} ticks, expected 1 to {MAX_BODY // 8}")
    masks = bytes(data[8 * ticks : 8 * ticks + len(shape.blocks) * _mask_bytes(ticks)]) if version > 1 else b""
    key = version, ticks, masks
    plan: Plan | None = shape.plans.get(key)
    if plan is None:
        plan = PlainPlan(shape, ticks) if version == 1 else PackedPlan(shape, ticks, masks)
        if len(shape.plans) >= _PLANS:
            shape.plans.clear()
        shape.plans[key] = plan
    return plan


def _mask_bytes(ticks: int) -> int:
    return (ticks + 7) // 8


def _check_extent(devices: int, ticks: int) -> None:
    if devices * ticks > MAX_BODY:
        raise WireError(f"{devices} devices x {ticks} ticks, expected at most {MAX_BODY} values per signal")


class PlainPlan:
    """Version 1: every block has all ticks, and the values lie one signal after the other."""

    masks = b""

    def __init__(self, shape: Shape, ticks: int) -> None:
        self._shape, self._ticks = shape, ticks
        fields: list[Any] = [("time", _TIME, (ticks,))]
        for b, (_, devices, signals) in enumerate(shape.blocks):
            _check_extent(devices, ticks)
            fields += [(f"{b}/{name}", f"<{code}", (ticks * devices,)) for name, code in signals]
        try:
            self._dtype = np.dtype(fields)
        except (TypeError, ValueError, OverflowError) as error:
            raise WireError(f"layout cannot be represented: {error}") from error
        self.size = self._dtype.itemsize
        self.rows: Mapping[str, int] = _count_rows((c, devices * ticks) for c, devices, _ in shape.blocks)
        self.samples = ticks * sum(devices * len(signals) for _, devices, signals in shape.blocks)

    def check(self, data: bytes) -> None:
        """See `Plan.check`: any values can be decoded."""

    def decode(self, bodies: Sequence[Body]) -> Iterator[DecodedGroup]:
        """See `Plan.decode`: one structured view of all bodies."""
        record = np.frombuffer(b"".join([b.data for b in bodies]), self._dtype)
        yield DecodedGroup(
            bodies,
            record["time"],
            tuple(
                (device_class, _entities_of(bodies, b), {name: record[f"{b}/{name}"] for name, _ in signals})
                for b, (device_class, _, signals) in enumerate(self._shape.blocks)
            ),
        )

    def read_blocks(self, body: Body) -> tuple[Block, ...]:
        """See `Plan.read_blocks`."""
        record = np.frombuffer(body.data, self._dtype)
        return tuple(
            Block(
                block.device_class,
                block.entities,
                {name: record[f"{b}/{name}"][0].reshape(self._ticks, len(block.entities)) for name, _ in block.signals},
            )
            for b, block in enumerate(body.layout.blocks)
        )


def _entities_of(bodies: Sequence[Body], block: int) -> tuple[tuple[str, ...], ...]:
    return tuple(body.layout.blocks[block].entities for body in bodies)


@dataclass(frozen=True, slots=True)
class _Part:
    """Columns of one type of one block, packed together.

    start: of its bytes.  modes: where its modes are, in the order of `names`.
    """

    block: int
    code: str
    names: tuple[str, ...]
    ticks: int
    devices: int
    start: int
    modes: slice

    @property
    def size(self) -> int:
        return _SIZES[self.code] * len(self.names) * self.ticks * self.devices


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """The rows of one class and list of entities in ticks that the same blocks have.

    ticks: their numbers.  blocks: block -> where these ticks are among its own; None: the block has only these ticks.
    """

    device_class: str
    ticks: NDArray[np.intp]
    blocks: Mapping[int, NDArray[np.intp] | None]


class PackedPlan:
    """Version 2: each block has its own ticks and packed columns. masks: the ticks of each block, as in the body."""

    def __init__(self, shape: Shape, ticks: int, masks: bytes) -> None:
        width, count = _mask_bytes(ticks), len(shape.blocks)
        if len(masks) != width * count or width * count * 8 > MAX_BODY:
            raise WireError(f"{len(masks)} bytes of masks for {count} blocks and {ticks} ticks")
        bits = np.unpackbits(np.frombuffer(masks, np.uint8).reshape(count, width), axis=1, bitorder="little")
        if bits[:, ticks:].any() or not bits.any(axis=1).all():
            raise WireError(f"a block has no tick, or one beyond the {ticks} of the message")
        self._shape, self._ticks, self.masks = shape, ticks, masks
        self._has = bits[:, :ticks].astype(bool)
        counts = [int(n) for n in self._has.sum(axis=1)]
        for (_, devices, _), own in zip(shape.blocks, counts, strict=True):
            _check_extent(devices, own)
        self._modes = slice(8 * ticks + width * count, 8 * ticks + width * count + _count_floats(shape))
        self._parts = _place_parts(shape, counts, self._modes.start)
        self.size = self._modes.stop + sum(part.size for part in self._parts)
        self.samples = sum(len(part.names) * part.ticks * part.devices for part in self._parts)
        self._groups = _group_rows(shape, self._has)
        self.rows: Mapping[str, int] = _count_rows(
            (group.device_class, shape.blocks[next(iter(group.blocks))][1] * len(group.ticks)) for group in self._groups
        )

    def check(self, data: bytes) -> None:
        """See `Plan.check`: modes that do not exist."""
        if wrong := data[self._modes].translate(None, _MODES):
            raise WireError(f"mode {max(wrong)} of a column, expected at most {len(packing.SCALES) - 1}")

    def decode(self, bodies: Sequence[Body]) -> Iterator[DecodedGroup]:
        """See `Plan.decode`. A row has the signals of all blocks of its class that have its tick."""
        data = np.frombuffer(b"".join([b.data for b in bodies]), np.uint8).reshape(len(bodies), -1)
        times = np.ascontiguousarray(data[:, : 8 * self._ticks]).view(_TIME)
        parts: dict[int, list[tuple[tuple[str, ...], NDArray[Any]]]] = {b: [] for b in range(len(self._shape.blocks))}
        for part in self._parts:
            parts[part.block].append((part.names, self._unpack(part, data)))
        for group in self._groups:
            columns: dict[str, NDArray[Any]] = {}
            for block, places in group.blocks.items():
                for names, values in parts[block]:
                    own = values if places is None else values[:, :, places]
                    columns.update(zip(names, own.reshape(len(names), len(bodies), -1), strict=True))
            entities = _entities_of(bodies, next(iter(group.blocks)))
            yield DecodedGroup(bodies, times[:, group.ticks], ((group.device_class, entities, columns),))

    def _unpack(self, part: _Part, data: NDArray[np.uint8]) -> NDArray[Any]:
        """(signals, messages, ticks, devices) values of a part of all bodies."""
        from pipeline.transport import unpacking  # here: agents only encode, and need no compiler

        shape = len(part.names), part.ticks, part.devices
        return unpacking.unpack_columns(data, part.start, part.code, shape, part.modes.start)

    def read_blocks(self, body: Body) -> tuple[Block, ...]:
        """See `Plan.read_blocks`."""
        data = np.frombuffer(body.data, np.uint8).reshape(1, -1)
        values: list[dict[str, NDArray[Any]]] = [{} for _ in self._shape.blocks]
        for part in self._parts:
            unpacked = self._unpack(part, data)[:, 0]
            unpacked.flags.writeable = False
            values[part.block].update(zip(part.names, unpacked, strict=True))
        found = []
        for block, columns, has in zip(body.layout.blocks, values, self._has, strict=True):
            ticks = None if has.all() else tuple(np.flatnonzero(has).tolist())
            columns = {name: columns[name] for name, _ in block.signals}
            found.append(Block(block.device_class, block.entities, columns, ticks))
        return tuple(found)


def _count_rows(found: Iterable[tuple[str, int]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for device_class, count in found:
        rows[device_class] = rows.get(device_class, 0) + count
    return rows


def split_types(signals: Signals) -> dict[str, list[int]]:
    """Type -> positions of its signals; the types in order of their first signal."""
    found: dict[str, list[int]] = {}
    for place, (_, code) in enumerate(signals):
        found.setdefault(code, []).append(place)
    return found


def _count_floats(shape: Shape) -> int:
    return sum(code.startswith("f") for _, _, signals in shape.blocks for _, code in signals)


def _place_parts(shape: Shape, counts: Sequence[int], modes: int) -> list[_Part]:
    """The parts of all blocks in their order. counts: ticks of each block.  modes: where the modes begin."""
    found: list[_Part] = []
    start = modes + _count_floats(shape)
    for block, ((_, devices, signals), ticks) in enumerate(zip(shape.blocks, counts, strict=True)):
        for code, places in split_types(signals).items():
            floats = len(places) if code.startswith("f") else 0
            names = tuple(signals[place][0] for place in places)
            found.append(_Part(block, code, names, ticks, devices, start, slice(modes, modes + floats)))
            start, modes = start + found[-1].size, modes + floats
    return found


def _group_rows(shape: Shape, has: NDArray[np.bool_]) -> list[_RowGroup]:
    """The groups of rows of a body, those of a class in order of their newest tick. has: (blocks, ticks).

    A block with a column that another block of its class and entities has too makes separate rows.
    """
    together: dict[tuple[str, int, int], list[int]] = {}
    taken: dict[tuple[str, int], set[str]] = {}
    for block, ((device_class, _, signals), number) in enumerate(zip(shape.blocks, shape.lists, strict=True)):
        columns = {column_of(name, device_class) for name, _ in signals}
        known = taken.setdefault((device_class, number), set())
        alone = bool(known & columns)
        known |= columns
        together.setdefault((device_class, number, block if alone else -1), []).append(block)
    found: list[_RowGroup] = []
    for (device_class, _, _), blocks in together.items():
        found += _split_ticks(device_class, blocks, has)
        if len(found) > MAX_ROW_GROUPS:
            raise WireError(f"more than {MAX_ROW_GROUPS} sets of rows with the same class, ticks and signals")
    return sorted(found, key=lambda group: int(group.ticks[-1]))


def _split_ticks(device_class: str, blocks: Sequence[int], has: NDArray[np.bool_]) -> Iterator[_RowGroup]:
    """Yields the groups of rows of blocks that share rows: one for each set of blocks that have the same tick."""
    own = has[blocks]
    if own.all():
        yield _RowGroup(device_class, np.arange(has.shape[1]), dict.fromkeys(blocks))
        return
    patterns, which = np.unique(own, axis=1, return_inverse=True)
    if patterns.shape[1] > MAX_ROW_GROUPS:
        raise WireError(f"more than {MAX_ROW_GROUPS} sets of rows with the same class, ticks and signals")
    before = np.cumsum(own, axis=1) - 1  # (blocks, ticks): where a tick is among those of the block
    for number, pattern in enumerate(patterns.T):
        if pattern.any():
            ticks = np.flatnonzero(which.reshape(-1) == number)
            having = np.flatnonzero(pattern)
            places = {blocks[i]: None if len(ticks) == own[i].sum() else before[i, ticks] for i in having.tolist()}
            yield _RowGroup(device_class, ticks, places)
