"""Instruments of GPUs: temperature and power against each other, the memory's temperature and the node's other GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from detectors.base import kernel
from detectors.base.cohorts import Peers
from detectors.base.state import State, memory, part
from detectors.base.streams import LEARN, Channel, Step, Streams
from detectors.base.throttle import THROTTLE, has_reason, read_reasons
from detectors.telemetry.instruments import (
    RHYTHM,
    ROUNDS,
    Bools,
    Climate,
    Floats,
    GroupMedians,
    InstrumentFault,
    NoiseLevel,
    StuckReading,
)
from pipeline.model.records import SECOND, Frame

HOLD = 600
"""s that a shift must last: benign slowdowns and their heat last 30 to 300 s, twice the longest; chosen."""
LEAST_K = 2.2
"""K of a temperature shift that counts: above the 2 K by which a service may leave a sensor off; chosen."""
STILL = HOLD // RHYTHM
"""Readings of one value before it is suspected."""
MOVED, MOVED_SHARE = 3.0, 0.15
"""How far related readings must have moved in that time: steps that a thermometer rounds to, and a share of the highest
power so far: of 35 to 55 K over the coolant that is 5 K and more. Chosen."""
RATIO = {"gpu.temperature": 2.5, "gpu.power": 2.0}
"""Multiple of the usual change, its own and that of its peers, that is noise; chosen: load moves all GPUs of a node."""
_NOISE = {"gpu.temperature": 0.7, "gpu.power": 0.02}  # least usual change: rounding, and a share of the power; chosen
_BUSY = 0.4  # of the highest power so far: below it R and idle power of each GPU matter more than load; chosen
_ALIKE = 0.3  # logarithm of power within which a GPU works as its node's others do; chosen
_K_PER_W = 0.03  # least thermal resistance of a liquid-cooled GPU; air-cooled ones have more
_LEAST_HEAT_K = 1.8
"""K by which a change of power must move the temperature to count: two steps of the thermometer, some 60 W; chosen."""
_AS_OLD = 0.8  # of the readings since a power moved that its temperature must have learnt from, some being lost; chosen
_MOST_LEARNT = 2000  # readings that are counted
_STILL_K = 0.6  # K that a temperature, smoothed over a minute, moves by itself; chosen
_STANDS_OUT = 0.5
"""Share of a power's shift by which it must differ from the node's others now: boards of a kind under one load draw the
same within a few per cent, so a faulty meter differs from its peers as well; chosen."""
_CLOCK = 0.25
"""Share of a power's shift by which its clock must differ the same way to explain it: power rises with clock times the
square of the voltage, which rises with it, so by one to three times as much. Chosen."""
_RISE_K = 40.0  # by which a GPU is warmer than its coolant under load: with its power its temperature varies; chosen
_WORKED = 0.3  # utilization that must have come or gone while a power stays; chosen
_FOLLOWS = 0.35  # share of the heat that a real change of power must show at least; chosen


def _peer_streams(floor: float, delta: float, phi: float) -> Streams:
    return Streams(Channel(floor=floor, delta=delta, phi=phi, both=True))


@dataclass
class GpuInstruments(State):
    """Temperature and power sensors of GPUs. A reset relearns an instrument; the climate of its cohort stays.

    apart: core less memory temperature.   heat: core temperature.   power: its logarithm.   highest: power so far.
    """

    apart: Streams = part(lambda: _peer_streams(0.7, LEAST_K, 0.6))
    heat: Streams = part(lambda: _peer_streams(0.8, LEAST_K, 0.6))
    power: Streams = part(lambda: _peer_streams(0.02, 0.05, 0.5))
    stuck_heat: StuckReading = part(lambda: StuckReading(("heat", "power")))
    stuck_power: StuckReading = part(lambda: StuckReading(("heat", "power", "work")))
    noise_heat: NoiseLevel = part(NoiseLevel)
    noise_power: NoiseLevel = part(NoiseLevel)
    noise_memory: NoiseLevel = part(NoiseLevel)
    climate: Climate = part(Climate, kept=True)
    highest: Floats = memory(0.0, kept=True)
    _peers: Peers = field(default_factory=lambda: Peers(("node",), ("rack",), least=4), init=False, repr=False)
    _kinds: Peers = field(default_factory=lambda: Peers(("@sku",), ("@model",), least=1), init=False, repr=False)
    _heats: GroupMedians = field(default_factory=GroupMedians, init=False, repr=False)
    _powers: GroupMedians = field(default_factory=GroupMedians, init=False, repr=False)
    _clocks: GroupMedians = field(default_factory=GroupMedians, init=False, repr=False)

    @property
    def streams(self) -> dict[str, Streams]:
        """The statistical streams by name."""
        return {"apart": self.apart, "heat": self.heat, "power": self.power}

    def find_faults(self, frame: Frame, gate: Bools) -> Iterator[InstrumentFault]:
        """Yields the instruments that are wrong now. gate: False for GPUs in maintenance; these are learnt again."""
        if not gate.all():
            self.reset(~gate)
        heat, power = frame["gpu.temperature"], frame["gpu.power"]
        groups = self._peers.groups(frame)
        self._relearn_woken(power)
        middle_k, middle_w = self._heats.medians(heat, groups), self._powers.medians(power, groups)
        self.climate.step(middle_k, middle_w)
        calm = self.climate.calm
        gate = gate & calm
        watts = np.log(np.where(power > 1, power, np.nan))
        busy = gate & (power > _BUSY * self.highest[: len(power)])
        kinds = self._kinds.kinds(frame)
        middle = self.power.step(watts, groups, frame.time, busy, kinds)
        usual = np.where(middle.size > 1, middle.median, np.nan)
        alike = gate & (np.abs(watts - usual) < _ALIKE)
        apart = self.apart.step(heat - frame["gpu.memory_temperature"], groups, frame.time, alike, kinds)
        warm = self.heat.step(heat, groups, frame.time, alike, kinds)
        yield from self._biased_heat(frame, apart, warm, middle, calm)
        yield from self._biased_power(frame, warm, middle, calm)
        yield from self._stuck(frame, middle_k, middle_w, calm)
        yield from self._noisy(frame, watts, calm)

    def _relearn_woken(self, power: Floats) -> None:
        """Resets GPUs that work for the first time: before, only the idle power of a spare was known."""
        self.grow(len(power))
        highest = self.highest[: len(power)]
        woken = (highest > 0) & (power * _BUSY > highest)
        np.fmax(highest, power, out=highest)
        if woken.any():
            self.power.reset(woken)
            self.heat.reset(woken)

    def _biased_heat(
        self, frame: Frame, apart: Step, warm: Step, watts: Step, calm: Bools
    ) -> Iterator[InstrumentFault]:
        throttled = has_reason(read_reasons(frame["gpu.throttle_reasons"])[0], THROTTLE)
        for i in np.flatnonzero(apart.on & (apart.held >= HOLD) & calm & ~apart.moved).tolist():
            if abs(np.nan_to_num(watts.effect[i])) >= 0.05:
                continue  # its load moved
            shift, own = float(apart.effect[i]), float(np.nan_to_num(warm.effect[i]))
            core = own * shift > 0 and abs(own) > 0.5 * abs(shift)
            signal = "gpu.temperature" if core else "gpu.memory_temperature"
            if (signal == "gpu.memory_temperature" and shift < 0) or (core and shift > 0 and throttled[i]):
                continue  # heat explains it: memory that is hotter than its core, or a core that slows down
            words = f"reads {abs(shift):.1f} K too {'high' if (shift > 0) == core else 'low'}"
            yield self._fault(frame, i, signal, "biased", int(apart.held[i]), shift, "K", words)

    def _biased_power(self, frame: Frame, warm: Step, watts: Step, calm: Bools) -> Iterator[InstrumentFault]:
        normal = self.power.cells[kernel.BASELINE]
        suspects = np.flatnonzero(watts.on & (watts.held >= HOLD) & calm & ~watts.moved).tolist()
        if not suspects:
            return
        median, size, judged = watts.median, watts.size, warm.judged
        clock = frame["gpu.sm_clock"]
        ahead = np.nan_to_num(clock / self._clocks.medians(clock, self._peers.groups(frame)) - 1)
        bits = self.heat.cells[kernel.WORD].view(np.uint32)
        for i in suspects:
            learnt = int((bits[i] >> kernel.COUNT_SHIFT) & kernel.COUNT_BITS)
            if learnt < min(_AS_OLD * int(watts.held[i]) / RHYTHM + LEARN, _MOST_LEARNT):
                continue  # its temperature was reset since its power moved: that it did not change proves nothing
            share, own = float(watts.effect[i]), float(np.nan_to_num(warm.effect[i]))
            level = float(np.exp(median[i])) if size[i] > 1 else np.nan
            expected = _K_PER_W * level * share
            still = max(_FOLLOWS * abs(expected), _STILL_K)  # heat that goes the other way is a cold plate's
            lead = share + float(normal[i])  # of the node's others now: else its normal is wrong, not its reading
            stands_out = lead * share > 0 and abs(lead) >= _STANDS_OUT * abs(share)
            if ahead[i] * share > 0 and abs(ahead[i]) >= _CLOCK * abs(share):
                continue  # its clock explains it; where fans hold a temperature, that shows nothing
            if abs(expected) >= _LEAST_HEAT_K and abs(own) < still and judged[i] and stands_out:
                words = f"reads {abs(share):.0%} too {'high' if share > 0 else 'low'}, temperature unchanged"
                yield self._fault(frame, i, "gpu.power", "biased", int(watts.held[i]), share, "1", words)

    def _stuck(self, frame: Frame, middle_k: Floats, middle_w: Floats, calm: Bools) -> Iterator[InstrumentFault]:
        heat, power = frame["gpu.temperature"], frame["gpu.power"]
        moved_w = MOVED_SHARE * self.highest[: len(power)]
        run, spans = self.stuck_heat.step(heat, heat=middle_k, power=power)
        moved_k = MOVED * self.stuck_heat.quantum[: len(run)]
        by_power = self.climate.resistance(len(run)) * spans["power"]
        suspected = (run >= STILL) & (spans["heat"] >= moved_k) & (spans["power"] >= moved_w) & (by_power >= moved_k)
        for i in np.flatnonzero(self.stuck_heat.stayed(heat, suspected, calm)).tolist():
            words = f"stuck at {heat[i]:.0f} °C while its power moved by {spans['power'][i]:.0f} W"
            yield self._fault(frame, i, "gpu.temperature", "stuck", int(run[i]) * RHYTHM, 0.0, "K", words)
        # a GPU without work gets warm by its neighbours
        work = frame["gpu.utilization"]
        run, spans = self.stuck_power.step(power, heat=heat, power=middle_w, work=work)
        own = np.where(np.isnan(work), power > _BUSY * self.highest[: len(power)], spans["work"] >= _WORKED)
        suspected = (run >= STILL) & (spans["power"] >= moved_w) & (spans["heat"] >= moved_k) & own
        for i in np.flatnonzero(self.stuck_power.stayed(power, suspected, calm)).tolist():
            words = f"stuck at {power[i]:.0f} W while its temperature moved by {spans['heat'][i]:.0f} K"
            yield self._fault(frame, i, "gpu.power", "stuck", int(run[i]) * RHYTHM, 0.0, "W", words)

    def _noisy(self, frame: Frame, watts: Floats, calm: Bools) -> Iterator[InstrumentFault]:
        groups = self._peers.groups(frame)
        temperature, memory_k = frame["gpu.temperature"], frame["gpu.memory_temperature"]
        steps = self.stuck_heat.quantum[: len(calm)]
        heat = self.noise_heat.step(temperature, _NOISE["gpu.temperature"], RATIO["gpu.temperature"], calm, steps)
        rounds = np.exp(-watts) * self.stuck_power.quantum[: len(calm)]  # of its logarithm: 5 W are much of an idle GPU
        power = self.noise_power.step(watts, _NOISE["gpu.power"], RATIO["gpu.power"], calm, rounds)
        memory_times, _ = self.noise_memory.step(memory_k, _NOISE["gpu.temperature"], np.inf, quantum=steps)
        floor = np.fmax(_NOISE["gpu.temperature"], np.nan_to_num(ROUNDS * steps))
        floor = np.fmax(floor, _RISE_K * self.noise_power.now[: len(calm)])
        of_power = np.fmax(_NOISE["gpu.power"], np.nan_to_num(ROUNDS * rounds))
        for signal, (times, held), others, now, least in (
            ("gpu.temperature", heat, np.fmax(power[0], memory_times), self.noise_heat.now, floor),
            ("gpu.power", power, heat[0], self.noise_power.now, of_power),
        ):
            for i in np.flatnonzero((held >= STILL) & (others < 0.7 * times)).tolist():
                like = now[: len(groups)][groups == groups[i]] if groups[i] >= 0 else now[:0]
                if len(like) > 2 and now[i] >= RATIO[signal] * max(float(np.median(like)), float(least[i])):
                    words = f"noisy, changes {times[i]:.1f} times as large as usual"
                    yield self._fault(frame, i, signal, "noisy", int(held[i]) * RHYTHM, float(times[i]), "1", words)

    def _fault(
        self, frame: Frame, i: int, signal: str, mode: str, held: int, effect: float, unit: str, words: str
    ) -> InstrumentFault:
        since = frame.time - held * SECOND
        evidence = {"value": float(frame[signal][i]), "cohort": self._peers.cohort_name(frame, i)}
        return InstrumentFault(frame.entities[i], signal, mode, since, effect, unit, words, evidence)
