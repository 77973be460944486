"""Kernel log lines of simulated nodes, XIDs included, parsed by the code with which agents read the real log."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from agents.collectors.gpu.xid_correlation import XidCorrelator
from agents.collectors.gpu.xid_table import shipped_xid_table
from agents.collectors.host.kernel_events import PREFILTER_WORDS, GpuAddresses, KernelEventDecoder
from agents.collectors.host.kernel_patterns import LogPatterns, load_patterns
from agents.collectors.host.kmsg import KmsgRecord
from agents.sim.effects import Effects
from pipeline.model.records import SECOND

_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)  # of the eight GPUs of a node, as HGX H100 servers have them
_MOST = 32  # GPUs of a node, as scenarios allow
_UNKNOWN_PROCESS = "pid='<unknown>', name=<unknown>"


class Line(NamedTuple):
    """One line of the driver: seconds after the start, code, text. user: caused by a process."""

    moment: float
    code: int
    text: str
    user: bool = False


def address(index: int) -> str:
    """Returns the PCI address of a node's GPU, as the driver writes it."""
    domain, place = divmod(index, len(_BUSES))
    return f"{domain:04x}:{_BUSES[place]:02x}:00"


def log_xids(effects: Effects, device: int, lines: Sequence[Line]) -> None:
    """Adds the XIDs of one GPU that lie in the block. `lines`: all of one fault, since they are correlated."""
    times = [round(line.moment * SECOND) for line in lines]
    if not any(effects.contains(time / SECOND) for time in times):
        return
    entity = effects.layout.entities["gpu"][device]
    node, _, index = entity.removeprefix("gpu:").rpartition(".")
    first, read = zlib.crc32(f"{entity} {times[0]}".encode()) % 1_000_000, _decoder(node)
    events = []
    for number, (line, time) in enumerate(zip(lines, times, strict=True)):
        process = f"pid={4000 + first % 60_000}, name=python3" if line.user else _UNKNOWN_PROCESS
        text = f"NVRM: Xid (PCI:{address(int(index))}): {line.code}, {process}, {line.text}"
        parsed = read.decode(KmsgRecord(first + number, 0, 3, 0, text), effects.start + time)
        assert parsed is not None
        events.append(parsed[1])
    for event in XidCorrelator().process(events, max(event.time for event in events)):
        effects.add_event((event.time - effects.start) / SECOND, event.entity, "xid", **event.data)


@cache
def _decoder(node: str) -> KernelEventDecoder:
    places = GpuAddresses(Path("/proc/driver/nvidia"), {address(index): index for index in range(_MOST)})
    return KernelEventDecoder(node, shipped_xid_table(), load_patterns(None, PREFILTER_WORDS), places, Path("/sys"))


_NO_PATH = Path("/dev/null")  # devices of this host do not belong to the fleet


def log_line(effects: Effects, node: int, moment: float, text: str) -> None:
    """Adds the event that an agent makes of a kernel log line, if its time is in the block."""
    if not effects.contains(moment):
        return
    name = effects.layout.node_names[node]
    sequence = zlib.crc32(f"{name} {moment} {text}".encode()) % 1_000_000
    read = KernelEventDecoder(name, shipped_xid_table(), _patterns(), GpuAddresses(_NO_PATH), _NO_PATH)
    parsed = read.decode(KmsgRecord(sequence, 0, 3, 0, text), round(moment * SECOND))
    assert parsed is not None, text
    effects.add_event(moment, parsed[1].entity, "kernel", node, **parsed[1].data)


@cache
def _patterns() -> LogPatterns:
    return load_patterns(None, PREFILTER_WORDS)
