"""The GPU canary's program: finds idle GPUs, runs a worker on each in turn, and kills the worker when a job needs the
GPU.

    python -m agents.collectors.canary.gpu_program --seconds 21.6 --idle 300 --variant 3

It uses NVIDIA's driver alone and never loads torch. The worker loads it for one GPU, and is killed within POLL_S of the
first compute process of another user. The result of a killed worker is not reported.
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
from agents.collectors.canary.child_process import CanaryProcess, module_command
from agents.collectors.canary.cpu_program import WriteLine, write_line
from agents.collectors.gpu.library import NvmlLibrary
from agents.collectors.gpu.slots import GpuSlots, gpus_on_bus, kernel_pci_address, load_gpus
from pipeline.runtime.supervise import set_parent_death_signal

POLL_S = 0.1
"""Seconds between two checks of a GPU with a worker (detection.md section 3: yield to a compute process)."""
IDLE_POLL_S = 1.0
"""Seconds between two checks of GPUs until they count as idle. Chosen."""
IDLE_MEMORY_BYTES = 2 << 30
"""A GPU with so much memory in use is busy even if no process is visible, as in another container. Chosen: driver and
firmware of an idle H100 hold 480 MiB."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
LOAD_S = 120.0
"""Seconds for a worker to load torch and start the GPU, beside its computing. Chosen: an H100 takes 4."""


@dataclass(frozen=True, slots=True)
class CanaryGpu:
    """One GPU: its number in the nvml collector, its UUID for torch, and the driver's handle."""

    index: int
    uuid: str
    handle: Any


class NvmlGpus:
    """The node's GPUs as NVIDIA's driver lists them."""

    def __init__(self, seen: Path | None, pci: Path = PCI_DEVICES) -> None:
        """Raises NoData where there is no driver."""
        self._driver = NvmlLibrary()
        self._nvml = self._driver.nvml
        handles = [(self._slot_key(i, h), h) for i, h in enumerate(self._driver.gpu_handles())]
        places = GpuSlots()
        places.assign(handles, gpus_on_bus(pci), load_gpus(seen))
        self.gpus = [
            CanaryGpu(p.index, self._read_uuid(p.handle), p.handle) for p in places.slots if p.handle is not None
        ]

    def _slot_key(self, index: int, handle: Any) -> str | None:
        if handle is None:  # a lost GPU keeps its slot, so that those after it keep their names
            return None
        try:
            return kernel_pci_address(_decode(self._nvml.nvmlDeviceGetPciInfo_v3(handle).busId)) or f"index {index}"
        except (self._nvml.NVMLError, AttributeError):  # not supported by this driver or binding
            return f"index {index}"

    def _read_uuid(self, handle: Any) -> str:
        try:
            return _decode(self._nvml.nvmlDeviceGetUUID(handle))
        except self.nvml_error:
            return ""

    @property
    def nvml_error(self) -> type[Exception]:
        """The binding's exception class."""
        found: type[Exception] = self._nvml.NVMLError
        return found

    def is_usable(self, gpu: CanaryGpu) -> bool:
        """Whether a canary may run on the GPU: no MIG, and a compute mode in which a job can start beside it."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetComputeMode(gpu.handle) != nvml.NVML_COMPUTEMODE_DEFAULT or not gpu.uuid:
                return False
            return bool(nvml.nvmlDeviceGetMigMode(gpu.handle)[0] == 0)
        except nvml.NVMLError as error:  # GPUs without MIG do not support the call
            return bool(error.value == nvml.NVML_ERROR_NOT_SUPPORTED)

    def has_other_processes(self, gpu: CanaryGpu, own: int = 0) -> bool:
        """Whether another process computes on the GPU; true if the driver does not report it."""
        try:
            return any(p.pid != own for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu.handle))
        except self.nvml_error:
            return True

    def is_busy(self, gpu: CanaryGpu) -> bool:
        """Whether the GPU is in use, by everything that the driver reports."""
        try:
            used = self._nvml.nvmlDeviceGetMemoryInfo(gpu.handle).used
            active = self._nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu
        except self.nvml_error:
            return True
        return bool(used > IDLE_MEMORY_BYTES or active > 0) or self.has_other_processes(gpu)

    def close(self) -> None:
        """Closes the driver."""
        self._driver.close()


def _decode(found: Any) -> str:
    """Returns text; older bindings return bytes."""
    return found.decode() if isinstance(found, bytes) else str(found)


def wait_for_idle(gpus: NvmlGpus, seconds: float, every: float = IDLE_POLL_S) -> list[CanaryGpu]:
    """Returns the GPUs that stay idle for so many seconds; returns early if none is left."""
    left, until = [gpu for gpu in gpus.gpus if gpus.is_usable(gpu)], time.monotonic() + seconds
    while True:
        left = [gpu for gpu in left if not gpus.is_busy(gpu)]
        wait = min(every, until - time.monotonic())
        if not left or wait <= 0:
            return left
        time.sleep(wait)


def supervise_worker(gpus: NvmlGpus, gpu: CanaryGpu, worker: CanaryProcess, seconds: float, write: WriteLine) -> None:
    """Passes on the worker's lines until it ends, is late, or another process needs the GPU."""
    device, until = str(gpu.index), time.monotonic() + seconds
    while True:
        wanted, late, over = gpus.has_other_processes(gpu, worker.pid), time.monotonic() > until, worker.has_ended()
        if wanted and not over:
            worker.kill()
            write({"device": device, "yielded": True})
            return
        for line in worker.read_lines():
            write({**line, "uuid": gpu.uuid})
        if over or late:
            worker.kill()
            if worker.death_signal or worker.status:
                write({"device": device, "died": worker.death_signal, "talk": worker.last_text})
            return
        time.sleep(POLL_S)


def main(
    words: list[str] | None = None,
    work: Callable[[CanaryGpu, list[str]], list[str]] | None = None,
    pci: Path = PCI_DEVICES,
) -> int:
    """Runs the program. `work` is for tests: returns the command that starts a worker; so is `pci`: the PCI bus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=20.0, help="time on each GPU")
    parser.add_argument("--variant", type=int, default=0, help="which set of inputs")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds for which a GPU must be idle")
    parser.add_argument("--seen", type=Path, help="state file of the nvml collector with the GPUs' numbers")
    options = parser.parse_args(words)
    set_parent_death_signal(signal.SIGKILL)
    try:
        gpus = NvmlGpus(options.seen, pci)
    except NoData as error:
        write_line({"absent": str(error)})
        return 3
    for gpu in wait_for_idle(gpus, options.idle):
        if gpus.is_busy(gpu):  # since another GPU was tested
            continue
        what = ["--index", str(gpu.index), "--seconds", str(options.seconds), "--variant", str(options.variant)]
        words = work(gpu, what) if work else module_command("agents.collectors.canary.gpu_worker", *what)
        worker = CanaryProcess(words, {"CUDA_VISIBLE_DEVICES": gpu.uuid})
        try:
            supervise_worker(gpus, gpu, worker, options.seconds + LOAD_S, write_line)
        finally:
            worker.close()
    gpus.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
