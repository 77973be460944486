"""Edge events of a simulated fleet: the agents' own rules for flow, pressure and temperature at one reading per second.

Temperatures are evaluated for all GPUs of a loop together (agents/node/edge/temperature.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.node.edge.coolant import CLEAR_READINGS, LEARN_READINGS, CollapseRule
from agents.node.edge.temperature import CALM_READINGS, CALM_SHARE, COOLEST_C, MAX_SPAN, MIN_SPAN, ROUNDING_K
from agents.sim.effects import Collapse, Effects, EventTime, FalseReading
from agents.sim.physics.noise import Floats, generator
from agents.sim.world import World
from pipeline.config.sections import Edge as Settings
from pipeline.model.records import SECOND, Event

CLEAR_TAIL_S = CLEAR_READINGS + 5.0
"""Seconds after its end within which the end of a collapse is reported."""
_LONGEST_FALL = 1800.0  # s of a fall that are evaluated: a slower fall becomes the baseline; chosen
_NOISE = 0.006  # of a flow meter and of its pressure gauge; as in agents/sim/physics/plant.py
_KEY = 9


def add_collapse_events(effects: Effects, flow: NDArray[Any], pressure: float) -> None:
    """Adds the events of the block's collapses; `flow` and `pressure`: normal values of the loops."""
    for collapse in effects.collapses:
        entity = effects.layout.entities["coolant"][collapse.loop]
        for time, kind, data in _collapse_events(collapse, float(flow[collapse.loop]), pressure):
            effects.add_event(time, entity, kind, **data)


@lru_cache(64)
def _collapse_events(collapse: Collapse, flow: float, pressure: float) -> tuple[tuple[float, str, dict[str, Any]], ...]:
    """Returns (second, kind, data) of all events of one collapse: cached, since long ones span hundreds of blocks."""
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
        rest = remaining_flow(collapse, second)
        usual = {"coolant.flow": flow * rest, "coolant.pressure": pressure * rest**2}
        if not collapse.real:
            del usual["coolant.pressure"]
        read = {name: value * (1 + _NOISE * float(rng.standard_normal())) for name, value in usual.items()}
        if not collapse.real:  # only the meter is wrong: the pressure is unchanged
            read["coolant.pressure"] = pressure
        for rule in rules:
            found += rule.evaluate(second * SECOND, "", read)
    return tuple((e.time / SECOND, e.kind, {**e.data, "since": EventTime(e.data["since"] / SECOND)}) for e in found)


def _seconds(collapse: Collapse) -> Iterator[int]:
    """Yields the seconds to evaluate: from before the fall to its bottom, and from its end to well after it."""
    begin, end = math.ceil(collapse.onset), math.ceil(collapse.end)
    bottom = min(begin + math.ceil(min(collapse.ramp, _LONGEST_FALL)) + LEARN_READINGS, end)
    yield from range(begin - LEARN_READINGS - 1, bottom)
    yield from range(max(bottom, end - 3), end + round(CLEAR_TAIL_S))


def remaining_flow(collapse: Collapse, second: int) -> float:
    """Returns the share of the flow that is left."""
    if second >= collapse.end:
        return 1.0
    return 1 - (1 - collapse.flow) * min(max((second - collapse.onset) / collapse.ramp, 0.0), 1.0)


WATCHED = 120
"""Seconds from the onset in which rises are searched: several times the lag of a plate. Chosen."""
_WATCHED = ("gpu.temperature", "coolant.supply_temperature")  # by agents/node/edge/rules.py
LEAST_FLOW = 0.05
"""Share of the flow to which the cooling of a stopped loop corresponds: convection, and the air around the board;
chosen."""
_GIVE_BACK, _OFF = 0.003, 0.11
"""As in agents/sim/physics/gpus.py: share of the power per K and second, and of a GPU that is shut down."""
_MOVED = 0.08  # share by which the power of a GPU under load moves within a minute, after the rule's filter
_SHORTEST, _LONGEST_SPAN = MIN_SPAN // SECOND, MAX_SPAN // SECOND


def add_rise_events(effects: Effects, heat: Floats, power: Floats, resistance: Floats, warming: float) -> None:
    """Adds temperature events of the block's collapses. (GPUs,) heat and power just before the onset; K/W of the plates
    and of the coolant."""
    layout = effects.layout
    for collapse in effects.collapses:
        if collapse.real and collapse.onset <= effects.until and collapse.onset + WATCHED >= effects.since:
            gpus = layout.gpus_of(layout.nodes_below("coolant", collapse.loop))
            plate = resistance[gpus] + np.float32(warming), np.float32(0.7) * resistance[gpus] + np.float32(warming)
            for time, gpu, data in _rise_events(collapse, heat[gpus], power[gpus], plate, layout.world):
                effects.add_event(time, layout.entities["gpu"][int(gpus[gpu])], "temperature_rise", **data)


def add_jump_events(effects: Effects, false_reading: FalseReading, entity: str, readings: NDArray[Any]) -> None:
    """Adds the events of an instrument that jumps up; `readings`: (ticks,) in the block."""
    if false_reading.jump is None or false_reading.signal not in _WATCHED:
        return
    second, size = false_reading.jump
    detected = float(np.ceil(second)) + 1  # the middle of three readings is one second late
    limit = Settings().temperature_slope
    value = float(readings[min(int(np.searchsorted(effects.time, detected)), len(readings) - 1)])
    moved = _MOVED if false_reading.signal.startswith("gpu.") else 0.0
    unexplained = size - ROUNDING_K - moved * max(value - COOLEST_C, 0)
    if not unexplained / _SHORTEST > limit:
        return
    calm = detected + min(_LONGEST_SPAN, np.ceil(unexplained / (CALM_SHARE * limit))) + CALM_READINGS - 1
    data = {"value": value, "power_moved": moved, "limit": limit, "signal": false_reading.signal}
    began = {"rise": size, "seconds": float(_SHORTEST), "slope": unexplained / _SHORTEST}
    effects.add_event(
        detected, entity, "temperature_rise", state="active", since=EventTime(detected - _SHORTEST), **data, **began
    )
    ended = {"rise": 0.0, "seconds": float(_LONGEST_SPAN), "slope": -ROUNDING_K / _LONGEST_SPAN}
    effects.add_event(calm, entity, "temperature_rise", state="cleared", since=EventTime(detected), **data, **ended)


def _rise_events(
    collapse: Collapse, heat: Floats, power: Floats, plate: tuple[Floats, Floats], world: World
) -> Iterator[tuple[float, int, dict[str, Any]]]:
    """Yields (second, GPU, data) of the events; `plate`: K/W of each, and the additional K/W at half the flow."""
    first, limit = int(np.floor(collapse.onset)) - _LONGEST_SPAN, Settings().temperature_slope
    warm, drawn = _heat_without_flow(collapse, heat, power, plate, first, world)
    rounded = np.rint(warm)[:-1]  # the middle of three readings that rise is the second
    explained = (_MOVED + 1 - drawn[:-1]) * np.maximum(rounded - COOLEST_C, 0)
    slopes = np.stack([_slope(rounded, explained, d) for d in range(_SHORTEST, _LONGEST_SPAN + 1)])
    best = slopes.max(axis=0)
    for gpu in np.flatnonzero((best > limit).any(axis=0)).tolist():
        at = int(np.argmax(best[:, gpu] > limit))
        within = int(np.argmax(slopes[:, at, gpu])) + _SHORTEST
        calm = np.convolve(best[at:, gpu] < CALM_SHARE * limit, np.ones(CALM_READINGS), "valid") == CALM_READINGS
        moments = [("active", at, EventTime(first + 1 + at - within))]
        if calm.any():
            moments.append(("cleared", at + int(np.argmax(calm)) + CALM_READINGS - 1, EventTime(first + 1 + at)))
        for state, detected, since in moments:
            steepest = int(np.argmax(slopes[:, detected, gpu])) + _SHORTEST
            yield (
                float(first + 1 + detected),
                gpu,
                {
                    "state": state,
                    "since": since,
                    "value": float(rounded[detected, gpu]),
                    "rise": float(rounded[detected, gpu] - rounded[max(detected - steepest, 0), gpu]),
                    "seconds": float(steepest),
                    "slope": float(best[detected, gpu]),
                    "power_moved": _MOVED,
                    "limit": limit,
                    "signal": "gpu.temperature",
                },
            )


def _heat_without_flow(
    collapse: Collapse, heat: Floats, power: Floats, plate: tuple[Floats, Floats], first: int, world: World
) -> tuple[Floats, Floats]:
    """Returns (seconds, GPUs) temperatures from `first` on, and the share of the power after thermal throttling."""
    now, found, rest, shares = heat.astype(np.float64), [], np.ones(len(heat)), []
    heat_j_k, slowdown, shutdown = world.cooling.heat_j_k, world.part.slowdown, world.part.shutdown
    for second in range(first, first + _LONGEST_SPAN + WATCHED):
        more = plate[1] * (1 / max(remaining_flow(collapse, second), LEAST_FLOW) - 1)
        coolant = heat - power * plate[0]
        target = coolant + rest * power * (plate[0] + more)
        now = np.minimum(now + (1 - np.exp(-1 / (heat_j_k * (plate[0] + more)))) * (target - now), shutdown)
        rest = np.where(now >= shutdown, _OFF, np.clip(rest - _GIVE_BACK * (now - slowdown), _OFF, 1))
        found.append(now)
        shares.append(rest)
    return np.asarray(found, np.float32), np.asarray(shares, np.float32)


def _slope(rounded: Floats, explained: NDArray[Any], seconds: int) -> NDArray[Any]:
    """Returns (readings, GPUs) the unexplained slope over `seconds` (K/s); -1 for the first `seconds`."""
    out = np.full(rounded.shape, -1.0)
    out[seconds:] = (rounded[seconds:] - rounded[:-seconds] - ROUNDING_K - explained[seconds:]) / seconds
    return out
