"""Lines of a simulated node's kernel log, read by the same code with which agents read the real one."""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path

from agents.sim.effects import Effects
from agents.sources.kernel.events import WORDS, Interpreter
from agents.sources.kernel.gpu_places import GpuPlaces
from agents.sources.kernel.kmsg import Record
from agents.sources.kernel.patterns import Patterns, load
from agents.sources.xids.table import shipped
from pipeline.records import SECOND

_NOWHERE = Path("/dev/null")  # the devices of the machine that simulates are none of the fleet's


def tell(effects: Effects, node: int, moment: float, text: str) -> None:
    """The event that an agent makes of a line, if its moment falls into the block."""
    if not effects.holds(moment):
        return
    name = effects.layout.node_names[node]
    sequence = zlib.crc32(f"{name} {moment} {text}".encode()) % 1_000_000
    read = Interpreter(name, shipped(), _patterns(), GpuPlaces(_NOWHERE), _NOWHERE)
    told = read.event(Record(sequence, 0, 3, 0, text), round(moment * SECOND))
    assert told is not None, text
    effects.tell(moment, told[1].entity, "kernel", node, **told[1].data)


@cache
def _patterns() -> Patterns:
    return load(None, WORDS)
