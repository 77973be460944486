"""The GPU canary's program: finds GPUs that have been idle, runs a worker on each in turn, and ends it for any job.

    python -m agents.collectors.canary.gpu_program --seconds 21.6 --idle 300 --variant 3

It asks NVIDIA's driver alone and never loads torch: the worker does, for one GPU, and is killed within POLL_S of the
first compute process of somebody else. What the killed worker was about is not told.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.collector import NoData
from agents.collectors.canary.child_process import Child, program
from agents.collectors.canary.cpu_program import Emit, emit
from agents.collectors.gpu.library import Driver
from agents.collectors.gpu.slots import Places, address, fitted, recall
from pipeline.runtime.supervise import end_with_parent

POLL_S = 0.1
"""How often a GPU with a worker is looked at (detection.md section 3: yield when a compute process appears)."""
WATCH_S = 1.0
"""How often GPUs are looked at until they count as idle. Chosen."""
IDLE_MEMORY = 2 << 30
"""Bytes in use from which on a GPU counts as busy even if no process is shown, as in a container of its own. Chosen:
driver and firmware of an idle H100 hold less than 1 GiB."""
LOAD_S = 120.0
"""Seconds that a worker gets beside its computing, to load torch and start the GPU. Chosen: it takes 5 to 20."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its number, as the nvml collector names it, how torch is told of it, and the driver's handle."""

    index: int
    uuid: str
    handle: Any


class Gpus:
    """The node's GPUs as NVIDIA's driver shows them."""

    def __init__(self, seen: Path | None) -> None:
        """Raises NoData where there is no driver."""
        self._driver = Driver()
        self._nvml = self._driver.nvml
        handles = [(self._key(i, h), h) for i, h in enumerate(self._driver.handles())]
        places = Places()
        places.settle(handles, fitted(Path("/sys/bus/pci/devices")), recall(seen))
        self.all = [Gpu(p.index, self._uuid(p.handle), p.handle) for p in places.all if p.handle is not None]

    def _key(self, index: int, handle: Any) -> str | None:
        if handle is None:  # a lost GPU keeps its place, so that those behind it keep their names
            return None
        try:
            return address(_text(self._nvml.nvmlDeviceGetPciInfo_v3(handle).busId)) or f"index {index}"
        except (self._nvml.NVMLError, AttributeError):  # a driver or binding that does not tell
            return f"index {index}"

    def _uuid(self, handle: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetUUID(handle))
        except self.error:
            return ""

    @property
    def error(self) -> type[Exception]:
        found: type[Exception] = self._nvml.NVMLError
        return found

    def usable(self, gpu: Gpu) -> bool:
        """Whether a canary on it could be in nobody's way: no MIG, and a mode in which a job may come beside it."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetComputeMode(gpu.handle) != nvml.NVML_COMPUTEMODE_DEFAULT or not gpu.uuid:
                return False
            return bool(nvml.nvmlDeviceGetMigMode(gpu.handle)[0] == 0)
        except nvml.NVMLError as error:  # GPUs without MIG do not know the question
            return bool(error.value == nvml.NVML_ERROR_NOT_SUPPORTED)

    def strangers(self, gpu: Gpu, own: int = 0) -> bool:
        """Whether anybody else computes on it; a driver that does not say counts as if."""
        try:
            return any(p.pid != own for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle))
        except self.error:
            return True

    def busy(self, gpu: Gpu) -> bool:
        """Whether it is in use, by whatever the driver shows."""
        try:
            used = self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle).used
            active = self._nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu
        except self.error:
            return True
        return bool(used > IDLE_MEMORY or active > 0) or self.strangers(gpu)

    def close(self) -> None:
        self._driver.close()


def _text(found: Any) -> str:
    """Older bindings give bytes."""
    return found.decode() if isinstance(found, bytes) else str(found)


def idle(gpus: Gpus, seconds: float, every: float = WATCH_S) -> list[Gpu]:
    """GPUs on which nothing happened for so long; ends early when none is left."""
    left, until = [gpu for gpu in gpus.all if gpus.usable(gpu)], time.monotonic() + seconds
    while True:
        left = [gpu for gpu in left if not gpus.busy(gpu)]
        wait = min(every, until - time.monotonic())
        if not left or wait <= 0:
            return left
        time.sleep(wait)


def attend(gpus: Gpus, gpu: Gpu, worker: Child, seconds: float, tell: Emit) -> None:
    """Passes on what the worker says until it ends, is late, or somebody else wants the GPU."""
    device, until = str(gpu.index), time.monotonic() + seconds
    while True:
        wanted, late, over = gpus.strangers(gpu, worker.pid), time.monotonic() > until, worker.ended()
        if wanted and not over:
            worker.end()
            tell({"device": device, "yielded": True})
            return
        for line in worker.lines():
            tell({**line, "uuid": gpu.uuid})
        if over or late:
            worker.end()
            if worker.died or worker.status:
                tell({"device": device, "died": worker.died, "talk": worker.last})
            return
        time.sleep(POLL_S)


def main(words: list[str] | None = None, work: Callable[[Gpu, list[str]], list[str]] | None = None) -> int:
    """`work` is for tests: the words that start a worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="time on each GPU")
    parser.add_argument("--variant", type=int, default=0, help="which set of inputs")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds that a GPU must have been idle")
    parser.add_argument("--seen", type=Path, help="file in which the nvml collector keeps which GPU is which")
    options = parser.parse_args(words)
    end_with_parent(signal.SIGKILL)
    try:
        gpus = Gpus(options.seen)
    except NoData as error:
        emit({"absent": str(error)})
        return 3
    for gpu in idle(gpus, options.idle):
        if gpus.busy(gpu):  # while another one had its turn
            continue
        what = ["--index", str(gpu.index), "--seconds", str(options.seconds), "--variant", str(options.variant)]
        words = work(gpu, what) if work else program("agents.collectors.canary.gpu_worker", *what)
        worker = Child(words, {"CUDA_VISIBLE_DEVICES": gpu.uuid})
        try:
            attend(gpus, gpu, worker, options.seconds + LOAD_S, emit)
        finally:
            worker.close()
    gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
