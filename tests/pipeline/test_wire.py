"""Messages of every released version can always be decoded; all others are a WireError, at bounded cost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pipeline.model.errors import WireError
from pipeline.model.records import Batch, Block, Event, EventBatch, Origin
from pipeline.transport import packing, unpacking, wire
from tests.examples import examples
from tests.pipeline import wire_v1

GOLDEN = Path(__file__).parent / "golden"
EPOCH = bytes(range(16))
ORIGIN = Origin("oslo-1", "n042", bytes.fromhex("00112233445566778899aabbccddeeff"), False)


def golden_batch() -> Batch:
    """Returns every wire type, two ticks, two classes, missing values, a name outside ASCII."""
    gpu = Block(
        "gpu",
        ("gpu:n042.0", "gpu:n042.1"),
        {
            "gpu.power": np.array([[310.5, np.nan], [311.0, 95.25]], "f4"),
            "gpu.memory_used": np.array([[8e10, 1.0], [8.1e10, np.nan]], "f8"),
            "gpu.pcie_width": np.array([[16, 255], [8, 16]], "u1"),
            "gpu.sm_clock": np.array([[1980, 65535], [1410, 210]], "u2"),
            "gpu.made_up": np.array([[7, 8], [9, 2**32 - 1]], "u4"),
            "gpu.energy": np.array([[2**53 + 1, 2**64 - 1], [2**53 + 2, 0]], "u8"),
        },
    )
    node = Block("node", ("node:n042",), {"node.température": np.array([[1.5], [2.5]], "f4")})
    return Batch(ORIGIN, np.array([1_700_000_000_000_000, 1_700_000_001_000_000], np.int64), (gpu, node))


def joined_batch() -> Batch:
    """Returns blocks of one class with different ticks, decimals, counters, ranges of names, and another class."""
    ticks, ports = np.arange(5), tuple(f"port:n042.mlx5_{i}" for i in range(9))
    fast = {
        "nic.rx_bytes": (10**15 + 3_000_000_007 * ticks[:, None] + np.arange(9)).astype("u8"),
        "nic.state": np.ones((5, 9), "u1"),
    }
    slow = {
        "nic.pcie_stalled_writes": np.linspace(0, 1, 9, dtype="f4").reshape(1, 9),
        "nic.speed": np.full((1, 9), 4e5, "f4"),
    }
    power = np.round(300 + np.sin(ticks)[:, None], 3).astype("f4")
    gpu = Block("gpu", ("gpu:n042.0",), {"gpu.power": power, "=odd": np.arange(5, dtype="u2").reshape(5, 1)})
    rare = Block("gpu", ("gpu:n042.0",), {".energy": np.array([[7], [2**64 - 1]], "u8")}, (1, 3))
    times = 1_700_000_000_000_000 + 1_000_000 * ticks
    return Batch(ORIGIN, times, (Block("nic", ports, fast), Block("nic", ports, slow, (3,)), gpu, rare))


def golden_events() -> EventBatch:
    return EventBatch(
        Origin("oslo-1", "n042", ORIGIN.boot_id, True),
        (
            Event(1_700_000_000_000_000, "gpu:n042.3", "xid", {"code": 79, "text": "fallen off the bus: «ø»"}),
            Event(1_700_000_000_500_000, "node:n042", "inventory", {"entities": {"node:n042": {"parents": []}}}),
        ),
    )


def telemetry_message(batch: Batch | None = None) -> bytes:
    return wire.seal(wire.encode(batch or golden_batch()), wire.TELEMETRY_KIND, EPOCH, 41, 1_700_000_002_000_000)


def joined_message() -> bytes:
    return telemetry_message(joined_batch())


def old_message() -> bytes:
    return wire_v1.seal(wire_v1.encode(golden_batch()), 1, EPOCH, 41, 1_700_000_002_000_000)


def events_message() -> bytes:
    body = wire.encode_events(golden_events())
    return wire.seal(body, wire.EVENTS_KIND, EPOCH, 42, 1_700_000_002_000_001, simulated=True)


MESSAGES: dict[str, tuple[Callable[[], bytes], Callable[[bytes], Any]]] = {
    "telemetry": (telemetry_message, wire.decode),
    "joined telemetry": (joined_message, wire.decode),
    "telemetry of version 1": (old_message, wire.decode),
    "events": (events_message, wire.decode_events),
}


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.origin == wanted.origin
    np.testing.assert_array_equal(found.times, wanted.times)
    assert [(b.device_class, b.entities) for b in found.blocks] == [(b.device_class, b.entities) for b in wanted.blocks]
    for a, b in zip(found.blocks, wanted.blocks, strict=True):
        assert list(a.columns) == list(b.columns)
        assert a.ticks == b.ticks
        for name in b.columns:
            assert a.columns[name].dtype == b.columns[name].dtype
            np.testing.assert_array_equal(a.columns[name], b.columns[name])


# --- golden bytes ----------------------------------------------------------------------------------------------------


def test_golden_telemetry_of_version_1_still_decodes() -> None:
    message = (GOLDEN / "wire-v1-telemetry.bin").read_bytes()
    assert wire.open_envelope(message) == wire.Envelope(1, False, EPOCH, 41, 1_700_000_002_000_000)
    assert_same(wire.decode(message), golden_batch())


def test_golden_events_of_version_1_still_decode() -> None:
    message = (GOLDEN / "wire-v1-events.bin").read_bytes()
    assert wire.open_envelope(message) == wire.Envelope(2, True, EPOCH, 42, 1_700_000_002_000_001)
    assert wire.decode_events(message) == golden_events()


def test_golden_telemetry_of_version_2_still_decodes() -> None:
    for name, wanted in (("telemetry", golden_batch()), ("joined", joined_batch())):
        message = (GOLDEN / f"wire-v2-{name}.bin").read_bytes()
        assert wire.open_envelope(message) == wire.Envelope(1, False, EPOCH, 41, 1_700_000_002_000_000)
        assert_same(wire.decode(message), wanted)


GOLDEN_OF = {
    "telemetry": "wire-v2-telemetry",
    "joined telemetry": "wire-v2-joined",
    "telemetry of version 1": "wire-v1-telemetry",
    "events": "wire-v1-events",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_current_messages_differ_from_the_golden_bytes_at_most_in_compression(name: str) -> None:
    golden, today = (GOLDEN / f"{GOLDEN_OF[name]}.bin").read_bytes(), MESSAGES[name][0]()
    assert today[:40] == golden[:40]  # all of the envelope before length and checksum of the compressed body
    assert raw_of(today) == raw_of(golden)


def test_the_dictionary_of_version_2_never_changes() -> None:
    digest = hashlib.sha256(DICTIONARY).hexdigest()
    assert digest == "0a27656b25300de9e86097a37036a65e4c6323c5d0636745fd25eba7def65c7a"


DICTIONARY = Path(wire.__file__).with_name("wire-2.dictionary").read_bytes()
CONTENT = zstandard.ZstdCompressionDict(DICTIONARY, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def raw_of(message: bytes) -> bytes:
    known = {"dict_data": CONTENT} if message[3] == 2 else {}
    return zstandard.ZstdDecompressor(**known).decompress(message[wire.ENVELOPE_BYTES :])


# --- round trips -----------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
TYPES = st.sampled_from(["u1", "u2", "u4", "u8", "f4", "f8"])


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    ticks = draw(st.integers(1, 4))
    blocks = []
    for _ in range(draw(st.integers(0, 3))):
        entities = tuple(f"gpu:{name}" for name in draw(st.lists(NAMES, min_size=0, max_size=4, unique=True)))
        own = tuple(sorted(draw(st.sets(st.integers(0, ticks - 1), min_size=1))))
        shape = (len(own), len(entities))
        columns = {n: draw(npst.arrays(draw(TYPES), shape)) for n in draw(st.lists(NAMES, max_size=4, unique=True))}
        blocks.append(Block(draw(NAMES), entities, columns, None if len(own) == ticks else own))
    times = sorted(draw(st.lists(st.integers(0, 2**57), min_size=ticks, max_size=ticks)))
    origin = Origin(draw(NAMES), draw(NAMES), draw(st.binary(min_size=16, max_size=16)), draw(st.booleans()))
    return Batch(origin, np.array(times, np.int64), tuple(blocks))


@settings(max_examples=examples(150), deadline=None)
@given(batch=batches())
def test_any_batch_is_decoded_unchanged(batch: Batch) -> None:
    message = wire.seal(wire.encode(batch), wire.TELEMETRY_KIND, EPOCH, 1, 2, batch.origin.simulated)
    assert_same(wire.decode(message), batch)


@settings(max_examples=examples(100), deadline=None)
@given(
    events=st.lists(
        st.builds(
            Event,
            time=st.integers(0, 2**57),
            entity=NAMES.map(lambda n: f"node:{n}"),
            kind=NAMES,
            data=st.dictionaries(NAMES, st.one_of(st.integers(-(2**60), 2**60), NAMES, st.none(), st.booleans())),
        ),
        max_size=5,
    )
)
def test_any_events_are_decoded_unchanged(events: list[Event]) -> None:
    batch = EventBatch(ORIGIN, tuple(events))
    message = wire.seal(wire.encode_events(batch), wire.EVENTS_KIND, EPOCH, 1, 2)
    assert wire.decode_events(message) == batch


Samples = dict[tuple[int, int, str, str], Any]


def samples_of(batch: Batch, key: int) -> Samples:
    """Returns (key, number of the tick, entity, signal) -> value; classes and ticks may have a signal once."""
    return {
        (key, tick, entity, name): values[row, i]
        for block in batch.blocks
        for name, values in block.columns.items()
        for row, tick in enumerate(range(len(batch.times)) if block.ticks is None else block.ticks)
        for i, entity in enumerate(block.entities)
    }


def samples_of_group(group: wire.DecodedGroup, ticks: dict[tuple[int, int], int]) -> Iterator[tuple[Any, Any]]:
    """Yields the samples of a decoded group. ticks: (key, time) -> number of the tick."""
    for _, entities, columns in group.blocks:
        for name, values in columns.items():
            for m, body in enumerate(group.bodies):
                key = body.envelope.sequence
                rows = values[m].reshape(group.times.shape[1], -1)
                for row, at in enumerate(group.times[m].tolist()):
                    yield from (((key, ticks[key, at], e, name), rows[row, i]) for i, e in enumerate(entities[m]))


@settings(max_examples=examples(80), deadline=None)
@given(found=st.lists(batches(), min_size=1, max_size=6), old=st.booleans())
def test_joined_messages_have_the_same_values_as_each_alone(found: list[Batch], old: bool) -> None:
    wanted: Samples = {}
    ticks: dict[tuple[int, int], int] = {}
    bodies = []
    for i, batch in enumerate(found):
        times = 1_000_000 * np.arange(len(batch.times))
        whole = all(block.ticks is None for block in batch.blocks)
        named = tuple(replace(block, device_class=f"c{b}") for b, block in enumerate(batch.blocks))
        batch = replace(batch, times=times, blocks=named)
        # a signal of one entity in two classes would be one key here
        batch = replace(
            batch,
            blocks=tuple(
                replace(b, columns={f"{b.device_class}.{n}": v for n, v in b.columns.items()}) for b in batch.blocks
            ),
        )
        message = (
            wire_v1.seal(wire_v1.encode(batch), 1, EPOCH, i)
            if old and whole
            else wire.seal(wire.encode(batch), 1, EPOCH, i, 2)
        )
        bodies.append(wire.open_telemetry(message))
        wanted |= samples_of(batch, i)
        ticks |= {(i, int(time)): tick for tick, time in enumerate(times)}
    got = [pair for group in wire.decode_together(bodies) for pair in samples_of_group(group, ticks)]
    assert len(got) == len(dict(got)) == len(wanted)
    for key, value in got:
        np.testing.assert_array_equal(value, wanted[key])


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_many_messages_of_one_plan_are_decoded_together(data: st.DataObject) -> None:
    """Nodes of equal hardware: other names and values, some of them with decimals and some without."""
    ticks, types = data.draw(st.integers(1, 9)), data.draw(st.lists(TYPES, min_size=1, max_size=5))
    rare = tuple(sorted(data.draw(st.sets(st.integers(0, ticks - 1), min_size=1))))
    wanted: Samples = {}
    bodies, numbers = [], {}
    for message in range(data.draw(st.integers(2, 5))):
        entities = (f"gpu:n{message}.0", f"gpu:n{message}.1")

        def columns(prefix: str, rows: int, node: int = message) -> dict[str, Any]:
            found = {}
            for i, code in enumerate(types):
                drawn = data.draw(npst.arrays(code, (rows, 2), elements=None if node % 2 else st.integers(0, 200)))
                found[f"gpu.{prefix}{i}"] = drawn
            return found

        blocks = (
            Block("gpu", entities, columns("fast", ticks)),
            Block("gpu", entities, columns("rare", len(rare)), rare),
        )
        batch = Batch(ORIGIN, 1_000_000 * np.arange(ticks), blocks)
        bodies.append(wire.open_telemetry(wire.seal(wire.encode(batch), 1, EPOCH, message, 2)))
        wanted |= samples_of(batch, message)
        numbers |= {(message, 1_000_000 * tick): tick for tick in range(ticks)}
    groups = list(wire.decode_together(bodies))
    assert len(groups) == (1 if len(rare) == ticks else 2)
    got = dict(pair for group in groups for pair in samples_of_group(group, numbers))
    assert got.keys() == wanted.keys()
    for key, value in got.items():
        np.testing.assert_array_equal(value, wanted[key])


def test_a_row_has_the_signals_of_all_blocks_of_its_class_and_tick() -> None:
    body = wire.open_telemetry(joined_message())
    rows: dict[str, list[tuple[list[int], list[str]]]] = {}
    for group in wire.decode_together([body]):
        for device_class, _, columns in group.blocks:
            seconds = [int(t) % 1_000_000_000 // 1_000_000 for t in group.times[0]]
            rows.setdefault(device_class, []).append((seconds, sorted(columns)))
    fast, slow = ["nic.rx_bytes", "nic.state"], ["nic.pcie_stalled_writes", "nic.speed"]
    assert rows["nic"] == [([3], sorted(fast + slow)), ([0, 1, 2, 4], fast)]  # the newest tick is the last
    assert rows["gpu"] == [([1, 3], [".energy", "=odd", "gpu.power"]), ([0, 2, 4], ["=odd", "gpu.power"])]
    assert body.plan.rows == {"nic": 45, "gpu": 5}
    assert body.plan.samples == 5 * 18 + 18 + 10 + 2


def test_blocks_with_the_same_column_make_rows_of_their_own() -> None:
    def block(value: float) -> Block:
        return Block("gpu", ("gpu:a",), {"gpu.power": np.full((1, 1), value, "f4")})

    message = telemetry_message(Batch(ORIGIN, np.array([1]), (block(1.0), block(2.0))))
    groups = list(wire.decode_together([wire.open_telemetry(message)]))
    assert [float(group.blocks[0][2]["gpu.power"][0, 0]) for group in groups] == [1.0, 2.0]


def test_an_encoder_gives_the_same_values_whatever_it_remembers() -> None:
    encoder = wire.Encoder(layouts=1)
    for step in range(6):
        noise = step % 2 == 1  # decimals that fit the message before no longer do
        power = np.array([[0.1 + step], [np.pi if noise else np.nan]], "f4")
        name = "gpu:a" if step < 3 else "gpu:b"
        batch = Batch(ORIGIN, np.array([step, step + 1]), (Block("gpu", (name,), {"gpu.power": power}),))
        assert_same(wire.decode(wire.seal(encoder.encode(batch), 1, EPOCH, step, 2)), batch)


@settings(max_examples=examples(200), deadline=None)
@given(values=npst.arrays(st.sampled_from(["f4", "f8"]), (1, 3, 2)), mode=st.integers(1, len(packing.SCALES) - 1))
def test_decimals_are_exact_or_not_used(values: Any, mode: int) -> None:
    packed, modes = packing.pack_columns(list(values), [mode])
    raw = np.frombuffer(bytes(modes) + packed, np.uint8)[None]
    found = unpacking.unpack_columns(raw, 1, values.dtype.str[1:], (1, 3, 2), 0)
    np.testing.assert_array_equal(found[0, 0], values[0])
    there = ~np.isnan(values[0])
    np.testing.assert_array_equal(np.signbit(found[0, 0])[there], np.signbit(values[0])[there])


def test_decoded_arrays_are_read_only() -> None:
    column = wire.decode(telemetry_message()).blocks[0].columns["gpu.power"]
    with pytest.raises(ValueError, match="read-only"):
        column[0, 0] = 1


def test_a_batch_of_unequal_shapes_or_unknown_types_is_refused_by_the_writer() -> None:
    def of(values: Any) -> Batch:
        return Batch(ORIGIN, np.array([1], np.int64), (Block("gpu", ("gpu:a",), {"gpu.power": values}),))

    with pytest.raises(WireError, match=r"shape \(1, 2\), expected \(1, 1\)"):
        wire.encode(of(np.zeros((1, 2), "f4")))
    with pytest.raises(WireError, match="type int32"):
        wire.encode(of(np.zeros((1, 1), "i4")))
    for ticks in ((), (1,), (-1,), (0, 0)):
        block = Block("gpu", ("gpu:a",), {"gpu.power": np.zeros((len(ticks), 1), "f4")}, ticks)
        with pytest.raises(WireError, match="expected ascending numbers of the 1 of the batch"):
            wire.encode(Batch(ORIGIN, np.array([1], np.int64), (block,)))


# --- hostile input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_cut_at_any_byte_is_refused(name: str) -> None:
    make, decode = MESSAGES[name]
    message = make()
    for cut in range(len(message)):
        with pytest.raises(WireError):
            decode(message[:cut])
    with pytest.raises(WireError, match="truncated or joined"):
        decode(message + b"\0")


@pytest.mark.parametrize("name", MESSAGES)
def test_any_flipped_bit_is_refused(name: str) -> None:
    make, decode = MESSAGES[name]
    message = make()
    for bit in range(len(message) * 8):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(damaged))


def opened(message: bytes) -> str:
    """Returns everything that a message says, or why it cannot be read."""
    try:
        body = wire.open_telemetry(message)
        blocks = [[(n, v.dtype.str, v.tobytes()) for n, v in b.columns.items()] for b in body.plan.read_blocks(body)]
        ticks = [block.ticks for block in body.plan.read_blocks(body)]
        return repr((body.envelope, body.boot_id, body.layout.blocks, body.ticks, bytes(body.data), blocks, ticks))
    except WireError as error:
        return str(error)


def alike_messages() -> list[bytes]:
    """Returns messages with the same layout, but other ticks, masks, boots, versions and lengths, and invalid ones."""
    batch = golden_batch()
    first, later = (replace(block, columns={n: v[:1] for n, v in block.columns.items()}) for block in batch.blocks)
    masked = [replace(batch, blocks=(replace(batch.blocks[0]), replace(later, ticks=(tick,)))) for tick in (0, 1)]
    single = replace(batch, times=batch.times[:1], blocks=(first, later))
    rebooted = replace(batch, origin=replace(ORIGIN, boot_id=bytes(16)))
    found = [batch, *masked, single, rebooted, replace(batch, times=batch.times[::-1])]
    bodies = [zstandard.ZstdDecompressor(dict_data=CONTENT).decompress(wire.encode(one)) for one in found]
    bodies += [bodies[0] + b"x", bodies[0][:-1], bodies[0][:30], b""]
    old = [wire_v1.seal(wire_v1.encode(one), 1, EPOCH) for one in (batch, single)]
    return [telemetry_message(one) for one in found] + [seal(raw, version=v) for raw in bodies for v in (1, 2)] + old


@settings(max_examples=examples(100), deadline=None)
@given(order=st.lists(st.integers(0, 1000), max_size=60))
def test_what_a_message_says_does_not_depend_on_the_messages_before_it(order: list[int]) -> None:
    messages = alike_messages()
    alone = []
    for message in messages:
        wire._codecs().openings.clear()
        alone.append(opened(message))
    for number in order:
        assert opened(messages[number % len(messages)]) == alone[number % len(messages)]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    for decode in (wire.open_envelope, wire.decode, wire.decode_events):
        with pytest.raises(WireError):
            decode(data)


def seal(raw: bytes, kind: int = wire.TELEMETRY_KIND, version: int = 1) -> bytes:
    """Returns a message with a valid envelope and checksum around any body, as a hostile or broken sender can make."""
    known = {"dict_data": CONTENT} if version == 2 else {}
    return wire_v1.seal(zstandard.ZstdCompressor(**known).compress(raw), kind, EPOCH, version=version)


def body(layout: Any, ticks: int, data: bytes, length: int | None = None) -> bytes:
    names = layout if isinstance(layout, bytes) else json.dumps(layout).encode()
    return struct.pack("<16sII", bytes(16), len(names) if length is None else length, ticks) + names + data


@settings(max_examples=examples(300), deadline=None)
@given(raw=st.binary(max_size=200))
def test_any_body_under_a_valid_envelope_is_refused_as_a_wire_error(raw: bytes) -> None:
    for kind, decode in ((wire.TELEMETRY_KIND, wire.decode), (wire.EVENTS_KIND, wire.decode_events)):
        for version in (1, 2):
            with pytest.raises(WireError):
                decode(seal(raw, kind, version))


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_a_changed_body_is_decoded_or_is_a_wire_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(MESSAGES)))
    make, decode = MESSAGES[name]
    raw = bytearray(raw_of(make()))
    for _ in range(data.draw(st.integers(1, 4))):
        place, other = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, len(raw) - 1))
        raw[place], raw[other] = data.draw(st.sampled_from([raw[other], 0, 1, 0xFF, raw[place] ^ 1])), raw[place]
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    message = seal(bytes(raw), wire.EVENTS_KIND if name == "events" else wire.TELEMETRY_KIND, make()[3])
    with contextlib.suppress(WireError):
        decode(message)
    if name != "events":
        with contextlib.suppress(WireError):
            for group in wire.decode_together([wire.open_telemetry(message)]):
                assert group.times.shape[0] == 1


TIME = struct.pack("<q", 1)
ONE = {"site": "s", "node": "n", "blocks": [["gpu", ["gpu:a"], [["gpu.power", "f4"]]]]}


def with_blocks(*blocks: Any) -> dict[str, Any]:
    return {"site": "s", "node": "n", "blocks": list(blocks)}


HOSTILE: dict[str, bytes] = {
    "more ticks than bytes": body(ONE, 2**32 - 1, TIME),
    "no tick": body(ONE, 0, b""),
    "a tick too many": body(ONE, 2, TIME + bytes(4)),
    "a byte too many": body(ONE, 1, TIME + bytes(5)),
    "a layout longer than the body": body(ONE, 1, TIME, length=2**32 - 1),
    "a layout that is not JSON": body(b"{", 1, TIME),
    "a layout that is a list": body([], 1, TIME),
    "a layout nested without end": body(b"[" * 100_000, 1, TIME),
    "a number of 10,000 digits": body(b'{"site":' + b"9" * 10_000 + b"}", 1, TIME),
    "no node": body({"site": "s", "blocks": []}, 1, TIME),
    "a node that is a number": body({"site": "s", "node": 5, "blocks": []}, 1, TIME),
    "blocks that are a number": body({"site": "s", "node": "n", "blocks": 5}, 1, TIME),
    "a block of four": body(with_blocks(["gpu", [], [], []]), 1, TIME),
    "entities that are a number": body(with_blocks(["gpu", 5, []]), 1, TIME),
    "an entity that is a list": body(with_blocks(["gpu", [["gpu:a"]], [["gpu.power", "f4"]]]), 1, TIME + bytes(4)),
    "an entity without a kind": body(with_blocks(["gpu", ["a"], [["gpu.power", "f4"]]]), 1, TIME + bytes(4)),
    "an entity twice": body(with_blocks(["gpu", ["gpu:a", "gpu:a"], [["gpu.power", "f4"]]]), 1, TIME + bytes(8)),
    "a type that is an object": body(with_blocks(["gpu", ["gpu:a"], [["gpu.power", "O"]]]), 1, TIME + bytes(8)),
    "a type that is a list": body(with_blocks(["gpu", ["gpu:a"], [["gpu.power", ["f4"]]]]), 1, TIME + bytes(4)),
    "a type that is a number": body(with_blocks(["gpu", ["gpu:a"], [["gpu.power", 4]]]), 1, TIME + bytes(4)),
    "a signal twice": body(with_blocks(["gpu", ["gpu:a"], [["gpu.power", "f4"]] * 2]), 1, TIME + bytes(8)),
    "100,000 signals of no device": body(with_blocks(["gpu", [], [[f"s{i}", "u1"] for i in range(100_000)]]), 1, TIME),
    "100,000 blocks": body(with_blocks(*[["gpu", [], []]] * 100_000), 1, TIME),
    "time before 1970": body(ONE, 1, struct.pack("<q", -1) + bytes(4)),
    "time after the year 9999": body(ONE, 1, struct.pack("<q", 2**62) + bytes(4)),
    "time running backwards": body(ONE, 2, struct.pack("<qq", 5, 4) + bytes(8)),
}


LISTED = {"site": "s", "node": "n", "entities": [[["gpu:a0", 2]]], "blocks": [["gpu", 0, [[".power", "f4"]]]]}
TWO = TIME + b"\x01" + b"\x00" + bytes(8)  # one tick: time, mask, mode, two values


def with_lists(entities: Any, *blocks: Any) -> dict[str, Any]:
    return {"site": "s", "node": "n", "entities": entities, "blocks": list(blocks)}


HOSTILE_2: dict[str, bytes] = {
    "no mask": body(LISTED, 1, TIME),
    "a mask without a tick": body(LISTED, 1, TIME + bytes(10)),
    "a mask with a tick too many": body(LISTED, 1, TIME + b"\x03\x00" + bytes(8)),
    "a mode that does not exist": body(LISTED, 1, TIME + b"\x01\xff" + bytes(8)),
    "a byte too few": body(LISTED, 1, TWO[:-1]),
    "a byte too many": body(LISTED, 1, TWO + b"\0"),
    "more ticks than bytes": body(LISTED, 2**32 - 1, TWO),
    "no tick": body(LISTED, 0, b""),
    "a list of entities that does not exist": body(with_lists([], ["gpu", 0, []]), 1, TIME + b"\x01"),
    "a list with a negative number": body(with_lists([["gpu:a"]], ["gpu", -1, []]), 1, TIME + b"\x01"),
    "a list with a number that is true": body(with_lists([["gpu:a"], []], ["gpu", True, []]), 1, TIME + b"\x01"),
    "lists that are a number": body(with_lists(5), 1, TIME),
    "a run of four billion": body(with_lists([[["gpu:a0", 2**32]]]), 1, TIME),
    "a run of no entity": body(with_lists([[["gpu:a0", 0]]]), 1, TIME),
    "a run without a number": body(with_lists([[["gpu:a", 2]]]), 1, TIME),
    "a long name 30,000 times": body(with_lists([[["gpu:" + "a" * 200_000 + "0", 30_000]]]), 1, TIME),
    "10,000 runs of 30,000": body(with_lists([[["gpu:a0", 30_000]]] * 10_000), 1, TIME),
    "an entity twice in runs": body(with_lists([[["gpu:a0", 2], "gpu:a1"]], ["gpu", 0, []]), 1, TIME + b"\x01"),
    "a list of entities that no block has": body(with_lists([["gpu:a"], []], ["gpu", 0, []]), 1, TIME + b"\x01"),
    "a class of 100,000 characters in 1,000 names": body(
        with_lists([[]], ["g" * 100_000, 0, [[f".{i}", "u1"] for i in range(1000)]]), 1, TIME + b"\x01"
    ),
    "a class that is a number": body(with_lists([[]], [5, 0, [[".power", "f4"]]]), 1, TIME + b"\x01\x00"),
    "a name that is a number": body(with_lists([[]], ["gpu", 0, [[5, "f4"]]]), 1, TIME + b"\x01\x00"),
    "a name twice, with and without its class": body(
        with_lists([[]], ["gpu", 0, [[".a", "u1"], ["gpu.a", "u1"]]]), 1, TIME + b"\x01"
    ),
    "masks of 10,000 blocks and 100,000 ticks": body(
        with_lists([[]], *[["gpu", 0, []]] * 10_000), 100_000, struct.pack("<q", 1) * 100_000
    ),
    "ticks with 8,192 combinations of blocks": body(
        with_lists([["gpu:a"]], *[["gpu", 0, [[f".s{i}", "u1"]]] for i in range(13)]),
        8192,
        TIME * 8192
        + np.packbits(np.arange(8192) >> np.arange(13)[:, None] & 1, axis=1, bitorder="little").tobytes()
        + bytes(8192 // 2 * 13),
    ),
}


def peak_of_refusal(message: bytes) -> int:
    """Returns the peak memory of Python in bytes while it refused a message."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(message)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_at_bounded_cost(name: str) -> None:
    assert_refused_at_bounded_cost(seal(HOSTILE[name]))


@pytest.mark.parametrize("name", HOSTILE_2)
def test_a_hostile_body_of_version_2_is_refused_at_bounded_cost(name: str) -> None:
    assert_refused_at_bounded_cost(seal(HOSTILE_2[name], version=2))


def test_the_smallest_body_of_version_2_is_accepted() -> None:
    assert wire.decode(seal(body(LISTED, 1, TWO), version=2)).blocks[0].entities == ("gpu:a0", "gpu:a1")


def assert_refused_at_bounded_cost(message: bytes) -> None:
    began = time.process_time()
    assert peak_of_refusal(message) < 64 << 20
    assert time.process_time() - began < 2.0


EVENT = {"time": 1, "entity": "gpu:a", "kind": "xid", "data": {}}
HOSTILE_EVENTS = {
    "not an object": b"5",
    "not JSON": b"{",
    "no time": json.dumps({k: v for k, v in EVENT.items() if k != "time"}).encode(),
    "a time that is a text": json.dumps({**EVENT, "time": "now"}).encode(),
    "a time that is true": json.dumps({**EVENT, "time": True}).encode(),
    "a time beyond all clocks": json.dumps({**EVENT, "time": 10**30}).encode(),
    "a negative time": json.dumps({**EVENT, "time": -5}).encode(),
    "an entity without a kind": json.dumps({**EVENT, "entity": "a"}).encode(),
    "data that is a list": json.dumps({**EVENT, "data": []}).encode(),
    "two events where one was declared": json.dumps(EVENT).encode() + b"\n" + json.dumps(EVENT).encode(),
    "nested without end": b'{"time":1,"entity":"a:b","kind":"k","data":' + b"[" * 100_000,
    "bytes that are not UTF-8": b'{"time":1,"entity":"a:\xff","kind":"k","data":{}}',
}


@pytest.mark.parametrize("name", HOSTILE_EVENTS)
def test_hostile_events_are_refused(name: str) -> None:
    message = seal(body({"site": "s", "node": "n"}, 1, HOSTILE_EVENTS[name]), wire.EVENTS_KIND)
    with pytest.raises(WireError):
        wire.decode_events(message)


def make_bombs() -> dict[str, bytes]:
    """Returns a gigabyte of zeros in some 32 kB: with its size declared, without, and as several frames."""
    zeros = bytes(1 << 20)
    declared, silent = zstandard.ZstdCompressor(), zstandard.ZstdCompressor(write_content_size=False)
    with_size = declared.compressobj(size=1 << 30)
    without = silent.compressobj()
    return {
        "declared": b"".join([with_size.compress(zeros) for _ in range(1 << 10)]) + with_size.flush(),
        "undeclared": b"".join([without.compress(zeros) for _ in range(1 << 10)]) + without.flush(),
        "many frames": declared.compress(zeros) * 1024,
    }


@pytest.mark.slow
def test_a_decompression_bomb_costs_no_more_than_the_bound() -> None:
    for name, bomb in make_bombs().items():
        message = wire.seal(bomb, wire.TELEMETRY_KIND, EPOCH, 1, 2)
        assert peak_of_refusal(message) < 4 * wire.MAX_BODY, name


@pytest.mark.slow
def test_a_body_larger_than_the_bound_is_refused_by_the_writer() -> None:
    ticks = 1 << 20
    block = Block("gpu", ("gpu:a",), {name: np.zeros((ticks, 1), "f8") for name in ("gpu.power", "gpu.energy")})
    with pytest.raises(WireError, match="send fewer ticks"):
        wire.encode(Batch(ORIGIN, np.arange(ticks), (block,)))
    crowd = Block("gpu", tuple(f"gpu:{i}" for i in range(50_000)), {})
    with pytest.raises(WireError, match="send fewer devices"):
        wire.encode(Batch(ORIGIN, np.array([1]), (crowd,)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"magic": b"XYZ"}, "not written by Fleetpulse"),
        ({"version": 3}, "wire version 3, expected at most 2: the agent is newer; upgrade the pipeline"),
        ({"version": 0}, "wire version 0 of kind 1, expected 1 to 2"),
        ({"version": 2, "kind": 2}, "wire version 2 of kind 2"),
        ({"kind": 3}, "kind 3"),
        ({"flags": 2}, "flags 2"),
    ],
)
def test_an_envelope_of_another_kind_is_refused_with_the_reason(change: dict[str, Any], complaint: str) -> None:
    field = {"magic": b"FPW", "version": 1, "kind": 1, "flags": 0, **change}
    content = wire.encode(golden_batch())
    head = struct.pack(
        "<3sBBBH16sQqI", field["magic"], field["version"], field["kind"], field["flags"], 0, EPOCH, 1, 2, len(content)
    )
    message = head + struct.pack("<I", zlib.crc32(content, zlib.crc32(head))) + content
    with pytest.raises(WireError, match=complaint):
        wire.decode(message)


def test_telemetry_is_not_decoded_as_events_and_events_not_as_telemetry() -> None:
    with pytest.raises(WireError, match="expected 2"):
        wire.decode_events(telemetry_message())
    with pytest.raises(WireError, match="expected 1"):
        wire.decode(events_message())
