"""The matrices that products multiply: integers first, then in the format and range of the problem."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.canaries.numbers import Whole, integers, seed_of
from agents.canaries.problems import EXPONENTS, Problem

DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}
_EVEN = 0x5555555555555555
"""Every second bit."""


def whole(problem: Problem, variant: int, side: str) -> Whole:
    """One operand as integers, the shape of `a` (size, sums), of `b` (sums, size)."""
    shape = (problem.size, problem.sums) if side == "a" else (problem.sums, problem.size)
    count = shape[0] * shape[1]
    if problem.range == "ones":  # all bits that the format may have are set
        return np.full(shape, problem.most, np.int64)
    if problem.range == "alternating":
        first, second = problem.most & _EVEN, problem.most & ~_EVEN
        bits = np.arange(count, dtype=np.int64) + variant
        return np.where(bits % 2, first, second).reshape(shape)
    # the scaled ranges bear the integers of the plain one
    return integers(seed_of(problem.format, variant, side), count, problem.most).reshape(shape)


def exponent(problem: Problem) -> int:
    """By which power of 2 the product is larger than that of the integers."""
    return 2 * EXPONENTS.get(problem.range, 0)


def operand(problem: Problem, variant: int, side: str) -> NDArray[Any]:
    """One operand as the CPU multiplies it."""
    values = whole(problem, variant, side)
    shift = EXPONENTS.get(problem.range, 0)
    found = values.astype(DTYPES[problem.format])
    return np.ldexp(found, shift) if shift else found


def exact(problem: Problem, variant: int) -> Whole:
    """The product of the integers, by integer arithmetic alone."""
    return whole(problem, variant, "a") @ whole(problem, variant, "b")


def expected(problem: Problem, variant: int) -> NDArray[Any]:
    """The right product in the problem's format, found without arithmetic in that format."""
    scaled = np.ldexp(exact(problem, variant).astype(np.float64), exponent(problem))
    if problem.format in ("i32", "i64"):
        return exact(problem, variant).astype(DTYPES[problem.format])
    return scaled.astype(DTYPES[problem.format])
