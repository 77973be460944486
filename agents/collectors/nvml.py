"""NVIDIA GPUs through the driver's own library (nvidia-ml-py): what each GPU does not tell is missing, not an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from agents.collector import Collector, Device, NoData, Reading

Getter = Callable[[Any, Any], tuple[float | int, ...]]
_MISSING = np.iinfo(np.uint64).max
_COUNTERS = ("gpu.energy", "gpu.ecc_corrected", "gpu.ecc_uncorrected", "gpu.pcie_replays", "gpu.throttle_reasons")

# One driver call each; a call may fill several signals.
_CALLS: tuple[tuple[tuple[str, ...], Getter], ...] = (
    (("gpu.utilization", "gpu.memory_utilization"), lambda n, h: _shares(n.nvmlDeviceGetUtilizationRates(h))),
    (("gpu.memory_used", "gpu.memory_total"), lambda n, h: _memory(n.nvmlDeviceGetMemoryInfo(h))),
    (("gpu.sm_clock",), lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),)),
    (("gpu.memory_clock",), lambda n, h: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),)),
    (("gpu.throttle_reasons",), lambda n, h: (n.nvmlDeviceGetCurrentClocksEventReasons(h),)),
    (("gpu.temperature",), lambda n, h: (n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),)),
    (("gpu.power",), lambda n, h: (n.nvmlDeviceGetPowerUsage(h) / 1000,)),  # mW
    (("gpu.energy",), lambda n, h: (n.nvmlDeviceGetTotalEnergyConsumption(h),)),
    (("gpu.ecc_corrected",), lambda n, h: (_ecc(n, h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED),)),
    (("gpu.ecc_uncorrected",), lambda n, h: (_ecc(n, h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),)),
    (("gpu.pcie_generation",), lambda n, h: (n.nvmlDeviceGetCurrPcieLinkGeneration(h),)),
    (("gpu.pcie_width",), lambda n, h: (n.nvmlDeviceGetCurrPcieLinkWidth(h),)),
    (("gpu.pcie_replays",), lambda n, h: (n.nvmlDeviceGetPcieReplayCounter(h),)),
)


@dataclass
class Nvml(Collector):
    """gpu.*: one entity per GPU that the driver counts, in its order. A lost GPU keeps its place, all missing."""

    name: ClassVar[str] = "nvml"
    signals: ClassVar[tuple[str, ...]] = tuple(name for names, _ in _CALLS for name in names)
    _nvml: Any = field(default=None, init=False, repr=False)
    _handles: list[Any] = field(default_factory=list, init=False, repr=False)
    _unsupported: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        try:
            import pynvml  # here, so that a node without GPUs does not pay for it
        except ImportError:
            raise NoData("nvidia-ml-py is not installed; wanted for GPUs: pip install 'fleetpulse[agent]'") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoData(_why(pynvml, error)) from None
        self._nvml = pynvml
        self._unsupported.clear()
        self._handles = [self._handle(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if not self._handles:
            raise NoData("no NVIDIA GPU: the driver counts none")

    def read(self) -> tuple[Reading, ...]:
        count = len(self._handles)
        columns: dict[str, Any] = {
            name: np.full(count, _MISSING, np.uint64) if name in _COUNTERS else np.full(count, np.nan)
            for name in self.signals
        }
        answers = sum(self._ask(index, columns) for index in range(count))
        if not answers:
            raise NoData(f"none of {count} NVIDIA GPUs answers the driver")
        return (Reading("gpu", tuple(f"gpu:{self._node}.{i}" for i in range(count)), columns),)

    def inventory(self) -> Mapping[str, Device]:
        driver = self._fact(self._nvml.nvmlSystemGetDriverVersion)
        return {
            f"gpu:{self._node}.{i}": Device((f"node:{self._node}",), self._facts(i, driver))
            for i in range(len(self._handles))
        }

    def close(self) -> None:
        if self._nvml is not None:
            nvml, self._nvml, self._handles = self._nvml, None, []
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:  # the driver went away; there is nothing left to give back
                return

    def _handle(self, index: int) -> Any:
        """The driver's handle; None for a GPU that is lost already."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None

    def _ask(self, index: int, columns: Mapping[str, Any]) -> int:
        """Fills the columns of one GPU; returns how many calls were answered."""
        handle, answers = self._handles[index], 0
        if handle is None:
            handle = self._handles[index] = self._handle(index)
            if handle is None:
                return 0
        for call, (names, get) in enumerate(_CALLS):
            if (index, call) in self._unsupported:
                continue
            try:
                found = get(self._nvml, handle)
            except self._nvml.NVMLError as error:
                if error.value in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                    self._unsupported.add((index, call))  # this GPU will never tell: do not ask again
                    answers += 1
                continue
            answers += 1
            for name, value in zip(names, found, strict=True):
                columns[name][index] = value
        return answers

    def _facts(self, index: int, driver: str | None) -> dict[str, str]:
        handle = self._handles[index]
        facts = {"driver": driver}
        if handle is not None:
            facts["sku"] = self._fact(self._nvml.nvmlDeviceGetName, handle)
            facts["serial"] = self._fact(self._nvml.nvmlDeviceGetSerial, handle)
            facts["uuid"] = self._fact(self._nvml.nvmlDeviceGetUUID, handle)
        return {key: value for key, value in facts.items() if value}

    def _fact(self, get: Callable[..., Any], *arguments: Any) -> str | None:
        try:
            return str(get(*arguments))
        except self._nvml.NVMLError:
            return None


def _why(nvml: Any, error: Any) -> str:
    """What `nvidia-smi` would complain of, for a person."""
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return "no NVIDIA driver"
    if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return "no NVIDIA driver: the library is there, the kernel module is not loaded"
    return f"the NVIDIA driver does not start: {error}"


def _shares(found: Any) -> tuple[float, float]:
    return found.gpu / 100, found.memory / 100


def _memory(found: Any) -> tuple[int, int]:
    return found.used, found.total


def _ecc(nvml: Any, handle: Any, kind: int) -> int:
    """Counted since the driver was loaded (volatile)."""
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
