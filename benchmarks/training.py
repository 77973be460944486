"""The cost of reporting a training step: for the training script, and for the agent that receives it.

    python -m benchmarks.training [--steps 20000] [--ranks 8] [--seconds 10]

A step is all that a script calls: step, computed, communicated, loss, gradient_norm. With an agent: the real collector
in a separate process that reads once a second. Without: no socket at the path. Full: a socket without a reader. One
step after the other shows what the hook itself costs (budget: 20 microseconds on average, docs/training.md); a step
every 5 ms includes the cost of waking the processor; a step after a matrix product includes the cost of cold caches.
`nothing` measures only these: the same calls, which do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from agents.collectors.training.agent_socket import SOCKET_VARIABLE
from agents.training import Steps, replica_digest

COLLECTOR = """
import select, sys, time, resource
from agents.collectors.training.training import Training
collector = Training(socket=sys.argv[1])
collector.open("n1")
before = resource.getrusage(resource.RUSAGE_SELF)
began = time.monotonic()
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 1.0)[0]:
    collector.read()
after = resource.getrusage(resource.RUSAGE_SELF)
used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(100 * used / (time.monotonic() - began))
collector.close()
"""
SCRIPT = """
import sys, time
from agents.training import Steps
steps, end, pause = Steps("bench", int(sys.argv[1])), time.monotonic() + float(sys.argv[2]), float(sys.argv[3])
while time.monotonic() < end:
    with steps.step(tokens=4096) as step:
        step.computed()
        step.communicated()
        step.loss(1.0)
        step.gradient_norm(1.0)
    time.sleep(pause)
print(steps._step, steps.dropped)
"""


class Nothing:
    """Has the interface of Steps and of a step, and does nothing."""

    dropped = 0

    def step(self, tokens: int) -> Nothing:
        return self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def computed(self) -> None:
        pass

    communicated = computed

    def loss(self, value: float) -> None:
        pass

    gradient_norm = loss


def measured(steps: Steps | Nothing, count: int, pause: float = 0.0, between: Callable[[], object] = int) -> str:
    """One line of figures over `count` steps; between two of them it sleeps, or calls `between`."""
    took = np.empty(count)
    for number in range(count):
        began = time.perf_counter_ns()
        with steps.step(tokens=4096) as step:
            step.computed()
            step.communicated()
            step.loss(1.0)
            step.gradient_norm(1.0)
        took[number] = time.perf_counter_ns() - began
        if pause:
            time.sleep(pause)
        between()
    mean, p50, p99, most = (x / 1e3 for x in (took.mean(), *np.percentile(took, (50, 99)), took.max()))
    return f"mean {mean:6.2f}  median {p50:6.2f}  p99 {p99:6.2f}  max {most:8.1f} us  dropped {steps.dropped}"


@contextlib.contextmanager
def agent(path: str) -> Iterator[list[float]]:
    """Runs the collector in a separate process; returns percent of a core that it used, after its end."""
    used: list[float] = []
    words = [sys.executable, "-c", COLLECTOR, path]
    running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    running.stdout.readline()
    yield used
    used.append(float(running.communicate("\n")[0]))


def product() -> Callable[[], object]:
    """Multiplies matrices for about 5 ms: fills the caches as training does, and keeps the processor awake."""
    matrix = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    return lambda: matrix @ matrix


def many(ranks: int, seconds: float, pause: float) -> str:
    """Runs several scripts in parallel; returns steps and drops of all."""
    words = [sys.executable, "-c", SCRIPT]
    running = [
        subprocess.Popen([*words, str(rank), str(seconds), str(pause)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    counts = [tuple(map(int, script.communicate()[0].split())) for script in running]
    return f"{sum(steps for steps, _ in counts)} steps, {sum(dropped for _, dropped in counts)} dropped"


def main() -> int:
    """Prints figures, a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.environ[SOCKET_VARIABLE] = str(Path(folder) / "training.sock")
        print("without an agent             ", measured(Steps("bench", 0), chosen.steps))
        with agent(path):
            print("with one, one by one         ", measured(Steps("bench", 0), chosen.steps))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
            reader.bind(path)
            print(
                "each one received immediately", measured(Steps("bench", 0), chosen.steps, 0, lambda: reader.recv(1000))
            )
            os.unlink(path)
        few = min(chosen.steps, 1000)
        print("nothing, each 5 ms           ", measured(Nothing(), few, 0.005))
        print("without an agent, each 5 ms  ", measured(Steps("bench", 0), few, 0.005))
        with agent(path):
            print("with one, each 5 ms          ", measured(Steps("bench", 0), few, 0.005))
        with agent(path):
            print("with one, product between    ", measured(Steps("bench", 0), few, 0.0, product()))
        print("nothing, product between     ", measured(Nothing(), few, 0.0, product()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as full:
            full.bind(path)
            print("with a full queue            ", measured(Steps("bench", 0), chosen.steps))
            os.unlink(path)
        with agent(path) as used:
            time.sleep(chosen.seconds)
        print(f"agent, silent                 {used[0]:.3f} % of a core")
        for pause in (1.0, 0.1):
            with agent(path) as used:
                said = many(chosen.ranks, chosen.seconds, pause)
            print(f"agent, {chosen.ranks} ranks each {pause:g} s       {used[0]:.3f} % of a core, {said}")
    parameters = np.random.default_rng(0).standard_normal(64 << 20, np.float32)
    began = time.perf_counter()
    replica_digest(parameters)
    print(f"digest of 256 MiB in NumPy    {(time.perf_counter() - began) * 1e3:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
