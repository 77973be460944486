"""What is wrong with a memory, in words: troubles, what ends them, and how long spare rows will last."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detectors.memory.host import Host
from detectors.memory.rows import LEAST_DAYS, LEAST_ROWS
from pipeline.records import LEVELS, Level

_RESET = "a reset of the GPU, after which its driver counts anew"
_RESET_OR_DAY = f"{_RESET}, or a day after the first of them; what broke then is still to be looked for"
CLEARS: Mapping[str, str] = {
    "gpu.rows_failed": "the exchange of the GPU",
    "gpu.sram_uncorrected": _RESET_OR_DAY,
    "gpu.sram_corrected": _RESET,
    "gpu.dram_uncorrected": _RESET_OR_DAY,
    "gpu.rows_corrected": "the exchange of the GPU, or spare rows that last for two months again",
    "gpu.rows_pending": "a reset of the GPU, which replaces the row",
    "gpu.sram_threshold": "the exchange of the GPU",
    "gpu.banks_none": "the exchange of the GPU",
    "gpu.dram_corrected": "a day without a corrected error, or a reset of the GPU",
    "host": "the reboot after the module was exchanged; else a day without corrected errors, or after uncorrected ones",
}
"""By the signal that is worst."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong."""

    level: Level
    since: int
    text: str
    signal: str


def worst(troubles: Sequence[Trouble]) -> Trouble:
    """The loudest; of equals the first."""
    return max(troubles, key=lambda trouble: LEVELS.index(trouble.level))


def within(hours: float) -> str:
    """`20 min`, `2.5 h`."""
    return f"{max(hours * 60, 1):.0f} min" if hours < 1 else f"{hours:.1f} h"


def counted(errors: float, what: str) -> str:
    """`1 corrected error`, `2 corrected errors`."""
    return f"{errors:.0f} {what} error{'' if errors == 1 else 's'}"


def budget(rows: float, first: float, days: float, limit: float) -> str:
    """How many rows were replaced, and when none can be any more at the rate of the last `days`."""
    if math.isnan(rows):
        return "cannot tell: replaced rows are not told"
    used = f"{rows:.0f} rows replaced, {limit:.0f} fail the GPU"
    grown = rows - first
    if grown < LEAST_ROWS or days < LEAST_DAYS:
        return f"{used}; cannot tell for how long the rest lasts: {grown:.0f} in the last {days:.1f} days"
    left = max(limit - rows, 0.0) / (grown / days)
    return f"{used}; at {grown / days:.2g} a day the rest lasts {left:,.0f} days, less where all are of one bank"


def of_host(cell: Any, host: Host, time: int) -> Trouble:
    """What is wrong with a server's memory, or with one of its modules."""
    what = "memory" if host.device_class == "node" else "module"
    if cell["lost"]:
        text = f"{counted(cell['lost'], 'uncorrected')} of its {what}: drain, find and exchange the module"
        return Trouble("page", int(cell["lost_at"]), text, host.uncorrected)
    text = f"more than {host.limit:.0f} corrected errors of its {what} a day: plan to exchange the module"
    return Trouble("ticket", int(cell["since"]), text, host.corrected)
