"""XIDs as the NVIDIA driver reports them to NVML: without text, but available where the kernel log may not be read.

xid_correlation.py merges them with the kernel log's reports of the same XIDs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from agents.collector import Collector, NoData, Reading, wall_clock
from agents.collectors.gpu import xid_table
from agents.collectors.gpu.slots import SlotIndexes, add_indexes, default_state_file
from agents.collectors.gpu.xid_table import XidTable
from agents.collectors.gpu.xid_text import pci_without_function
from pipeline.config.settings import constraint
from pipeline.model.errors import ConfigError
from pipeline.model.records import Event

MAX_EVENTS = 256
"""Most events of one read. Chosen: further ones wait in the driver for the next read."""
WHOLE_GPU = 0xFFFFFFFF
"""NVML_GPU_INSTANCE_ID_ANY: the event concerns the whole GPU."""


@dataclass
class _Gpu:
    index: int
    handle: Any
    pci: str | None


@dataclass
class XidEvents(Collector):
    """Events of the NVML event set. `wait`: milliseconds that a read waits for the first event. seen: state file of the
    nvml collector's GPUs.
    """

    name: ClassVar[str] = "xid"
    lane: ClassVar[str] = "gpu"
    signals: ClassVar[tuple[str, ...]] = ()
    events: ClassVar[tuple[str, ...]] = ("xid",)
    wait: int = field(default=10, metadata=constraint("0 to 100 ms", lambda v: 0 <= v <= 100))
    xid_table: Path | None = field(default=None, metadata=xid_table.XID_TABLE_SETTING)
    seen: Path | None = field(default_factory=default_state_file)
    _now: Callable[[], int] = field(default_factory=lambda: wall_clock, init=False, repr=False)
    _slots: SlotIndexes = field(default_factory=lambda: SlotIndexes(None), init=False, repr=False)
    _indexes: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _nvml: Any = field(default=None, init=False, repr=False)
    _event_set: Any = field(default=None, init=False, repr=False)
    _gpus: dict[int, _Gpu] = field(default_factory=dict, init=False, repr=False)
    _table: XidTable | None = field(default=None, init=False, repr=False)
    _node: str = field(default="", init=False, repr=False)

    def open(self, node: str) -> None:
        """Starts NVML and registers for the XID events of all GPUs. Raises NoData without a driver."""
        self._node, self._slots = node, SlotIndexes(self.seen)
        try:
            self._table = xid_table.load_xid_table(self.xid_table)
        except ConfigError as error:
            raise NoData(str(error)) from None
        try:
            import pynvml  # imported here: not needed on a node without GPUs
        except ImportError:
            raise NoData("nvidia-ml-py is not installed, which GPUs need: pip install 'fleetpulse[agent]'") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoData(f"no NVIDIA driver: {error}") from None
        self._nvml = pynvml
        self._gpus = {
            _handle_address(gpu.handle): gpu for gpu in map(self._find_gpu, range(self._gpu_count())) if gpu is not None
        }
        self._add_indexes()
        self._register_gpus()

    def read(self) -> tuple[Reading, ...]:
        """Returns the XIDs since the last read, at most MAX_EVENTS; waits a moment for the first."""
        found: list[Event] = []
        try:
            while len(found) < MAX_EVENTS and (data := self._next_event(0 if found else self.wait)) is not None:
                found += self._to_events(data)
        except self._nvml.NVMLError:  # such as a lost GPU: the others continue in a new set
            self._register_gpus()
        return (Reading("gpu", (), {}, tuple(found)),)

    def close(self) -> None:
        """Frees the event set and shuts NVML down."""
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        self._gpus = {}
        try:
            self._free_event_set(nvml)
            nvml.nvmlShutdown()
        except nvml.NVMLError:  # the driver disappeared; nothing is left to release
            return

    def _gpu_count(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            raise NoData(f"the NVIDIA driver reports no number of GPUs: {error}") from None

    def _find_gpu(self, index: int) -> _Gpu | None:
        """Returns a GPU by index; None if it is already lost, since it will send no more events."""
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None
        try:
            address = self._nvml.nvmlDeviceGetPciInfo(handle).busId
            pci = pci_without_function(address.decode("ascii") if isinstance(address, bytes) else str(address))
        except (self._nvml.NVMLError, ValueError):  # not a valid address: the index identifies the GPU
            pci = None
        return _Gpu(index, handle, pci)

    def _add_indexes(self) -> None:
        """Numbers the GPUs: as the driver does at first, later only those that are new."""
        driver = {gpu.pci: gpu.index for gpu in self._gpus.values() if gpu.pci is not None}
        known = {**self._indexes, **self._slots.load()}
        self._indexes = add_indexes(known, driver) if known else driver

    def _index_of(self, gpu: _Gpu) -> int:
        """Returns the index by address, as the nvml collector has it; the driver's if it gives no address."""
        if gpu.pci is None:
            return gpu.index
        return self._slots.load().get(gpu.pci, self._indexes.get(gpu.pci, gpu.index))

    def _register_gpus(self) -> None:
        """Creates a new event set for all GPUs that support it. Raises NoData if none does."""
        nvml, taking = self._nvml, 0
        try:
            self._free_event_set(nvml)
            self._event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            raise NoData(f"the NVIDIA driver returns no event set: {error}") from None
        wanted = nvml.nvmlEventTypeXidCriticalError
        for gpu in self._gpus.values():
            try:
                if nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, self._event_set)
                    taking += 1
            except nvml.NVMLError:  # this GPU does not support it, the others may
                continue
        if not taking:
            raise NoData(f"none of {len(self._gpus)} NVIDIA GPUs reports XIDs")

    def _free_event_set(self, nvml: Any) -> None:
        events, self._event_set = self._event_set, None
        if events is not None:
            nvml.nvmlEventSetFree(events)

    def _next_event(self, milliseconds: int) -> Any:
        """Returns the next event; None if there is none."""
        try:
            return self._nvml.nvmlEventSetWait(self._event_set, milliseconds)
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            raise

    def _to_events(self, data: Any) -> list[Event]:
        gpu = self._gpus.get(_handle_address(data.device))
        if gpu is None:  # a GPU that was added after this collector was opened
            return []
        known = (self._table or xid_table.shipped_xid_table()).find_xid(int(data.eventData))
        facts: dict[str, Any] = {"xid": known.code, "name": known.name, "class": known.group}
        facts |= {
            "severity": known.severity,
            "action": known.action,
            "then": known.next_action,
            "source": "nvml",
            "count": 1,
        }
        instances = {"gpu_instance": data.gpuInstanceId, "compute_instance": data.computeInstanceId}
        detail = {name: int(value) for name, value in instances.items() if value != WHOLE_GPU}
        facts |= {"pci": gpu.pci, "detail": detail}
        kept = {key: value for key, value in facts.items() if value not in (None, {})}
        return [Event(self._now(), f"gpu:{self._node}.{self._index_of(gpu)}", "xid", kept)]


def _handle_address(handle: Any) -> int:
    """Returns the pointer of a handle. The driver returns the same pointer in an event."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
