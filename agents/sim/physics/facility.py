"""What stands beside the nodes: coolant loops (supply, flow, pump, reservoir), leak ropes and distribution units.

The coolant takes the heat away: return - supply = 15.1 K per kW and L/min (PG25: 1.02 kg/L, 3.9 kJ/kg K).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.physics.edge import collapses
from agents.sim.physics.edge_heat import LEAST_FLOW
from agents.sim.physics.gpus import SHUTDOWN_C
from agents.sim.physics.noise import Drift, Floats, generator
from agents.sim.physics.state import State
from pipeline.signals import CATALOGUE

SUPPLY_C = 32.0  # warm-water cooling; chosen
_PG25, _CAPTURE = 15.1, 0.85  # K L/min per kW; share of a node's heat that goes into the coolant
_FLOW_PER_KW = 1.5  # L/min, design rule of direct liquid cooling
_GPU_KW, HOST_W = 0.66, 1500.0  # a loaded GPU; processors, memory and fans of a node
_PUMP_RPM, _PRESSURE, _VOLTS = 3200.0, 2.0, 415.0
_TAUS = {"supply": 95.0, "flow": 1.0, "pressure": 0.5, "pump": 14.0, "return": 14.0}
"""s until noise is forgotten: flow and pressure of a loop from second to second [SKAB], else chosen."""
_CALM = ("flow", "pressure")  # whose noise has no heavy tails [SKAB]
_FLOW_SD, _PRESSURE_SD, _SENSOR_K = 0.004, 0.008, 0.04  # shares, and white noise of a temperature sensor; chosen
_FLOW_STEP, _PRESSURE_STEP, _STEP_K = 0.1, 0.01, 0.01  # L/min, bar and K in which a controller tells them; chosen
_LEVEL, _LEVEL_SD = 0.85, 0.002  # share of the reservoir, and noise of its float; chosen
_STATES = CATALOGUE["leak.state"].states


class Facility:
    """State of all loops and PDUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng = generator(seed, 40)
        self.layout, self.interval, self.seed = layout, interval, seed
        loops, pdus = len(layout.entities["coolant"]), len(layout.entities["power"])
        nodes = np.bincount(layout.loop_of_rack[layout.rack_of_node], minlength=loops)
        rated = nodes * (layout.gpus_per_node * _GPU_KW + HOST_W / 1000)
        self._flow = (rated * _FLOW_PER_KW * rng.uniform(0.97, 1.03, loops)).astype(np.float32)
        self._bias = rng.normal(0, 0.4, loops).astype(np.float32)
        self._pdu_of_node = layout.pdu_of_rack[layout.rack_of_node]
        self._hosts = np.bincount(self._pdu_of_node, minlength=pdus) * HOST_W
        self._drifts = {
            name: Drift(state, f"loop.{name}", rng, loops, float(np.exp(-10 / tau)), interval, name in _CALM)
            for name, tau in _TAUS.items()
        }
        self._volts = Drift(state, "volts", rng, pdus, 0.8, interval)

    def supply(self, block: int, effects: Effects) -> Floats:
        """(ticks, loops) temperature of the coolant that goes to the racks."""
        rng = generator(self.seed, 41, block)
        daily = 0.5 * np.sin(2 * np.pi * effects.time / 86_400 + 1).astype(np.float32)
        noise = np.float32(0.15) * self._drifts["supply"].draw(rng, len(daily))
        return np.asarray(SUPPLY_C + self._bias + daily[:, None] + noise + effects.site.supply.values, np.float32)

    def advance(
        self, block: int, supply: Floats, power: NDArray[Any], effects: Effects
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Columns of the classes coolant, power and leak from the GPUs' power."""
        rng, ticks = generator(self.seed, 42, block), len(supply)
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items() if name != "supply"}
        rest = np.broadcast_to(effects.site.flow.values, supply.shape)
        flow = self._flow * rest * self._through(effects) * (1 + np.float32(_FLOW_SD) * noise["flow"])
        draw = self._sum(power, self.layout.pdu_of_gpu, len(self._hosts)) + self._others(effects)
        heat = self._sum(power, self.layout.loop_of_gpu, len(self._flow)) / 1000 * np.float32(_CAPTURE + 0.1)
        back = supply + _PG25 * heat / np.maximum(flow, LEAST_FLOW * self._flow) + np.float32(0.1) * noise["return"]
        back = np.minimum(back, SHUTDOWN_C)  # coolant never grows warmer than the plates that warm it
        pressure = _PRESSURE * rest**2 * effects.site.pressure.values * (1 + _PRESSURE_SD * noise["pressure"])
        sensor = np.float32(_SENSOR_K) * rng.standard_normal((2, *flow.shape), np.float32)
        coolant: dict[str, NDArray[Any]] = {
            "coolant.flow": _stepped(flow, _FLOW_STEP),
            "coolant.supply_temperature": _stepped(supply + sensor[0], _STEP_K),
            "coolant.return_temperature": _stepped(back + sensor[1], _STEP_K),
            "coolant.pressure": _stepped(pressure, _PRESSURE_STEP),
            "pump.speed": _PUMP_RPM * rest * (1 + np.float32(0.003) * noise["pump"]),
            "reservoir.level": _LEVEL * effects.site.level.values
            + np.float32(_LEVEL_SD) * rng.standard_normal(flow.shape, np.float32),
        }
        volts = (_VOLTS + self._volts.draw(rng, ticks)) * effects.site.volts.values
        collapses(effects, self._flow, _PRESSURE)
        wet = np.broadcast_to(effects.site.leak.values, (ticks, self.layout.racks))
        return {
            "coolant": coolant,
            "power": {"power.draw": np.rint(draw), "power.voltage": volts},
            "leak": {"leak.state": np.where(wet, np.uint8(_STATES.index("critical")), np.uint8(_STATES.index("ok")))},
        }

    def _through(self, effects: Effects) -> Any:
        """(ticks or 1, loops) factor on the flow by what its nodes let through. The pump holds its pressure, as units
        that feed many branches are set: the loop loses what a restricted node takes less, and no other node gets more.
        """
        if not effects.node.flow:
            return np.float32(1)
        loops = self.layout.loop_of_rack[self.layout.rack_of_node]
        return (self._sum(effects.node.flow.whole(), loops, len(self._flow)) / np.bincount(loops)).astype(np.float32)

    def _others(self, effects: Effects) -> NDArray[Any]:
        """(ticks or 1, PDUs) W of what is not a GPU in the nodes that have power."""
        if not effects.node.dead:
            return self._hosts[None]
        alive = np.where(effects.node.dead.whole(), 0.0, HOST_W)
        return self._sum(alive, self._pdu_of_node, len(self._hosts))

    @staticmethod
    def _sum(values: NDArray[Any], groups: NDArray[np.intp], count: int) -> NDArray[np.float64]:
        """(ticks, count) sums over groups of devices; groups are consecutive."""
        starts = np.searchsorted(groups, np.arange(count))
        return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=1))


def _stepped(values: NDArray[Any], step: float) -> NDArray[np.float32]:
    """Rounded to what a controller tells."""
    return np.asarray(np.rint(values / step) * step, np.float32)
