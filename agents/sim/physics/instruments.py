"""Instruments: the readings of the plant, with broken sensors, lost values, silent nodes and late clocks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.sim.effects import Effects, FalseReading
from agents.sim.layout import Layout
from agents.sim.physics.edge import add_jump_events
from agents.sim.physics.noise import Floats, generator
from agents.sim.physics.state import State
from pipeline.model.records import SECOND
from pipeline.model.signals import CATALOGUE


def apply_false_reading(values: NDArray[Any], false_reading: FalseReading, held: NDArray[np.float64]) -> NDArray[Any]:
    """Returns a column as a broken instrument reports it. held: number of a fault -> reading of a stuck instrument."""
    out = values.copy()
    true = out[false_reading.when, false_reading.device]
    if false_reading.hold is not None and np.isnan(held[false_reading.hold]):
        known = true[np.isfinite(true)]
        held[false_reading.hold] = known[0] if len(known) else np.nan
    shown = true if false_reading.hold is None else np.full_like(true, held[false_reading.hold])
    out[false_reading.when, false_reading.device] = false_reading.change(shown)
    return out


def grain(signal: str, values: Floats) -> Floats:
    """Returns values in the resolution of a signal's instrument: GPUs report whole degrees and watts."""
    return np.rint(values) if signal.startswith("gpu.") else values


_MISSING, _JITTER, _GLITCH = 70, 71, 72  # keys of the generators of lost values, sample times and absurd readings
_LOG_EVERY_S = 600.0  # s between two readings of a disk's health log, as agents do
_OF_BMC = ("sensor", "psu", "coolant", "power")
_REPEATED = {
    "sensor": ("sensor.temperature", "sensor.fan_speed"),
    "psu": ("psu.output_power", "psu.input_voltage", "psu.status", "psu.input_status"),
    "coolant": (
        *("coolant.flow", "coolant.supply_temperature", "coolant.return_temperature", "coolant.pressure"),
        *("pump.speed", "reservoir.level"),
    ),
    "power": ("power.draw", "power.voltage"),
    "disk": (
        *("disk.state", "disk.temperature", "disk.critical_warning", "disk.spare", "disk.spare_threshold"),
        *("disk.endurance_used", "disk.media_errors", "disk.power_on_time"),
    ),
}
"""Signals of slow controllers, which repeat a reading until they refresh it."""
_GLITCHING = (
    *("gpu.temperature", "gpu.memory_temperature", "gpu.power", "sensor.temperature", "sensor.fan_speed"),
    *("coolant.flow", "coolant.supply_temperature", "coolant.pressure", "psu.output_power", "psu.input_voltage"),
    *("power.draw", "nic.module_temperature", "nic.rx_power_min"),
)
"""Gauges of slow buses, on which field reports have single absurd readings."""
_LATEST = 0.9  # of a tick; later samples would overtake the next tick's

Columns = dict[str, NDArray[Any]]


class Instruments:
    """All instruments of a fleet. missing: share of lost values; jitter: s by which samples are late."""

    def __init__(
        self, layout: Layout, interval: float, seed: int, missing: float, jitter: float, faults: int, state: State
    ) -> None:
        self.layout, self.interval, self.seed = layout, interval, seed
        self.missing, self.jitter, self._state = missing, jitter, state
        state["held"] = np.full(1 + faults, np.nan)
        self.world = layout.world
        self._refresh = dict.fromkeys(_OF_BMC, max(1, round(self.world.instruments.bmc_refresh / interval)))
        self._refresh["disk"] = max(1, round(_LOG_EVERY_S / interval))
        for device_class, count in self._refresh.items():
            for signal in _REPEATED[device_class] if count > 1 and device_class in layout.entities else ():
                shape, wire = len(layout.entities[device_class]), CATALOGUE[signal].type
                state[f"repeated.{signal}"] = np.zeros(shape, wire)
        self._glitch_rate = self.world.instruments.glitches / 1000 * interval / 86_400

    def read(self, columns: Mapping[str, Columns], effects: Effects, block: int) -> dict[str, Columns]:
        """Returns columns in wire type and catalogue order, as broken instruments read them, with lost values."""
        rng, held = generator(self.seed, _MISSING, block), self._state["held"].copy()
        out = {}
        for device_class, found in columns.items():
            wired = {n: np.ascontiguousarray(found[n], CATALOGUE[n].type) for n in CATALOGUE if n in found}
            wired = {n: values for n, values in wired.items() if self.world.reads(n)}
            self._apply_false_readings(device_class, wired, effects, held)
            if (refresh := self._refresh.get(device_class, 1)) > 1:
                phase = self.layout.senders[device_class] % refresh
                wired = {n: self._repeat(n, values, block, refresh, phase) for n, values in wired.items()}
            if self._glitch_rate:
                wired = {n: self._glitch(n, values, block) for n, values in wired.items()}
            if wired or device_class == "rank":
                out[device_class] = {n: self._lose(rng, values) for n, values in wired.items()}
        self._state["held"] = held
        return out

    def _repeat(
        self, signal: str, values: NDArray[Any], block: int, refresh: int, phase: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Returns readings that each node refreshes every `refresh` ticks, at its own `phase`, and repeats."""
        ticks, key = len(values), f"repeated.{signal}"
        last = self._state[key] if block else values[0]
        tick = np.arange(block * ticks, (block + 1) * ticks)[:, None]
        newest = (tick - (tick - phase) % refresh) - block * ticks
        out = np.where(newest < 0, last, np.take_along_axis(values, np.maximum(newest, 0), axis=0))
        self._state[key] = out[-1].copy()
        return np.asarray(out, values.dtype)

    def _glitch(self, signal: str, values: NDArray[Any], block: int) -> NDArray[Any]:
        """Returns readings of which single ones are absurd: zero, all bits of a byte or word, ten times the value."""
        if signal not in _GLITCHING or not values.size:
            return values
        rng = generator(self.seed, _GLITCH, block, zlib.crc32(signal.encode()))
        count = rng.poisson(self._glitch_rate * values.size)
        if not count:
            return values
        out, where = values.copy(), rng.integers(0, values.size, count)
        true = out.reshape(-1)[where]
        absurd = np.stack([0 * true, 0 * true + 255, 0 * true + 65_535, 10 * true])[
            rng.integers(0, 4, count), range(count)
        ]
        out.reshape(-1)[where] = absurd
        return out

    def _apply_false_readings(self, device_class: str, wired: Columns, effects: Effects, held: NDArray[Any]) -> None:
        for false_reading in effects.false_readings:
            if false_reading.signal in wired:
                wired[false_reading.signal] = apply_false_reading(wired[false_reading.signal], false_reading, held)
                if false_reading.jump:
                    entity = self.layout.entities[device_class][false_reading.device]
                    add_jump_events(
                        effects, false_reading, entity, wired[false_reading.signal][:, false_reading.device]
                    )

    def _lose(self, rng: np.random.Generator, values: NDArray[Any]) -> NDArray[Any]:
        if not self.missing or values.dtype.kind != "f" or not values.size:
            return values
        out = values.copy()  # the physics may still use the array
        out.reshape(-1)[rng.integers(0, out.size, rng.poisson(self.missing * out.size))] = np.nan
        return out

    def silent(self, effects: Effects) -> NDArray[np.bool_]:
        """Returns (ticks, senders) whether a sender sends nothing; the facility always sends."""
        silent_now = np.zeros((len(effects.time), len(self.layout.sender_names)), np.bool_)
        silent_now[:, :-1] = effects.node.silent.values | effects.node.dead.values
        return silent_now

    def present(
        self, effects: Effects, silent: NDArray[np.bool_], homes: Mapping[str, NDArray[np.intp]]
    ) -> dict[str, NDArray[np.bool_]]:
        """Returns which rows exist: those of senders that send, of GPUs whose driver responds, of ranks whose job
        runs."""
        found = {c: ~silent[:, home] for c, home in homes.items()}
        if effects.gpu.gone:
            for device_class in ("gpu", "nvlink"):
                found[device_class] &= ~effects.gpu.gone.array()
        if effects.node.bmc_silent:
            for device_class in ("sensor", "psu"):
                found[device_class] &= ~effects.node.bmc_silent.array()[:, homes[device_class]]
        begin = 0
        for allocation in effects.reporting:
            found["rank"][:, begin : begin + allocation.job.ranks] &= effects.active(allocation.begin, allocation.end)[
                :, None
            ]
            begin += allocation.job.ranks
        return found

    def late(self, effects: Effects, block: int) -> NDArray[np.int64]:
        """Returns (ticks, senders) us after the tick at which a sender took its samples."""
        shape = (len(effects.time), len(self.layout.sender_names))
        late = generator(self.seed, _JITTER, block).random(shape) * self.jitter
        late[:, :-1] += effects.node.late.values
        return np.minimum(np.rint(late * SECOND), _LATEST * self.interval * SECOND).astype(np.int64)
