"""Known problems: exact in any order of sums, the same everywhere, and sensitive to every single bit."""

from __future__ import annotations

import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.collectors.canary import gpu_problems
from agents.collectors.canary.arithmetic import _ALU, compute_problem, digest_array, run_march
from agents.collectors.canary.gpu_problems import ACCUMULATED_BITS, fold_rows, to_bits
from agents.collectors.canary.known_answers import load_known_answers, right_answer
from agents.collectors.canary.problems import (
    DTYPES,
    EXACT_BITS,
    EXPONENTS,
    PROBLEMS,
    VARIANTS,
    VERSION,
    Problem,
    hash_problems,
    integer_operand,
    product_exponent,
    random_integers,
    random_words,
    typed_operand,
)
from tests.examples import examples

PRODUCTS = [p for p in PROBLEMS if p.work == "gemm"]


def splitmix(seed: int, count: int) -> list[int]:
    """Returns the published generator in Python's own integers."""
    found, mask = [], 2**64 - 1
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_the_generator_matches_its_publication() -> None:
    assert random_words(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 40), most=st.integers(1, 2**62))
def test_random_numbers_match_plain_integer_arithmetic(seed: int, count: int, most: int) -> None:
    assert random_words(seed, count).tolist() == splitmix(seed, count)
    assert random_integers(seed, count, most).tolist() == [z % (2 * most + 1) - most for z in splitmix(seed, count)]


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PRODUCTS, ids=lambda p: p.name)
def test_no_sum_of_a_product_exceeds_its_format(problem: Problem) -> None:
    assert problem.largest_sum < 2 ** EXACT_BITS[problem.format]
    assert int(np.abs(integer_operand(problem, 0, "a")).max()) <= problem.most


@pytest.mark.parametrize("problem", [p for p in gpu_problems.PROBLEMS if p.work == "gemm"], ids=lambda p: p.name)
def test_no_sum_of_a_gpu_product_exceeds_its_accumulator_and_no_input_its_format(problem: Problem) -> None:
    assert problem.largest_sum < 2 ** ACCUMULATED_BITS.get(problem.format, 24)
    significand = {"f8": 4, "f32": 24}.get(problem.format) or EXACT_BITS[problem.format.removesuffix("-wide")]
    assert problem.most < 2**significand
    largest = {"f8": 448, "f16": 65504, "f16-wide": 65504}.get(problem.format, math.inf)
    assert problem.most * 2.0 ** EXPONENTS.get(problem.range, 0) <= largest
    assert problem.format != "f16" or problem.largest_sum * 2.0 ** product_exponent(problem) <= largest


@settings(max_examples=examples(60), deadline=None)
@given(
    format_=st.sampled_from(sorted(DTYPES)),
    range_=st.sampled_from(["random", "ones", "alternating", "down", "up"]),
    size=st.integers(1, 12),
    variant=st.integers(0, VARIANTS - 1),
    share=st.floats(0, 1),
)
def test_every_product_within_the_bound_matches_python_integers(
    format_: str, range_: str, size: int, variant: int, share: float
) -> None:
    most = max(1, math.isqrt((2 ** EXACT_BITS[format_] - 1) // size))
    most = max(1, round(most * share)) if most * most * size < 2 ** EXACT_BITS[format_] else 1
    floating = format_.startswith("f")
    problem = Problem("p", "gemm", format_, range_ if floating else "random", size, most)
    if problem.largest_sum >= 2 ** EXACT_BITS[format_]:
        return
    a, b = (integer_operand(problem, variant, side).tolist() for side in "ab")
    exact = [[sum(a[i][k] * b[k][j] for k in range(size)) for j in range(size)] for i in range(size)]
    found = typed_operand(problem, variant, "a") @ typed_operand(problem, variant, "b")
    factor = Fraction(2) ** product_exponent(problem)
    assert [[Fraction(x) for x in row] for row in found.tolist()] == [[x * factor for x in row] for row in exact]


# --- known answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_this_machine_gives_the_shipped_answers(problem: Problem) -> None:
    for variant in (0, 5):
        assert (
            digest_array(compute_problem(problem, variant)) == load_known_answers()[VERSION][problem.instance(variant)]
        )


def test_shipped_products_come_from_integer_arithmetic() -> None:
    for problem in PRODUCTS[::3]:
        assert right_answer(problem, 1) == load_known_answers()[VERSION][problem.instance(1)]


def test_all_problems_and_no_others_have_a_shipped_answer() -> None:
    for version, problems in ((VERSION, PROBLEMS), (gpu_problems.VERSION, gpu_problems.PROBLEMS)):
        assert load_known_answers()[version].keys() == {p.instance(v) for p in problems for v in range(VARIANTS)}
    assert len(load_known_answers()) == 2


def test_another_set_of_problems_has_another_version() -> None:
    assert hash_problems(PROBLEMS[1:]) != VERSION != hash_problems(reversed(PROBLEMS))


# --- elementwise, against Python's own arithmetic ---------------------------------------------------------------------

WORD = st.integers(0, 2**64 - 1)


@settings(max_examples=examples(40), deadline=None)
@given(pairs=st.lists(st.tuples(WORD, WORD), min_size=1, max_size=20))
def test_elementwise_answers_match_plain_integers(pairs: list[tuple[int, int]]) -> None:
    a, b = ([p[side] for p in pairs] for side in (0, 1))
    x, y = np.array(a, np.uint64), np.array(b, np.uint64)
    divisors = [(q >> (q & 63)) | 1 for q in b]
    assert _ALU["divide"](x, y).tolist() == [p // q for p, q in zip(a, divisors, strict=True)]
    assert _ALU["modulo"](x, y).tolist() == [p % q for p, q in zip(a, divisors, strict=True)]
    assert _ALU["multiply"](x, y).tolist() == [p * q % 2**64 for p, q in pairs]
    assert _ALU["sort"](x, y).tolist()[: len(a)] == sorted(a)
    assert _ALU["reduce"](x, y).tolist()[:2] == [sum(a) % 2**64, sum(b) % 2**64]
    assert _ALU["crc32"](x, y).tolist()[0] == zlib.crc32(b"".join(p.to_bytes(8, "little") for p in a))
    order = sorted(range(len(b)), key=lambda i: b[i])
    scattered = _ALU["scatter"](x, y).tolist()
    assert [scattered[place] for place in order] == a
    assert scattered[len(a) : 2 * len(a)] == [a[place] for place in order]
    signed = [p - 2**64 if p >> 63 else p for p in a]
    shifted = [
        ((p << (q & 63)) ^ (p >> (q & 63)) ^ (s >> (q & 63))) % 2**64 for (p, q), s in zip(pairs, signed, strict=True)
    ]
    assert _ALU["shift"](x, y).tolist() == shifted


@settings(max_examples=examples(40), deadline=None)
@given(a=WORD, b=WORD)
def test_division_and_square_root_are_rounded_as_ieee_754_defines(a: int, b: int) -> None:
    x, y = np.array([a], np.uint64), np.array([b], np.uint64)
    p, q = (a >> 11) | 1, (b >> 11) | 1
    assert _ALU["divide-f64"](x, y).tolist() == [p / q]  # Python rounds the quotient of integers correctly
    for name, bits, kind in (("sqrt-f32", 24, np.float32), ("sqrt-f64", 53, np.float64)):
        root = _ALU[name](x, y)[0]
        argument = (a >> (64 - bits)) | 1
        low, high = (Fraction(float(np.nextafter(root, kind(end)))) for end in (0, np.inf))
        middle = Fraction(float(root))
        assert ((low + middle) / 2) ** 2 <= argument <= ((middle + high) / 2) ** 2


# --- every bit counts -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(30), deadline=None)
@given(problem=st.sampled_from(PRODUCTS), place=st.integers(0, 2**30), bit=st.integers(0, 31))
def test_any_flipped_bit_of_an_answer_changes_its_digest(problem: Problem, place: int, bit: int) -> None:
    answer = compute_problem(problem, 0)
    flat = answer.view(np.uint32).reshape(-1)
    flat[place % flat.size] ^= np.uint32(1 << bit)
    assert digest_array(answer) != load_known_answers()[VERSION][problem.instance(0)]


@settings(max_examples=examples(30), deadline=None)
@given(rows=st.integers(1, 4), columns=st.integers(1, 9), place=st.integers(0, 35), change=st.integers(1, 2**32 - 1))
def test_any_single_wrong_value_of_a_row_changes_its_fold(rows: int, columns: int, place: int, change: int) -> None:
    bits = random_words(3, rows * columns).astype(np.uint32).view(np.int32).reshape(rows, columns)
    wrong = bits.copy()
    wrong.view(np.uint32).reshape(-1)[place % bits.size] ^= np.uint32(change)
    differing = np.flatnonzero(fold_rows(bits) != fold_rows(wrong)).tolist()
    assert differing == [place % bits.size // columns]


@settings(max_examples=examples(25), deadline=None)
@given(
    range_=st.sampled_from(["solid", "checker", "address"]),
    place=st.integers(0, 4095),
    bit=st.integers(0, 63),
    when=st.integers(0, 4),
)
def test_memory_changed_between_two_passes_is_found_with_index_and_bit(
    range_: str, place: int, bit: int, when: int
) -> None:
    problem, stage = Problem("m", "march", "i64", range_, 4096), iter(range(9))

    def spoil(_: str, __: Problem, held: np.ndarray) -> None:
        if next(stage) == when:
            held[place] ^= np.uint64(1 << bit)

    found = run_march(problem, 0, spoil)
    assert found[when].tolist() == [1, 1 << bit, place]
    assert np.count_nonzero(np.delete(found, when, axis=0)) == 0


@given(value=st.integers(-(2**24), 2**24))
def test_rounding_to_bfloat16_is_to_the_nearest_even(value: int) -> None:
    (found,) = to_bits(np.array([float(value)]), "bf16").view(np.uint16).tolist()
    near = [
        np.array([(found + step) << 16], np.uint32).view(np.float32)[0]
        for step in (-1, 0, 1)
        if 0 <= found + step < 0xFF80
    ]
    here = np.array([found << 16], np.uint32).view(np.float32)[0]
    distances = sorted(abs(Fraction(float(x)) - value) for x in near if math.isfinite(x))
    assert abs(Fraction(float(here)) - value) == distances[0]
    if len(distances) > 1 and distances[0] == distances[1]:
        assert found % 2 == 0
