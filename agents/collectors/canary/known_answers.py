"""Digests of the right answers, so that a single core or GPU can be judged: known_answers.json, written by this module.

    python -m agents.collectors.canary.known_answers > agents/collectors/canary/known_answers.json

Products are computed by integer arithmetic, not in the format under test. The other answers are computed by this
machine; tests compare them with Python's own integers and fractions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from agents.collectors.canary.arithmetic import compute_problem, digest_array
from agents.collectors.canary.gpu_problems import VERSION as GPU_VERSION
from agents.collectors.canary.gpu_problems import compute_known_answers
from agents.collectors.canary.problems import PROBLEMS, VARIANTS, VERSION, Problem, expected_product

FILE = Path(__file__).with_name("known_answers.json")


@cache
def load_known_answers(path: Path = FILE) -> Mapping[str, Mapping[str, str]]:
    """Returns version of the problems -> instance -> digest."""
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def right_answer(problem: Problem, variant: int) -> str:
    """Returns the digest of the right answer, computed now."""
    return digest_array(
        expected_product(problem, variant) if problem.work == "gemm" else compute_problem(problem, variant)
    )


def main() -> None:
    """Writes the digests of all CPU and GPU problems; takes a minute or two."""
    cpu = {p.instance(v): right_answer(p, v) for p in PROBLEMS for v in range(VARIANTS)}
    whole = {VERSION: cpu, GPU_VERSION: compute_known_answers()}
    sys.stdout.write(json.dumps(whole, indent=0) + "\n")


if __name__ == "__main__":
    main()
