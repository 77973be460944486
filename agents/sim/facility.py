"""What stands beside the nodes: coolant loops (supply, flow, pump) and power distribution units.

The coolant takes the heat away: return - supply = 15.1 K per kW and L/min (PG25: 1.02 kg/L, 3.9 kJ/kg K).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import Layout
from agents.sim.noise import Drift, Floats, generator

SUPPLY_C = 32.0  # warm-water cooling; chosen
_PG25, _CAPTURE = 15.1, 0.85  # K L/min per kW; share of a node's heat that goes into the coolant
_FLOW_PER_KW = 1.5  # L/min, design rule of direct liquid cooling
_GPU_KW, _HOST_W = 0.66, 1500.0  # a loaded GPU; processors, memory and fans of a node
_PUMP_RPM, _PRESSURE, _VOLTS = 3200.0, 2.0, 415.0


class Facility:
    """State of all loops and PDUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int) -> None:
        rng = generator(seed, 40)
        self.layout, self.interval, self.seed = layout, interval, seed
        loops, pdus = len(layout.entities["coolant"]), len(layout.entities["power"])
        nodes = np.bincount(layout.loop_of_rack[layout.rack_of_node], minlength=loops)
        rated = nodes * (layout.gpus_per_node * _GPU_KW + _HOST_W / 1000)
        self._flow = (rated * _FLOW_PER_KW * rng.uniform(0.97, 1.03, loops)).astype(np.float32)
        self._bias = rng.normal(0, 0.4, loops).astype(np.float32)
        self._hosts = np.bincount(layout.pdu_of_rack[layout.rack_of_node], minlength=pdus) * _HOST_W
        names = ("supply", "flow", "pressure", "pump", "return")
        self._drifts = {name: Drift(rng, loops, 0.9 if name == "supply" else 0.5) for name in names}
        self._volts = Drift(rng, pdus, 0.8)

    def supply(self, block: int, effects: Effects) -> Floats:
        """(ticks, loops) temperature of the coolant that goes to the racks."""
        rng = generator(self.seed, 41, block)
        daily = 0.5 * np.sin(2 * np.pi * effects.time / 86_400 + 1).astype(np.float32)
        noise = np.float32(0.15) * self._drifts["supply"].draw(rng, len(daily))
        return np.asarray(SUPPLY_C + self._bias + daily[:, None] + noise, np.float32)

    def advance(
        self, block: int, supply: Floats, power: NDArray[Any], effects: Effects
    ) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """(columns of class coolant, columns of class power) from the GPUs' power."""
        rng, ticks = generator(self.seed, 42, block), len(supply)
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items() if name != "supply"}
        flow = self._flow * effects.flow * (1 + np.float32(0.006) * noise["flow"])
        draw = self._sum(power, self.layout.pdu_of_gpu, len(self._hosts)) + self._hosts
        heat = self._sum(power, self.layout.loop_of_gpu, len(self._flow)) / 1000 * np.float32(_CAPTURE + 0.1)
        coolant: dict[str, NDArray[Any]] = {
            "coolant.flow": flow,
            "coolant.supply_temperature": supply,
            "coolant.return_temperature": supply + _PG25 * heat / flow + np.float32(0.1) * noise["return"],
            "coolant.pressure": _PRESSURE * effects.flow**2 * (1 + np.float32(0.008) * noise["pressure"]),
            "pump.speed": _PUMP_RPM * effects.flow * (1 + np.float32(0.003) * noise["pump"]),
        }
        volts = _VOLTS + self._volts.draw(rng, ticks)
        return coolant, {"power.draw": np.rint(draw), "power.voltage": volts}

    @staticmethod
    def _sum(values: NDArray[Any], groups: NDArray[np.intp], count: int) -> NDArray[np.float64]:
        """(ticks, count) sums over groups of devices; groups are consecutive."""
        starts = np.searchsorted(groups, np.arange(count))
        return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=1))
