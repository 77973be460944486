"""One round: all problems of a kind once, on one device, and what is told of it.

Right answers are folded into one digest for the round. Of a round with wrong ones, the first wrong problem is told with
its digest, the right one and how often it went wrong again at once; the others are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agents.collectors.canary.arithmetic import combined
from agents.collectors.canary.problems import Problem

AGAIN = 3
"""How often a problem that went wrong is computed once more: tells a broken device from a passing upset. Chosen."""
NAMED = 8
"""Most wrong problems that are named. Chosen."""

Asked = Callable[[Problem, int], "str | None"]
"""Digest of the device's answer; None where device or library cannot compute it."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked of every device: label names the round's folded digest; known is empty where nobody can know."""

    label: str
    version: str
    problems: tuple[Problem, ...]
    variant: int
    known: Mapping[str, str]

    @property
    def canary(self) -> str:
        return f"{self.label}.{self.variant}"

    def expected(self, problems: Iterable[Problem]) -> str | None:
        """The folded digest of right answers."""
        names = [p.instance(self.variant) for p in problems]
        return combined([self.known[name] for name in names]) if all(name in self.known for name in names) else None

    def opening(self, device: str) -> dict[str, Any]:
        """What is said before a device begins, so that one that does not survive it is known."""
        return {"device": device, "begin": True, "canary": self.canary, "version": self.version} | _expected(
            self.expected(self.problems)
        )


def asked(
    task: Task,
    device: str,
    ask: Asked,
    go_on: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Any] | None:
    """The result of a round; None if it was not let finish, or the device can compute none of it."""
    began, wall = clock(), time.time_ns() // 1000
    found: dict[Problem, str] = {}
    for problem in task.problems:
        if not go_on():
            return None
        answer = ask(problem, task.variant)
        if answer is not None:
            found[problem] = answer
    if not found:
        return None
    wrong = [p for p, answer in found.items() if task.known.get(p.instance(task.variant), answer) != answer]
    result = _wrong(task, wrong, found, ask) if wrong else _right(task, found)
    lacking = len(task.problems) - len(found)
    result |= {"lacking": lacking} if lacking else {}
    took = clock() - began
    return {"device": device, "version": task.version, "runs": len(found), "began": wall, "took": took, **result}


def _right(task: Task, found: Mapping[Problem, str]) -> dict[str, Any]:
    """A device that lacks a format is asked another question than one that has all."""
    every = len(found) == len(task.problems)
    part = "" if every else "-" + combined([p.name for p in found])[:6]
    expected = task.expected(found)
    result = {"canary": f"{task.label}{part}.{task.variant}", "digest": combined(list(found.values()))}
    return result | _expected(expected) | ({"golden": True} if expected else {})


def _wrong(task: Task, wrong: list[Problem], found: Mapping[Problem, str], ask: Asked) -> dict[str, Any]:
    first = wrong[0]
    right = task.known[first.instance(task.variant)]
    return {
        "canary": first.instance(task.variant),
        "digest": found[first],
        "expected": right,
        "golden": False,
        "format": first.format,
        "range": first.range,
        "wrong": [p.name for p in wrong[:NAMED]],
        "again": sum(ask(first, task.variant) != right for _ in range(AGAIN)),
    }


def _expected(digest: str | None) -> dict[str, str]:
    return {} if digest is None else {"expected": digest}
