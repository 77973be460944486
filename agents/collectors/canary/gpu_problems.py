"""The problems of the GPU canary, with answers that every sound GPU gives to the bit, whatever its kernels and make.

A product is folded on the GPU before it is copied out: each row to one word of 64 bits, the sum modulo 2^64 of the
answer's bits times odd weights. One wrong value in a row always shows, since an odd factor loses nothing modulo 2^64;
several hide with a chance of 2^-64. It cuts 16 MiB to 16 KiB, and no rounding is involved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary.arithmetic import digest
from agents.collectors.canary.problems import (
    BACKGROUNDS,
    PLAIN,
    SCALED,
    VARIANTS,
    Problem,
    Whole,
    exponent,
    integers,
    products,
    seed_of,
    version_of,
    whole,
    words,
)

SIZE, SUMS = 2048, 1024
"""Rows of a product, and length of its sums: 256 tiles of 128 x 128 give work to each processor of a GPU, in 20
microseconds to 20 ms; sums of 1024 leave 7 bits to each input below 2^24. Chosen."""
WORDS = 1 << 20
"""Values of the elementwise problems. Chosen: 8 MiB, 1 ms."""
ACCUMULATED_BITS = {"f8": 13, "i8": 31, "f64": 53}
"""Sums below 2 to this power are exact; 24, single precision, for all others. fp8: NVIDIA's Hopper keeps about 14 bits
of a sum (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.5.2)."""
OUT = {"i8": "i32", "f64": "f64", "bf16": "bf16", "f16": "f16"}
"""Format of the product; single precision for all others. `bf16` and `f16` round it once, to the nearest even."""
ALU = {
    **dict.fromkeys(("divide", "modulo", "multiply", "shift", "sort", "scatter", "running-sum"), "i64"),
    "divide-f32": "f32",
    "divide-f64": "f64",
    "sqrt-f32": "f32",
    "sqrt-f64": "f64",
}
SPECIAL = ("exp", "log", "sin", "rsqrt")
"""Functions of the special function units: not rounded alike everywhere, so that only a vote can judge them."""

PROBLEMS: tuple[Problem, ...] = (
    *products("i8", SIZE, 127, PLAIN, SUMS),
    *products("f8", SIZE, 2, ("random", "ones", "down5", "up5"), SUMS),
    *products("bf16", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *products("bf16-wide", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *products("f16", SIZE, 7, (*PLAIN, "down5"), SUMS),
    *products("f16-wide", SIZE, 127, (*PLAIN, "down", "down5", "up5"), SUMS),
    *products("tf32", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *products("f32", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *products("f64", SIZE, 2**21 - 1, (*PLAIN, *SCALED), SUMS),
    *(Problem(f"alu-{name}", "alu", format_, "random", WORDS) for name, format_ in ALU.items()),
    *(Problem(f"march-{name}", "march", "i64", name, 0) for name in BACKGROUNDS),
)  # fmt: skip
VOTED: tuple[Problem, ...] = tuple(Problem(f"special-{name}", "special", "f32", "random", WORDS) for name in SPECIAL)
VERSION = version_of(PROBLEMS)
PASSES = 5
"""Readings of a march."""


def fold(bits: NDArray[Any]) -> Whole:
    """One word per row, as the GPU makes it."""
    found: Whole = (bits.astype(np.int64) * weights(bits.shape[1])).sum(axis=1)
    return found


@lru_cache(maxsize=2)
def weights(count: int) -> Whole:
    """Odd numbers of 64 bits."""
    return (words(seed_of("fold"), count) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=2)
def _product(format_: str, plain: str, most: int, size: int, inner: int, variant: int) -> NDArray[np.float64]:
    """The product of the integers. Double precision is exact here: no sum reaches 2^53."""
    problem = Problem("", "gemm", format_, plain, size, most, inner)
    assert problem.largest_sum < 2**53
    found: NDArray[np.float64] = whole(problem, variant, "a").astype(np.float64) @ whole(problem, variant, "b")
    rows = slice(variant, None, 97)  # some rows by integer arithmetic alone
    assert np.array_equal(found[rows], whole(problem, variant, "a")[rows] @ whole(problem, variant, "b"))
    return found


def bits_of(values: NDArray[np.float64], out: str) -> NDArray[Any]:
    """Values in a format as the integers that their bits are; rounded to the nearest even where they do not fit."""
    if out == "i32":
        return values.astype(np.int64)
    if out == "f64":
        return values.view(np.int64)
    if out == "f16":
        return values.astype(np.float16).view(np.int16)
    single = values.astype(np.float32).view(np.int32)
    if out == "bf16":  # the upper half of single precision
        return ((single.astype(np.int64) + 0x7FFF + ((single >> 16) & 1)) >> 16).astype(np.int16)
    return single


def right(problem: Problem, variant: int) -> str:
    """The digest of the right answer, without a GPU."""
    if problem.work == "march":
        return digest(np.zeros((PASSES, 2), np.int64))
    if problem.work == "alu":
        return digest(fold(_elementwise(problem, variant).reshape(64, -1)))
    plain = problem.range if problem.range in PLAIN else "random"
    product = _product(problem.format, plain, problem.most, problem.size, problem.sums, variant)
    return digest(fold(bits_of(np.ldexp(product, exponent(problem)), OUT.get(problem.format, "f32"))))


def inputs(problem: Problem, variant: int) -> tuple[Whole, Whole]:
    """What elementwise problems work on: numbers of up to 62 bits, and positive ones of all lengths."""
    a = integers(seed_of(problem.name, variant, "a"), problem.size, 2**62 - 1)
    b = words(seed_of(problem.name, variant, "b"), problem.size)
    return np.abs(a), ((b >> ((b & np.uint64(31)) + np.uint64(2))) | np.uint64(1)).view(np.int64)


def _elementwise(problem: Problem, variant: int) -> NDArray[Any]:
    """The answers as integers, or as the bits of floats."""
    a, b = inputs(problem, variant)
    name = problem.name.removeprefix("alu-")
    if name.endswith("f32"):
        x, y = (a >> 38).astype(np.float32), (b & 0xFFFFFF | 1).astype(np.float32)
        return (x / y if name.startswith("divide") else np.sqrt(x)).view(np.int32)
    if name.endswith("f64"):
        x, y = (a >> 10).astype(np.float64), (b & (2**52 - 1) | 1).astype(np.float64)
        return (x / y if name.startswith("divide") else np.sqrt(x)).view(np.int64)
    if name == "scatter":
        spread = np.empty_like(a)
        spread[np.argsort(b, kind="stable")] = a
        return spread
    whole_numbers: dict[str, Callable[[], Whole]] = {
        "divide": lambda: a // b,
        "modulo": lambda: a % b,
        "multiply": lambda: a * b,
        "shift": lambda: (a << (b & 63)) ^ (a >> (b & 31)),
        "sort": lambda: np.sort(a),
        "running-sum": lambda: np.cumsum(a),
    }
    return whole_numbers[name]()


def all_known() -> dict[str, str]:
    """Digests of all problems that have one right answer."""
    return {p.instance(v): right(p, v) for v in range(VARIANTS) for p in PROBLEMS}
