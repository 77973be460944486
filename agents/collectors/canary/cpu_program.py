"""The CPU canary's program: one round on each core in turn, pinned to it; a line of JSON before and after each.

    python -m agents.collectors.canary.cpu_program --cores 0,1,2 --seconds 1.8 --variant 3

A program of its own, started now and then: it takes no memory between, may wait for a busy core as long as it must, and
a core so wrong that it kills the program kills nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agents.collectors.canary.arithmetic import Touch, compute, digest
from agents.collectors.canary.known_answers import known
from agents.collectors.canary.problems import PROBLEMS, VARIANTS, VERSION, Problem
from agents.collectors.canary.rounds import Task, asked
from pipeline.runtime.supervise import end_with_parent

Emit = Callable[[Mapping[str, Any]], None]
LABEL = "cpu"
LONGEST_REST_S = 0.5
"""Longest rest between two problems, such as the one after the program's own start. Chosen."""


def emit(line: Mapping[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def task(variant: int) -> Task:
    """The round with one set of inputs."""
    return Task(LABEL, VERSION, PROBLEMS, variant, known().get(VERSION, {}))


def step_back() -> None:
    """Whatever else wants this core goes first."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):  # forbidden, or no Linux
        with contextlib.suppress(OSError):
            os.nice(19)


def answer(problem: Problem, variant: int, touch: Touch | None = None) -> str:
    """The digest of this core's answer. A core that computes wrong addresses or lengths may raise anything."""
    try:
        return digest(compute(problem, variant, touch))
    except Exception as error:  # noqa: BLE001 - what it raised is its answer, and a wrong one
        return f"raised {type(error).__name__}"


@dataclass
class Pace:
    """Asked before each problem whether there is time for it; rests `rest` times as long as the last one took.

    A service with a quota of processor time would else have used it up, and its other processes would stand still.
    """

    rest: float = 0.0
    until: float = math.inf
    used: float = field(default_factory=time.process_time)

    def __call__(self) -> bool:
        took, self.used = time.process_time() - self.used, time.process_time()
        if self.rest:
            time.sleep(min(LONGEST_REST_S, self.rest * took))
        return time.monotonic() < self.until


def rounds(
    cores: Iterable[int],
    seconds: float,
    variant: int,
    patience: float,
    pace: Pace,
    tell: Emit,
    touch: Touch | None,
) -> int:
    """Goes over the cores until `seconds` of processor time are used; how many it came to."""
    question, parent, count = task(variant), os.getppid(), 0
    for core in cores:
        if os.getppid() != parent or (count and time.process_time() >= seconds):
            break
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:  # taken offline, or not ours to use
            tell({"device": str(core), "skipped": error.strerror})
            continue
        count += 1
        pace.until = time.monotonic() + patience
        tell(question.opening(str(core)))
        result = asked(question, str(core), partial(answer, touch=touch), pace)
        tell(result or {"device": str(core), "yielded": True})
    return count


def main(words: list[str] | None = None, touch: Touch | None = None) -> int:
    """`touch` is for tests: it may corrupt what is computed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cores", default="", help="numbers of processors, separated by commas; default: all allowed")
    parser.add_argument("--seconds", type=float, default=1.0, help="processor time in all, a round at least")
    parser.add_argument("--variant", type=int, default=0, help="which set of inputs")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="go on so long, with all inputs in turn, for a burn-in"
    )
    parser.add_argument("--rest", type=float, default=0.0, help="rests so many times as long as a problem took")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that one busy core may keep us waiting")
    options = parser.parse_args(words)
    end_with_parent(signal.SIGKILL)
    cores = [int(core) for core in options.cores.split(",") if core] or sorted(os.sched_getaffinity(0))
    seconds, turn, pace = options.seconds, options.variant, Pace(options.rest)
    if options.minutes:
        seconds, until = math.inf, time.monotonic() + 60 * options.minutes
    else:
        step_back()
        until = math.inf
    # a node of few cores comes to more than one set of inputs
    while rounds(cores, seconds, turn % VARIANTS, options.patience, pace, emit, touch):
        turn += 1
        if time.process_time() >= seconds or time.monotonic() >= until:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
