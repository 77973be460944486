"""The signal catalogue as data: one line per signal, and what every part may ask about it.

A signal is a named measured quantity `CLASS.NAME` with a unit (UCUM, as in OpenTelemetry), a kind and a device class.
Its wire type is a NumPy type code; a missing value is NaN in floats and the highest value in unsigned integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "state"]
TYPES = ("u1", "u2", "u4", "u8", "f4", "f8")
CLASSES: Mapping[str, str] = {
    # device class -> kind of the entities that bear it
    "gpu": "gpu",
    "nic": "port",
    "node": "node",
    "power": "pdu",
    "coolant": "cdu",
    "rank": "rank",
}


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured quantity. `valid` is inclusive; what lies outside is a broken reading and counts as missing."""

    name: str
    unit: str
    kind: Kind
    device_class: str
    type: str
    help: str
    source: str = ""
    otel: str = ""
    valid: tuple[float, float] = (-math.inf, math.inf)
    states: tuple[str, ...] = ()
    normal: tuple[str, ...] = ()
    harm: Literal["up", "down", "both"] = "both"
    interval: float | None = None

    @property
    def column(self) -> str:
        """Name of the SQL column: the class is dropped from the front, other dots become underscores."""
        return column_of(self.name, self.device_class)


def column_of(name: str, device_class: str) -> str:
    """SQL column of signal `name` in the view of its class: gpu.sm_clock -> sm_clock, pump.speed -> pump_speed."""
    return name.removeprefix(f"{device_class}.").replace(".", "_")


_S = Signal
_LINK = ("down", "up")
_SIGNALS: tuple[Signal, ...] = (
    # --- gpu: one GPU -----------------------------------------------------------------------------------------------
    _S("gpu.utilization", "1", "gauge", "gpu", "f4", "Share of the last sample period in which a kernel ran", "nvmlDeviceGetUtilizationRates", "hw.gpu.utilization", (0, 1)),
    _S("gpu.memory_utilization", "1", "gauge", "gpu", "f4", "Share of the last sample period in which device memory was read or written", "nvmlDeviceGetUtilizationRates", "", (0, 1)),
    _S("gpu.memory_used", "By", "gauge", "gpu", "f8", "Device memory in use", "nvmlDeviceGetMemoryInfo", "hw.gpu.memory.usage", (0, 2e12)),
    _S("gpu.memory_total", "By", "gauge", "gpu", "f8", "Device memory fitted", "nvmlDeviceGetMemoryInfo", "hw.gpu.memory.limit", (0, 2e12)),
    _S("gpu.sm_clock", "MHz", "gauge", "gpu", "u2", "Clock of the streaming multiprocessors", "nvmlDeviceGetClockInfo", "", (0, 10_000), harm="down"),
    _S("gpu.memory_clock", "MHz", "gauge", "gpu", "u2", "Clock of the device memory", "nvmlDeviceGetClockInfo", "", (0, 20_000), harm="down"),
    _S("gpu.throttle_reasons", "1", "state", "gpu", "u8", "Bit mask of clock event reasons as NVML gives it: 0x8 hardware slowdown, 0x20 software thermal, 0x40 hardware thermal, 0x80 power brake, 0x4 power cap", "nvmlDeviceGetCurrentClocksEventReasons"),
    _S("gpu.temperature", "Cel", "gauge", "gpu", "f4", "Temperature of the GPU core", "nvmlDeviceGetTemperature", "hw.temperature", (-20, 150), harm="up"),
    _S("gpu.power", "W", "gauge", "gpu", "f4", "Board power", "nvmlDeviceGetPowerUsage", "hw.power", (0, 5000)),
    _S("gpu.energy", "mJ", "counter", "gpu", "u8", "Energy used since the driver was loaded", "nvmlDeviceGetTotalEnergyConsumption", "hw.energy"),
    _S("gpu.ecc_corrected", "{error}", "counter", "gpu", "u8", "Corrected memory errors since the driver was loaded", "nvmlDeviceGetTotalEccErrors", "hw.errors", harm="up"),
    _S("gpu.ecc_uncorrected", "{error}", "counter", "gpu", "u8", "Uncorrected memory errors since the driver was loaded", "nvmlDeviceGetTotalEccErrors", "hw.errors", harm="up"),
    _S("gpu.pcie_generation", "1", "state", "gpu", "u1", "PCIe generation the link runs at now", "nvmlDeviceGetCurrPcieLinkGeneration", "", (0, 16)),
    _S("gpu.pcie_width", "{lane}", "state", "gpu", "u1", "PCIe lanes the link runs with now", "nvmlDeviceGetCurrPcieLinkWidth", "", (0, 64)),
    _S("gpu.pcie_replays", "{error}", "counter", "gpu", "u8", "PCIe packets sent again since the driver was loaded", "nvmlDeviceGetPcieReplayCounter", "hw.errors", harm="up"),
    # --- nic: one network port --------------------------------------------------------------------------------------
    _S("nic.state", "1", "state", "nic", "u1", "Whether the link carries traffic", "/sys/class/net/IF/operstate", "hw.network.up", (0, 1), states=_LINK, normal=("up",)),
    _S("nic.speed", "Mbit/s", "gauge", "nic", "f4", "Speed the link was trained to", "/sys/class/net/IF/speed", "hw.network.bandwidth.limit", (0, 10_000_000), harm="down"),
    _S("nic.rx_bytes", "By", "counter", "nic", "u8", "Bytes received", "/sys/class/net/IF/statistics/rx_bytes", "hw.network.io"),
    _S("nic.tx_bytes", "By", "counter", "nic", "u8", "Bytes sent", "/sys/class/net/IF/statistics/tx_bytes", "hw.network.io"),
    _S("nic.rx_packets", "{packet}", "counter", "nic", "u8", "Packets received", "/sys/class/net/IF/statistics/rx_packets", "hw.network.packets"),
    _S("nic.tx_packets", "{packet}", "counter", "nic", "u8", "Packets sent", "/sys/class/net/IF/statistics/tx_packets", "hw.network.packets"),
    _S("nic.rx_errors", "{error}", "counter", "nic", "u8", "Packets received with an error", "/sys/class/net/IF/statistics/rx_errors", "hw.errors", harm="up"),
    _S("nic.tx_errors", "{error}", "counter", "nic", "u8", "Packets that could not be sent", "/sys/class/net/IF/statistics/tx_errors", "hw.errors", harm="up"),
    _S("nic.rx_dropped", "{packet}", "counter", "nic", "u8", "Received packets that the host dropped", "/sys/class/net/IF/statistics/rx_dropped", "", harm="up"),
    _S("nic.tx_dropped", "{packet}", "counter", "nic", "u8", "Packets dropped before they were sent", "/sys/class/net/IF/statistics/tx_dropped", "", harm="up"),
    _S("nic.crc_errors", "{error}", "counter", "nic", "u8", "Packets received with a wrong checksum", "/sys/class/net/IF/statistics/rx_crc_errors", "hw.errors", harm="up"),
    _S("nic.carrier_changes", "{change}", "counter", "nic", "u8", "Times the link went up or down", "/sys/class/net/IF/carrier_changes", "", harm="up"),
    _S("nic.symbol_errors", "{error}", "counter", "nic", "u8", "Symbol errors left after error correction", "/sys/class/infiniband/DEV/ports/P/counters/symbol_error", "hw.errors", harm="up"),
    # --- node: one server -------------------------------------------------------------------------------------------
    _S("node.load1", "1", "gauge", "node", "f4", "Runnable tasks, 1-minute mean", "/proc/loadavg", "", (0, 1e6)),
    _S("node.load5", "1", "gauge", "node", "f4", "Runnable tasks, 5-minute mean", "/proc/loadavg", "", (0, 1e6)),
    _S("node.cpu_count", "{cpu}", "gauge", "node", "u2", "Logical processors online", "/proc/stat", "system.cpu.logical.count"),
    _S("node.cpu_busy_time", "ms", "counter", "node", "u8", "Processor time spent in user, system, interrupt and stolen work, all processors", "/proc/stat", "system.cpu.time"),
    _S("node.cpu_idle_time", "ms", "counter", "node", "u8", "Processor time spent idle or waiting for I/O, all processors", "/proc/stat", "system.cpu.time"),
    _S("node.memory_total", "By", "gauge", "node", "f8", "Memory fitted", "/proc/meminfo", "system.memory.limit", (0, 1e15)),
    _S("node.memory_available", "By", "gauge", "node", "f8", "Memory that can be had without swapping", "/proc/meminfo", "system.linux.memory.available", (0, 1e15), harm="down"),
    _S("node.swap_used", "By", "gauge", "node", "f8", "Swap in use", "/proc/meminfo", "system.paging.usage", (0, 1e15), harm="up"),
    _S("node.cpu_pressure", "us", "counter", "node", "u8", "Time in which some task waited for a processor", "/proc/pressure/cpu", "", harm="up"),
    _S("node.memory_pressure", "us", "counter", "node", "u8", "Time in which some task waited for memory", "/proc/pressure/memory", "", harm="up"),
    _S("node.io_pressure", "us", "counter", "node", "u8", "Time in which some task waited for I/O", "/proc/pressure/io", "", harm="up"),
    _S("node.uptime", "s", "gauge", "node", "f8", "Time since the kernel started", "/proc/uptime", "system.uptime", (0, 1e10)),
    _S("node.disk_used", "By", "gauge", "node", "f8", "Space in use on the root file system", "statvfs(/)", "system.filesystem.usage", (0, 1e18)),
    _S("node.disk_total", "By", "gauge", "node", "f8", "Size of the root file system", "statvfs(/)", "system.filesystem.limit", (0, 1e18)),
    _S("node.disk_read", "By", "counter", "node", "u8", "Bytes read from all whole disks", "/proc/diskstats", "system.disk.io"),
    _S("node.disk_written", "By", "counter", "node", "u8", "Bytes written to all whole disks", "/proc/diskstats", "system.disk.io"),
    # --- power: one power distribution unit -------------------------------------------------------------------------
    _S("power.draw", "W", "gauge", "power", "f4", "Power delivered to the racks fed", "simulator; Redfish later", "hw.power", (0, 1e7)),
    _S("power.voltage", "V", "gauge", "power", "f4", "Input voltage", "simulator; Redfish later", "hw.voltage", (0, 1e5)),
    # --- coolant: one coolant distribution unit and its loop --------------------------------------------------------
    _S("coolant.flow", "L/min", "gauge", "coolant", "f4", "Coolant flow of the loop", "simulator; Redfish later", "", (0, 50_000), harm="down"),
    _S("coolant.supply_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature to the racks", "simulator; Redfish later", "hw.temperature", (-20, 120), harm="up"),
    _S("coolant.return_temperature", "Cel", "gauge", "coolant", "f4", "Coolant temperature from the racks", "simulator; Redfish later", "hw.temperature", (-20, 120), harm="up"),
    _S("coolant.pressure", "bar", "gauge", "coolant", "f4", "Pressure difference across the loop", "simulator; Redfish later", "", (0, 100), harm="down"),
    _S("pump.speed", "rpm", "gauge", "coolant", "f4", "Speed of the loop's pump", "simulator; Redfish later", "hw.fan.speed", (0, 100_000), harm="down"),
    # --- rank: one member of a training job -------------------------------------------------------------------------
    _S("rank.step", "{step}", "counter", "rank", "u8", "Training steps finished", "training job"),
    _S("rank.step_time", "s", "gauge", "rank", "f4", "Length of the last step for the whole job", "training job", "", (0, 1e6), harm="up"),
    _S("rank.compute_time", "s", "gauge", "rank", "f4", "Forward and backward computation of the last step, before any collective", "training job", "", (0, 1e6), harm="up"),
    _S("rank.communication_time", "s", "gauge", "rank", "f4", "Time in collectives of the last step, waiting included", "training job", "", (0, 1e6)),
)  # fmt: skip

CATALOGUE: Mapping[str, Signal] = {signal.name: signal for signal in _SIGNALS}


def of_class(device_class: str, catalogue: Mapping[str, Signal] = CATALOGUE) -> tuple[Signal, ...]:
    """All signals of a device class in catalogue order."""
    return tuple(s for s in catalogue.values() if s.device_class == device_class)


def with_declared(declared: Iterable[Signal]) -> dict[str, Signal]:
    """The catalogue with `declared` signals added; a declaration wins over a line of the same name."""
    return {**CATALOGUE, **{signal.name: signal for signal in declared}}
