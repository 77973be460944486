"""Compiled reading of protobuf's wire format, with every bound checked, and a keyed hash of byte spans.

All integers are int64 or uint64: numba turns a mixture of both into a float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.compiling import compiled, inlined

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
KEYS = 512
"""Words of random keys per hash; longer spans use them again, with a mix in between."""
HASH_KEYS = np.frombuffer(np.random.default_rng().bytes(8 * (KEYS + 4)), np.uint64)
"""Random for each process, so that no sender can make two layouts with one hash."""
_LOW = np.uint64(0xFFFFFFFF)
_M1, _M2, _32, _29 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(32), np.uint64(29)
_ONE = np.uint64(1)
MAX_TAG = 1 << 32


@compiled
def read_word(b: Bytes, p: int) -> Any:
    """The 8 bytes from `p` as uint64, which the compiler turns into one load."""
    q = np.uint64(p)  # an unsigned index is not checked for counting from the end
    return (
        np.uint64(b[q])
        | np.uint64(b[q + np.uint64(1)]) << np.uint64(8)
        | np.uint64(b[q + np.uint64(2)]) << np.uint64(16)
        | np.uint64(b[q + np.uint64(3)]) << np.uint64(24)
        | np.uint64(b[q + np.uint64(4)]) << np.uint64(32)
        | np.uint64(b[q + np.uint64(5)]) << np.uint64(40)
        | np.uint64(b[q + np.uint64(6)]) << np.uint64(48)
        | np.uint64(b[q + np.uint64(7)]) << np.uint64(56)
    )


@compiled
def read_varint(b: Bytes, p: Any, end: int) -> tuple[Any, Any]:
    """(value, position after it); position -1 if it does not end before `end` or within ten bytes."""
    value: Any = np.int64(0)
    shift: Any = np.int64(0)
    while p < end and shift < 70:
        c = np.int64(b[np.uint64(p)])
        p += 1
        if shift < 64:
            value |= (c & 127) << shift
        if c < 128:
            return value, p
        shift += 7
    return np.int64(0), np.int64(-1)


@inlined
def read_field(b: Bytes, p: Any, end: int) -> tuple[Any, Any, Any, Any]:
    """(tag, number, start of the content, position after it) of the field at `p`; tag -1 if it is malformed.

    number: the value of a varint, else the length of the content.
    """
    tag: Any = np.int64(b[np.uint64(p)])
    at = p + 1  # most tags and lengths have one byte
    if tag > 127:
        tag, at = read_varint(b, p, end)
    kind, start, after = tag & 7, at, at + 8
    number: Any = np.int64(8)
    if kind == 2:
        if at < end and b[np.uint64(at)] < 128:
            number, start = np.int64(b[np.uint64(at)]), at + 1
        else:
            number, start = read_varint(b, at, end)
        after = start + number
    elif kind == 0:
        number, after = read_varint(b, at, end)
    elif kind == 5:
        after = at + 4
    elif kind != 1:
        after = np.int64(-1)
    if at < 0 or start < 0 or (kind == 2 and number < 0) or after < 0 or after > end or tag < 8 or tag >= MAX_TAG:
        tag = np.int64(-1)
    return tag, number, start, after


@inlined
def mix(h: Words, first: Any, second: Any, key: int) -> None:
    """Mixes a word into each lane of a hash, with the secret keys `key` and `key` + 1."""
    one = (h[0] ^ first) * (_M1 ^ (h[2 + key] | _ONE) << _ONE)
    one = (one ^ one >> _29) * (_M2 + (h[2 + key] << _ONE))
    two = (h[1] ^ second) * (_M1 ^ (h[3 + key] | _ONE) << _ONE)
    two = (two ^ two >> _29) * (_M2 + (h[3 + key] << _ONE))
    h[0], h[1] = one ^ one >> _32, two ^ two >> _32


@inlined
def hash_span(b: Bytes, at: int, end: int, salt: int, h: Words) -> None:
    """Adds the bytes from `at` to `end` to a hash. salt: what they are.  h: two lanes, then HASH_KEYS.

    Within a span NH (UMAC, RFC 4418), two lanes with shifted keys: a sum of products of keyed halves.
    """
    first = second = np.uint64(0)
    i, k = at, 2
    while i < end:
        if i + 8 <= end:
            word = read_word(b, i)
        elif end - at >= 8:
            word = read_word(b, end - 8)  # the last 8 bytes, some of them a second time
        else:
            word = np.uint64(0)
            for j in range(i, end):
                word |= np.uint64(b[np.uint64(j)]) << np.uint64(8 * (j - i))
        low, high = word & _LOW, word >> _32
        first += ((low + h[k]) & _LOW) * ((high + h[k + 1]) & _LOW)
        second += ((low + h[k + 2]) & _LOW) * ((high + h[k + 3]) & _LOW)
        i += 8
        k += 2
        if k >= KEYS:
            mix(h, first, second, 0)
            k = 2
    label = np.uint64(end - at) << np.uint64(8) | np.uint64(salt)
    mix(h, first ^ label, second + label * _M2, 2)
