"""The problems of the CPU canary. Each has one right answer, to the bit, on every processor that follows IEEE 754.

Inputs are integers so small that all partial sums of a product are integers that the format holds, in any order of
addition; factors of 2 move exponents and round nothing; division and square root round as IEEE 754 defines.

Inputs come from splitmix64 over a counter: a library's generator may change its stream from version to version, and a
canary's inputs must not. Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014),
and Vigna's splitmix64.c.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

VARIANTS = 8
"""Sets of inputs, one per round in turn. Chosen: other data find more faults than repetition, and the detector keeps 64
questions, of which the CPU's and a GPU's take 24."""
REVISION = 1
"""Incremented with every change of a computation that the fields of a problem do not show."""
EXACT_BITS = {"f16": 11, "bf16": 8, "tf32": 11, "f32": 24, "f64": 53, "i8": 7, "i32": 31, "i64": 63}
"""The format holds every integer up to 2 to this power: significands of IEEE 754 with the hidden bit."""

Range = Literal["random", "ones", "alternating", "down", "down5", "up5", "up"]
EXPONENTS: dict[str, int] = {"down": -10, "down5": -5, "up5": 5, "up": 10}
"""Power of 2 by which both operands are scaled: 2^-10 to 2^10 spans 1e-3 to 1e3, over which errors differ."""
SCALED: tuple[Range, ...] = ("down", "down5", "up5", "up")
PLAIN: tuple[Range, ...] = ("random", "ones", "alternating")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. work: gemm, alu or march. size: rows of square matrices, or words. most: largest input.

    inner: length of the sums of a product; 0: as `size`. Class and field names are part of the problems' version.
    """

    name: str
    work: str
    format: str
    range: str
    size: int
    most: int = 0
    inner: int = 0

    def instance(self, variant: int) -> str:
        """Returns its name with one set of inputs."""
        return f"{self.name}.{variant}"

    @property
    def sums(self) -> int:
        """Length of the sums of a product."""
        return self.inner or self.size

    @property
    def largest_sum(self) -> int:
        """Bound of all partial sums of the product, in any order."""
        return self.sums * self.most * self.most


def gemm_problems(format_: str, size: int, most: int, ranges: Iterable[str], inner: int = 0) -> tuple[Problem, ...]:
    """Returns a matrix product of one format in each range."""
    return tuple(Problem(f"gemm-{format_}-{r}", "gemm", format_, r, size, most, inner) for r in ranges)


ALU = {
    # name -> format; all over WORDS words of 64 bits
    "divide": "i64",
    "modulo": "i64",
    "multiply": "i64",
    "shift": "i64",
    "sort": "i64",
    "scatter": "i64",
    "reduce": "i64",
    "divide-f32": "f32",
    "divide-f64": "f64",
    "sqrt-f32": "f32",
    "sqrt-f64": "f64",
    "crc32": "i64",
    "sha256": "i64",
}
WORDS = 1 << 14
"""Words of the elementwise problems: 128 KiB, which no first-level cache holds. Chosen."""
MARCH_WORDS = 1 << 19
"""Words of the march: 4 MiB of fresh pages each time, more than most second-level caches. Chosen."""
BACKGROUNDS = ("solid", "checker", "address")

PROBLEMS: tuple[Problem, ...] = (
    *gemm_problems("f32", 192, 255, (*PLAIN, *SCALED)),
    *gemm_problems("f64", 192, 2**22 - 1, (*PLAIN, *SCALED)),
    *gemm_problems("i32", 64, 2**12 - 1, PLAIN),
    *gemm_problems("i64", 64, 2**28 - 1, PLAIN),
    *(Problem(f"alu-{name}", "alu", format_, "random", WORDS) for name, format_ in ALU.items()),
    *(Problem(f"march-{name}", "march", "i64", name, MARCH_WORDS) for name in BACKGROUNDS),
)


def hash_problems(problems: Iterable[Problem]) -> str:
    """Returns a version: the same on all machines whose answers may be compared."""
    text = f"{REVISION} {VARIANTS} {tuple(problems)!r}".encode()
    return hashlib.blake2b(text, digest_size=4).hexdigest()


VERSION = hash_problems(PROBLEMS)


_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]


def make_seed(*words: object) -> int:
    """Returns 64 bits that identify the words."""
    text = " ".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def random_words(seed: int, count: int) -> Words:
    """Returns `count` 64-bit words; the i-th depends on seed and i alone."""
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= np.uint64(_STEP)
    z += np.uint64(seed & _WORD)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_FIRST)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    return z


def random_integers(seed: int, count: int, most: int) -> Integers:
    """Returns `count` integers from -most to most. Canaries do not need an exactly uniform distribution."""
    drawn = (random_words(seed, count) % np.uint64(2 * most + 1)).astype(np.int64)
    drawn -= most
    return drawn


DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}
_EVEN = 0x5555555555555555
"""Every second bit."""


def integer_operand(problem: Problem, variant: int, side: str) -> Integers:
    """Returns one operand as integers: `a` has the shape (size, sums), `b` (sums, size)."""
    shape = (problem.size, problem.sums) if side == "a" else (problem.sums, problem.size)
    count = shape[0] * shape[1]
    if problem.range == "ones":  # all bits that the format may have are set
        return np.full(shape, problem.most, np.int64)
    if problem.range == "alternating":
        first, second = problem.most & _EVEN, problem.most & ~_EVEN
        bits = np.arange(count, dtype=np.int64) + variant
        return np.where(bits % 2, first, second).reshape(shape)
    # the scaled ranges use the integers of the plain one
    return random_integers(make_seed(problem.format, variant, side), count, problem.most).reshape(shape)


def product_exponent(problem: Problem) -> int:
    """Returns the power of 2 by which the product is larger than that of the integers."""
    return 2 * EXPONENTS.get(problem.range, 0)


def typed_operand(problem: Problem, variant: int, side: str) -> NDArray[Any]:
    """Returns one operand in the format in which the CPU multiplies it."""
    values = integer_operand(problem, variant, side)
    shift = EXPONENTS.get(problem.range, 0)
    found = values.astype(DTYPES[problem.format])
    return np.ldexp(found, shift) if shift else found


def exact_product(problem: Problem, variant: int) -> Integers:
    """Returns the product of the integers, by integer arithmetic."""
    return integer_operand(problem, variant, "a") @ integer_operand(problem, variant, "b")


def expected_product(problem: Problem, variant: int) -> NDArray[Any]:
    """Returns the right product in the problem's format, computed without arithmetic in that format."""
    scaled = np.ldexp(exact_product(problem, variant).astype(np.float64), product_exponent(problem))
    if problem.format in ("i32", "i64"):
        return exact_product(problem, variant).astype(DTYPES[problem.format])
    return scaled.astype(DTYPES[problem.format])
