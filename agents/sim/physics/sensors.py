"""Air at the nodes: its temperature at the inlet, and the fans that follow it. The GPUs are cooled by liquid."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.noise import Drift, generator
from agents.sim.physics.state import State

_INLET_C, _RACK_SD, _NODE_SD = 24.0, 0.6, 0.4  # Celsius, K: within ASHRAE's 18 to 27 for air; spreads are chosen
_DAILY, _DRIFT = 0.4, 0.2  # K over a day, and from minute to minute; chosen
_FAN_RPM, _FAN_MOST, _PER_K = 6000.0, 12_000.0, 900.0  # at _INLET_C, at most, per K above; chosen as server fans run
_STEP = 60.0  # rpm in which BMCs count a fan; chosen


class Sensors:
    """Inlet and fan of each node, in turn; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, n = generator(seed, 57), layout.nodes
        self.layout, self.seed = layout, seed
        rack = rng.normal(0, _RACK_SD, layout.racks)[layout.rack_of_node]
        self._inlet = (_INLET_C + rack + rng.normal(0, _NODE_SD, n)).astype(np.float32)
        self._fan = (1 + 0.02 * rng.standard_normal(n).clip(-3, 3)).astype(np.float32)
        self._drift = Drift(state, "node.inlet", rng, n, 0.9, interval)

    def advance(self, block: int, effects: Effects) -> dict[str, NDArray[Any]]:
        """Columns of class sensor: a temperature has no speed, and a fan no temperature."""
        rng, ticks = generator(self.seed, 58, block), len(effects.time)
        daily = _DAILY * np.sin(2 * np.pi * effects.time / 86_400 - 2).astype(np.float32)
        drift = np.float32(_DRIFT) * self._drift.draw(rng, ticks)
        inlet = self._inlet + daily[:, None] + drift + effects.node.inlet.values
        speed = (_FAN_RPM + _PER_K * np.maximum(inlet - _INLET_C, 0)) * self._fan * effects.node.fans.values
        shape = ticks, 2 * self.layout.nodes
        warmth, fan = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        warmth[:, 0::2] = np.rint(inlet * 2) / 2  # BMCs tell halves of a degree
        fan[:, 1::2] = np.rint(np.minimum(speed, _FAN_MOST) / _STEP) * _STEP
        return {"sensor.temperature": warmth, "sensor.fan_speed": fan}
