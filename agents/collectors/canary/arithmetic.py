"""Computes the problems of the CPU canary with NumPy, and digests of the answers."""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary.problems import Problem, Words, make_seed, random_words, typed_operand

Corrupt = Callable[[str, Problem, NDArray[Any]], None]
"""Tests pass one to corrupt an array in place; it is called at the stages input, output and march."""


def digest_array(answer: NDArray[Any]) -> str:
    """Returns 64 bits of hash over the answer's bytes, little-endian, in C order."""
    plain = np.ascontiguousarray(answer.astype(answer.dtype.newbyteorder("<"), copy=False))
    return hashlib.blake2b(plain.data, digest_size=8).hexdigest()


def combine_digests(digests: list[str]) -> str:
    """Returns one digest for several."""
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()


def compute_problem(problem: Problem, variant: int, touch: Corrupt | None = None) -> NDArray[Any]:
    """Returns this machine's answer."""
    touch = touch or _corrupt_nothing
    if problem.work == "march":
        return run_march(problem, variant, touch)
    if problem.work == "gemm":
        a, b = typed_operand(problem, variant, "a"), typed_operand(problem, variant, "b")
        touch("input", problem, a)
        answer: NDArray[Any] = a @ b
    else:
        drawn = random_words(make_seed(problem.name, variant), 2 * problem.size)
        touch("input", problem, drawn)
        answer = _ALU[problem.name.removeprefix("alu-")](drawn[: problem.size], drawn[problem.size :])
    touch("output", problem, answer)
    return answer


def _corrupt_nothing(stage: str, problem: Problem, values: NDArray[Any]) -> None:
    """Changes nothing."""


# --- elementwise ------------------------------------------------------------------------------------------------------


def _divide(a: Words, b: Words) -> NDArray[Any]:
    return a // ((b >> (b & np.uint64(63))) | np.uint64(1))  # divisors of all lengths


def _modulo(a: Words, b: Words) -> NDArray[Any]:
    return a % ((b >> (b & np.uint64(63))) | np.uint64(1))


def _shift(a: Words, b: Words) -> NDArray[Any]:
    by = b & np.uint64(63)
    return (a << by) ^ (a >> by) ^ (a.view(np.int64) >> by.astype(np.int64)).view(np.uint64)


def _scatter(a: Words, b: Words) -> NDArray[Any]:
    """Writes words to shuffled places, reads them from others, and counts into 256 cells."""
    places = np.argsort(b, kind="stable")
    spread = np.empty_like(a)
    spread[places] = a
    counted = np.bincount((a & np.uint64(255)).astype(np.int64), minlength=256).astype(np.uint64)
    return np.concatenate((spread, a[places], counted))


def _reduce(a: Words, b: Words) -> NDArray[Any]:
    """Returns sums modulo 2^64, also cumulative ones, exclusive or, minimum and maximum."""
    ends = np.array([a.sum(), b.sum(), np.bitwise_xor.reduce(a), a.min(), a.max(), np.bitwise_and.reduce(b)], np.uint64)
    return np.concatenate((ends, np.cumsum(a), np.bitwise_xor.accumulate(b)))


def _real(values: Words, bits: int) -> NDArray[np.float64]:
    """Returns integers of up to `bits` bits, never 0, as floats that hold them exactly."""
    return ((values >> np.uint64(64 - bits)) | np.uint64(1)).astype(np.float64)


def _bytes(values: Words) -> bytes:
    return values.astype("<u8", copy=False).tobytes()


def _crc32(a: Words, b: Words) -> NDArray[Any]:
    return np.array([zlib.crc32(_bytes(a)), zlib.crc32(_bytes(b))], np.uint64)


def _sha256(a: Words, b: Words) -> NDArray[Any]:
    return np.frombuffer(hashlib.sha256(_bytes(a)).digest() + hashlib.sha256(_bytes(b)).digest(), np.uint8).copy()


_ALU: dict[str, Callable[[Words, Words], NDArray[Any]]] = {
    "divide": _divide,
    "modulo": _modulo,
    "multiply": lambda a, b: a * b,
    "shift": _shift,
    "sort": lambda a, b: np.concatenate((np.sort(a), np.sort(b.view(np.int64)).view(np.uint64))),
    "scatter": _scatter,
    "reduce": _reduce,
    "divide-f32": lambda a, b: _real(a, 24).astype(np.float32) / _real(b, 24).astype(np.float32),
    "divide-f64": lambda a, b: _real(a, 53) / _real(b, 53),
    "sqrt-f32": lambda a, b: np.sqrt(_real(a, 24).astype(np.float32)),
    "sqrt-f64": lambda a, b: np.sqrt(_real(a, 53)),
    "crc32": _crc32,
    "sha256": _sha256,
}


# --- memory -----------------------------------------------------------------------------------------------------------


def march_background(problem: Problem, variant: int) -> Words:
    """Returns the first values of a march; their complement follows."""
    if problem.range == "address":
        return np.arange(problem.size, dtype=np.uint64) * np.uint64(0x0001000100010001) + np.uint64(variant)
    word = 0x5555555555555555 if problem.range == "checker" else 0
    return np.full(1, word, np.uint64)


def run_march(problem: Problem, variant: int, touch: Corrupt) -> NDArray[Any]:
    """Writes and reads back memory, upwards and downwards, on fresh pages of the kernel.

    For each reading the answer has the number of wrong words, the wrong bits, and the first wrong index: all 0 if
    sound. March C- by passes; van de Goor, "Using March Tests to Test SRAMs" (IEEE Design & Test, 1993).
    """
    with mmap.mmap(-1, 8 * problem.size) as pages:
        # no name is bound to the array: the pages cannot be unmapped while it exists
        return _run_passes(
            np.frombuffer(pages, np.uint64), march_background(problem, variant), partial(touch, "march", problem)
        )


def _run_passes(held: Words, plain: Words, between: Callable[[Words], None]) -> NDArray[Any]:
    found: list[tuple[int, int, int]] = []
    inverse = ~plain
    held[:] = plain
    for order in (slice(None), slice(None, None, -1)):
        for there, next_ in ((plain, inverse), (inverse, plain)):
            between(held)
            found.append(_compare_words(held, there))
            walk, value = held[order], np.broadcast_to(next_, held.shape)[order]
            walk[:] = value
    between(held)
    found.append(_compare_words(held, plain))
    return np.array(found, np.uint64)


def _compare_words(held: Words, wanted: Words) -> tuple[int, int, int]:
    """Returns the number of wrong words, the bits that were wrong in any, and the index of the first."""
    if np.array_equal(held, np.broadcast_to(wanted, held.shape)):
        return 0, 0, 0
    differing = held ^ wanted
    at = np.flatnonzero(differing)
    return len(at), int(np.bitwise_or.reduce(differing)), int(at[0]) if len(at) else 0
