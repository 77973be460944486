"""What comparable loops lose together: the hall's water or its pumps, told once on what the loops share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.detector import Part
from detectors.base.findings import Comparison, make_evidence
from detectors.base.streams import Bools, Channel, Floats, Step, Streams
from detectors.base.topology_index import EVERYTHING
from detectors.heat.coolant_loops import DOUBTED, MOVED, SHARE, Loops, throttled
from pipeline.model.records import SECOND, Finding, Frame, Level, to_json

_FOLLOWS = (
    0.5  # share of the lost flow by which the GPUs' power fell too: valves and pumps then follow the load; chosen
)


class Settings(Protocol):
    """Of the detector."""

    flow_delta: float
    temperature_delta: float
    warm: float
    hold: float
    collapse: float

    def jumped(self, i: int, time: int) -> bool: ...

    def rapid(self, i: int, time: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Shift:
    """An instant of what loops share: (N,) each, of the loop's group; NaN where they are too few.

    flow, supply, pressure, speed: departure, ln for all but K of the supply; + is less flow, pressure, speed, more K.
    """

    frame: Frame
    gpus: Frame | None
    groups: NDArray[np.int32]
    flow: Floats
    supply: Floats
    pressure: Floats
    speed: Floats


@dataclass
class Shared(Part):
    """CUSUM on the shift itself, one stream per loop though those of a group are alike: loops come and go."""

    flow: Streams = field(default_factory=lambda: Streams(Channel(floor=0.004, delta=0.03, phi=0.6)))
    warmth: Streams = field(default_factory=lambda: Streams(Channel(floor=0.3, delta=2.75, phi=0.9)))
    draw: Streams = field(default_factory=lambda: Streams(Channel(floor=0.02, delta=0.05, phi=0.6)))
    low: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    large: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def take(self, shift: Shift, gate: Bools, settings: Settings) -> tuple[Step, Step, float]:
        """One instant; returns where flow and supply stand, and ln by which the GPUs draw less than usual."""
        n, time = len(shift.flow), shift.frame.time
        if len(self.low) < n:
            more = np.zeros(n - len(self.low), np.int64)
            self.low, self.large = np.append(self.low, more), np.append(self.large, more)
        alone = np.full(n, -1, np.int32)
        flow = self.flow.step(shift.flow, alone, time, gate)
        warmth = self.warmth.step(shift.supply, alone, time, gate)
        known, low = np.isfinite(shift.flow) & gate, self.low[:n]
        low[known] = np.where(shift.flow > -np.log(settings.collapse), low + 1, 0)[known]
        big = (flow.effect >= settings.flow_delta) | (low >= 2)
        large = self.large[:n]
        large[big & ((large == 0) | (large > time))] = time  # the clock may have gone back
        large[~big] = 0
        return flow, warmth, self._drawn(shift.gpus, time)

    def _drawn(self, gpus: Frame | None, time: int) -> float:
        power = gpus["gpu.power"] if gpus is not None else np.empty(0)
        told = power[power > 0]
        value = np.array([-np.log(told.mean()) if len(told) else np.nan])
        step = self.draw.step(value, np.full(1, -1, np.int32), time)
        return float(step.effect[0])

    def reset(self, mask: Bools) -> None:
        for streams in (self.flow, self.warmth):
            streams.reset(mask)
        for cells in (self.low, self.large):
            cells[: len(mask)][mask[: len(cells)]] = 0

    def snapshot(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).snapshot() for name in ("flow", "warmth", "draw")}
        return {**parts, "low": self.low.copy(), "large": self.large.copy()}

    def restore(self, state: Any) -> None:
        for name in ("flow", "warmth", "draw"):
            getattr(self, name).restore(state[name])
        self.low, self.large = state["low"], state["large"]


@dataclass(frozen=True, slots=True)
class Blamed:
    """What the loops share, and why it is told."""

    entity: str
    level: Level
    onset: int
    finding: Finding


def blamed(
    shift: Shift, told: tuple[Step, Step, float], shared: Shared, settings: Settings, loops: Loops, gate: Bools
) -> Blamed | None:
    """One finding for all loops that lose flow or warm together; None if none do."""
    flow, warmth, less = told
    n = len(shift.flow)
    weak = ((flow.on & (flow.effect > 0)) | (shared.low[:n] >= 2)) & gate & np.isfinite(shift.flow)
    warm = warmth.on & gate & np.isfinite(shift.supply)
    if not (weak | warm).any():
        return None
    mine = np.flatnonzero(weak | warm)
    feeding = [e for i in mine.tolist() if len(loops.of(e := shift.frame.entities[i], shift.gpus))]
    hot = bool(feeding) and 2 * sum(throttled(shift.gpus, e, loops) for e in feeding) >= len(feeding)
    level, words, signals, meters = (
        _flow_level(shift, flow, weak, shared, settings, hot, less) if weak.any() else _NOTHING
    )
    other, more, sensor = _warm_level(shift, warmth, warm, settings, hot) if warm.any() else ("suspect", "", True)
    if other == "page":
        level = "page"
    signals = (*signals, *(("coolant.supply_temperature",) if warm.any() else ()))
    words = " and ".join(text for text in (words, more) if text)
    doubted = level == "suspect" and meters and sensor
    return _finding(shift, mine, level, words, signals, (flow, warmth), {"gpus_throttle": hot, DOUBTED: doubted})


_NOTHING: tuple[Level, str, tuple[str, ...], bool] = ("suspect", "", (), True)


def _flow_level(
    shift: Shift, flow: Step, weak: Bools, shared: Shared, settings: Settings, hot: bool, less: float
) -> tuple[Level, str, tuple[str, ...], bool]:
    """Page where pressure, pump or the GPUs bear it out; meters that fall while those stand are a doubted suspect."""
    i = int(np.flatnonzero(weak)[np.argmax(flow.effect[weak])])
    lost = max(float(shift.flow[i]), float(flow.effect[i]))
    moved = {"coolant.pressure": shift.pressure[i], "pump.speed": shift.speed[i]}
    others = tuple(name for name, by in moved.items() if abs(by) >= max(MOVED, SHARE * lost))
    against = not others and any(np.isfinite(by) for by in moved.values())
    collapsed, large = bool(shared.low[i] >= 2), int(shared.large[i])
    level: Level = "suspect"
    if hot and (collapsed or large):
        level = "page"
    elif against or less >= _FOLLOWS * lost:
        level = "suspect"
    elif collapsed or (large and others):
        level = "page"
    elif large and shift.frame.time - large >= settings.hold * SECOND:
        level = "ticket"
    note = ", though pressure and pumps say that it flows" if against else ""
    note = note or (", as the GPUs draw less too" if less >= _FOLLOWS * lost and not hot else "")
    return level, f"flow is {-np.expm1(-lost):.0%} below usual{note}", ("coolant.flow", *others), bool(note)


def _warm_level(shift: Shift, warmth: Step, warm: Bools, settings: Settings, hot: bool) -> tuple[Level, str, bool]:
    """Page where it rose faster than set-points do, by more than they are moved, or GPUs throttle."""
    mine, time = np.flatnonzero(warm).tolist(), shift.frame.time
    i = max(mine, key=lambda at: (float(warmth.effect[at]), -at))
    up, held = float(warmth.effect[i]), int(warmth.held[i])
    sensor = sum(settings.jumped(at, time) for at in mine) * 2 > len(mine)
    rapid = sum(settings.rapid(at, time) for at in mine) * 2 >= len(mine) and up >= settings.temperature_delta
    sure = not sensor and (rapid or (up >= settings.warm and held >= settings.hold))
    words = f"supply is {up:.1f} K above usual" + (", in one jump: its sensors?" if sensor else "")
    return ("page" if sure or hot else "suspect"), words, sensor


def _finding(
    shift: Shift,
    mine: NDArray[np.int64],
    level: Level,
    words: str,
    signals: tuple[str, ...],
    steps: tuple[Step, Step],
    more: dict[str, Any],
) -> Blamed:
    frame, (flow, warmth) = shift.frame, steps
    entity = common(frame, mine)
    first = steps[0] if "coolant.flow" in signals else steps[1]
    held = max((int(step.held[i]) for step in steps for i in mine.tolist() if step.on[i]), default=0)
    onset = frame.time - max(held, 10) * SECOND
    value = float(np.nanmedian(frame[signals[0]][mine])) if np.isfinite(frame[signals[0]][mine]).any() else float("nan")
    worst = float(np.max(first.effect[mine]))
    is_flow = first is flow
    expected, unit = (value / np.exp(-worst), "L/min") if is_flow else (value - worst, "K")
    effect = float(-np.expm1(-worst)) if is_flow else worst
    compared = Comparison(value, float(expected), None, "own past", 0, effect, unit)
    names = [frame.entities[i] for i in mine[:16].tolist()]
    shown = make_evidence(
        "ends when flow and supply of the loops are back at what they were",
        compared,
        loops=names,
        judged=len(mine),
        **to_json({**more, "supply_rise": float(np.max(warmth.effect[mine]))}),
    )
    summary = f"{entity}: of {len(mine)} comparable loops together {words}, compared with their own past"
    score = float(np.max(first.score[mine]))
    return Blamed(
        entity, level, onset, Finding(frame.time, onset, entity, "coolant", level, score, summary, shown, signals)
    )


def common(frame: Frame, mine: NDArray[np.int64]) -> str:
    """The nearest thing that is above all of these loops."""
    above = frame.topology.ancestors
    first, *others = [above(frame.entities[i]) for i in mine.tolist()]
    shared = set(first).intersection(*others)
    return next((e for e in first if e in shared), EVERYTHING)
