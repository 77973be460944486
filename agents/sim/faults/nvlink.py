"""NVLinks: links between the GPUs of a node that err, fall out or take their job down."""

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
from agents.sim.faults.gpu import hang, node_of, reset
from agents.sim.faults.kind import HOUR, Fault, Kind, Rate, Span
from agents.sim.physics.kernel_log import Line, log_xids
from pipeline.model.records import SECOND

_FATAL = 0.9  # share of the bandwidth from which on the job does not go on; chosen
_INSIDE = 0.10  # of a rank's step, in collectives between the GPUs of its node; chosen, tensor parallelism hides most
_AGAIN = 1200.0  # s between two messages while it goes on; chosen
_LINKS = 18  # of a GPU [H100 datasheet]


@dataclass(frozen=True)
class NvlinkError(Kind):
    """NVLinks of a GPU err and some fall out: its node's ranks slow down; with nearly all bandwidth goes the job."""

    name = "nvlink_error"
    row = 9
    strikes = "nvlink"
    detectability = "hard"
    attribution = "gpu"
    seen = "XID 74 and SXid, checksum errors, replays and recoveries, speed; compute time of all ranks of the node"
    unseen = "which end of the link: GPU, NVSwitch or what lies between"
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

    def act(self, fault: Fault, effects: Effects) -> None:
        """Writes its effects into the block."""
        assert self.loss is not None
        assert self.crc_rate is not None
        gpu, device, here = effects.gpu, fault.device, effects.active(fault.onset, fault.end)
        gpu.nvlink_crc.add(device, self.crc_rate * here)
        gpu.nvlink_replays.add(device, 0.8 * self.crc_rate * here)  # most are sent again with success; chosen
        gpu.nvlink_speed.scale(device, 1 - self.loss * here)
        moments = self._moments(fault, effects)
        for moment in moments:
            gpu.nvlink_recoveries.add(device, effects.impulse(moment))
        if self._fatal():
            gpu.nvlink_down.add(device, here)
            hang(effects, device, fault.onset, self._dies(fault))
            reset(effects, device, fault.end)
        else:
            width = effects.layout.gpus_per_node
            first = node_of(device, effects.layout) * width
            gpu.compute.scale(slice(first, first + width), 1 + _INSIDE * (1 / (1 - self.loss) - 1) * here)
        self._tell(fault, effects, moments)

    def job_death(self, fault: Fault) -> float | None:
        """Returns the second at which the job has died, if the link is dead."""
        return self._dies(fault) if self._fatal() else None

    def _fatal(self) -> bool:
        assert self.loss is not None
        return self.loss >= _FATAL

    def _dies(self, fault: Fault) -> float:
        assert self.dies_after is not None
        return min(fault.onset + self.dies_after, fault.end)

    def _moments(self, fault: Fault, effects: Effects) -> list[float]:
        """Yields when the driver logs it within the block: immediately and while it lasts; for a dead link once."""
        count = 1 if self._fatal() else 1 + int((fault.end - fault.onset) / _AGAIN)
        first, last = (int((moment - fault.onset) // _AGAIN) for moment in (effects.since, effects.until))
        return [fault.onset + number * _AGAIN for number in range(max(0, first), min(count, last + 2))]

    def _tell(self, fault: Fault, effects: Effects, moments: list[float]) -> None:
        """The GPU's message, and of the first one the switch's."""
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
            parsed = _interpreter(node).decode(record, effects.start + round(moment * SECOND))
            assert parsed is not None
            effects.add_event(moment, parsed[1].entity, parsed[1].kind, None, **parsed[1].data)


_HEAD = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): "


@cache
def _interpreter(node: str) -> KernelEventDecoder:
    return KernelEventDecoder(
        node,
        shipped_xid_table(),
        load_patterns(None, PREFILTER_WORDS),
        GpuAddresses(Path("/proc/driver/nvidia"), {}),
        Path("/sys"),
    )
