"""Protobuf's wire format: compared with the real library, and tested with garbage."""

from __future__ import annotations

import math

import pytest
from google.protobuf import descriptor_pb2, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from agents.protobuf import (
    MAX_FIELDS,
    MalformedMessage,
    ProtobufMessage,
    encode_double,
    encode_fixed64,
    encode_nested,
    encode_tag,
    encode_text,
    encode_unsigned,
    encode_varint,
)

WHOLE = st.integers(0, 2**64 - 1)


@given(WHOLE, st.floats(allow_nan=False), st.text(), st.lists(st.text(), max_size=5))
def test_encoded_fields_are_decoded(number: int, real: float, word: str, words: list[str]) -> None:
    data = (
        encode_unsigned(1, number)
        + encode_double(2, real)
        + encode_text(3, word)
        + b"".join(encode_text(4, w) for w in words)
        + encode_fixed64(5, number)
    )
    found = ProtobufMessage(encode_nested(9, data)).message(9)
    clean = [w.encode("utf-8", "replace").decode() for w in words]
    assert (found.unsigned(1), found.double(2), found.fixed64(5)) == (number, real, number)
    assert (found.text(3), found.texts(4)) == (word.encode("utf-8", "replace").decode(), clean)


def test_a_message_of_the_real_library_is_read() -> None:
    made = descriptor_pb2.FileDescriptorProto(name="f.proto", public_dependency=[1, 300, 70_000])
    made.message_type.add(name="One").field.add(name="a", number=7)
    made.message_type.add(name="Two")
    found = ProtobufMessage(made.SerializeToString())
    assert found.text(1) == "f.proto"
    assert found.unsigned_list(10) == [1, 300, 70_000]
    assert [m.text(1) for m in found.messages(4)] == ["One", "Two"]
    assert found.messages(4)[0].messages(2)[0].signed(3) == 7
    assert ProtobufMessage(struct_pb2.Value(number_value=-2.5).SerializeToString()).double(2) == -2.5
    assert ProtobufMessage(descriptor_pb2.EnumValueDescriptorProto(number=-7).SerializeToString()).signed(2) == -7


def test_repeated_numbers_are_read_packed_and_unpacked() -> None:
    assert ProtobufMessage(
        encode_nested(3, encode_varint(1) + encode_varint(300)) + encode_unsigned(3, 5)
    ).unsigned_list(3) == [5, 1, 300]


def test_the_last_of_several_fields_counts_and_another_wire_type_is_absent() -> None:
    found = ProtobufMessage(
        encode_unsigned(1, 1) + encode_unsigned(1, 2) + encode_text(2, "x") + encode_tag(6, 5) + b"abcd"
    )
    assert (found.unsigned(1), found.text(1, "none"), found.unsigned(2, 9), found.double(6)) == (2, "none", 9, 0.0)
    assert found.has(6)
    assert not found.has(7)
    assert (found.message(7).unsigned(1), found.messages(7), found.texts(7), found.unsigned_list(7)) == (0, [], [], [])


@pytest.mark.parametrize(
    "torn",
    [
        *(b"\x08", b"\x0a\x05ab", b"\x09\0\0", b"\x0d\0", b"\xff" * 11, b"\x08" + b"\x80" * 20, b"\x0b", b"\x0f"),
        *(b"\0\0", b"\x0a" + b"\xff" * 9 + b"\x01"),
    ],
)
def test_invalid_bytes_are_malformed(torn: bytes) -> None:
    with pytest.raises(MalformedMessage):
        ProtobufMessage(torn)


def test_a_message_with_too_many_fields_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=f"above {MAX_FIELDS} fields"):
        ProtobufMessage(encode_unsigned(1, 1) * (MAX_FIELDS + 1))


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_malformed(data: bytes) -> None:
    try:
        found = ProtobufMessage(data)
        for number in range(1, 20):
            assert 0 <= found.unsigned(number) < 2**64
            assert -(2**63) <= found.signed(number) < 2**63
            assert math.isnan(found.double(number)) or isinstance(found.double(number), float)
            found.texts(number)
            found.unsigned_list(number)
            found.messages(number)
    except MalformedMessage:
        pass
