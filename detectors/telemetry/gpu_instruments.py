"""Temperature and power of GPUs against each other, the memory's temperature and the other GPUs of the node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from detectors.base import kernel
from detectors.base.cohorts import Peers
from detectors.base.streams import LEARN, Channel, Step, Streams
from detectors.telemetry.instruments import RHYTHM, Bools, Climate, Floats, Middles, Still, Swing
from pipeline.model.records import SECOND, Frame

HOLD = 600
"""s that a shift must last: benign slowdowns and their heat last 30 to 300 s, twice the longest; chosen."""
LEAST_K = 2.2
"""Shift of a temperature that is one: above the 2 K by which a service may leave a sensor off; chosen."""
STILL = HOLD // RHYTHM
"""Readings of one value before it is odd."""
MOVED_K, MOVED_W = 3.0, 100.0
"""How far what hangs together must have moved meanwhile: three roundings; and what moves a cold plate of 0.03 to 0.04
K/W by that; chosen."""
RATIO = {"gpu.temperature": 2.5, "gpu.power": 2.0}
"""Times the change from reading to reading, its own usual and that of its like, which is noise; chosen: load moves all
GPUs of a node alike."""
_NOISE = {"gpu.temperature": 0.7, "gpu.power": 0.02}  # least usual change: rounding, and a share of the power; chosen
_BUSY = 0.4  # of the highest power seen: below it R and idle power of each GPU matter more than load; chosen
_ALIKE = 0.3  # logarithm of power within which a GPU works as its node's others do; chosen
_K_PER_W = 0.03  # least thermal resistance of a liquid-cooled GPU; air-cooled ones have more
_LEAST_HEAT_K = 1.8
"""K by which a change of power moves the temperature, below which nobody sees that it did not: two steps of the
thermometer, so some 60 W; chosen."""
_AS_OLD = 0.8  # of the readings since a power moved that its temperature must have learnt from, some being lost; chosen
_MOST_LEARNT = 2000  # readings that are counted
_STILL_K = 0.6  # K that a temperature, smoothed over a minute, moves by itself; chosen
_STANDS_OUT = 0.5
"""Share of a power's shift by which it must differ from the node's others now: boards of a kind under one load draw
the same but for some per cent, so a meter that is off is off against its like as well; chosen."""
_FOLLOWS = 0.35  # share of the heat that a change of power must show at least, if it is one; chosen


@dataclass(frozen=True, slots=True)
class Wrong:
    """An instrument that is wrong now. effect: in `unit`; since: us."""

    entity: str
    signal: str
    mode: str
    since: int
    effect: float
    unit: str
    words: str
    more: Mapping[str, Any]


class GpuInstruments:
    """State per GPU: four streams, two counters of stillness, two of swing."""

    def __init__(self) -> None:
        self._peers = Peers(("node",), ("rack",), least=4)
        self.parts: dict[str, Any] = {
            "apart": Streams(Channel(floor=0.7, delta=LEAST_K, phi=0.6, both=True)),
            "heat": Streams(Channel(floor=0.8, delta=LEAST_K, phi=0.6, both=True)),
            "power": Streams(Channel(floor=0.02, delta=0.05, phi=0.5, both=True)),
            "still_heat": Still("heat", "power"),
            "still_power": Still("heat", "power"),
            "swing_heat": Swing(),
            "swing_power": Swing(),
            "swing_memory": Swing(),
        }
        self._most = np.zeros(0)
        self._heats, self._powers = Middles(), Middles()
        self.parts["climate"] = Climate()

    @property
    def streams(self) -> dict[str, Streams]:
        """What is judged by statistics."""
        return {name: each for name, each in self.parts.items() if isinstance(each, Streams)}

    def look(self, frame: Frame, gate: Bools) -> Iterator[Wrong]:
        """Who is wrong now. gate: False for those whom people work on; they are learnt anew."""
        if not gate.all():
            self.reset(~gate)
        heat, power = frame["gpu.temperature"], frame["gpu.power"]
        groups = self._peers.groups(frame)
        size = len(heat)
        self._wake(power)
        middle_k, middle_w = self._heats.of(heat, groups), self._powers.of(power, groups)
        self.parts["climate"].step(middle_k, middle_w)
        calm = self.parts["climate"].calm
        gate = gate & calm
        watts = np.log(np.where(power > 1, power, np.nan))
        middle = self.parts["power"].step(watts, groups, frame.time, gate & (power > _BUSY * self._most[:size]))
        usual = np.where(middle.size > 1, middle.median, np.nan)
        alike = gate & (np.abs(watts - usual) < _ALIKE)
        apart = self.parts["apart"].step(heat - frame["gpu.memory_temperature"], groups, frame.time, alike)
        warm = self.parts["heat"].step(heat, groups, frame.time, alike)
        yield from self._shifted(frame, apart, warm, middle, calm)
        yield from self._still(frame, middle_k, middle_w, calm)
        yield from self._swinging(frame, watts, calm)

    def reset(self, mask: Bools) -> None:
        """These are learnt anew."""
        for name, each in self.parts.items():
            if name != "climate":
                each.reset(mask)

    def _wake(self, power: Floats) -> None:
        """Learns those anew that work for the first time: of a spare only the board's own draw was known till then."""
        size = len(power)
        self._most = np.append(self._most, np.zeros(max(0, size - len(self._most))))
        most = self._most[:size]
        woken = (most > 0) & (power * _BUSY > most)
        np.fmax(most, power, out=most)
        if woken.any():
            for name in ("power", "heat"):
                self.parts[name].reset(woken)

    def _shifted(self, frame: Frame, apart: Step, warm: Step, watts: Step, calm: Bools) -> Iterator[Wrong]:
        for i in np.flatnonzero(apart.on & (apart.held >= HOLD) & calm & ~apart.moved).tolist():
            if abs(np.nan_to_num(watts.effect[i])) >= 0.05:
                continue  # its load moved
            shift, own = float(apart.effect[i]), float(np.nan_to_num(warm.effect[i]))
            core = own * shift > 0 and abs(own) > 0.5 * abs(shift)
            signal = "gpu.temperature" if core else "gpu.memory_temperature"
            words = f"tells {abs(shift):.1f} K too {'much' if (shift > 0) == core else 'little'} against"
            words += " memory, power and the node's other GPUs" if core else " core, power and the node's other GPUs"
            yield self._wrong(frame, i, signal, "biased", int(apart.held[i]), shift, "K", words)
        normal = self.parts["power"].cells[kernel.BASELINE]
        suspects = np.flatnonzero(watts.on & (watts.held >= HOLD) & calm & ~watts.moved).tolist()
        if not suspects:
            return
        median, size, judged = watts.median, watts.size, warm.judged
        bits = self.parts["heat"].cells[kernel.WORD].view(np.uint32)
        for i in suspects:
            learnt = int((bits[i] >> kernel.COUNT_SHIFT) & kernel.COUNT_BITS)
            if learnt < min(_AS_OLD * int(watts.held[i]) / RHYTHM + LEARN, _MOST_LEARNT):
                continue  # its temperature was learnt anew since its power moved: that it is as ever proves nothing
            share, own = float(watts.effect[i]), float(np.nan_to_num(warm.effect[i]))
            level = float(np.exp(median[i])) if size[i] > 1 else np.nan
            expected = _K_PER_W * level * share
            still = max(_FOLLOWS * abs(expected), _STILL_K)  # heat that goes the other way is a cold plate's
            lead = share + float(normal[i])  # of the node's others now: else its normal is odd, not its reading
            stands_out = lead * share > 0 and abs(lead) >= _STANDS_OUT * abs(share)
            if abs(expected) >= _LEAST_HEAT_K and abs(own) < still and judged[i] and stands_out:
                words = (
                    f"tells {abs(share):.0%} too {'much' if share > 0 else 'little'}: its temperature does not follow"
                )
                yield self._wrong(frame, i, "gpu.power", "biased", int(watts.held[i]), share, "1", words)

    def _still(self, frame: Frame, middle_k: Floats, middle_w: Floats, calm: Bools) -> Iterator[Wrong]:
        heat, power = frame["gpu.temperature"], frame["gpu.power"]
        run, spans = self.parts["still_heat"].step(heat, heat=middle_k, power=power)
        odd = (run >= STILL) & (spans["heat"] >= MOVED_K) & (spans["power"] >= MOVED_W)
        for i in np.flatnonzero(self.parts["still_heat"].stayed(heat, odd, calm)).tolist():
            words = f"has stood at {heat[i]:.0f} Cel while its power moved by {spans['power'][i]:.0f} W"
            yield self._wrong(frame, i, "gpu.temperature", "stuck", int(run[i]) * RHYTHM, 0.0, "K", words)
        run, spans = self.parts["still_power"].step(power, heat=heat, power=middle_w)
        odd = (run >= STILL) & (spans["power"] >= MOVED_W) & (spans["heat"] >= MOVED_K)
        for i in np.flatnonzero(self.parts["still_power"].stayed(power, odd, calm)).tolist():
            words = f"has stood at {power[i]:.0f} W while its temperature moved by {spans['heat'][i]:.0f} K"
            yield self._wrong(frame, i, "gpu.power", "stuck", int(run[i]) * RHYTHM, 0.0, "W", words)

    def _swinging(self, frame: Frame, watts: Floats, calm: Bools) -> Iterator[Wrong]:
        groups, found = self._peers.groups(frame), {}
        for signal, name, values in (
            ("gpu.temperature", "swing_heat", frame["gpu.temperature"]),
            ("gpu.power", "swing_power", watts),
        ):
            found[signal] = self.parts[name].step(values, _NOISE[signal], RATIO[signal], calm)
        memory, _ = self.parts["swing_memory"].step(frame["gpu.memory_temperature"], _NOISE["gpu.temperature"], np.inf)
        heat, power = found["gpu.temperature"][0], found["gpu.power"][0]
        for signal, others, name in (
            ("gpu.temperature", np.fmax(power, memory), "swing_heat"),
            ("gpu.power", heat, "swing_power"),
        ):
            (times, held), now = found[signal], self.parts[name].cells["now"]
            for i in np.flatnonzero((held >= STILL) & (others < 0.7 * times)).tolist():
                like = now[: len(groups)][groups == groups[i]] if groups[i] >= 0 else now[:0]
                if len(like) > 2 and now[i] >= RATIO[signal] * max(float(np.median(like)), _NOISE[signal]):
                    words = f"swings {times[i]:.1f} times as much as usual from reading to reading, its like do not"
                    yield self._wrong(frame, i, signal, "noisy", int(held[i]) * RHYTHM, float(times[i]), "1", words)

    def _wrong(
        self, frame: Frame, i: int, signal: str, mode: str, held: int, effect: float, unit: str, words: str
    ) -> Wrong:
        cohort = self._peers.cohort_name(frame, i)
        since = frame.time - held * SECOND
        value = float(frame[signal][i])
        return Wrong(frame.entities[i], signal, mode, since, effect, unit, words, {"value": value, "cohort": cohort})

    def snapshot(self) -> dict[str, Any]:
        return {"most": self._most.copy(), **{name: each.snapshot() for name, each in self.parts.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._most = state["most"]
        for name, each in self.parts.items():
            each.restore(state[name])
