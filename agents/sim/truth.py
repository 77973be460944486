"""truth.jsonl: what really happened, so that whatever a detector says can be held against it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from agents.sim.faults.kind import Fault
from agents.sim.layout import Layout
from agents.sim.schedule import Schedule
from pipeline.records import SECOND, iso

_LOOKS = 16  # moments within a fault at which it is asked whether a job ran there; chosen


def lines(
    faults: Iterable[Fault], schedule: Schedule, layout: Layout, start: int, horizon: float
) -> list[dict[str, Any]]:
    """One line per fault or benign event that began before `horizon` s, in order of their numbers."""
    return [_line(fault, schedule, layout, start, horizon) for fault in faults if fault.onset < horizon]


def _line(fault: Fault, schedule: Schedule, layout: Layout, start: int, horizon: float) -> dict[str, Any]:
    kind, idle = fault.kind, _idle(fault, schedule, layout)
    guilty = kind.guilty(fault, layout)
    detectable = kind.detectable(fault)
    unseen = idle or detectable >= min(fault.end, horizon)
    line: dict[str, Any] = {
        "id": f"fault-{fault.number}",
        "kind": kind.name,
        "entity": fault.entity,
        "onset": _time(start, fault.onset),
        "end": _time(start, min(fault.end, horizon)),
        "class": "invisible" if unseen else kind.verdict(fault),
        "signals": list(kind.signals),
        "parameters": {**kind.parameters(), "row": kind.row, "attribution": kind.blames()},
    }
    if guilty != (fault.entity,):
        line["entities"] = list(guilty)
    more = {"severity": kind.severity(), "effect": kind.effect(), "effect_unit": kind.effect_unit}
    line["parameters"] |= {name: value for name, value in more.items() if value is not None}
    if fault.onset < detectable < fault.end:
        line["parameters"]["detectable"] = _time(start, min(detectable, horizon))
    if idle:
        line["parameters"]["idle"] = True
    return line


def _idle(fault: Fault, schedule: Schedule, layout: Layout) -> bool:
    """Whether a fault that only shows under load struck where no job ran for most of its time. A logged fact is seen
    all the same."""
    if not fault.kind.loaded or fault.kind.detectability != "soft":
        return False
    below = fault.kind.strikes in ("node", "leaf")
    gpu = int(layout.gpus_of(layout.nodes_below(fault.kind.strikes, fault.device))[0]) if below else fault.device
    stop = fault.kind.stops(fault, layout)  # a job that it has stopped was there
    end = min(fault.end, fault.onset + 86_400, stop.at if stop else np.inf)
    looks = np.linspace(fault.onset, end, _LOOKS, endpoint=False)
    return sum(schedule.at(gpu, float(t)) is not None for t in looks) < _LOOKS / 2


def _time(start: int, seconds: float) -> str:
    return iso(start + round(seconds * SECOND))
