"""Coolers: what a GPU's heat flows into, and the thermal resistance on the way: cold plates, or sinks in a fan's air.

    plate: R(flow) = R_th * (0.3 + 0.7 / flow) + warming / flow     air: R(speed) = R_th * (0.35 + 0.65 / speed^0.8)

A node's fans follow its hottest GPU and its inlet with a lag, so the resistance to air falls with the load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.edge import LEAST_FLOW
from agents.sim.physics.noise import Floats
from agents.sim.physics.state import State

_MIDDLE_C = 24.0  # inlet at which the fans of an air-cooled node stand at their least speed when it is idle; chosen
_PER_INLET_K = 0.015  # share of the full speed per K of inlet above that; chosen: 20 K of it are a third
_SOLID = 0.35  # share of the resistance that the air's speed does not change: paste, lid and fins; chosen
_WITHIN = 5  # more steps in which fans and temperatures meet within a tick that is long for the fans; chosen
_SETTLES = 100  # steps in which the fans settle before the first tick
_LEAST_AIR = 0.1  # share of the full speed to which the cooling without fans corresponds: convection; chosen


class PlateCooler:
    """Cold plates on coolant loops."""

    def __init__(self, layout: Layout, interval: float, r_th: Floats) -> None:
        self.layout, self.interval, self._cooling = layout, interval, layout.world.cooling
        second = np.arange(layout.gpus) % layout.gpus_per_node % 2  # of two plates in series
        self.r_th: Floats = r_th.copy()
        self.r_th += np.float32(self._cooling.behind / layout.world.part.board_w) * second
        self.warming = self._cooling.warming

    def rest_temperature(self, draw: NDArray[Any], supply: float) -> NDArray[Any]:
        """Returns (GPUs,) the settled temperature of GPUs that draw so many W."""
        return np.asarray(supply + (self.r_th + self.warming) * draw)

    def begin(self, supply: Floats, air: Floats, effects: Effects) -> None:
        """Prepares a block; `supply`: (ticks, loops), `air`: (ticks, nodes) Celsius."""
        ticks, warming = len(supply), np.float32(self.warming)
        cooling = 1 / np.maximum(np.asarray(self._flow(effects), np.float32), np.float32(LEAST_FLOW))
        own = self.r_th * np.asarray(effects.gpu.resistance.values, np.float32)
        resistance = own * (np.float32(0.3) + np.float32(0.7) * cooling) + warming * cooling
        share = 1 - np.exp(np.float32(-self.interval / self._cooling.heat_j_k) / resistance)
        self._share = np.broadcast_to(share, (ticks, self.layout.gpus))
        self._resistance = np.broadcast_to(resistance, (ticks, self.layout.gpus))
        self._inlet = supply[:, self.layout.loop_of_gpu]

    def at(self, tick: int, heat: Floats, power: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns (GPUs,) Celsius of the coolant, K/W, and the share of the way to the end that a tick goes."""
        return self._inlet[tick], self._resistance[tick], self._share[tick]

    def _flow(self, effects: Effects) -> Any:
        """Returns the factor on the coolant flow at each GPU: of its loop and of its node."""
        flow = effects.site.flow.values
        flow = flow if np.ndim(flow) == 0 else flow[:, self.layout.loop_of_gpu]
        own = effects.node.flow.values
        return flow * (own if np.ndim(own) == 0 else own[:, self.layout.node_of_gpu])


class AirCooler:
    """Heat sinks in the air of a node's fans; `node.flow` of a fault is the share of the air that is left."""

    warming = 0.0

    def __init__(self, layout: Layout, interval: float, r_th: Floats, state: State) -> None:
        self.layout, self.interval, self._world, self.r_th = layout, interval, layout.world, r_th
        width = layout.gpus_per_node
        rear = np.arange(layout.gpus) % width >= width // 2  # the second row of an HGX board
        self._behind = np.where(rear, self._world.cooling.behind / self._world.part.board_w, 0).astype(np.float32)
        self._state = state
        state["air.speed"] = np.full(layout.nodes, self._world.air.least, np.float32)
        self.speed: Floats = state["air.speed"][None]
        """(ticks, nodes) share of the fans' full speed in the newest block."""

    def rest_temperature(self, draw: NDArray[Any], supply: float) -> NDArray[Any]:
        """Returns (GPUs,) the settled temperature of GPUs that draw so many W, and settles the fans."""
        fans, node = self._world.air, self.layout.node_of_gpu
        inlet, speed = np.full(self.layout.nodes, fans.inlet), self._state["air.speed"]
        for _ in range(_SETTLES):
            heat = inlet[node] + self._resistance(self.r_th, speed) * draw
            speed = (speed + (self._wanted(inlet, heat) - speed) / _SETTLES**0.5).astype(np.float32)
        self._state["air.speed"] = speed
        return np.asarray(heat)

    def begin(self, supply: Floats, air: Floats, effects: Effects) -> None:
        """Prepares a block; `air`: (ticks, nodes) Celsius at the inlets."""
        self._air, self.speed = air, np.empty_like(air)
        shape = len(air), self.layout.gpus
        self._own = np.broadcast_to(self.r_th * np.asarray(effects.gpu.resistance.values, np.float32), shape)
        self._flow = np.broadcast_to(np.asarray(effects.node.flow.values, np.float32), air.shape)

    def at(self, tick: int, heat: Floats, power: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns (GPUs,) Celsius of the air, K/W, and the share of the way to the end that a tick goes."""
        inlet, now = self._air[tick], self._state["air.speed"]
        way = 1 - np.exp(-self.interval / self._world.air.tau)
        speed = now
        for _ in range(1 + _WITHIN * (self.interval > self._world.air.tau / 2)):
            resistance, share = self._contact(tick, speed)
            ahead = heat + share * (inlet[self.layout.node_of_gpu] + resistance * power - heat)
            speed = 0.5 * (speed + now + way * (self._wanted(inlet, ahead) - now))
        self._state["air.speed"] = self.speed[tick] = speed.astype(np.float32)
        resistance, share = self._contact(tick, speed)
        return inlet[self.layout.node_of_gpu], resistance.astype(np.float32), share.astype(np.float32)

    def _contact(self, tick: int, speed: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns (GPUs,) K/W, and the share of the way to the end that a tick goes."""
        resistance = self._resistance(self._own[tick], speed * self._flow[tick])
        return resistance, 1 - np.exp(np.float32(-self.interval / self._world.cooling.heat_j_k) / resistance)

    def _wanted(self, inlet: NDArray[Any], heat: NDArray[Any]) -> NDArray[Any]:
        """Returns (nodes,) the share of the full speed for an inlet and the GPUs' temperatures."""
        fans, hottest = self._world.air, heat.reshape(self.layout.nodes, -1).max(axis=1)
        wanted = fans.least + _PER_INLET_K * (inlet - _MIDDLE_C) + fans.per_k * np.maximum(hottest - fans.aim, 0)
        return np.asarray(np.clip(wanted, fans.least, 1))

    def _resistance(self, own: NDArray[Any], air: NDArray[Any]) -> NDArray[Any]:
        """Returns (GPUs,) K/W by their own contact and the share of the full air of their nodes."""
        blown = np.maximum(air, _LEAST_AIR) ** np.float32(-self._world.air.exponent)
        return np.asarray(own * (_SOLID + (1 - _SOLID) * blown)[self.layout.node_of_gpu] + self._behind)


def build_cooler(layout: Layout, interval: float, r_th: Floats, state: State) -> PlateCooler | AirCooler:
    """Returns the cooler of the world; r_th: (GPUs,) K/W of each GPU's own contact."""
    if layout.world.cooling.has_loop:
        return PlateCooler(layout, interval, r_th)
    return AirCooler(layout, interval, r_th, state)
