"""Canaries: known problems on each core, and on idle GPUs, whose answers are told as events of kind `digest`.

Both run in programs of their own: this collector starts them, listens and counts.

How much memory the kernel lets this process and its children have: that of its control group and those above.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, Rhythm, wall_clock
from agents.collectors.canary.child_process import program
from agents.collectors.canary.ledger import Ledger
from agents.collectors.canary.problems import VARIANTS
from agents.collectors.canary.schedule import Cores, Turns, cores
from agents.collectors.gpu.slots import memory_of_the_service
from pipeline.config.settings import constraint
from pipeline.model.records import SECOND

PYTORCH = 8 << 30
"""Bytes that a worker with PyTorch and CUDA may need on the host; chosen: it takes 3 to 5 GiB."""


def limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes; infinite where nobody says. A service is stopped whole when one of its processes exceeds it."""
    lowest = math.inf
    for line in _lines(proc):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.strip("/")
        for place in (folder, *folder.parents):
            lowest = min(lowest, _bytes(place / name))
            if place == top:
                break
    return lowest


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no control groups
        return []


def _bytes(path: Path) -> float:
    try:
        return float(int(path.read_text()))
    except (OSError, ValueError):  # the root has none, and "max" is none
        return math.inf


COUNTS_S = 3600.0
"""How often counts are told: they serve to see how much was tested, over days. Chosen."""
GPU_CARE_S = 900.0
"""Seconds that the GPUs' program gets beside waiting and computing: it loads torch once for each GPU. Chosen."""
REST = 20.0
"""How many times as long as a problem took the program rests after it: 5 % of a core while it runs, so that a service
with a quota of 10 % (deploy/fleetpulse-agent.service) has enough left. Chosen."""
MOST_TEXTS = 16
"""Different faults of its programs that are said on stderr. Chosen."""
CORE_S = 10.0
"""Seconds that one busy core may keep the canary waiting before it goes on. Chosen."""


@dataclass
class Canary(Collector):
    """canary.* of each core and gpu.canary_* of each GPU that ran one. `share` is of one core, and of each GPU."""

    name: ClassVar[str] = "canary"
    signals: ClassVar[tuple[str, ...]] = (
        *("canary.runs", "canary.mismatches", "canary.yields", "canary.busy_time"),
        *("gpu.canary_runs", "gpu.canary_mismatches", "gpu.canary_yields", "gpu.canary_busy_time"),
    )
    events: ClassVar[tuple[str, ...]] = ("digest",)
    interval: float = 10.0
    cpu: bool = True
    gpu: bool = True
    share: float = field(
        default=0.001, metadata=constraint("a share of time, above 0 and at most 1", lambda v: 0 < v <= 1)
    )
    every: float = field(default=1800.0, metadata=constraint("more than 0 s", lambda v: v > 0))
    gpu_every: float = field(default=21600.0, metadata=constraint("more than 0 s", lambda v: v > 0))
    idle: float = 300.0
    tell: float = 21600.0
    driver: Path = Path("/proc/driver/nvidia/version")
    seen: Path | None = field(default_factory=memory_of_the_service)
    _node: str = field(default="", init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _rhythm: Rhythm = field(default_factory=lambda: Rhythm(""), init=False, repr=False)
    _cores: Cores = field(default_factory=lambda: Cores([]), init=False, repr=False)
    _cpu: Turns | None = field(default=None, init=False, repr=False)
    _gpu: Turns | None = field(default=None, init=False, repr=False)
    _rest: float = field(default=REST, init=False, repr=False)
    _said: set[str] = field(default_factory=set, init=False, repr=False)

    def wanted(self) -> bool:
        return self.cpu or self.gpu

    def open(self, node: str) -> None:
        self.close()
        self._node, self._rhythm = node, Rhythm(node, self._now)
        first = zlib.crc32(node.encode()) % 1000 / 1000
        if self.cpu:
            self._cores = Cores(cores())
            ledger = Ledger(lambda core: f"cpu:{node}.{core}", self.tell, self._now)
            for core in self._cores.all:
                ledger.of(str(core))
            longest = max(self.every, 60.0)
            self._cpu = Turns(self.every, self.share, longest, ledger, self._cpu_words, first, self._monotonic)
            self._cpu.heard = self._cores.heard
        absent = self._no_gpu() if self.gpu else "`cpu` and `gpu` are off"
        if not absent:
            ledger = Ledger(lambda index: f"gpu:{node}.{index}", self.tell, self._now)
            longest = self.idle + GPU_CARE_S + 64 * self.share * self.gpu_every
            # its share is of the GPUs' time and is told to the program; of processor time it may take what that needs
            self._gpu = Turns(self.gpu_every, 1.0, longest, ledger, self._gpu_words, first, self._monotonic)
        if self._cpu is None and self._gpu is None:
            raise NoData(f"no canary to run: {absent}")
        if self.gpu and absent and self.driver.exists():
            self._say(f"GPUs are not tested: {absent}")

    def _no_gpu(self) -> str:
        """Why no canary can run on GPUs; empty if one can."""
        if not self.driver.exists():
            return f"no NVIDIA driver: {self.driver} is not there"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'fleetpulse[torch]'"
        if (room := limit()) < PYTORCH:
            return f"the service may use {room / 2**20:.0f} MiB, PyTorch needs {PYTORCH >> 20}: raise MemoryMax="
        return ""

    def _variant(self, every: float) -> int:
        """The whole fleet works on the same inputs at a time."""
        return int(self._now() // max(1, round(every * SECOND)) % VARIANTS)

    def _cpu_words(self, seconds: float) -> list[str]:
        watched = self._cpu.ledger.watched() if self._cpu else []
        order = ",".join(map(str, self._cores.order(watched)))
        what = (
            "--seconds",
            f"{seconds:.3f}",
            "--variant",
            self._variant(self.every),
            "--patience",
            CORE_S,
            "--rest",
            self._rest,
        )
        return program("agents.collectors.canary.cpu_program", "--cores", order, *what)

    def _gpu_words(self, _: float) -> list[str]:
        seconds = self.share * self.gpu_every
        seen = ("--seen", self.seen) if self.seen else ()
        what = ("--seconds", f"{seconds:.3f}", "--variant", self._variant(self.gpu_every), "--idle", self.idle)
        return program("agents.collectors.canary.gpu_program", *what, *seen)

    def read(self) -> tuple[Reading, ...]:
        cpu = self._cpu.look() if self._cpu else []
        gpu = self._gpu.look() if self._gpu else []
        for turns in (self._cpu, self._gpu):
            if turns is not None and turns.failed:
                self._say(turns.failed)
        tell = self._rhythm.due(COUNTS_S)
        found = [_counts("canary", "canary.", self._cpu), _counts("gpu", "gpu.canary_", self._gpu)] if tell else []
        found += [Reading("node", (), {}, (*cpu, *gpu))] if cpu or gpu else []
        return tuple(reading for reading in found if reading.entities or reading.events)

    def _say(self, text: str) -> None:
        """A line on stderr, once for each text: what ends one canary must not end the collector of both."""
        if text not in self._said and len(self._said) < MOST_TEXTS:
            self._said.add(text)
            sys.stderr.write(f"collector canary: {text}\n")

    def inventory(self) -> Mapping[str, Device]:
        found: dict[str, Device] = {}
        for turns in (self._cpu, self._gpu):
            if turns is not None:
                found |= {turns.ledger.entity(d): Device((f"node:{self._node}",)) for d in turns.ledger.tallies}
        return found

    def close(self) -> None:
        for turns in (self._cpu, self._gpu):
            if turns is not None:
                turns.close()
        self._cpu = self._gpu = None


def _counts(device_class: str, prefix: str, turns: Turns | None) -> Reading:
    """Counts of all devices of one kind since the agent's start."""
    if turns is None:
        return Reading(device_class, (), {})
    tallies = list(turns.ledger.tallies.values())
    columns = {
        f"{prefix}runs": np.array([t.runs for t in tallies], np.uint64),
        f"{prefix}mismatches": np.array([t.mismatches for t in tallies], np.uint64),
        f"{prefix}yields": np.array([t.yields for t in tallies], np.uint64),
        f"{prefix}busy_time": np.array([1000 * t.time for t in tallies]).astype(np.uint64),
    }
    return Reading(device_class, tuple(map(turns.ledger.entity, turns.ledger.tallies)), columns)
