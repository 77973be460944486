"""Edge rules for coolant: flow or pressure far below the usual value of the same sensor, and leak detectors.

A leak state is reported at once: the controller of the leak detector has already debounced it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.node.edge.condition import LOOKS, Condition, event
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

LEARN = 30
"""Looks that make a usual value; chosen: half a minute at 1 s, longer than a pump takes to start."""
SLOW = 600 * SECOND
"""Time in which the usual value follows the sensor; chosen: a collapse takes seconds, night set-back hours."""
JUMP = 2.0
"""Times the usual value; chosen: no set-point moves so far, a pump that starts does."""
RECOVERED = 1.15
"""Above its threshold by so much it is over; chosen: ten times the noise of a flow meter (2 % of reading)."""
WELL = 5
"""Looks in a row that end it; chosen: a pump that catches itself swings for some seconds."""
NEW_LEVEL = 4 * 3600 * SECOND
"""A level that stays so long is the usual one; chosen: longer than a repair on call takes, shorter than a night."""
ZEROS = 3
"""Looks in a row at 0 that decide, of a sensor that never changed before; chosen: one more than else, since 0 is what a
broken reading shows."""
HELD = 2
"""Times the looks for which the sensor usually stands still; chosen, so that one wrong measurement of a controller that
renews its sensors every 5 to 10 s decides nothing."""
REPEATED_MOST = 15
"""Looks at one and the same low value that decide in any case; chosen: controllers renew a sensor within 10 s."""
RUNS = 8
"""How many times of standing still are remembered; chosen, so that an idle night is forgotten within a minute."""


@dataclass(slots=True)
class _Sensor:
    """One sensor's usual value: the median of its first looks, then what it shows, slowly."""

    usual: float = 0.0
    first: list[float] = field(default_factory=list)
    high: int = 0
    last: int = 0
    low_since: int = 0
    condition: Condition = field(default_factory=Condition)
    shown: float | None = None
    run: int = 0
    runs: deque[int] = field(default_factory=lambda: deque(maxlen=RUNS))
    differ: bool = False

    @property
    def known(self) -> bool:
        return len(self.first) >= LEARN

    def learn(self, time: int, value: float) -> None:
        """A single wrong value moves little; what stays at twice the usual is learnt anew, as when a pump starts."""
        self.high = self.high + 1 if self.known and value > JUMP * self.usual else 0
        if self.high >= LEARN:
            self.first, self.high = [], 0
        if not self.known:
            self.first.append(value)
            self.usual = sorted(self.first)[len(self.first) // 2]
        elif not self.high:
            self.usual += min(1.0, max(0, time - self.last) / SLOW) * (value - self.usual)

    def see(self, value: float, low: bool) -> None:
        """Counts looks at one and the same value; what it does while low says nothing of how it is renewed."""
        was_low = self.condition.bad > 0
        if value == self.shown:
            self.run += 1
        else:
            if self.run and not low and not was_low:
                self.runs.append(self.run)
            self.run = 1
        self.differ = low and was_low and (self.differ or value != self.shown)
        self.shown = value

    def looks(self, seconded: bool) -> int:
        """How many low looks decide: two measurements. A repeated value may be one measurement, seen twice."""
        if self.differ or seconded:
            return LOOKS
        if not self.runs:
            return ZEROS if self.shown == 0 else LOOKS
        return min(REPEATED_MOST, HELD * sorted(self.runs)[(len(self.runs) - 1) // 2])


@dataclass(slots=True)
class CollapseRule:
    """Event `kind`: two measurements in a row below `share` of what the sensor usually shows.

    Two looks are two measurements where the value differs, where a sensor of the other rule is low too (`lows`, which
    both rules share). Else the value must hold for twice as long as the sensor usually stands still; of a sensor that
    never changed before, two looks decide, at 0 three.

    Below it the usual value stands still, so that a slow look at a collapse does not make it the new normal. A sensor
    that usually shows less than `least` is idle. No news is no look: it neither begins nor ends anything.

    The event that begins it bears in `others` what the sensors of the other rule show beside it, as shares of what they
    usually show (`usual` by entity and signal, which both rules share): a flow that falls alone may be its meter.
    """

    kind: str
    signals: tuple[str, ...]
    share: float
    least: float
    lows: dict[str, set[str]] = field(default_factory=dict)
    usual: dict[tuple[str, str], float] = field(default_factory=dict)
    _known: dict[tuple[str, str], _Sensor] = field(default_factory=dict)

    def look(self, time: int, entity: str, values: dict[str, float]) -> list[Event]:
        found = (self._one(time, entity, name, values) for name in self.signals if name in values)
        return [e for e in found if e is not None]

    def _one(self, time: int, entity: str, signal: str, values: dict[str, float]) -> Event | None:
        value = values[signal]
        sensor = self._known.setdefault((entity, signal), _Sensor())
        limit = self.share * sensor.usual
        low = sensor.known and sensor.usual >= self.least and value < limit
        sensor.see(value, low)
        looks = sensor.looks(self._seconded(entity, signal, low))
        said = sensor.condition.look(time, low, value >= limit * RECOVERED, looks, WELL)
        why = "recovered"
        if not low:
            sensor.low_since = time
            sensor.learn(time, value)
        elif time - sensor.low_since > NEW_LEVEL:
            sensor.usual, sensor.condition.bad = value, 0
            said, why = ("cleared", "new level") if sensor.condition.on else ("", "")
            sensor.condition.on = False
        sensor.last = time
        if sensor.known:
            self.usual[entity, signal] = sensor.usual
        if not said:
            return None
        numbers = {"value": value, "usual": limit / self.share, "share": self.share, "signal": signal}
        since = sensor.condition.onset
        more = {"why": why} if said == "cleared" else {"others": self._others(entity, values)}
        return event(time, entity, self.kind, said, since, **numbers, **more)

    def _others(self, entity: str, values: dict[str, float]) -> dict[str, float]:
        """What the sensors of the other rule show, as shares of what they usually show."""
        usual = {name: self.usual.get((entity, name), 0.0) for name in values if name not in self.signals}
        return {name: round(values[name] / known, 3) for name, known in usual.items() if known > 0}

    def _seconded(self, entity: str, signal: str, low: bool) -> bool:
        """Notes whether this one is low; whether a sensor of the same part is low that measures something else."""
        lows = self.lows.setdefault(entity, set())
        (lows.add if low else lows.discard)(signal)
        return bool(lows - set(self.signals))


SIGNAL = "leak.state"
STATES = CATALOGUE[SIGNAL].states
BAD = tuple(STATES.index(name) for name in ("warning", "critical"))
OK = STATES.index("ok")


@dataclass(slots=True)
class LeakRule:
    """Event `leak`: a detector went to warning or critical, a warning became critical, or it is well again.

    A detector that is unavailable or absent, or is not read, neither leaks nor is well. One look begins it, as the next
    may be 10 s away; two looks end it.
    """

    kind: str = "leak"
    signals: tuple[str, ...] = (SIGNAL,)
    _known: dict[str, tuple[Condition, int]] = field(default_factory=dict)

    def look(self, time: int, entity: str, values: dict[str, float]) -> Event | None:
        value = values.get(SIGNAL, -1.0)
        if not 0 <= value < len(STATES):
            return None
        state = int(value)
        condition, worst = self._known.get(entity, (Condition(), OK))
        grows = condition.on and state in BAD and state > worst
        said = condition.look(time, state in BAD, state == OK, looks=1) or ("active" if grows else "")
        if said:
            worst = state if said == "active" else OK
        self._known[entity] = (condition, worst)
        if not said:
            return None
        return event(time, entity, self.kind, said, condition.onset, leak=STATES[state], value=state)
