"""Servers that slow down or stop, and jobs that hang or stall without a hardware fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from agents.sim.effects import Effects
from agents.sim.faults.kind import DAY, HOUR, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.physics import kernel_log
from agents.sim.schedule import Job, Stop

_LOG_EVERY_S = 60.0  # s between two log lines of corrected errors, which the kernel rate-limits; chosen
_PANIC_DUMP_S = 30.0  # s from the fatal error to the loss of the node: the panic writes a crash dump; chosen


@dataclass(frozen=True)
class HostContention(Kind):
    """Other processes use the CPUs of a node (daemon, noisy neighbour): kernel launches are late, ranks slow down."""

    name = "host_contention"
    row = 21
    target = "node"
    detectability = "soft"
    attribution = "host"
    seen = (
        "longer compute time of the node's ranks, slightly lower SM activity and power, CPU pressure and load; longer "
        "job steps only if its ranks become the slowest, e.g. in the last stage"
    )
    unseen = "which process causes it; any sign while the node runs no job"
    rate = Rate(15.0, "1,000 node-days", "Greyhound, ATC'25: 6 of 392 single-node jobs; one job = one node-day")
    lasts = Span(30.0, 600.0, 4 * HOUR)  # mean 10 min [Greyhound]
    signals = ("rank.compute_time", "node.cpu_pressure", "node.load1", "gpu.sm_active")
    ranges: ClassVar = {"slowdown": (0.10, 0.50)}
    limits: ClassVar = {"slowdown": (0.0, 10.0)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    slowdown: float | None = None  # share by which the compute time of the slowest rank grows

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        starve_node(effects, fault, self.slowdown, effects.active(fault.onset, fault.end))
        there = effects.active(fault.onset, fault.end).astype(np.float32)
        effects.node.cpu.add(fault.device, (0.3 + 0.5 * self.slowdown) * there)
        effects.node.pressure.add(fault.device, min(0.2 + self.slowdown, 1.0) * there)


def starve_node(effects: Effects, fault: Fault, slowdown: float, when: np.ndarray) -> None:
    """Starves the GPUs of a node: one of them by `slowdown` of its compute time, the others by 0.6 to 1 of that."""
    gpus = effects.layout.gpus_of(np.array([fault.device]))
    rng = fault.rng(1)
    shares = rng.uniform(0.6, 1.0, len(gpus))  # chosen: loaders and launch threads are pinned, so GPUs differ
    shares[int(rng.integers(len(gpus)))] = 1.0
    longer = slowdown * shares * when[:, None]
    effects.gpu.starved.raise_to(gpus, longer / (1 + longer))


@dataclass(frozen=True)
class HostFault(Kind):
    """A part of a server fails (CPU, memory, chassis, board, disk): its job dies, and it is out of service for
    hours."""

    name = "host_fault"
    row = 22
    target = "node"
    detectability = "hard"
    attribution = "host"
    seen = "machine checks, memory, PCIe or disk errors in the kernel log, then no data; a chassis fault logs nothing"
    unseen = "which module or board failed, if the node goes down before it is logged"
    rate = Rate(0.50, "1M GPU-hours", "Llama 3: CPU, memory, chassis and IO board 0.09 each, SSD 0.14")
    lasts = Span(2 * HOUR, 2 * HOUR, 24 * HOUR)  # until it is repaired; chosen
    signals = ("node.memory_corrected", "node.memory_uncorrected", "node.io_pressure")
    idle_soft = True
    choices: ClassVar = {"part": 2 * ("cpu", "dimm", "chassis", "io_board") + 3 * ("ssd",)}
    ranges: ClassVar = {"corrected_rate": (0.1, 5.0), "warning": (300.0, 1800.0)}
    limits: ClassVar = {"corrected_rate": (0.0, 1e5), "warning": (0.0, 1e6)}
    part: str | None = None  # drawn with the frequencies of Llama 3
    corrected_rate: float | None = None  # corrected errors per second of a memory module before it fails; chosen
    warning: float | None = None  # s from a module's first corrected errors to the error that kills the node; chosen

    def fatal_error_time(self, fault: Fault) -> float:
        """Returns the second of the first error that kills a process, and with it the job."""
        assert self.warning is not None
        after = {"cpu": 1.0, "dimm": self.warning, "chassis": 0.5, "io_board": 2.0, "ssd": 60.0}[str(self.part)]
        return fault.onset + min(after, 0.3 * (fault.end - fault.onset))

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        return self.fatal_error_time(fault)

    def dead_from(self, fault: Fault) -> float:
        """Returns the second from which the node is down; with a failed disk it runs until the repair."""
        if self.part == "ssd":
            return fault.onset + 0.6 * (fault.end - fault.onset)
        return min(self.fatal_error_time(fault) + (0.0 if self.part == "chassis" else _PANIC_DUMP_S), fault.end)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        node, death, dead = effects.node, self.fatal_error_time(fault), self.dead_from(fault)
        if self.part == "dimm":
            self._memory(fault, death, effects)
        elif self.part == "ssd":
            node.io_pressure.raise_to(fault.device, effects.active(fault.onset, min(death + 600.0, dead)))
            for after, text in _DISK.items():
                kernel_log.log_line(effects, fault.device, fault.onset + after, text)
        elif self.part in ("cpu", "io_board"):
            kernel_log.log_line(effects, fault.device, death, _FATAL_LINES[self.part])
        node.dead.add(fault.device, effects.active(dead, fault.end))
        node.reset.add(fault.device, effects.impulse(fault.end))

    def _memory(self, fault: Fault, death: float, effects: Effects) -> None:
        """Adds corrected errors, logged at intervals, until an error cannot be corrected."""
        assert self.corrected_rate is not None
        effects.node.corrected.add(fault.device, self.corrected_rate * effects.active(fault.onset, death))
        effects.node.uncorrected.add(fault.device, effects.impulse(death))
        errors = max(1, round(self.corrected_rate * _LOG_EVERY_S))
        for moment in np.arange(fault.onset + 5, death - 1, _LOG_EVERY_S).tolist():
            kernel_log.log_line(effects, fault.device, moment, f"EDAC MC0: {errors} CE memory read error on {_MODULE}")
        kernel_log.log_line(effects, fault.device, death, f"EDAC MC0: 1 UE memory read error on {_MODULE}")


_MODULE = "CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x3f2a1c offset:0x0 grain:32)"
_DISK = {
    1.0: "I/O error, dev nvme0n1, sector 93712 op 0x1:(WRITE)",
    5.0: "EXT4-fs (nvme0n1p2): Remounting filesystem read-only",
}
_FATAL_LINES = {
    "cpu": "mce: [Hardware Error]: CPU 14: Machine Check Exception: 5 Bank 4: b200000000070f0f",
    "io_board": "pcieport 0000:15:01.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
}
"""Texts of the Linux kernel: block/blk-core.c, fs/ext4, drivers/edac, arch/x86/kernel/cpu/mce and pci/pcie/aer.c."""


@dataclass(frozen=True)
class JobHang(Kind):
    """Ranks of a job wait in mismatched collectives: GPUs spin without progress until the watchdog ends the job."""

    name = "job_hang"
    row = 31
    target = "job"
    detectability = "hard"
    attribution = "job"
    seen = (
        "no steps, no RDMA traffic, GPUs at 100 % utilization and a quarter of their power; finally the end of the job"
    )
    unseen = "which rank is missing from the collective, without flight recorder or stack traces"
    rate = Rate(1.95, "1M GPU-hours", "ByteRobust, SOSP'25: 9.9 % of incidents hang; of 19.7 of Llama 3")
    lasts = Span(600.0, high=1800.0)  # PyTorch's watchdog waits 10 min, older versions 30
    signals = ("rank.step", "nic.tx_bytes", "gpu.utilization", "gpu.power")

    def job_class(self, job: Job) -> Detectability:
        """Returns `soft` for a job of one node, which loses little."""
        return self.detectability if job.networked else "soft"

    def evidence(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns what shows that it makes no step; busy GPUs at low power may as well decode."""
        return "rank.step", "nic.tx_bytes"

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.end, (), 0.0, fault.device)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.site.hung.add(fault.device, effects.active(fault.onset, fault.end))


@dataclass(frozen=True)
class DataStall(Kind):
    """Storage delivers no data to a job: all its ranks wait before their next step, and their nodes wait for I/O."""

    name = "data_stall"
    row = 32
    target = "job"
    detectability = "soft"
    attribution = "job"
    seen = "no steps, idle GPUs, I/O pressure and blocked data loaders on all nodes of the job, then one very long step"
    unseen = "the storage system itself: it is not monitored"
    rate = Rate(0.6, "1M GPU-hours", "assumed: 2 to 4 % of incidents; of 19.7 of Llama 3")
    lasts = Span(20.0, 300.0, HOUR)  # mean 5 min; assumed
    signals = ("rank.step", "rank.step_time", "node.io_pressure", "node.tasks_blocked", "gpu.power")
    ranges: ClassVar = {"pressure": (0.5, 1.0)}
    limits: ClassVar = {"pressure": (0.0, 1.0)}
    severe = "pressure"
    pressure: float | None = None  # share of the time in which some task waits for I/O; chosen

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.pressure is not None
        when = effects.active(fault.onset, fault.end)
        effects.site.stalled.add(fault.device, when)
        there = effects.job_of_gpu[:, :: effects.layout.gpus_per_node] == fault.device
        effects.node.io_pressure.raise_to(slice(None), np.float32(self.pressure) * (there & when[:, None]))


@dataclass(frozen=True)
class SlowCollectives(Kind):
    """Collectives of a job take longer on all its ranks (algorithm, spine, route): no port or rank is at fault."""

    name = "slow_collectives"
    row = 38
    target = "job"
    detectability = "soft"
    attribution = "job"
    seen = "longer communication and step time of all ranks alike, and less traffic of all their ports"
    unseen = "any culprit among ranks, ports and leaves"
    rate = Rate(1.0, "1M GPU-hours", "assumed; Greyhound, ATC'25: 40 % of multi-node jobs see slow communication")
    lasts = Span(1200.0, 2 * HOUR, 24 * HOUR)
    signals = ("rank.communication_time", "rank.step_time", "nic.tx_bytes")
    ranges: ClassVar = {"slowdown": (0.2, 1.5), "rise": (1.0, 120.0)}
    limits: ClassVar = {"slowdown": (0.0, 100.0), "rise": (0.0, 1e6)}
    severe = "slowdown"
    effect_unit = "time"
    loaded = True
    world_only = True
    slowdown: float | None = None  # share by which a step takes longer
    rise: float | None = None  # s until the full effect

    @classmethod
    def suits(cls, job: Job) -> bool:
        """Returns whether the job has collectives between nodes."""
        return job.networked

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.slowdown is not None
        assert self.rise is not None
        effects.site.step.scale(fault.device, 1 + self.slowdown * effects.ramp(fault.onset, fault.end, self.rise))


_USUAL_USED, _ALL_USED = 0.12, 0.98  # share of a host's memory in use at first, and when the kernel kills; chosen
_WARNS = 0.40  # share left that needs attention: fsSpaceFillingUpWarningThreshold of the Prometheus node mixin


@dataclass(frozen=True)
class MemoryLeak(Kind):
    """A process leaks the memory of a host until the kernel kills it, and with it the node's job."""

    name = "memory_leak"
    row = 39
    target = "node"
    detectability = "soft"
    attribution = "host"
    seen = "available memory that falls steadily; at the end the kernel's log line and the end of the job"
    unseen = "which process leaks"
    rate = Rate(5.0, "1,000 node-days", "assumed")
    lasts = Span(HOUR, 6 * HOUR, 3 * DAY)
    signals = ("node.memory_available", "event:kernel")
    world_only = True

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        return fault.end

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it matters: so little memory is left, also of a host that used none."""
        return fault.onset + (1 - _WARNS) / (_ALL_USED - _USUAL_USED) * (fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        grown = effects.ramp(fault.onset, fault.end, fault.end - fault.onset)
        effects.node.memory.add(fault.device, np.float32(_ALL_USED - _USUAL_USED) * grown)
        text = "Out of memory: Killed process 41207 (python3) total-vm:1842310kB, anon-rss:1790112kB, file-rss:0kB"
        kernel_log.log_line(effects, fault.device, fault.end - 1.0, text)


@dataclass(frozen=True)
class DiskFault(Kind):
    """What befalls the local disk of a node; only at sites whose disks are known."""

    target = "node"
    attribution = "host"
    world_only = True

    @classmethod
    def exists(cls, layout: Layout) -> bool:
        """Returns whether the site's disks are known."""
        return "disk" in layout.entities

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        return fault.entity, layout.entities["disk"][fault.device]


@dataclass(frozen=True)
class DiskWear(DiskFault):
    """Disk of a node is written far beyond its rating, and reaches the end of its rated life within days."""

    name = "disk_wear"
    row = 40
    detectability = "soft"
    seen = "used endurance that grows by percents a day"
    unseen = "what writes so much, since the disk's writes are those of the whole node"
    rate = Rate(1.0, "1,000 node-days", "assumed")
    lasts = Span(DAY, 4 * DAY, 14 * DAY)
    signals = ("disk.endurance_used",)
    ranges: ClassVar = {"daily": (0.03, 0.12)}
    limits: ClassVar = {"daily": (0.0, 1.0)}
    severe = "daily"
    daily: float | None = None  # share of the rated life a day; 67 drive writes a day of a disk made for 0.3 are 0.12

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected: some percent have been used."""
        assert self.daily is not None
        return min(fault.onset + 0.04 / max(self.daily, 1e-9) * DAY, fault.end)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.daily is not None
        worn = self.daily / DAY * np.clip(effects.time - fault.onset, 0, fault.end - fault.onset)
        effects.node.disk_wear.add(fault.device, worn.astype(np.float32))


@dataclass(frozen=True)
class DiskFailing(DiskFault):
    """NVMe disk of a node uses up its spare blocks: it loses data, warns, and is read-only at the end."""

    name = "disk_failing"
    row = 41
    detectability = "hard"
    seen = "spare blocks that run out, media errors, the critical warning below the threshold"
    unseen = "which data is lost"
    rate = Rate(0.14, "1M GPU-hours", "Llama 3: SSD, as in host_fault")
    lasts = Span(2 * HOUR, 12 * HOUR, 5 * DAY)
    signals = ("disk.spare", "disk.critical_warning", "disk.media_errors")

    def detectable_from(self, fault: Fault) -> float:
        """Returns the second from which on it can be detected: half of the spare blocks are gone."""
        return fault.onset + 0.4 * (fault.end - fault.onset)

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        effects.node.disk_spare.add(fault.device, effects.ramp(fault.onset, fault.end, 0.8 * (fault.end - fault.onset)))
