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
from agents.sim.physics.cooling import AirCooler
from agents.sim.physics.counter_generations import CounterGenerations
from agents.sim.physics.edge import LEAST_FLOW, add_collapse_events
from agents.sim.physics.gpus import Gpus
from agents.sim.physics.hosts import Disks, Hosts
from agents.sim.physics.jobs import Jobs
from agents.sim.physics.links import Links, Nvlinks
from agents.sim.physics.noise import Drift, Floats, generator, stepped
from agents.sim.physics.state import State
from agents.sim.schedule import Schedule
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE
from pipeline.model.signals.signal import HEALTH

_PG25 = 15.1  # K L/min per kW
_FLOW_PER_KW = 1.5  # L/min, design rule of direct liquid cooling
_LOADED, HOST_W = (
    0.66 / 0.7,
    1500.0,
)  # share of the board's limit of a loaded GPU; processors, memory and fans of a node
_PUMP_RPM, _PRESSURE, _VOLTS = 3200.0, 2.0, 415.0
_TAUS = {"flow": 1.0, "pressure": 0.5, "pump": 14.0, "return": 14.0}
"""Correlation time of the noise (s): flow and pressure of a loop from second to second [SKAB], else chosen."""
_NIGHT = (22.0, 6.0)  # hours of a lowered set-point; chosen
_NIGHT_RAMP_H = 0.5
_CALM = ("flow", "pressure")  # noise without heavy tails [SKAB]
_FLOW_SD, _PRESSURE_SD, _SENSOR_K = 0.004, 0.008, 0.04  # shares, and white noise of a temperature sensor; chosen
_PRESSURE_STEP = 0.01  # bar: resolution of a controller; chosen
_LEVEL, _LEVEL_SD = 0.85, 0.002  # share of the reservoir, and noise of its float; chosen
_STATES = CATALOGUE["leak.state"].states


class Facility:
    """State of all loops and PDUs; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng = generator(seed, 40)
        self.layout, self.interval, self.seed, self._cooling = layout, interval, seed, layout.world.cooling
        loops, pdus = len(layout.entities["coolant"]), len(layout.entities["power"])
        nodes = np.bincount(layout.loop_of_rack[layout.rack_of_node], minlength=loops)[:loops]
        rated = nodes * (layout.gpus_per_node * _LOADED * layout.world.part.board_w / 1000 + HOST_W / 1000)
        self._flow = (rated * _FLOW_PER_KW * rng.uniform(0.97, 1.03, loops)).astype(np.float32)
        self._bias = rng.normal(0, self._cooling.supply_loop, loops).astype(np.float32)
        self._pdu_of_node = layout.pdu_of_rack[layout.rack_of_node]
        self._hosts = np.bincount(self._pdu_of_node, minlength=pdus) * HOST_W
        self._drifts = {
            name: Drift(
                state,
                f"loop.{name}",
                rng,
                loops,
                float(np.exp(-10 / tau)),
                interval,
                "normal" if name in _CALM else "t4",
            )
            for name, tau in ({"supply": self._cooling.supply_tau} | _TAUS).items()
        }
        self._volts = Drift(state, "volts", rng, pdus, 0.8, interval)

    def supply(self, block: int, effects: Effects) -> Floats:
        """Returns (ticks, loops) the temperature of the coolant that goes to the racks."""
        rng = generator(self.seed, 41, block)
        daily = self._cooling.supply_daily * np.sin(2 * np.pi * effects.time / 86_400 + 1).astype(np.float32)
        daily = daily - lowered_at_night(effects.time, self._cooling.night)
        noise = np.float32(self._cooling.supply_noise) * self._drifts["supply"].draw(rng, len(daily))
        return np.asarray(
            self._cooling.supply + self._bias + daily[:, None] + noise + effects.site.supply.values, np.float32
        )

    def step(
        self, block: int, supply: Floats, power: NDArray[Any], effects: Effects
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns the columns of the classes coolant, power and leak from the GPUs' power."""
        rng = generator(self.seed, 42, block)
        loops = self._loops(rng, supply, power, effects) if self.layout.world.cooling.has_loop else {}
        draw = self._sum(power, self.layout.pdu_of_gpu, len(self._hosts)) + self._others(effects)
        volts = (_VOLTS + self._volts.draw(rng, len(supply))) * effects.site.volts.values
        found = {"power": {"power.draw": np.rint(draw), "power.voltage": volts}, **loops}
        return {name: found[name] for name in ("coolant", "power", "leak") if name in found}

    def _loops(
        self, rng: np.random.Generator, supply: Floats, power: NDArray[Any], effects: Effects
    ) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns the columns of the classes coolant and leak."""
        ticks, world = len(supply), self.layout.world
        noise = {name: drift.draw(rng, ticks) for name, drift in self._drifts.items() if name != "supply"}
        rest = np.broadcast_to(effects.site.flow.values, supply.shape)
        flow = self._flow * rest * self._node_factor(effects) * (1 + np.float32(_FLOW_SD) * noise["flow"])
        heat = self._sum(power, self.layout.loop_of_gpu, len(self._flow)) / 1000
        heat = heat * np.float32(world.cooling.capture + 0.1)
        back = supply + _PG25 * heat / np.maximum(flow, LEAST_FLOW * self._flow) + np.float32(0.1) * noise["return"]
        back = np.minimum(back, world.part.shutdown)  # coolant never grows warmer than the plates that warm it
        pressure = _PRESSURE * rest**2 * effects.site.pressure.values * (1 + _PRESSURE_SD * noise["pressure"])
        sensor = np.float32(_SENSOR_K) * rng.standard_normal((2, *flow.shape), np.float32)
        step = world.instruments.coolant_step
        coolant: dict[str, NDArray[Any]] = {
            "coolant.flow": stepped(flow, 10 * step),
            "coolant.supply_temperature": stepped(supply + sensor[0], step),
            "coolant.return_temperature": stepped(back + sensor[1], step),
            "coolant.pressure": stepped(pressure, _PRESSURE_STEP),
            "pump.speed": _PUMP_RPM * rest * (1 + np.float32(0.003) * noise["pump"]),
            "reservoir.level": _LEVEL * effects.site.level.values
            + np.float32(_LEVEL_SD) * rng.standard_normal(flow.shape, np.float32),
        }
        add_collapse_events(effects, self._flow, _PRESSURE)
        wet = np.broadcast_to(effects.site.leak.values, (ticks, self.layout.racks))
        states = np.where(wet, np.uint8(_STATES.index("critical")), np.uint8(_STATES.index("ok")))
        return {"coolant": coolant, "leak": {"leak.state": states}}

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


def lowered_at_night(time: NDArray[np.float64], kelvin: float) -> Floats:
    """Returns (ticks,) K by which a set-point is lowered at night, with a ramp of half an hour."""
    hour = np.mod(time / 3600, 24)
    since, left = np.mod(hour - _NIGHT[0], 24), np.mod(_NIGHT[1] - hour, 24)
    inside = since + left < 24
    share = np.clip(np.minimum(since, left) / _NIGHT_RAMP_H, 0, 1) * inside
    return np.asarray(kelvin * share, np.float32)


_SHARING, _NOISE = 0.02, 0.005  # spread of the shares, as active load sharing leaves it; noise of a reading. Chosen
_PSU_VOLTS, _VOLTS_SD = 230.0, 0.8  # V of a phase; chosen
_CRITICAL, _STANDBY = HEALTH.index("critical"), HEALTH.index("standby")
_NO_INPUT = 1  # psu.input_status: loss_of_input


class Psus:
    """Load shares of all power supplies: constant, without state between blocks."""

    def __init__(self, layout: Layout, seed: int) -> None:
        rng = generator(seed, 55)
        self.layout, self.seed = layout, seed
        share = 1 + _SHARING * rng.uniform(-1, 1, (layout.nodes, PSUS))
        self._share: Floats = (share / share.sum(axis=1, keepdims=True)).astype(np.float32)
        self._standby = np.arange(PSUS) >= PSUS - layout.world.instruments.standby

    def step(self, block: int, power: NDArray[Any], effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class psu from the power of the GPUs."""
        rng, site = generator(self.seed, 56, block), effects.site
        shape = len(power), self.layout.nodes * PSUS
        draw = power.reshape(len(power), self.layout.nodes, -1).sum(axis=2, dtype=np.float32) + np.float32(HOST_W)
        lost = np.broadcast_to(site.psu_lost.values | site.psu_unfed.values, shape)
        noise = rng.standard_normal((2, *shape), np.float32)
        resting = self._resting(lost)
        given = draw[:, :, None] * self._shares(site.psu_lost or site.psu_unfed or self._standby.any(), lost | resting)
        unfed = np.broadcast_to(site.psu_unfed.values, shape)
        return {
            "psu.output_power": np.rint(given.reshape(shape) * (1 + np.float32(_NOISE) * noise[0])),
            "psu.input_voltage": np.where(
                unfed, np.float32(0), np.float32(_PSU_VOLTS) + np.float32(_VOLTS_SD) * noise[1]
            ),
            "psu.status": np.where(lost, np.uint8(_CRITICAL), np.where(resting, np.uint8(_STANDBY), np.uint8(0))),
            "psu.input_status": np.where(unfed, np.uint8(_NO_INPUT), np.uint8(0)),
        }

    def _resting(self, lost: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns (ticks, supplies) which are in cold redundancy: the last of each node, until another one is lost."""
        standby = np.broadcast_to(np.tile(self._standby, self.layout.nodes), lost.shape)
        if not lost.any() or not self._standby.any():
            return standby
        whole = ~lost.reshape(len(lost), -1, PSUS).any(axis=2)
        return np.asarray(standby & np.repeat(whole, PSUS, axis=1))

    def _shares(self, touched: object, lost: NDArray[np.bool_]) -> NDArray[Any]:
        """Returns (ticks or 1, nodes, supplies) each supply's share of the node's power; 0 if none is left."""
        if not touched:
            return self._share[None]
        gone = lost.reshape(len(lost), -1, PSUS)
        left = np.where(gone, np.float32(0), self._share)
        shared = left / np.maximum(left.sum(axis=2, keepdims=True), np.float32(1e-6))
        return np.asarray(np.where(gone.any(axis=2, keepdims=True), shared, self._share), np.float32)


_AT_C, _STEP = 24.0, 60.0  # inlet at which fans have their usual speed; rpm in which BMCs count a fan; chosen


class Sensors:
    """Inlet and fan of each node, in turn; advances block by block."""

    def __init__(self, layout: Layout, interval: float, seed: int, state: State) -> None:
        rng, own, n = generator(seed, 57), generator(seed, 59), layout.nodes
        self.layout, self.seed, self._air = layout, seed, layout.world.air
        rack = rng.normal(0, self._air.rack_sd, layout.racks)[layout.rack_of_node]
        self._inlet = (self._air.inlet + rack + rng.normal(0, self._air.node_sd, n)).astype(np.float32)
        row = layout.loop_of_rack[layout.rack_of_node]
        self._inlet += (self._air.row_sd * own.standard_normal(int(row[-1]) + 1))[row].astype(np.float32)
        self._fan = (1 + 0.02 * rng.standard_normal(n).clip(-3, 3)).astype(np.float32)
        self._drift = Drift(state, "node.inlet", rng, n, 0.9, interval)
        self._offset = np.float32(layout.world.spread.inlet_offset) * own.standard_normal(n, np.float32)
        self._daily_drift = np.float32(layout.world.instruments.drift / 86_400) * own.standard_normal(n, np.float32)

    def inlet(self, block: int, effects: Effects) -> Floats:
        """Returns (ticks, nodes) the temperature of the air at the inlets."""
        rng, ticks = generator(self.seed, 58, block), len(effects.time)
        daily = self._air.daily * np.sin(2 * np.pi * effects.time / 86_400 - 2).astype(np.float32)
        daily = daily - lowered_at_night(effects.time, self.layout.world.cooling.night)
        drift = np.float32(self._air.drift) * self._drift.draw(rng, ticks)
        return np.asarray(self._inlet + daily[:, None] + drift + effects.node.inlet.values, np.float32)

    def step(self, inlet: Floats, driven: Floats | None, effects: Effects) -> dict[str, NDArray[Any]]:
        """Returns the columns of class sensor: a temperature has no speed, and a fan no temperature.

        driven: (ticks, nodes) share of the full speed, where fans follow the GPUs.
        """
        if driven is None:
            speed = (self._air.rpm + self._air.rpm_per_k * np.maximum(inlet - _AT_C, 0)) * self._fan
            speed = speed * effects.node.fans.values
        else:
            speed = driven * np.float32(self._air.most_rpm) * self._fan
        shape = len(inlet), 2 * self.layout.nodes
        warmth, fan = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        shown = inlet + self._offset + self._daily_drift * effects.time[:, None].astype(np.float32)
        warmth[:, 0::2] = stepped(shown, self._air.step)
        fan[:, 1::2] = np.rint(np.minimum(speed, self._air.most_rpm) / _STEP) * _STEP
        return {"sensor.temperature": warmth, "sensor.fan_speed": fan}


Columns = dict[str, NDArray[Any]]


class Plant:
    """State of a whole fleet; advances block by block."""

    def __init__(self, layout: Layout, schedule: Schedule, interval: float, seed: int, state: State) -> None:
        running = schedule.running_jobs(np.zeros(1), layout.gpus)[0]
        self._jobs = Jobs(layout, schedule, interval, seed, state)
        self._gpus = Gpus(layout, interval, seed, layout.world.cooling.supply, running, state)
        self._links = Links(layout, schedule, interval, seed, state)
        self._nvlinks = Nvlinks(layout, schedule, interval, seed, state)
        self._hosts = Hosts(layout, interval, seed, state)
        self._facility = Facility(layout, interval, seed, state)
        self._psus = Psus(layout, seed)
        self._sensors = Sensors(layout, interval, seed, state)
        self._disks = Disks(layout, interval, seed, state) if "disk" in layout.entities else None
        self._generations = CounterGenerations(layout, state)

    def step(self, block: int, effects: Effects) -> dict[str, Columns]:
        """Returns device class -> true columns, in the order load, heat, job steps, the rest. Ranks: of the block's
        allocations."""
        before, allocations = self._generations.readings(), list(effects.allocations)
        activity, supply = self._jobs.load(block, effects, allocations), self._facility.supply(block, effects)
        inlet = self._sensors.inlet(block, effects)
        gpu, clock = self._gpus.step(block, activity, (supply, inlet), effects, allocations)
        cooler = self._gpus.cooler
        sent = self._jobs.step(block, activity, clock, effects, allocations)
        columns = {
            "gpu": gpu,
            "nic": self._links.step(block, activity, effects),
            "nvlink": self._nvlinks.step(block, activity, effects),
            "node": self._hosts.step(block, activity, effects),
            "psu": self._psus.step(block, gpu["gpu.power"], effects),
            "sensor": self._sensors.step(inlet, cooler.speed if isinstance(cooler, AirCooler) else None, effects),
            **self._facility.step(block, supply, gpu["gpu.power"], effects),
        }
        if self._disks:
            columns["disk"] = self._disks.step(block, effects)
        self._generations.add_columns(columns, before, effects, effects.start // SECOND)
        sent = [one for one in sent if one[0].job.hooked]
        names = sent[0][1] if sent else {}
        ranks = {name: np.concatenate([columns[name] for _, columns in sent], axis=1) for name in names}
        return {**columns, "rank": ranks}
