"""Plant: the physical models of a whole fleet, and the order in which they are computed.

This file has cooling and power besides the GPUs: coolant loops, leak detectors, distribution units, power supplies, air
and fans. The coolant removes the heat: return - supply = 15.1 K per kW and L/min (PG25: 1.02 kg/L, 3.9 kJ/kg K). The
working power supplies of a node share its power, so the others carry the load of a lost one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects
from agents.sim.layout import PSUS, Layout
from agents.sim.physics.counter_generations import CounterGenerations
from agents.sim.physics.edge import LEAST_FLOW, add_collapse_events
from agents.sim.physics.gpus import SHUTDOWN_C, Gpus
from agents.sim.physics.hosts import Hosts
from agents.sim.physics.jobs import Jobs
from agents.sim.physics.links import Links, Nvlinks
from agents.sim.physics.noise import Drift, Floats, generator
from agents.sim.physics.state import State
from agents.sim.schedule import Schedule
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.model.signals.signal import HEALTH

SUPPLY_C = 32.0  # warm-water cooling; chosen
_PG25, _CAPTURE = 15.1, 0.85  # K L/min per kW; share of a node's heat that goes into the coolant
_FLOW_PER_KW = 1.5  # L/min, design rule of direct liquid cooling
_GPU_KW, HOST_W = 0.66, 1500.0  # a loaded GPU; processors, memory and fans of a node
_PUMP_RPM, _PRESSURE, _VOLTS = 3200.0, 2.0, 415.0
_TAUS = {"supply": 95.0, "flow": 1.0, "pressure": 0.5, "pump": 14.0, "return": 14.0}
"""Correlation time of the noise (s): flow and pressure of a loop from second to second [SKAB], else chosen."""
_CALM = ("flow", "pressure")  # noise without heavy tails [SKAB]
_FLOW_SD, _PRESSURE_SD, _SENSOR_K = 0.004, 0.008, 0.04  # shares, and white noise of a temperature sensor; chosen
_FLOW_STEP, _PRESSURE_STEP, _STEP_K = 0.1, 0.01, 0.01  # L/min, bar and K: resolution of a controller; chosen
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
        """Returns (ticks, loops) the temperature of the coolant that goes to the racks."""
        rng = generator(self.seed, 41, block)
        daily = 0.5 * np.sin(2 * np.pi * effects.time / 86_400 + 1).astype(np.float32)
        noise = np.float32(0.15) * self._drifts["supply"].draw(rng, len(daily))
        return np.asarray(SUPPLY_C + self._bias + daily[:, None] + noise + effects.site.supply.values, np.float32)

    def step(
        self, block: int, supply: Floats, power: NDArray[Any], effects: Effects
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns the columns of the classes coolant, power and leak from the GPUs' power."""
        rng, ticks = generator(self.seed, 42, block), len(supply)
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items() if name != "supply"}
        rest = np.broadcast_to(effects.site.flow.values, supply.shape)
        flow = self._flow * rest * self._node_factor(effects) * (1 + np.float32(_FLOW_SD) * noise["flow"])
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
        add_collapse_events(effects, self._flow, _PRESSURE)
        wet = np.broadcast_to(effects.site.leak.values, (ticks, self.layout.racks))
        return {
            "coolant": coolant,
            "power": {"power.draw": np.rint(draw), "power.voltage": volts},
            "leak": {"leak.state": np.where(wet, np.uint8(_STATES.index("critical")), np.uint8(_STATES.index("ok")))},
        }

    def _node_factor(self, effects: Effects) -> Any:
        """Returns (ticks or 1, loops) the factor on the flow from restricted nodes.

        The pump keeps its pressure, as usual for units with many branches: a restricted node reduces the flow of the
        loop, and no other node gets more.
        """
        if not effects.node.flow:
            return np.float32(1)
        loops = self.layout.loop_of_rack[self.layout.rack_of_node]
        return (self._sum(effects.node.flow.array(), loops, len(self._flow)) / np.bincount(loops)).astype(np.float32)

    def _others(self, effects: Effects) -> NDArray[Any]:
        """Returns (ticks or 1, PDUs): W of everything but GPUs in the nodes that have power."""
        if not effects.node.dead:
            return self._hosts[None]
        alive = np.where(effects.node.dead.array(), 0.0, HOST_W)
        return self._sum(alive, self._pdu_of_node, len(self._hosts))

    @staticmethod
    def _sum(values: NDArray[Any], groups: NDArray[np.intp], count: int) -> NDArray[np.float64]:
        """Returns (ticks, count) sums over groups of devices; groups are consecutive."""
        starts = np.searchsorted(groups, np.arange(count))
        return np.asarray(np.add.reduceat(values.astype(np.float64), starts, axis=1))


def _stepped(values: NDArray[Any], step: float) -> NDArray[np.float32]:
    """Returns values rounded to a controller's resolution."""
    return np.asarray(np.rint(values / step) * step, np.float32)


_SHARING, _NOISE = 0.02, 0.005  # spread of the shares, as active load sharing leaves it; noise of a reading. Chosen
_PSU_VOLTS, _VOLTS_SD = 230.0, 0.8  # V of a phase; chosen
_CRITICAL, _NO_INPUT = HEALTH.index("critical"), 1  # psu.input_status: loss_of_input


class Psus:
    """Load shares of all power supplies: constant, without state between blocks."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = generator(seed, 55)
        self.layout, self.seed = layout, seed
        share = 1 + _SHARING * rng.uniform(-1, 1, (layout.nodes, PSUS))
        self._share: Floats = (share / share.sum(axis=1, keepdims=True)).astype(np.float32)

    def step(self, block: int, power: NDArray[Any], effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class psu from the power of the GPUs."""
        rng, site = generator(self.seed, 56, block), effects.site
        shape = len(power), self.layout.nodes * PSUS
        draw = power.reshape(len(power), self.layout.nodes, -1).sum(axis=2, dtype=np.float32) + np.float32(HOST_W)
        lost = np.broadcast_to(site.psu_lost.values | site.psu_unfed.values, shape)
        noise = rng.standard_normal((2, *shape), np.float32)
        given = draw[:, :, None] * self._shares(site.psu_lost or site.psu_unfed, lost)
        unfed = np.broadcast_to(site.psu_unfed.values, shape)
        return {
            "psu.output_power": np.rint(given.reshape(shape) * (1 + np.float32(_NOISE) * noise[0])),
            "psu.input_voltage": np.where(
                unfed, np.float32(0), np.float32(_PSU_VOLTS) + np.float32(_VOLTS_SD) * noise[1]
            ),
            "psu.status": np.where(lost, np.uint8(_CRITICAL), np.uint8(0)),
            "psu.input_status": np.where(unfed, np.uint8(_NO_INPUT), np.uint8(0)),
        }

    def _shares(self, touched: object, lost: NDArray[np.bool_]) -> NDArray[Any]:
        """Returns (ticks or 1, nodes, supplies) each supply's share of the node's power; 0 if none is left."""
        if not touched:
            return self._share[None]
        gone = lost.reshape(len(lost), -1, PSUS)
        left = np.where(gone, np.float32(0), self._share)
        shared = left / np.maximum(left.sum(axis=2, keepdims=True), np.float32(1e-6))
        return np.asarray(np.where(gone.any(axis=2, keepdims=True), shared, self._share), np.float32)


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

    def step(self, block: int, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class sensor: a temperature has no speed, and a fan no temperature."""
        rng, ticks = generator(self.seed, 58, block), len(effects.time)
        daily = _DAILY * np.sin(2 * np.pi * effects.time / 86_400 - 2).astype(np.float32)
        drift = np.float32(_DRIFT) * self._drift.draw(rng, ticks)
        inlet = self._inlet + daily[:, None] + drift + effects.node.inlet.values
        speed = (_FAN_RPM + _PER_K * np.maximum(inlet - _INLET_C, 0)) * self._fan * effects.node.fans.values
        shape = ticks, 2 * self.layout.nodes
        warmth, fan = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        warmth[:, 0::2] = np.rint(inlet * 2) / 2  # BMCs report half degrees
        fan[:, 1::2] = np.rint(np.minimum(speed, _FAN_MOST) / _STEP) * _STEP
        return {"sensor.temperature": warmth, "sensor.fan_speed": fan}


Columns = dict[str, NDArray[Any]]


class Plant:
    """State of a whole fleet; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        running = schedule.running_jobs(np.zeros(1), layout.gpus)[0]
        self._jobs = Jobs(layout, schedule, interval, seed, state)
        self._gpus = Gpus(layout, interval, seed, SUPPLY_C, running, state)
        self._links = Links(layout, interval, seed, state)
        self._nvlinks = Nvlinks(layout, interval, seed, state)
        self._hosts = Hosts(layout, interval, seed, state)
        self._facility = Facility(layout, interval, seed, state)
        self._psus, self._sensors = Psus(layout, seed), Sensors(layout, interval, seed, state)
        self._generations = CounterGenerations(layout, state)

    def step(self, block: int, effects: Effects) -> dict[str, Columns]:
        """Returns device class -> true columns, in the order load, heat, job steps, the rest. Ranks: of the block's
        allocations."""
        before, allocations = self._generations.readings(), list(effects.allocations)
        activity, supply = self._jobs.load(effects, allocations), self._facility.supply(block, effects)
        gpu, clock = self._gpus.step(block, activity, supply, effects, allocations)
        sent = self._jobs.step(block, activity, clock, effects, allocations)
        columns = {
            "gpu": gpu,
            "nic": self._links.step(block, activity, effects),
            "nvlink": self._nvlinks.step(block, activity, effects),
            "node": self._hosts.step(block, activity, effects),
            "psu": self._psus.step(block, gpu["gpu.power"], effects),
            "sensor": self._sensors.step(block, effects),
            **self._facility.step(block, supply, gpu["gpu.power"], effects),
        }
        self._generations.add_columns(columns, before, effects, effects.start // SECOND)
        names = sent[0][1] if sent else {}
        ranks = {name: np.concatenate([columns[name] for _, columns in sent], axis=1) for name in names}
        return {**columns, "rank": ranks}
