"""The problems of the CPU canary. Each has one right answer, to the bit, on every processor that keeps IEEE 754.

Inputs are integers so small that all partial sums of a product are integers that the format holds, in whichever order
a library adds them; factors of 2 move exponents and round nothing; division and square root round as IEEE 754 says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from agents.canaries import VARIANTS as VARIANTS

REVISION = 1
"""Goes up with every change of what a problem computes that its fields do not show."""
EXACT_BITS = {"f16": 11, "bf16": 8, "tf32": 11, "f32": 24, "f64": 53, "i8": 7, "i32": 31, "i64": 63}
"""Up to 2 to this power the format holds every integer: significands of IEEE 754 with the hidden bit."""

Range = Literal["random", "ones", "alternating", "down", "down5", "up5", "up"]
EXPONENTS: dict[str, int] = {"down": -10, "down5": -5, "up5": 5, "up": 10}
"""By which power of 2 both operands are scaled: 2^-10 to 2^10 spans 1e-3 to 1e3, over which errors differ."""
SCALED: tuple[Range, ...] = ("down", "down5", "up5", "up")
PLAIN: tuple[Range, ...] = ("random", "ones", "alternating")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem. work: gemm, alu or march. size: rows of square matrices, or words. most: largest input.

    inner: length of the sums of a product; 0: as `size`.
    """

    name: str
    work: str
    format: str
    range: str
    size: int
    most: int = 0
    inner: int = 0

    def instance(self, variant: int) -> str:
        """Its name with one set of inputs."""
        return f"{self.name}.{variant}"

    @property
    def sums(self) -> int:
        return self.inner or self.size

    @property
    def largest_sum(self) -> int:
        """No partial sum of the product is larger, whatever its order."""
        return self.sums * self.most * self.most


def products(format_: str, size: int, most: int, ranges: Iterable[str], inner: int = 0) -> tuple[Problem, ...]:
    """A product of matrices of one format in each range."""
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
    *products("f32", 192, 255, (*PLAIN, *SCALED)),
    *products("f64", 192, 2**22 - 1, (*PLAIN, *SCALED)),
    *products("i32", 64, 2**12 - 1, PLAIN),
    *products("i64", 64, 2**28 - 1, PLAIN),
    *(Problem(f"alu-{name}", "alu", format_, "random", WORDS) for name, format_ in ALU.items()),
    *(Problem(f"march-{name}", "march", "i64", name, MARCH_WORDS) for name in BACKGROUNDS),
)


def version_of(problems: Iterable[Problem]) -> str:
    """Stands for what is computed: the same on all machines whose answers may be compared."""
    text = f"{REVISION} {VARIANTS} {tuple(problems)!r}".encode()
    return hashlib.blake2b(text, digest_size=4).hexdigest()


VERSION = version_of(PROBLEMS)
