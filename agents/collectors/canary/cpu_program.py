"""The CPU canary's program: one round on each core in turn, pinned to it; a line of JSON before and after each.

    python -m agents.collectors.canary.cpu_program --cores 0,1,2 --seconds 1.8 --variant 3

It is a separate program: it holds no memory between two runs, can wait for a busy core, and a core that crashes it
harms nothing else.
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

from agents.collectors.canary.arithmetic import Corrupt, compute_problem, digest_array
from agents.collectors.canary.known_answers import load_known_answers
from agents.collectors.canary.problems import PROBLEMS, VARIANTS, VERSION, Problem
from agents.collectors.canary.rounds import CanaryTask, run_round
from pipeline.runtime.supervise import set_parent_death_signal

WriteLine = Callable[[Mapping[str, Any]], None]
LABEL = "cpu"
MAX_REST_S = 0.5
"""Longest rest between two problems, such as the one after the program's own start. Chosen."""


def write_line(line: Mapping[str, Any]) -> None:
    """Writes one line of JSON."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def build_task(variant: int) -> CanaryTask:
    """Returns the round with one set of inputs."""
    return CanaryTask(LABEL, VERSION, PROBLEMS, variant, load_known_answers().get(VERSION, {}))


def lower_priority() -> None:
    """Lets everything else that needs this core run first."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):  # forbidden, or no Linux
        with contextlib.suppress(OSError):
            os.nice(19)


def compute_answer(problem: Problem, variant: int, touch: Corrupt | None = None) -> str:
    """Returns the digest of this core's answer. A core with wrong addresses or lengths may raise anything."""
    try:
        return digest_array(compute_problem(problem, variant, touch))
    except Exception as error:  # noqa: BLE001 - the error is the core's answer, and a wrong one
        return f"raised {type(error).__name__}"


@dataclass
class RestingPace:
    """Called before each problem: rests `rest_factor` times as long as the last problem took; whether time is left.

    Otherwise the program would use up a service's quota of processor time, and stall the service's other processes.
    """

    rest_factor: float = 0.0
    until: float = math.inf
    cpu_before: float = field(default_factory=time.process_time)

    def __call__(self) -> bool:
        took, self.cpu_before = time.process_time() - self.cpu_before, time.process_time()
        if self.rest_factor:
            time.sleep(min(MAX_REST_S, self.rest_factor * took))
        return time.monotonic() < self.until


def run_rounds(
    cores: Iterable[int],
    seconds: float,
    variant: int,
    patience: float,
    pace: RestingPace,
    write: WriteLine,
    touch: Corrupt | None,
) -> int:
    """Tests the cores until `seconds` of processor time are used; returns how many were tested."""
    task, parent, count = build_task(variant), os.getppid(), 0
    for core in cores:
        if os.getppid() != parent or (count and time.process_time() >= seconds):
            break
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:  # offline, or not in our set of processors
            write({"device": str(core), "skipped": error.strerror})
            continue
        count += 1
        pace.until = time.monotonic() + patience
        write(task.describe_start(str(core)))
        result = run_round(task, str(core), partial(compute_answer, touch=touch), pace)
        write(result or {"device": str(core), "yielded": True})
    return count


def main(words: list[str] | None = None, touch: Corrupt | None = None) -> int:
    """Runs the program. `touch` is for tests: it may corrupt the computation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cores", default="", help="numbers of processors, separated by commas; default: all allowed")
    parser.add_argument("--seconds", type=float, default=1.0, help="processor time in total; at least one round")
    parser.add_argument("--variant", type=int, default=0, help="which set of inputs")
    parser.add_argument("--minutes", type=float, default=0.0, help="burn-in: run this long, with all inputs in turn")
    parser.add_argument("--rest", type=float, default=0.0, help="rest so many times as long as each problem took")
    parser.add_argument("--patience", type=float, default=10.0, help="longest wait for one busy core, in seconds")
    options = parser.parse_args(words)
    set_parent_death_signal(signal.SIGKILL)
    cores = [int(core) for core in options.cores.split(",") if core] or sorted(os.sched_getaffinity(0))
    seconds, turn, pace = options.seconds, options.variant, RestingPace(options.rest)
    if options.minutes:
        seconds, until = math.inf, time.monotonic() + 60 * options.minutes
    else:
        lower_priority()
        until = math.inf
    # on a node with few cores there is time for more than one set of inputs
    while run_rounds(cores, seconds, turn % VARIANTS, options.patience, pace, write_line, touch):
        turn += 1
        if time.process_time() >= seconds or time.monotonic() >= until:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
