"""GPUs and NVLinks that fail suddenly: off the bus, engine faults, hung firmware, link errors."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from agents.collectors.gpu.xid_table import shipped_xid_table
from agents.collectors.host.kernel_events import PREFILTER_WORDS, GpuAddresses, KernelEventDecoder
from agents.collectors.host.kernel_patterns import load_patterns as load_patterns
from agents.collectors.host.kmsg import KmsgRecord
from agents.sim.effects import Effects
from agents.sim.faults.kind import HOUR, Attribution, Detectability, Fault, Kind, Rate, Span
from agents.sim.layout import Layout
from agents.sim.physics.kernel_log import Line, address, log_xids
from agents.sim.schedule import Stop
from pipeline.model.records import SECOND

_REBOOT = 240.0  # s that a training server needs to boot; chosen
_GSP_WAITS = 6.0  # s until the driver's wait for its firmware times out and XID 119 is logged
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
_NODE_REBOOT = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
_MMU = (
    "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f1c_2000f000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
)


def hang_job(effects: Effects, device: int, since: float, until: float) -> None:
    """Makes the job on a GPU hang in a collective in [since, until)."""
    mask, running = effects.active(since, until), effects.job_of_gpu[:, device]
    for job in set(running[mask].tolist()) - {-1}:
        effects.site.hung.add(job, mask & (running == job))


def node_of(device: int, layout: Layout) -> int:
    """Returns the number of a GPU's node."""
    return int(layout.node_of_gpu[device])


def reset(effects: Effects, device: int, moment: float) -> None:
    """Resets a GPU at `moment`: its counters restart."""
    effects.gpu.reset.add(device, effects.impulse(moment) > 0)


@dataclass(frozen=True)
class GpuOffBus(Kind):
    """GPU falls off the PCIe bus: the driver loses it, its job dies, and only a reboot of the node recovers it."""

    name = "gpu_off_bus"
    row = 1
    target = "gpu"
    detectability = "hard"
    attribution = "gpu"
    seen = "XID 79 and 154, gpu_lost, gpu_count, no more rows of the GPU; its job hangs, then dies"
    unseen = "whether slot, power or the GPU itself is the cause"
    rate = Rate(3.5, "1M GPU-hours", "Llama 3: 7.0 faulty GPUs; assumed that half of them fall off the bus")
    lasts = Span(1200.0, high=4 * HOUR)
    signals = ("event:xid", "event:gpu_lost", "event:gpu_count", "gpu.power")
    ranges: ClassVar = {"dies_after": (1.0, 60.0)}
    limits: ClassVar = {"dies_after": (0.1, 1e5)}
    dies_after: float | None = None  # s until the job has died

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.dies_after is not None
        node, onset, back = node_of(fault.device, effects.layout), fault.onset, fault.end - self._boots(fault)
        effects.gpu.gone.add(fault.device, effects.active(onset, fault.end))
        hang_job(effects, fault.device, onset, onset + self.dies_after)
        log_xids(effects, fault.device, self._lines(onset))
        name, entity = effects.layout.node_names[node], fault.entity
        pci = address(int(entity.rpartition(".")[2]))
        width = effects.layout.gpus_per_node
        effects.add_event(
            onset + 1.0, entity, "gpu_lost", gpu=entity, pci=pci, serial=None, uuid=None, present=width - 1
        )
        counted = {"expected": width, "present": width - 1, "missing": [pci], "source": "nvml"}
        effects.add_event(onset + 1.0, f"node:{name}", "gpu_count", None, **counted)
        effects.node.dead.add(node, effects.active(back, fault.end))
        effects.node.reset.add(node, effects.impulse(fault.end) > 0)

    def _lines(self, onset: float) -> list[Line]:
        return [Line(onset, 79, "GPU has fallen off the bus."), Line(onset + 0.2, 154, _NODE_REBOOT)]

    def _boots(self, fault: Fault) -> float:
        return min(_REBOOT, 0.2 * (fault.end - fault.onset))

    def job_death_time(self, fault: Fault) -> float:
        """Returns the second at which the job has died."""
        assert self.dies_after is not None
        return min(fault.onset + self.dies_after, fault.end)


@dataclass(frozen=True)
class GpuEngineFault(Kind):
    """Engine or memory management of a GPU faults and ends its process; in three of five cases the program is at
    fault."""

    name = "gpu_engine_fault"
    row = 2
    target = "gpu"
    detectability = "hard"
    attribution = "gpu"
    seen = "XID 13, 31 or 109 with 43 of one GPU, and 154 if it is the hardware; of several GPUs if it is the program"
    unseen = "any early sign; with certainty, whether hardware or program is the cause"
    rate = Rate(3.5, "1M GPU-hours", "Llama 3: 7.0 faulty GPUs; half of them here, and 60 % user code, are assumed")
    lasts = Span(600.0, high=1800.0)
    signals = ("event:xid",)
    choices: ClassVar = {
        "origin": ("program", "program", "program", "hardware", "hardware"),
        "engine": ("compute", "memory", "scheduler"),
    }
    loaded = True
    origin: str | None = None  # program or hardware
    engine: str | None = None  # compute: XID 13; memory: 31; scheduler: 109, which only hardware has

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        width = effects.layout.gpus_per_node
        first = node_of(fault.device, effects.layout) * width
        others = (fault.device - first + 1 + fault.rng(1).permutation(max(1, width - 1))[:2]) % width + first
        affected = [fault.device, *(others.tolist() if self.origin == "program" and width > 2 else ())]
        for number, device in enumerate(affected):
            begin = fault.onset + 0.4 * number
            lines = [self._line(begin, fault), Line(begin + 0.1, 43, "Ch 00000010", True)]
            if self.origin == "hardware":
                lines.append(Line(begin + 0.3, 154, RESET))
            log_xids(effects, device, lines)
        hang_job(effects, fault.device, fault.onset, fault.onset + 10.0)
        if self.origin == "hardware":
            reset(effects, fault.device, fault.end)

    def _line(self, moment: float, fault: Fault) -> Line:
        gpc, tpc, sm = fault.rng(2).integers(0, (8, 9, 2)).tolist()
        text = f"Graphics SM Warp Exception on (GPC {gpc}, TPC {tpc}, SM {sm}): Out Of Range Address"
        if self.engine == "memory":
            return Line(moment, 31, _MMU, True)
        if self.engine == "scheduler" and self.origin == "hardware":
            return Line(moment, 109, "Ch 00000010, errorString CTX SWITCH TIMEOUT, Info 0x3c046", True)
        return Line(moment, 13, text, True)

    def truth_class(self, fault: Fault, layout: Layout) -> Detectability:
        """Returns its class in the truth."""
        return "hard" if self.origin == "hardware" else "benign"

    def attributed_part(self) -> Attribution:
        """Returns the GPU for a hardware fault, else the job."""
        return "gpu" if self.origin == "hardware" else "job"

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the faulty entities."""
        return (fault.entity,) if self.origin == "hardware" else ()

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        at = min(fault.onset + 10.0, fault.end)  # s until the launcher has seen it and ended all ranks; chosen
        out = fault.end - at if self.origin == "hardware" else 0.0
        return Stop(at, (node_of(fault.device, layout),), out)


@dataclass(frozen=True)
class GspTimeout(Kind):
    """GPU's own firmware (GSP) hangs: every call to the driver waits for it, its job hangs, then the GPU is reset."""

    name = "gsp_timeout"
    row = 8
    target = "gpu"
    detectability = "hard"
    attribution = "gpu"
    seen = "XID 119 or 120 with 154, missing rows of the GPU meanwhile, slow_call afterwards"
    unseen = "whether firmware or hardware is the cause"
    rate = Rate(0.8, "1M GPU-hours", "Llama 3: GPU system processor")
    lasts = Span(30.0, high=600.0)
    signals = ("event:xid", "event:slow_call")
    choices: ClassVar = {"code": ("119", "119", "119", "120")}
    code: str | None = None  # 119: no answer in time; 120: the firmware reported an error

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        logged = min(fault.onset + _GSP_WAITS, fault.end)
        index = fault.entity.rpartition(".")[2]
        text = (
            f"Timeout after 6s of waiting for RPC response from GPU{index} GSP! Expected function 76 (GSP_RM_CONTROL) "
            "(0x20800a2a 0x58c)."
            if self.code == "119"
            else "GSP task exception: store access page fault (cause:0xf) @ pc:0xffffffff93003d42, partition:4#0"
        )
        log_xids(effects, fault.device, [Line(logged, int(self.code or 119), text), Line(logged + 0.5, 154, RESET)])
        effects.gpu.gone.add(fault.device, effects.active(fault.onset, fault.end))
        hang_job(effects, fault.device, fault.onset, fault.end)
        waited = round(fault.end - fault.onset, 3)
        call = {"gpu": fault.entity, "call": "nvmlDeviceGetFieldValues", "seconds": waited}
        effects.add_event(fault.end, fault.entity, "slow_call", None, **call)
        reset(effects, fault.device, fault.end)

    def job_stop(self, fault: Fault, layout: Layout) -> Stop:
        """Returns the stop of jobs that it causes."""
        return Stop(fault.end, (node_of(fault.device, layout),), 600.0)  # drain, reset and check; chosen


_FATAL = 0.9  # lost share of the bandwidth from which the job dies; chosen
_INSIDE = 0.10  # share of a step in collectives within the node; chosen: tensor parallelism hides most
_REPEAT_S = 1200.0  # s between two messages while it lasts; chosen
_LINKS = 18  # of a GPU [H100 datasheet]


@dataclass(frozen=True)
class NvlinkError(Kind):
    """NVLinks of a GPU have errors and some fail: its node's ranks slow down; if nearly all bandwidth is lost, the job
    dies."""

    name = "nvlink_error"
    row = 9
    target = "nvlink"
    detectability = "hard"
    attribution = "gpu"
    seen = "XID 74 and SXid, checksum errors, replays and recoveries, speed; compute time of all ranks of the node"
    unseen = "which part of the link failed: GPU, NVSwitch or the connection between them"
    rate = Rate(
        0.5, "1M GPU-hours", "Minder: 1.7 % of faults; RSC-1: 34 of all kinds; other fleets have ten times that"
    )
    lasts = Span(600.0, HOUR, 8 * HOUR)
    signals = (
        *("nvlink.crc_errors", "nvlink.replay_errors", "nvlink.recovery_errors", "nvlink.speed", "nvlink.state"),
        *("rank.compute_time", "event:xid", "event:sxid"),
    )
    ranges: ClassVar = {"loss": (0.10, 1.0), "crc_rate": (1.0, 50.0), "dies_after": (1.0, 60.0)}
    limits: ClassVar = {"loss": (0.0, 1.0), "crc_rate": (0.0, 1e6), "dies_after": (0.1, 1e5)}
    severe = "loss"
    effect_unit = "bandwidth"
    loss: float | None = None  # share of the bandwidth inside the node; from 0.9 on its job dies
    crc_rate: float | None = None  # packets with a wrong checksum per second
    dies_after: float | None = None  # s until the job has died, if it does

    def faulty_entities(self, fault: Fault, layout: Layout) -> tuple[str, ...]:
        """Returns the link and its GPU: its counters do not tell which of them failed."""
        return fault.entity, layout.entities["gpu"][fault.device]

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.loss is not None
        assert self.crc_rate is not None
        gpu, device, here = effects.gpu, fault.device, effects.active(fault.onset, fault.end)
        gpu.nvlink_crc.add(device, self.crc_rate * here)
        gpu.nvlink_replays.add(device, 0.8 * self.crc_rate * here)  # most retransmissions succeed; chosen
        gpu.nvlink_speed.scale(device, 1 - self.loss * here)
        moments = self._moments(fault, effects)
        for moment in moments:
            gpu.nvlink_recoveries.add(device, effects.impulse(moment))
        if self._fatal():
            gpu.nvlink_down.add(device, here)
            hang_job(effects, device, fault.onset, self._death_time(fault))
            reset(effects, device, fault.end)
        else:
            width = effects.layout.gpus_per_node
            first = node_of(device, effects.layout) * width
            gpu.compute.scale(slice(first, first + width), 1 + _INSIDE * (1 / (1 - self.loss) - 1) * here)
        self._log_messages(fault, effects, moments)

    def job_death_time(self, fault: Fault) -> float | None:
        """Returns the second at which the job has died, if the link is dead."""
        return self._death_time(fault) if self._fatal() else None

    def _fatal(self) -> bool:
        assert self.loss is not None
        return self.loss >= _FATAL

    def _death_time(self, fault: Fault) -> float:
        assert self.dies_after is not None
        return min(fault.onset + self.dies_after, fault.end)

    def _moments(self, fault: Fault, effects: Effects) -> list[float]:
        """Returns when the driver logs it within the block: at the onset and repeatedly; once for a dead link."""
        count = 1 if self._fatal() else 1 + int((fault.end - fault.onset) / _REPEAT_S)
        first, last = (int((moment - fault.onset) // _REPEAT_S) for moment in (effects.since, effects.until))
        return [fault.onset + number * _REPEAT_S for number in range(max(0, first), min(count, last + 2))]

    def _log_messages(self, fault: Fault, effects: Effects, moments: list[float]) -> None:
        """Adds the GPU's log messages, and with the first one a message of the switch."""
        link = int(fault.rng().integers(_LINKS))
        severity = "fatal" if self._fatal() else "non-fatal"
        word = "0x10000" if self._fatal() else "0x20"
        text = f"NVLink: {severity} error detected on link {link}({word}, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
        for moment in moments:
            log_xids(effects, fault.device, [Line(moment, 74, text)])
        moment = round((fault.onset + 0.1) * SECOND) / SECOND
        if effects.contains(moment):
            code, what = (
                ("20034, Fatal", "LTSSM Fault Up") if self._fatal() else ("20001, Non-fatal", "TX Replay Error")
            )
            record = KmsgRecord(
                zlib.crc32(fault.entity.encode()) % 1_000_000, 0, 3, 0, f"{_HEAD}{code}, Link {link} {what}"
            )
            node = effects.layout.node_names[node_of(fault.device, effects.layout)]
            parsed = _decoder(node).decode(record, effects.start + round(moment * SECOND))
            assert parsed is not None
            effects.add_event(moment, parsed[1].entity, parsed[1].kind, None, **parsed[1].data)


_HEAD = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): "


@cache
def _decoder(node: str) -> KernelEventDecoder:
    return KernelEventDecoder(
        node,
        shipped_xid_table(),
        load_patterns(None, PREFILTER_WORDS),
        GpuAddresses(Path("/proc/driver/nvidia"), {}),
        Path("/sys"),
    )
