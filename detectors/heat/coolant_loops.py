"""What a coolant loop's departure means: lost flow or a broken meter, warm water or a new set-point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Compared, evidence
from detectors.base.streams import Step
from detectors.base.throttle import bits_of, has
from detectors.base.topology_index import Homes
from detectors.heat.coolant_kernel import PEERS
from detectors.heat.thermal_bits import HEAT
from pipeline.records import LEVELS, SECOND, Finding, Frame, Level, finite

Floats = NDArray[np.float64]
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
        self._homes = Homes()

    def of(self, loop: str, gpus: Frame | None) -> NDArray[np.intp]:
        """Numbers of a loop's GPUs."""
        if gpus is None:
            return _NONE
        self._homes.renew(gpus.entities, gpus.topology)
        return self._homes.places(loop)


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
    bits, _ = bits_of(gpus["gpu.throttle_reasons"][mine])
    return int(np.count_nonzero(has(bits, int(HEAT)))) >= 2


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
        compared = Compared(flow, usual, None, cohort, peers, 1 - flow / usual, "L/min")
    if seen.warmth.on[i]:
        rise = float(seen.warmth.effect[i])
        words = f"supply temperature is {supply:.1f} Cel, {rise:.1f} K above what is usual"
        told.append(words + (", in one jump: its sensor?" if verdict.sensor else ""))
        more |= {"supply_temperature": finite(supply), "supply_rise": round(rise, 2)}
        if not signals:
            clears = "ends when the supply is back within half of that"
            compared = Compared(supply, supply - rise, None, cohort, peers, rise, "K")
        signals.append("coolant.supply_temperature")
        doubts.append(verdict.sensor)
    more[DOUBTED] = due[1] == "suspect" and all(doubts)
    score = float(max(seen.flow.score[i], seen.warmth.score[i]))
    shown = evidence(clears, compared, **more, **_balance(seen, i, loops))
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
