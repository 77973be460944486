"""The right answers' digests, so that a lone core or GPU can be judged: known_answers.json, made by this file.

    python -m agents.collectors.canary.known_answers > agents/collectors/canary/known_answers.json

Products come from integer arithmetic, not from that of the format which is tested. The rest is what this machine
computes; tests compare it with Python's own integers and fractions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from agents.collectors.canary.arithmetic import compute, digest
from agents.collectors.canary.gpu_problems import VERSION as GPU_VERSION
from agents.collectors.canary.gpu_problems import all_known
from agents.collectors.canary.problems import PROBLEMS, VARIANTS, VERSION, Problem, expected

FILE = Path(__file__).with_name("known_answers.json")


@cache
def known(path: Path = FILE) -> Mapping[str, Mapping[str, str]]:
    """Version of the problems -> instance -> digest."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def right(problem: Problem, variant: int) -> str:
    """The digest of the right answer, computed anew."""
    return digest(expected(problem, variant) if problem.work == "gemm" else compute(problem, variant))


def main() -> None:
    """Writes the digests of all problems of the CPU and of GPUs; takes a minute or two."""
    cpu = {p.instance(v): right(p, v) for p in PROBLEMS for v in range(VARIANTS)}
    whole = {VERSION: cpu, GPU_VERSION: all_known()}
    sys.stdout.write(json.dumps(whole, indent=0) + "\n")


if __name__ == "__main__":
    main()
