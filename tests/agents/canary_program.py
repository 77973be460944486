"""The CPU canary's program with one bad core: corrupts what that core computes.

    python canary_program.py CORE WHAT [arguments of the program]

WHAT: output (flips a bit of each product in single precision), once (the same, only the first time), memory (changes a
word between two passes of a march), dies (as by a wrong pointer), killed (from outside).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.collectors.canary import cpu_program
from agents.collectors.canary.problems import Problem


class Fault:
    """The fault of the core."""

    def __init__(self, core: int, what: str) -> None:
        self.core, self.what, self.left = core, what, 1 if what == "once" else 1 << 30

    def __call__(self, stage: str, problem: Problem, values: NDArray[Any]) -> None:
        if os.sched_getaffinity(0) != {self.core}:
            return
        if self.what in ("dies", "killed"):
            os.kill(os.getpid(), signal.SIGSEGV if self.what == "dies" else signal.SIGKILL)
        if self.what == "memory" and stage == "march":
            values[12345] ^= np.uint64(1 << 40)
        if self.what in ("output", "once") and stage == "output" and problem.format == "f32" and self.left:
            self.left -= 1
            values.view(np.uint32).reshape(-1)[7] ^= np.uint32(1)


if __name__ == "__main__":
    sys.exit(cpu_program.main(sys.argv[3:], Fault(int(sys.argv[1]), sys.argv[2])))
