"""What the agents' edge rules say of a loop whose flow collapses: the very rules, at one look a second."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from agents.edge.collapse import LEARN, WELL, CollapseRule
from agents.sim.effects import Collapse, Effects, Moment
from agents.sim.physics.noise import generator
from pipeline.config import Edge as Settings
from pipeline.records import SECOND, Event

TELLS = WELL + 5.0
"""Seconds after its end within which the end of a collapse is told."""
_LONGEST = 1800.0  # s of a fall that are looked at: a slower one becomes the usual value; chosen
_NOISE = 0.006  # of a flow meter and of its pressure gauge; as agents/sim/physics/facility.py has it
_KEY = 9


def collapses(effects: Effects, flow: NDArray[Any], pressure: float) -> None:
    """Tells what the rules say of the block's collapses; `flow` and `pressure`: what the loops usually show."""
    for collapse in effects.collapses:
        entity = effects.layout.entities["coolant"][collapse.loop]
        for time, kind, data in _said(collapse, float(flow[collapse.loop]), pressure):
            effects.tell(time, entity, kind, **data)


@lru_cache(64)
def _said(collapse: Collapse, flow: float, pressure: float) -> tuple[tuple[float, str, dict[str, Any]], ...]:
    """(second, kind, data) of all events of one collapse: some long ones are asked for in hundreds of blocks."""
    settings, shared = Settings(), (dict[str, set[str]](), dict[tuple[str, str], float]())
    rules = (
        CollapseRule("flow_collapse", ("coolant.flow",), settings.flow_share, settings.least_flow, *shared),
        CollapseRule(
            "pressure_collapse", ("coolant.pressure",), settings.pressure_share, settings.least_pressure, *shared
        ),
    )
    rng = generator(*collapse.key, _KEY)
    found: list[Event] = []
    for second in _seconds(collapse):
        rest = left(collapse, second)
        usual = {"coolant.flow": flow * rest, "coolant.pressure": pressure * rest**2}
        if not collapse.real:
            del usual["coolant.pressure"]
        read = {name: value * (1 + _NOISE * float(rng.standard_normal())) for name, value in usual.items()}
        if not collapse.real:  # the meter alone: the pressure stands
            read["coolant.pressure"] = pressure
        for rule in rules:
            found += rule.look(second * SECOND, "", read)
    return tuple((e.time / SECOND, e.kind, {**e.data, "since": Moment(e.data["since"] / SECOND)}) for e in found)


def _seconds(collapse: Collapse) -> Iterator[int]:
    """Looks from before the fall to its bottom, and from the bottom to well after its end."""
    begin, end = math.ceil(collapse.onset), math.ceil(collapse.end)
    bottom = min(begin + math.ceil(min(collapse.ramp, _LONGEST)) + LEARN, end)
    yield from range(begin - LEARN - 1, bottom)
    yield from range(max(bottom, end - 3), end + round(TELLS))


def left(collapse: Collapse, second: int) -> float:
    """Share of the flow that is left."""
    if second >= collapse.end:
        return 1.0
    return 1 - (1 - collapse.flow) * min(max((second - collapse.onset) / collapse.ramp, 0.0), 1.0)
