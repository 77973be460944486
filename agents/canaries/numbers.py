"""Numbers of our own that are the same bit for bit on every machine: splitmix64 over a counter.

A library's generator may change its stream from one version to the next; a canary's inputs must not.
Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), and Vigna's splitmix64.c.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1

Words = NDArray[np.uint64]
Whole = NDArray[np.int64]


def seed_of(*words: object) -> int:
    """64 bits that stand for the words."""
    text = " ".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def words(seed: int, count: int) -> Words:
    """`count` words of 64 bits; the i-th depends on seed and i alone."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_STEP)
    z += np.uint64(seed & _WORD)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    return z


def integers(seed: int, count: int, most: int) -> Whole:
    """`count` integers from -most to most. That 2^64 is no multiple of their number matters to no canary."""
    drawn = (words(seed, count) % np.uint64(2 * most + 1)).astype(np.int64)
    drawn -= most
    return drawn
