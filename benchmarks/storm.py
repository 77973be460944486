"""A day of faults in minutes: the real agent, its real processes and spool, under a simulated clock.

    python -m benchmarks.storm [--hours 24] [--interval 5] [--every 120] [--seed 1] [--patience 0.4]

Runs all collectors over the files of node_files.py and a stub of NVML, and four faulty ones (trouble.py). About every
`every` seconds of simulated time one fault occurs: a collector hangs (a FIFO, the driver's library), fails, ends, sends
garbage; a worker or the process that forks them is killed or stopped; the spool's disk is full. Exits with 1 unless the
agent survived, each tick is stored or counted as lost, each hang was reported within 30 s, all collectors recovered and
nothing leaked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from agents.collectors.registry import configured_collectors
from agents.node.agent import Agent
from benchmarks import node_files
from benchmarks.mischief import FaultInjector
from benchmarks.stormwatch import Watch, report
from benchmarks.trouble import KINDS
from pipeline.config.sections import Agent as Section
from pipeline.config.sections import Config, Spool
from pipeline.model.records import SECOND
from tests.agents import nvml_stub

ROOT = Path(__file__).parents[1]
START = 1_800_000_000 * SECOND
CALM_S = 3600.0
"""Quiet time at the end, so that all can recover: the longest wait before a restart is 600 s, possibly twice."""
DISK = 8 << 20


class StormClock:
    """The agent's clock: waiting takes no real time and triggers the faults. Ends after `hours`."""

    def __init__(self, hours: float, interval: float) -> None:
        self.elapsed, self._end, self._interval = 0.0, hours * 3600, interval
        self.mischief: FaultInjector | None = None
        self.watch: Watch | None = None

    def now(self) -> int:
        return START + round(self.elapsed * SECOND)

    def monotonic(self) -> float:
        return self.elapsed

    def wait(self, seconds: float, stop: threading.Event) -> bool:
        assert self.watch is not None
        assert self.mischief is not None
        if math.isclose(self.elapsed % self._interval, 0, abs_tol=1e-6):  # after a tick, not on the way to the next
            self.watch.run_between_ticks(self.elapsed)
            self.mischief.run_between_ticks(self.elapsed, calm=self.elapsed > self._end - min(CALM_S, self._end / 2))
        self.elapsed += seconds
        return self.elapsed > self._end


def storm(folder: Path, options: argparse.Namespace) -> int:
    """Runs the storm in this process, whose environment has the stub; returns 0 if all checks passed."""
    tables = {name: dict(values) for name, values in _tables(folder).items()}
    (folder / "modes").mkdir()
    troubles = [kind(mode=folder / "modes" / kind.name) for kind in KINDS]
    for one in troubles:
        one.mode.write_text("healthy\n")
    clock = StormClock(options.hours, options.interval)
    config = Config(agent=Section("n1", options.interval), spool=Spool(folder / "spool", 1 << 21, 1 << 18, 1 << 18))
    watch = Watch(folder / "spool", clock.now)
    collectors = [*configured_collectors(tables), *troubles]
    agent = Agent(config, collectors, clock, watch, options.patience / options.interval)
    watch.agent = agent
    clock.watch = watch
    clock.mischief = FaultInjector(agent, folder, options.every, random.Random(options.seed), watch)
    began = time.monotonic()
    try:
        agent.run(threading.Event())
    finally:
        clock.mischief.repair_all()
    watch.finish()
    return report(watch, clock.mischief, clock.elapsed, time.monotonic() - began)


def _tables(folder: Path) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = json.loads((folder / "tables.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=120.0, help="mean time between two faults, s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=0.4, help="real s that a tick waits for its collectors")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return storm(options.inside, options)
    if nvml_stub.compiler() is None:
        print("benchmarks.storm: no C compiler for the stub of NVML; apt-get install gcc", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        return _in_its_environment(Path(name))


def _in_its_environment(folder: Path) -> int:
    """Runs this program again, so that the loader finds the stub; on a small separate disk if possible."""
    tables, environ = node_files.build(folder)
    (folder / "tables.json").write_text(json.dumps(tables, default=str))
    (folder / "spool").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder / "spool")]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        print("no right to mount a small disk: the storm runs without a full disk", file=sys.stderr)
    try:
        words = [sys.executable, "-m", "benchmarks.storm", *sys.argv[1:], "--inside", str(folder)]
        more = {"PYTHONPATH": str(ROOT), "STUB_CONTROL": str(folder / "control")}
        return subprocess.run(words, cwd=ROOT, env=environ | more).returncode
    finally:
        if mounted:
            subprocess.run(["umount", str(folder / "spool")], check=True)


if __name__ == "__main__":
    os.environ.pop("NOTIFY_SOCKET", None)
    sys.exit(main())
