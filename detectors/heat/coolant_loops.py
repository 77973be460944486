"""What a coolant loop's departure means: lost flow or a broken meter, warm water or a new set-point.

Whether the coolant still carries off what the GPUs draw: tells a flow that fell from a flow meter that lies.

Heat balance: kW = L/min * K / 15.1 for 25 % propylene glycol. Where less flows, what flows warms by more and carries
the same heat; where only the meter says so, the heat reckoned from it falls with it. What share of the GPUs' draw
a loop or branch takes is its own (0.75 to 0.95 for cold plates, the rest is air), so it is compared with its own past.
Idle GPUs, a return that is not measured or GPUs that tell no power leave it unknown: then the meter is not believed.

The compiled loops of coolant.py: loops are few, so that calls of NumPy cost more than what they reckon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Comparison, make_evidence
from detectors.base.kernel import compiled
from detectors.base.streams import Bools, Floats, Step
from detectors.base.throttle import has_reason, read_reasons
from detectors.base.topology_index import TopologyIndex
from detectors.heat.throttling import HEAT
from pipeline.model.records import LEVELS, SECOND, Finding, Frame, Level, to_json

Ints = NDArray[np.int64]
PEERS = 4  # loops below which the median is no witness, and a loop is judged by its own past alone; chosen
LEAST = 1e-3  # of a unit: the logarithm of what stands still; chosen
_LEAST_FLOW = 1.0  # L/min; a loop that runs with less is idle; chosen
_BACK, _WELL = 0.02, 5  # share that a flow may lack, as meters err, and samples for which, until it is back; chosen
_FAST_S, _SLOW_S = 30.0, 120.0  # of the two means of the supply whose difference is its slope; chosen
_RAPID = 0.5  # K/min; ASHRAE TC 9.9 allows 20 K/h, which is 0.33: half as much again, as two moves may meet; chosen
_JUMP_K, _JUMP_K_S = 1.5, 0.1  # K at once, and K/s: litres of coolant warm within minutes, a sensor at once; chosen


@compiled
def together(departure: Floats, groups: NDArray[np.int32]) -> Floats:
    """(K, N) median departure of comparable loops that are measured, of K signals; NaN where fewer than PEERS."""
    shift, room = np.full(departure.shape, np.nan), np.empty(departure.shape[1])
    for k in range(departure.shape[0]):
        for group in range(groups.max() + 1 if len(groups) else 0):
            count = 0
            for i in range(len(groups)):
                if groups[i] == group and math.isfinite(departure[k, i]):
                    room[count] = departure[k, i]
                    count += 1
            if count >= PEERS:
                ranked = np.sort(room[:count])
                middle = (ranked[(count - 1) // 2] + ranked[count // 2]) / 2
                for i in range(len(groups)):
                    if groups[i] == group:
                        shift[k, i] = middle
    return shift


@compiled
def collapsed(flow: Floats, expected: Floats, gate: Bools, share: float, time: int, low: Ints, low_since: Ints) -> None:
    """Counts samples in a row with less than a share of the expected flow."""
    for i in range(len(flow)):
        usual = math.exp(-expected[i])
        if math.isfinite(flow[i]) and math.isfinite(usual) and (usual >= _LEAST_FLOW) and gate[i]:
            bad = flow[i] < share * usual
            if bad and ((low[i] == 0) or (low_since[i] > time)):
                low_since[i] = time
            low[i] = low[i] + 1 if bad else 0


@compiled
def held(
    lost: Floats, effect: NDArray[np.float32], delta: float, time: int, large: Ints, well: Ints, back: Bools
) -> None:
    """Since when the flow is down by what matters; whether one that was down is back. lost: ln below the expected."""
    for i in range(len(lost)):
        if not effect[i] >= delta:
            large[i] = 0
        elif (large[i] == 0) or (large[i] > time):  # the clock may have gone back
            large[i] = time
        if math.isfinite(lost[i]):
            well[i] = well[i] + 1 if lost[i] < max(_BACK, effect[i] / 4) else 0
        back[i] = well[i] >= _WELL


@compiled
def slopes(
    supply: Floats, time: int, last: Floats, at: Ints, fast: Floats, slow: Floats, rapid_at: Ints, jumped_at: Ints
) -> None:
    """Notes when the supply rose faster than a set-point, or jumped within one sample."""
    for i in range(len(supply)):
        now = supply[i]
        if not math.isfinite(now):
            continue
        seconds = max((time - at[i]) / SECOND, 0.0)
        step = abs(now - last[i])
        if (at[i] > 0) and (step > _JUMP_K) and (step > _JUMP_K_S * seconds):
            jumped_at[i] = time
        for state, lag in ((fast, _FAST_S), (slow, _SLOW_S)):
            if math.isnan(state[i]):
                state[i] = now
            state[i] += (1 - math.exp(-seconds / lag)) * (now - state[i])
        if (fast[i] - slow[i]) * 60 / (_SLOW_S - _FAST_S) >= _RAPID:
            rapid_at[i] = time
        last[i], at[i] = now, time


MOVED = 0.05  # ln by which pressure or speed must move to bear a flow out; above the noise of both; chosen
SHARE = 0.3  # of the flow's departure: a valve that closes raises the head of a pump by a part of it; chosen
_CALM = 0.1  # ln; a pressure that swings by more says nothing; chosen
PG25 = 15.1  # K L/min per kW: 25 % propylene glycol, 1.02 kg/L, 3.9 kJ/kg K
LEAST_DT = 5.0  # K; below it 0.3 K of two sensors and 2 % of the flow make the heat balance worthless
_NONE = np.empty(0, np.intp)
DOUBTED = "doubted"
"""Key of the evidence: it is the instrument rather than the loop, or flow that follows the load; bears nothing out."""


@dataclass(frozen=True, slots=True)
class Seen:
    """An instant: frames, and where each stream stands. expected: -ln of the flow that was expected."""

    frame: Frame
    gpus: Frame | None
    flow: Step
    warmth: Step
    pressure: Step
    speed: Step
    expected: Floats


@dataclass(frozen=True, slots=True)
class Verdict:
    """level, what else moved, and whether the flow meter or the supply's sensor is to blame."""

    level: Level
    others: tuple[str, ...] = ()
    meter: bool = False
    sensor: bool = False


class Settings(Protocol):
    """Of the detector."""

    flow_delta: float
    temperature_delta: float
    warm: float
    hot: float
    hold: float
    low: NDArray[np.int64]
    back: NDArray[np.bool_]
    well: NDArray[np.int64]
    large_since: NDArray[np.int64]
    pressure: Any
    speed: Any

    @property
    def balance(self) -> Any: ...

    def jumped(self, i: int, time: int) -> bool: ...

    def rapid(self, i: int, time: int) -> bool: ...


class Loops:
    """The GPUs of each loop."""

    def __init__(self) -> None:
        self._homes = TopologyIndex()

    def of(self, loop: str, gpus: Frame | None) -> NDArray[np.intp]:
        """Numbers of a loop's GPUs."""
        if gpus is None:
            return _NONE
        self._homes.update(gpus.entities, gpus.topology)
        return self._homes.positions_below(loop)


def level_of(seen: Seen, i: int, settings: Settings, comparable: bool, loops: Loops) -> Verdict:
    """The worse of what flow and supply say."""
    flow = _flow(seen, i, settings, comparable)
    if flow.level == "page" or not seen.warmth.on[i]:
        return flow
    sensor = settings.jumped(i, seen.frame.time)
    level: Level = "suspect"
    effect, held = float(seen.warmth.effect[i]), int(seen.warmth.held[i]) >= settings.hold
    rapid = settings.rapid(i, seen.frame.time) and effect >= settings.temperature_delta
    hot = effect >= settings.hot and held
    if not sensor and (rapid or hot or throttled(seen.gpus, seen.frame.entities[i], loops)):
        level = "page"
    elif not sensor and effect >= settings.warm and held:
        level = "ticket"
    level = max(level, flow.level, key=LEVELS.index)
    return Verdict(level, flow.others, flow.meter, sensor)


def _flow(seen: Seen, i: int, settings: Settings, comparable: bool) -> Verdict:
    """Pages what pressure or pump bear out, and what they say nothing about after a while."""
    low = bool(settings.low[i] >= 2)
    if settings.back[i] or not (low or seen.flow.on[i]):
        return Verdict("suspect")
    drop = _departure(seen, i)
    need = max(MOVED, SHARE * drop)
    told = {
        "coolant.pressure": _moved(seen.pressure, settings.pressure, seen.frame["coolant.pressure"], i, need, low),
        "pump.speed": _moved(seen.speed, settings.speed, seen.frame["pump.speed"], i, need, low),
    }
    others = tuple(name for name, moved in told.items() if moved)
    against = not others and any(moved is False for moved in told.values())
    large = bool(settings.large_since[i])
    held = (seen.frame.time - int(settings.large_since[i])) / SECOND if large else 0.0
    if against and large and held >= settings.hold and settings.balance.flows_less(i, float(seen.flow.effect[i])):
        return Verdict("page" if comparable else "ticket", ("coolant.return_temperature",))
    if against:
        return Verdict("suspect", (), meter=True)
    if low or (large and others):
        return Verdict("page", others)
    if large and held >= settings.hold:
        return Verdict("page" if comparable else "ticket", others)
    return Verdict("suspect", others)


def _departure(seen: Seen, i: int) -> float:
    """ln by which the flow is below what was expected, now or smoothed."""
    flow, expected = float(seen.frame["coolant.flow"][i]), float(seen.expected[i])
    now = -np.log(max(flow, 1e-3)) - expected if np.isfinite(flow) and np.isfinite(expected) else 0.0
    return max(float(now), float(seen.flow.effect[i]))


def _moved(step: Step, streams: Any, values: Floats, i: int, need: float, sudden: bool) -> bool | None:
    """Whether another sensor of the loop moved, either way; None if it cannot tell. sudden: one sample tells."""
    value = float(values[i])
    if not step.judged[i] or not value > 0 or float(streams.cells[1, i]) > _CALM**2:
        return None
    now = abs(-np.log(value) - float(streams.cells[0, i]))
    return bool(max(now if sudden else 0.0, abs(float(step.effect[i]))) >= need)


def throttled(gpus: Frame | None, loop: str, loops: Loops) -> bool:
    """Whether at least two GPUs of the loop are held down by heat."""
    mine = loops.of(loop, gpus)
    if gpus is None or not len(mine):
        return False
    bits, _ = read_reasons(gpus["gpu.throttle_reasons"][mine])
    return int(np.count_nonzero(has_reason(bits, int(HEAT)))) >= 2


def finding(
    seen: Seen, i: int, due: tuple[int, Level], verdict: Verdict, settings: Settings, loops: Loops, alike: int
) -> Finding:
    """What is told of a loop; `alike`: comparable loops, itself among them."""
    frame, told = seen.frame, list[str]()
    peers = alike - 1 if alike >= PEERS else 0
    cohort = f"own past, less what {peers} comparable loops share" if peers else "own past"
    entity, flow = frame.entities[i], float(frame["coolant.flow"][i])
    usual, supply = float(np.exp(-seen.expected[i])), float(frame["coolant.supply_temperature"][i])
    more: dict[str, Any] = {"corroborated_by": list(verdict.others)}
    signals: list[str] = []
    doubts: list[bool] = []
    if (seen.flow.on[i] or settings.low[i] >= 2) and not settings.well[i]:
        words = f"flow is {flow:.4g} L/min, {flow / usual:.0%} of its usual {usual:.4g} L/min"
        told.append(words + (", but pressure and pump say that it flows: the meter?" if verdict.meter else ""))
        signals = ["coolant.flow", *verdict.others]
        doubts.append(verdict.meter)
        clears = "ends when the flow is back at its usual value"
        compared = Comparison(flow, usual, None, cohort, peers, 1 - flow / usual, "L/min")
    if seen.warmth.on[i]:
        rise = float(seen.warmth.effect[i])
        words = f"supply temperature is {supply:.1f} Cel, {rise:.1f} K above what is usual"
        told.append(words + (", in one jump: its sensor?" if verdict.sensor else ""))
        more |= {"supply_temperature": to_json(supply), "supply_rise": round(rise, 2)}
        if not signals:
            clears = "ends when the supply is back within half of that"
            compared = Comparison(supply, supply - rise, None, cohort, peers, rise, "K")
        signals.append("coolant.supply_temperature")
        doubts.append(verdict.sensor)
    more[DOUBTED] = due[1] == "suspect" and all(doubts)
    score = float(max(seen.flow.score[i], seen.warmth.score[i]))
    shown = make_evidence(clears, compared, **more, **_balance(seen, i, loops))
    return Finding(
        frame.time, due[0], entity, "coolant", due[1], score, f"{entity}: " + " and ".join(told), shown, tuple(signals)
    )


def _balance(seen: Seen, i: int, loops: Loops) -> dict[str, float | None]:
    """Heat that the coolant carries, and its share of what the loop's GPUs draw: evidence, no level rests on it."""
    frame = seen.frame
    warmed = float(frame["coolant.return_temperature"][i] - frame["coolant.supply_temperature"][i])
    flow = float(frame["coolant.flow"][i])
    if not (warmed >= LEAST_DT and flow > 0):
        return {}
    carried = flow * warmed / PG25
    mine = loops.of(frame.entities[i], seen.gpus)
    drawn = float(np.nansum(seen.gpus["gpu.power"][mine])) / 1000 if seen.gpus is not None and len(mine) else 0.0
    return {"heat_kw": round(carried, 1), "heat_share": round(carried / drawn, 2) if drawn > 1 else None}


_EVERY = 30 * SECOND  # the water of a loop takes minutes to warm: less often than each frame is soon enough; chosen
_ALIKE = 0.5  # share of the flow's fall up to which the heat may have fallen too, and the flow is believed; chosen
_SEEN = 0.8  # share of the fall that the samples with a known heat must show: five minutes of them at least; chosen
_LEARN = 20  # samples before anything rests on it: the replay contract
_FOLLOWS = 1 / 240  # of a sample: two hours, in which a usual share changes; chosen
_SMOOTH = 0.15  # of a sample: three minutes; chosen
_STEADY = 0.1  # ln by which the draw may be off its mean: water warms minutes after the GPUs; chosen
_DRAWS = 0.25  # of a sample: the two minutes of a loop's water; chosen
_CELLS = ("usual", "samples", "lost", "fallen", "drawn")


@dataclass
class Balance:
    """(N,) of the loops and branches; a part() of a detector. It learns only while the flow is as usual.

    usual, samples: -ln of the share.   drawn: ln W of late.   lost, fallen: ln by which heat and flow are below usual,
    smoothed over the same samples since the flow fell, so that what was known before it fell bears nothing out.
    """

    cells: Floats = field(default_factory=lambda: np.zeros((len(_CELLS), 0)))
    last: int = 0
    _key: tuple[int, ...] = ()
    _rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    _gpus: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def follow(self, frame: Frame, gpus: Frame | None, loops: Loops, calm: Bools, fallen: Floats) -> None:
        """One instant. calm: (N,) whose flow is as usual, and on whom nobody works; fallen: ln, 0 whose is not."""
        if 0 <= frame.time - self.last < _EVERY:
            return
        self.last, n = frame.time, len(frame.entities)
        if n > self.cells.shape[1]:
            self.cells = np.hstack([self.cells, np.zeros((len(_CELLS), n - self.cells.shape[1]))])
        self.cells[2:4, np.flatnonzero(fallen == 0)] = 0.0
        if gpus is None:
            return
        usual, samples, lost, fell, drew = self.cells[:, :n]
        drawn = np.log(self._drawn(frame, gpus, loops))
        off = np.where(drew == 0, 0.0, drawn - drew)
        drew += np.where(np.isfinite(drawn), np.where(drew == 0, drawn, _DRAWS * off), 0.0)
        warmed = frame["coolant.return_temperature"] - frame["coolant.supply_temperature"]
        heat = frame["coolant.flow"] * np.where(warmed >= LEAST_DT, warmed, np.nan) / PG25
        value = drawn - np.log(1000 * np.where(heat > 0, heat, np.nan))
        known = np.isfinite(value) & (np.abs(off) <= _STEADY)
        learns = known & calm
        samples += learns
        usual += np.where(learns, np.maximum(1 / np.maximum(samples, 1), _FOLLOWS) * (value - usual), 0.0)
        told = known & (samples >= _LEARN) & (fallen != 0) & np.isfinite(fallen)
        lost += np.where(told, _SMOOTH * (value - usual - lost), 0.0)
        fell += np.where(told, _SMOOTH * (fallen - fell), 0.0)

    def flows_less(self, i: int, fallen: float) -> bool:
        """Whether a fall of the flow by `fallen` (ln) is real: the heat was seen since and did not fall with it."""
        if i >= self.cells.shape[1]:
            return False
        lost, fell = self.cells[2:4, i]
        return bool(fell >= _SEEN * fallen and abs(lost) <= _ALIKE * fell)

    def _drawn(self, frame: Frame, gpus: Frame, loops: Loops) -> Floats:
        """(N,) W that the GPUs of each draw; NaN where there are none."""
        key = (id(gpus.topology), gpus.topology.version, len(gpus.entities), len(frame.entities))
        if key != self._key:
            mine = [loops.of(e, gpus) for e in frame.entities]
            self._rows = np.repeat(np.arange(len(mine)), [len(m) for m in mine])
            self._gpus = np.concatenate(mine) if mine else np.empty(0, np.int64)
            self._key = key
        power = gpus["gpu.power"][self._gpus]
        drawn = np.bincount(self._rows, np.where(power > 0, power, 0.0), minlength=len(frame.entities))
        return np.where(drawn > 0, drawn, np.nan)

    def reset(self, mask: Bools) -> None:
        self.cells[:, np.flatnonzero(mask[: self.cells.shape[1]])] = 0.0

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells, self.last = state["cells"], state["last"]
