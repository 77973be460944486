"""One round: all problems of a kind once on one device, and the result.

Right answers are folded into one digest for the round. A round with wrong answers reports the first wrong problem with
its digest, the right one and how many retests failed; the other wrong problems are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agents.collectors.canary.arithmetic import combine_digests
from agents.collectors.canary.problems import Problem

RETESTS = 3
"""How often a failed problem is computed again, to distinguish a broken device from a transient fault. Chosen."""
MAX_NAMED = 8
"""Most wrong problems that are named. Chosen."""

ComputeAnswer = Callable[[Problem, int], "str | None"]
"""Returns the digest of the device's answer; None if device or library cannot compute it."""


@dataclass(frozen=True, slots=True)
class CanaryTask:
    """The problems of one round. label: names the folded digest; known: right digests, empty if there are none."""

    label: str
    version: str
    problems: tuple[Problem, ...]
    variant: int
    known: Mapping[str, str]

    @property
    def canary(self) -> str:
        """The name of the round's digest."""
        return f"{self.label}.{self.variant}"

    def expected(self, problems: Iterable[Problem]) -> str | None:
        """Returns the folded digest of the right answers; None if one is unknown."""
        names = [p.instance(self.variant) for p in problems]
        return (
            combine_digests([self.known[name] for name in names]) if all(name in self.known for name in names) else None
        )

    def describe_start(self, device: str) -> dict[str, Any]:
        """Returns the line before a round, so that a device that does not survive it is known."""
        return {"device": device, "begin": True, "canary": self.canary, "version": self.version} | _expected_field(
            self.expected(self.problems)
        )


def run_round(
    task: CanaryTask,
    device: str,
    ask: ComputeAnswer,
    may_continue: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Any] | None:
    """Returns the result of a round; None if it was interrupted, or the device can compute none of it."""
    began, wall = clock(), time.time_ns() // 1000
    found: dict[Problem, str] = {}
    for problem in task.problems:
        if not may_continue():
            return None
        answer = ask(problem, task.variant)
        if answer is not None:
            found[problem] = answer
    if not found:
        return None
    wrong = [p for p, answer in found.items() if task.known.get(p.instance(task.variant), answer) != answer]
    result = _failed_result(task, wrong, found, ask) if wrong else _passed_result(task, found)
    lacking = len(task.problems) - len(found)
    result |= {"lacking": lacking} if lacking else {}
    took = clock() - began
    return {"device": device, "version": task.version, "runs": len(found), "began": wall, "took": took, **result}


def _passed_result(task: CanaryTask, found: Mapping[Problem, str]) -> dict[str, Any]:
    """Returns a result without errors. A device that lacks a format gets another name than one that has all."""
    every = len(found) == len(task.problems)
    part = "" if every else "-" + combine_digests([p.name for p in found])[:6]
    expected = task.expected(found)
    result = {"canary": f"{task.label}{part}.{task.variant}", "digest": combine_digests(list(found.values()))}
    return result | _expected_field(expected) | ({"golden": True} if expected else {})


def _failed_result(
    task: CanaryTask, wrong: list[Problem], found: Mapping[Problem, str], ask: ComputeAnswer
) -> dict[str, Any]:
    first = wrong[0]
    right = task.known[first.instance(task.variant)]
    return {
        "canary": first.instance(task.variant),
        "digest": found[first],
        "expected": right,
        "golden": False,
        "format": first.format,
        "range": first.range,
        "wrong": [p.name for p in wrong[:MAX_NAMED]],
        "again": sum(ask(first, task.variant) != right for _ in range(RETESTS)),
    }


def _expected_field(digest: str | None) -> dict[str, str]:
    return {} if digest is None else {"expected": digest}
