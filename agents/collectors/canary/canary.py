"""The collector `canary`: known problems on each core and on idle GPUs; answers are events of kind `digest`.

Both run in programs of their own, which this collector starts and reads.
"""

from __future__ import annotations

import importlib.util
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading, SamplingSchedule, wall_clock
from agents.collectors.canary.child_process import module_command
from agents.collectors.canary.ledger import ResultLedger
from agents.collectors.canary.problems import VARIANTS
from agents.collectors.canary.schedule import CoreRotation, ProgramSchedule, list_cores
from agents.collectors.gpu.slots import default_state_file
from pipeline.config.settings import constraint
from pipeline.model.records import SECOND
from pipeline.runtime.log_line import write_log_line

PYTORCH_BYTES = 8 << 30
"""Bytes of host memory for a worker with PyTorch and CUDA. Chosen: it takes 3 to 5 GiB."""


def memory_limit(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Returns the memory limit of this process' control group and its parents, in bytes; infinite if there is none.

    systemd stops a whole service if one of its processes exceeds it.
    """
    lowest = math.inf
    for line in _read_lines(proc):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = top / path.strip("/")
        for place in (folder, *folder.parents):
            lowest = min(lowest, _read_limit(place / name))
            if place == top:
                break
    return lowest


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no control groups
        return []


def _read_limit(path: Path) -> float:
    try:
        return float(int(path.read_text()))
    except (OSError, ValueError):  # the root has none, and "max" is none
        return math.inf


COUNTS_INTERVAL_S = 3600.0
"""Seconds between two reports of the counts, which show over days how much was tested. Chosen."""
GPU_START_S = 900.0
"""Seconds for the GPUs' program beside waiting and computing: it loads torch once for each GPU. Chosen."""
REST_FACTOR = 20.0
"""The program rests so many times as long as each problem took: 5 % of a core while it runs, so that a service with a
quota of 10 % (deploy/systemd/fleetpulse-agent.service) has enough left. Chosen."""
MAX_LOGGED = 16
"""Most different problems that are logged. Chosen."""
CORE_PATIENCE_S = 10.0
"""Longest wait for one busy core, in seconds. Chosen."""


@dataclass
class Canary(Collector):
    """Reports canary.* of each core and gpu.canary_* of each tested GPU.

    share: of one core's time, and of each GPU's. every, gpu_every: seconds between two runs. idle: seconds for which a
    GPU must be idle. tell: seconds between two events of a healthy device. driver, seen: NVIDIA's version file, and the
    state file of the nvml collector.
    """

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
    seen: Path | None = field(default_factory=default_state_file)
    _node: str = field(default="", init=False, repr=False)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _monotonic: Callable[[], float] = field(default=time.monotonic, init=False, repr=False)
    _rhythm: SamplingSchedule = field(default_factory=lambda: SamplingSchedule(""), init=False, repr=False)
    _cores: CoreRotation = field(default_factory=lambda: CoreRotation([]), init=False, repr=False)
    _cpu_schedule: ProgramSchedule | None = field(default=None, init=False, repr=False)
    _gpu_schedule: ProgramSchedule | None = field(default=None, init=False, repr=False)
    _rest_factor: float = field(default=REST_FACTOR, init=False, repr=False)
    _logged: set[str] = field(default_factory=set, init=False, repr=False)

    def has_work(self) -> bool:
        """See `Collector.has_work`."""
        return self.cpu or self.gpu

    def open(self, node: str) -> None:
        """See `Collector.open`."""
        self.close()
        self._node, self._rhythm = node, SamplingSchedule(node, self._now)
        first = zlib.crc32(node.encode()) % 1000 / 1000
        if self.cpu:
            self._cores = CoreRotation(list_cores())
            ledger = ResultLedger(lambda core: f"cpu:{node}.{core}", self.tell, self._now)
            for core in self._cores.cores:
                ledger.get_tally(str(core))
            longest = max(self.every, 60.0)
            self._cpu_schedule = ProgramSchedule(
                self.every, self.share, longest, ledger, self._cpu_command, first, self._monotonic
            )
            self._cpu_schedule.on_line = self._cores.advance
        absent = self._why_no_gpu() if self.gpu else "`cpu` and `gpu` are off"
        if not absent:
            ledger = ResultLedger(lambda index: f"gpu:{node}.{index}", self.tell, self._now)
            longest = self.idle + GPU_START_S + 64 * self.share * self.gpu_every
            # `share` is of the GPUs' time, and passed to the program; its processor time is not limited
            self._gpu_schedule = ProgramSchedule(
                self.gpu_every, 1.0, longest, ledger, self._gpu_command, first, self._monotonic
            )
        if self._cpu_schedule is None and self._gpu_schedule is None:
            raise NoData(f"no canary to run: {absent}")
        if self.gpu and absent and self.driver.exists():
            self._log_once(f"GPUs are not tested: {absent}")

    def _why_no_gpu(self) -> str:
        """Returns why no canary can run on GPUs; empty if one can."""
        if not self.driver.exists():
            return f"no NVIDIA driver: {self.driver} is not there"
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed: pip install 'fleetpulse[torch]'"
        if (room := memory_limit()) < PYTORCH_BYTES:
            return f"the service may use {room / 2**20:.0f} MiB, PyTorch needs {PYTORCH_BYTES >> 20}: raise MemoryMax="
        return ""

    def _current_variant(self, every: float) -> int:
        """Returns the set of inputs; the whole fleet uses the same at a time."""
        return int(self._now() // max(1, round(every * SECOND)) % VARIANTS)

    def _cpu_command(self, seconds: float) -> list[str]:
        watched = self._cpu_schedule.ledger.list_watched() if self._cpu_schedule else []
        order = ",".join(map(str, self._cores.order(watched)))
        what = (
            "--seconds",
            f"{seconds:.3f}",
            "--variant",
            self._current_variant(self.every),
            "--patience",
            CORE_PATIENCE_S,
            "--rest",
            self._rest_factor,
        )
        return module_command("agents.collectors.canary.cpu_program", "--cores", order, *what)

    def _gpu_command(self, _: float) -> list[str]:
        seconds = self.share * self.gpu_every
        seen_option = ("--seen", self.seen) if self.seen else ()
        what = ("--seconds", f"{seconds:.3f}", "--variant", self._current_variant(self.gpu_every), "--idle", self.idle)
        return module_command("agents.collectors.canary.gpu_program", *what, *seen_option)

    def read(self) -> tuple[Reading, ...]:
        """Returns the new events, and every hour the counts."""
        cpu = self._cpu_schedule.poll() if self._cpu_schedule else []
        gpu = self._gpu_schedule.poll() if self._gpu_schedule else []
        for turns in (self._cpu_schedule, self._gpu_schedule):
            if turns is not None and turns.last_failure:
                self._log_once(turns.last_failure)
        counts_due = self._rhythm.due(COUNTS_INTERVAL_S)
        found = (
            [
                _count_reading("canary", "canary.", self._cpu_schedule),
                _count_reading("gpu", "gpu.canary_", self._gpu_schedule),
            ]
            if counts_due
            else []
        )
        found += [Reading("node", (), {}, (*cpu, *gpu))] if cpu or gpu else []
        return tuple(reading for reading in found if reading.entities or reading.events)

    def _log_once(self, text: str) -> None:
        """Logs each text once; a failure of one canary must not end the collector of both."""
        if text not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(text)
            write_log_line(f"collector canary: {text}")

    def inventory(self) -> Mapping[str, Device]:
        """Returns the tested cores and GPUs."""
        found: dict[str, Device] = {}
        for turns in (self._cpu_schedule, self._gpu_schedule):
            if turns is not None:
                found |= {turns.ledger.entity(d): Device((f"node:{self._node}",)) for d in turns.ledger.tallies}
        return found

    def close(self) -> None:
        """See `Collector.close`."""
        for turns in (self._cpu_schedule, self._gpu_schedule):
            if turns is not None:
                turns.close()
        self._cpu_schedule = self._gpu_schedule = None


def _count_reading(device_class: str, prefix: str, turns: ProgramSchedule | None) -> Reading:
    """Returns the counts of all devices of one kind since the agent's start."""
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
