"""XIDs as NVIDIA's driver reports them to NVML: without text, but also where the kernel log may not be read.

agents/collectors/gpu/xid_correlation.py joins them with what the kernel log tells of the same XID.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, NoData, Reading, wall_clock
from agents.collectors.gpu import xid_table
from agents.collectors.gpu.xid_table import Table
from agents.collectors.gpu.xid_text import normal_pci
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event

MOST = 256
"""Most events of one look; chosen: what is more waits in the driver for the next look."""
NOT_PARTITIONED = 0xFFFFFFFF
"""NVML_GPU_INSTANCE_ID_ANY: the event is of the whole GPU."""


@dataclass
class _Gpu:
    index: int
    handle: Any
    pci: str | None


@dataclass
class XidEvents(Collector):
    """Events of the NVML event set. `wait` is how many ms a look waits for the first one."""

    name: ClassVar[str] = "xid"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("xid",)
    wait: int = field(default=10, metadata=constraint("0 to 100 ms", lambda v: 0 <= v <= 100))
    xid_table: Path | None = field(default=None, metadata=xid_table.WANTED)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _nvml: Any = field(default=None, init=False, repr=False)
    _set: Any = field(default=None, init=False, repr=False)
    _gpus: dict[int, _Gpu] = field(default_factory=dict, init=False, repr=False)
    _table: Table | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        self._node = node
        try:
            self._table = xid_table.load(self.xid_table)
        except ConfigError as error:
            raise NoData(str(error)) from None
        try:
            import pynvml  # here, so that a node without GPUs does not pay for it
        except ImportError:
            raise NoData("nvidia-ml-py is not installed; wanted for GPUs: pip install 'fleetpulse[agent]'") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoData(f"no NVIDIA driver: {error}") from None
        self._nvml = pynvml
        self._gpus = {_address(gpu.handle): gpu for gpu in map(self._gpu, range(self._count())) if gpu is not None}
        self._register()

    def read(self) -> tuple[Reading, ...]:
        found: list[Event] = []
        try:
            while len(found) < MOST and (data := self._next(0 if found else self.wait)) is not None:
                found += self._told(data)
        except self._nvml.NVMLError:  # such as a GPU that is lost: the others go on in a set of their own
            self._register()
        return (Reading("gpu", (), {}, tuple(found)),)

    def close(self) -> None:
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        self._gpus = {}
        try:
            self._free(nvml)
            nvml.nvmlShutdown()
        except nvml.NVMLError:  # the driver went away; there is nothing left to give back
            return

    def _count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise NoData(f"the NVIDIA driver does not count its GPUs: {error}") from None

    def _gpu(self, index: int) -> _Gpu | None:
        """None for a GPU that is lost already: it has told all it will."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None
        try:
            address = self._nvml.nvmlDeviceGetPciInfo(handle).busId
            pci = normal_pci(address.decode("ascii") if isinstance(address, bytes) else str(address))
        except (self._nvml.NVMLError, ValueError):  # an address that is none: the index says which GPU it is
            pci = None
        return _Gpu(index, handle, pci)

    def _register(self) -> None:
        """A new event set for all GPUs that take part. Raises NoData if none does."""
        nvml, taking = self._nvml, 0
        try:
            self._free(nvml)
            self._set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            raise NoData(f"the NVIDIA driver gives no event set: {error}") from None
        wanted = nvml.nvmlEventTypeXidCriticalError
        for gpu in self._gpus.values():
            try:
                if nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, self._set)
                    taking += 1
            except nvml.NVMLError:  # this GPU does not take part, the others do
                continue
        if not taking:
            raise NoData(f"none of {len(self._gpus)} NVIDIA GPUs reports XIDs")

    def _free(self, nvml: Any) -> None:
        events, self._set = self._set, None
        if events is not None:
            nvml.nvmlEventSetFree(events)

    def _next(self, milliseconds: int) -> Any:
        """The next event; None if there is none."""
        try:
            return self._nvml.nvmlEventSetWait(self._set, milliseconds)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            raise

    def _told(self, data: Any) -> list[Event]:
        gpu = self._gpus.get(_address(data.device))
        if gpu is None:  # of a GPU that was added after this collector was opened
            return []
        known = (self._table or xid_table.shipped()).xid(int(data.eventData))
        facts: dict[str, Any] = {"xid": known.code, "name": known.name, "class": known.group}
        facts |= {"severity": known.severity, "action": known.action, "then": known.then, "source": "nvml", "count": 1}
        instances = {"gpu_instance": data.gpuInstanceId, "compute_instance": data.computeInstanceId}
        detail = {name: int(value) for name, value in instances.items() if value != NOT_PARTITIONED}
        facts |= {"pci": gpu.pci, "detail": detail}
        kept = {key: value for key, value in facts.items() if value not in (None, {})}
        return [Event(self._now(), f"gpu:{self._node}.{gpu.index}", "xid", kept)]


def _address(handle: Any) -> int:
    """What tells handles apart: the driver gives the same pointer in an event."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
