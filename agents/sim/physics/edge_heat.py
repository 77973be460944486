"""What the agents' rule of temperatures says of GPUs that lost their coolant, and of instruments that jump.

The rule is that of agents/edge/rise.py at one look a second, for all GPUs of a loop at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.edge.rise import CALM, CALM_LOOKS, COOLEST, LONGEST, ROUNDING, SHORTEST
from agents.sim.effects import Collapse, Effects, Moment, Tamper
from agents.sim.physics.edge import left
from agents.sim.physics.noise import Floats
from pipeline.config import Edge as Settings
from pipeline.records import SECOND

WATCHED = 120
"""Seconds from the onset in which rises are looked for: ten times the lag of a plate. Chosen."""
_WATCHED = ("gpu.temperature", "coolant.supply_temperature")  # by agents/edge/edge.py
_LAG_S = 12.0  # as agents/sim/physics/gpus.py has it
_MOVED = 0.05  # share by which the power of a GPU under load moves within a minute, after the rule's filter
_SHORTEST, _LONGEST = SHORTEST // SECOND, LONGEST // SECOND


def rises(effects: Effects, heat: Floats, power: Floats, resistance: Floats, warming: float) -> None:
    """Tells what agents see of the block's collapses. (GPUs,) heat and power just before the onset; K/W of the plates
    and of the coolant on its way."""
    layout = effects.layout
    for collapse in effects.collapses:
        if collapse.real and collapse.onset <= effects.until and collapse.onset + WATCHED >= effects.since:
            gpus = layout.gpus_of(layout.nodes_below("coolant", collapse.loop))
            extra = power[gpus] * (np.float32(0.7) * resistance[gpus] + np.float32(warming))
            for time, gpu, data in _said(collapse, heat[gpus], extra):
                effects.tell(time, layout.entities["gpu"][int(gpus[gpu])], "temperature_rise", **data)


def jumps(effects: Effects, tamper: Tamper, entity: str, readings: NDArray[Any]) -> None:
    """Tells what an agent sees of an instrument that jumps up: (ticks,) its readings in the block."""
    if tamper.jump is None or tamper.signal not in _WATCHED:
        return
    second, size = tamper.jump
    look, limit = float(np.ceil(second)) + 1, Settings().temperature_slope  # the middle of three readings is one late
    value = float(readings[min(int(np.searchsorted(effects.time, look)), len(readings) - 1)])
    moved = _MOVED if tamper.signal.startswith("gpu.") else 0.0
    unexplained = size - ROUNDING - moved * max(value - COOLEST, 0)
    if not unexplained / _SHORTEST > limit:
        return
    calm = look + min(_LONGEST, np.ceil(unexplained / (CALM * limit))) + CALM_LOOKS - 1
    told = {"value": value, "power_moved": moved, "limit": limit, "signal": tamper.signal}
    began = {"rise": size, "seconds": float(_SHORTEST), "slope": unexplained / _SHORTEST}
    effects.tell(look, entity, "temperature_rise", state="active", since=Moment(look - _SHORTEST), **told, **began)
    ended = {"rise": 0.0, "seconds": float(_LONGEST), "slope": -ROUNDING / _LONGEST}
    effects.tell(calm, entity, "temperature_rise", state="cleared", since=Moment(look), **told, **ended)


def _said(collapse: Collapse, heat: Floats, extra: Floats) -> Iterator[tuple[float, int, dict[str, Any]]]:
    """(second, GPU, data) of the events; `extra`: K that each warms when its flow is halved."""
    first, limit = int(np.floor(collapse.onset)) - _LONGEST, Settings().temperature_slope
    looks = np.rint(_warm(collapse, heat, extra, first))[:-1]  # the middle of three readings that rise is the second
    explained = _MOVED * np.maximum(looks - COOLEST, 0)
    slopes = np.stack([_slope(looks, explained, d) for d in range(_SHORTEST, _LONGEST + 1)])
    best = slopes.max(axis=0)
    for gpu in np.flatnonzero((best > limit).any(axis=0)).tolist():
        at = int(np.argmax(best[:, gpu] > limit))
        within = int(np.argmax(slopes[:, at, gpu])) + _SHORTEST
        calm = np.convolve(best[at:, gpu] < CALM * limit, np.ones(CALM_LOOKS), "valid") == CALM_LOOKS
        moments = [("active", at, Moment(first + 1 + at - within))]
        if calm.any():
            moments.append(("cleared", at + int(np.argmax(calm)) + CALM_LOOKS - 1, Moment(first + 1 + at)))
        for state, look, since in moments:
            steepest = int(np.argmax(slopes[:, look, gpu])) + _SHORTEST
            yield (
                float(first + 1 + look),
                gpu,
                {
                    "state": state,
                    "since": since,
                    "value": float(looks[look, gpu]),
                    "rise": float(looks[look, gpu] - looks[max(look - steepest, 0), gpu]),
                    "seconds": float(steepest),
                    "slope": float(best[look, gpu]),
                    "power_moved": _MOVED,
                    "limit": limit,
                    "signal": "gpu.temperature",
                },
            )


def _warm(collapse: Collapse, heat: Floats, extra: Floats, first: int) -> Floats:
    """(seconds, GPUs) temperatures from `first` on at constant power."""
    share, now, found = 1 - np.exp(-1 / _LAG_S), heat.astype(np.float64), []
    for second in range(first, first + _LONGEST + WATCHED):
        now = now + share * (heat + extra * (1 / left(collapse, second) - 1) - now)
        found.append(now)
    return np.asarray(found, np.float32)


def _slope(looks: Floats, explained: NDArray[Any], seconds: int) -> NDArray[Any]:
    """(looks, GPUs) K/s that nothing explains over so many seconds; below any limit before there are so many."""
    out = np.full(looks.shape, -1.0)
    out[seconds:] = (looks[seconds:] - looks[:-seconds] - ROUNDING - explained[seconds:]) / seconds
    return out
