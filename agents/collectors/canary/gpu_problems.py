"""The problems of the GPU canary, with answers that are the same to the bit on every sound GPU, kernel and vendor.

A product is folded on the GPU before it is copied: each row becomes one 64-bit word, the sum modulo 2^64 of the
answer's bits times odd weights. One wrong value in a row always shows, since an odd factor loses nothing modulo 2^64;
several cancel with a chance of 2^-64. Folding cuts 16 MiB to 16 KiB, without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary.arithmetic import digest_array
from agents.collectors.canary.problems import (
    BACKGROUNDS,
    PLAIN,
    SCALED,
    VARIANTS,
    Integers,
    Problem,
    gemm_problems,
    hash_problems,
    integer_operand,
    make_seed,
    product_exponent,
    random_integers,
    random_words,
)

SIZE, SUMS = 2048, 1024
"""Rows of a product, and length of its sums: 256 tiles of 128 x 128 keep each processor of a GPU busy, for 20
microseconds to 20 ms; sums of 1024 leave 7 bits for each input below 2^24. Chosen."""
WORDS = 1 << 20
"""Values of the elementwise problems. Chosen: 8 MiB, 1 ms."""
ACCUMULATED_BITS = {"f8": 13, "i8": 31, "f64": 53}
"""Sums below 2 to this power are exact; 24, single precision, for all other formats. fp8: NVIDIA's Hopper keeps about
14 bits of a sum (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.5.2)."""
OUTPUT_FORMATS = {"i8": "i32", "f64": "f64", "bf16": "bf16", "f16": "f16"}
"""Format of the product; single precision for all others. `bf16` and `f16` round it once, to nearest even."""
ALU = {
    **dict.fromkeys(("divide", "modulo", "multiply", "shift", "sort", "scatter", "running-sum"), "i64"),
    "divide-f32": "f32",
    "divide-f64": "f64",
    "sqrt-f32": "f32",
    "sqrt-f64": "f64",
}
SPECIAL = ("exp", "log", "sin", "rsqrt")
"""Functions of the special function units: rounded differently by chips, so that devices are only compared by vote."""

PROBLEMS: tuple[Problem, ...] = (
    *gemm_problems("i8", SIZE, 127, PLAIN, SUMS),
    *gemm_problems("f8", SIZE, 2, ("random", "ones", "down5", "up5"), SUMS),
    *gemm_problems("bf16", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *gemm_problems("bf16-wide", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *gemm_problems("f16", SIZE, 7, (*PLAIN, "down5"), SUMS),
    *gemm_problems("f16-wide", SIZE, 127, (*PLAIN, "down", "down5", "up5"), SUMS),
    *gemm_problems("tf32", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *gemm_problems("f32", SIZE, 127, (*PLAIN, *SCALED), SUMS),
    *gemm_problems("f64", SIZE, 2**21 - 1, (*PLAIN, *SCALED), SUMS),
    *(Problem(f"alu-{name}", "alu", format_, "random", WORDS) for name, format_ in ALU.items()),
    *(Problem(f"march-{name}", "march", "i64", name, 0) for name in BACKGROUNDS),
)  # fmt: skip
VOTED_PROBLEMS: tuple[Problem, ...] = tuple(
    Problem(f"special-{name}", "special", "f32", "random", WORDS) for name in SPECIAL
)
VERSION = hash_problems(PROBLEMS)
MARCH_READS = 5
"""Readings of a march."""


def fold_rows(bits: NDArray[Any]) -> Integers:
    """Returns one word per row, as the GPU computes it."""
    found: Integers = (bits.astype(np.int64) * row_weights(bits.shape[1])).sum(axis=1)
    return found


@lru_cache(maxsize=2)
def row_weights(count: int) -> Integers:
    """Returns odd 64-bit numbers."""
    return (random_words(make_seed("fold"), count) | np.uint64(1)).view(np.int64)


@lru_cache(maxsize=2)
def _integer_product(format_: str, plain: str, most: int, size: int, inner: int, variant: int) -> NDArray[np.float64]:
    """Returns the product of the integers. Double precision is exact here: no sum reaches 2^53."""
    problem = Problem("", "gemm", format_, plain, size, most, inner)
    assert problem.largest_sum < 2**53
    found: NDArray[np.float64] = integer_operand(problem, variant, "a").astype(np.float64) @ integer_operand(
        problem, variant, "b"
    )
    rows = slice(variant, None, 97)  # some rows are checked by integer arithmetic
    assert np.array_equal(
        found[rows], integer_operand(problem, variant, "a")[rows] @ integer_operand(problem, variant, "b")
    )
    return found


def to_bits(values: NDArray[np.float64], out: str) -> NDArray[Any]:
    """Returns the bits of values in a format as integers; values that do not fit are rounded to nearest even."""
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


def right_answer(problem: Problem, variant: int) -> str:
    """Returns the digest of the right answer, computed without a GPU."""
    if problem.work == "march":
        return digest_array(np.zeros((MARCH_READS, 2), np.int64))
    if problem.work == "alu":
        return digest_array(fold_rows(_elementwise_answer(problem, variant).reshape(64, -1)))
    plain = problem.range if problem.range in PLAIN else "random"
    product = _integer_product(problem.format, plain, problem.most, problem.size, problem.sums, variant)
    return digest_array(
        fold_rows(to_bits(np.ldexp(product, product_exponent(problem)), OUTPUT_FORMATS.get(problem.format, "f32")))
    )


def elementwise_inputs(problem: Problem, variant: int) -> tuple[Integers, Integers]:
    """Returns the inputs of elementwise problems: numbers of up to 62 bits, and positive ones of all lengths."""
    a = random_integers(make_seed(problem.name, variant, "a"), problem.size, 2**62 - 1)
    b = random_words(make_seed(problem.name, variant, "b"), problem.size)
    return np.abs(a), ((b >> ((b & np.uint64(31)) + np.uint64(2))) | np.uint64(1)).view(np.int64)


def _elementwise_answer(problem: Problem, variant: int) -> NDArray[Any]:
    """Returns the answers as integers, or as the bits of floats."""
    a, b = elementwise_inputs(problem, variant)
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
    whole_numbers: dict[str, Callable[[], Integers]] = {
        "divide": lambda: a // b,
        "modulo": lambda: a % b,
        "multiply": lambda: a * b,
        "shift": lambda: (a << (b & 63)) ^ (a >> (b & 31)),
        "sort": lambda: np.sort(a),
        "running-sum": lambda: np.cumsum(a),
    }
    return whole_numbers[name]()


def compute_known_answers() -> dict[str, str]:
    """Returns the digests of all problems that have one right answer."""
    return {p.instance(v): right_answer(p, v) for v in range(VARIANTS) for p in PROBLEMS}
