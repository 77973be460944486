"""The reader and writer of protobuf's wire format: against the real library where it can judge, and against garbage."""

from __future__ import annotations

import math

import pytest
from google.protobuf import descriptor_pb2, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from agents.protobuf import MOST_FIELDS, Malformed, Message, double, fixed, nested, tag, text, varint, whole

WHOLE = st.integers(0, 2**64 - 1)


@given(WHOLE, st.floats(allow_nan=False), st.text(), st.lists(st.text(), max_size=5))
def test_what_is_written_is_read(number: int, real: float, word: str, words: list[str]) -> None:
    data = whole(1, number) + double(2, real) + text(3, word) + b"".join(text(4, w) for w in words) + fixed(5, number)
    found = Message(nested(9, data)).message(9)
    clean = [w.encode("utf-8", "replace").decode() for w in words]
    assert (found.whole(1), found.double(2), found.fixed(5)) == (number, real, number)
    assert (found.text(3), found.texts(4)) == (word.encode("utf-8", "replace").decode(), clean)


def test_a_message_of_the_real_library_is_read() -> None:
    made = descriptor_pb2.FileDescriptorProto(name="f.proto", public_dependency=[1, 300, 70_000])
    made.message_type.add(name="One").field.add(name="a", number=7)
    made.message_type.add(name="Two")
    found = Message(made.SerializeToString())
    assert found.text(1) == "f.proto"
    assert found.wholes(10) == [1, 300, 70_000]
    assert [m.text(1) for m in found.messages(4)] == ["One", "Two"]
    assert found.messages(4)[0].messages(2)[0].signed(3) == 7
    assert Message(struct_pb2.Value(number_value=-2.5).SerializeToString()).double(2) == -2.5
    assert Message(descriptor_pb2.EnumValueDescriptorProto(number=-7).SerializeToString()).signed(2) == -7


def test_repeated_numbers_are_read_packed_and_not() -> None:
    assert Message(nested(3, varint(1) + varint(300)) + whole(3, 5)).wholes(3) == [5, 1, 300]


def test_of_several_the_last_holds_and_another_wire_type_counts_as_absent() -> None:
    found = Message(whole(1, 1) + whole(1, 2) + text(2, "x") + tag(6, 5) + b"abcd")
    assert (found.whole(1), found.text(1, "none"), found.whole(2, 9), found.double(6)) == (2, "none", 9, 0.0)
    assert found.has(6)
    assert not found.has(7)
    assert (found.message(7).whole(1), found.messages(7), found.texts(7), found.wholes(7)) == (0, [], [], [])


@pytest.mark.parametrize(
    "torn",
    [
        *(b"\x08", b"\x0a\x05ab", b"\x09\0\0", b"\x0d\0", b"\xff" * 11, b"\x08" + b"\x80" * 20, b"\x0b", b"\x0f"),
        *(b"\0\0", b"\x0a" + b"\xff" * 9 + b"\x01"),
    ],
)
def test_what_is_no_message_is_malformed(torn: bytes) -> None:
    with pytest.raises(Malformed):
        Message(torn)


def test_a_message_of_too_many_fields_is_refused() -> None:
    with pytest.raises(Malformed, match=f"above {MOST_FIELDS} fields"):
        Message(whole(1, 1) * (MOST_FIELDS + 1))


@given(st.binary(max_size=300))
def test_garbage_is_read_or_malformed(data: bytes) -> None:
    try:
        found = Message(data)
        for number in range(1, 20):
            assert 0 <= found.whole(number) < 2**64
            assert -(2**63) <= found.signed(number) < 2**63
            assert math.isnan(found.double(number)) or isinstance(found.double(number), float)
            found.texts(number)
            found.wholes(number)
            found.messages(number)
    except Malformed:
        pass
