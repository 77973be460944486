"""Temperature that rises fast although the power does not: heat is no longer taken away.

Rise that the power explains is taken off first. A part at temperature T over a coolant of at least COOLEST is at most
(T - COOLEST) warmer through its power, so a power that moved by a share p explains at most p * (T - COOLEST), whatever
its thermal resistance. NVML rounds to 1 K, so a difference of two readings is wrong by less than ROUNDING.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from agents.node.edge.condition import Condition, event
from pipeline.model.records import SECOND, Event

ROUNDING = 1.0
"""K; half a kelvin at each end: nvmlDeviceGetTemperature gives whole degrees."""
SHORTEST, LONGEST = 2 * SECOND, 15 * SECOND
"""Between the two readings compared. At 1 kW without flow a plate warms by 2.3 K/s, a margin of 27 K lasts 12 s."""
CLOSEST = SECOND * 9 // 10
"""Readings closer together are passed over, so that what is remembered reaches far enough; chosen: below 1 s."""
REMEMBERED = 60 * SECOND
"""How far back power still warms: three to five times the 10-20 s by which temperature lags it."""
KNOWN = 30 * SECOND
"""Of power that must be known before a rise is called unexplained; chosen: half of what is remembered."""
SMOOTH = 2 * SECOND
"""Time constant of the power's filter: of a step it shows 39 % after one look and 63 % after two, when the median shows
the first warm reading; no less than the part of the resistance between die and plate, which answers within a second."""
COOLEST = 15.0
"""Degrees Celsius; chosen: no coolant or inlet air of a data hall is colder."""
CALM = 0.2
"""Share of the slope limit under which the rise is over; chosen."""
CALM_LOOKS = 10
"""Looks in a row that end it; chosen."""
MEDIAN = 3
"""Readings of which the middle one counts, so that a single wrong one, high or low, counts never."""


@dataclass(slots=True)
class _Part:
    """What is remembered of one part: at most 60 s of power and 15 s of temperature, at one look a second."""

    raw: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEDIAN))
    warmth: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LONGEST // SECOND + 1))
    power: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED // SECOND + 1))
    condition: Condition = field(default_factory=Condition)

    def warms(self, time: int, value: float) -> bool:
        """Takes a reading; whether there is a new middle one. After a gap, or a jump of the clock, all begins anew."""
        since = time - self.raw[-1][0] if self.raw else 0
        if self.raw and 0 <= since < CLOSEST:
            return False
        if not 0 <= since <= LONGEST:
            self.raw.clear()
            self.warmth.clear()
        self.raw.append((time, value))
        if len(self.raw) < MEDIAN:
            return False
        self.warmth.append((time, sorted(warm for _, warm in self.raw)[MEDIAN // 2]))
        return True

    def draws(self, time: int, value: float) -> None:
        """Power as a filter with a short lag sees it."""
        if self.power:
            before, smooth = self.power[-1]
            if 0 <= time - before < CLOSEST:
                return
            if not 0 <= time - before <= KNOWN:
                self.power.clear()
            else:
                value = smooth + (1 - math.exp((before - time) / SMOOTH)) * (value - smooth)
        self.power.append((time, value))

    def moved(self, time: int) -> float | None:
        """Share by which the power moved of late; None: not known for long enough."""
        seen = [(t, p) for t, p in self.power if time - t <= REMEMBERED]
        if not seen or seen[-1][0] - seen[0][0] < KNOWN or time - seen[-1][0] > KNOWN:
            return None
        highest, lowest = max(p for _, p in seen), min(p for _, p in seen)
        return (highest - lowest) / highest if highest > 0 else 0.0

    def steepest(self, time: int, explained: float) -> tuple[float, float, int]:
        """(K/s unexplained, K risen, us between) of the pair of readings that rises most."""
        now = self.warmth[-1][1]
        best = (-1.0, 0.0, 0)
        for then, value in self.warmth:
            if SHORTEST <= time - then <= LONGEST:
                slope = (now - value - ROUNDING - explained) / ((time - then) / SECOND)
                best = max(best, (slope, now - value, time - then))
        return best


@dataclass(slots=True)
class RiseRule:
    """Event `temperature_rise`: more than `slope` K/s that the power does not explain, in the middle of 3 readings.

    power: the signal that may explain it; "" where none does, as for coolant.
    """

    temperature: str
    power: str
    slope: float
    kind: str = "temperature_rise"
    _known: dict[str, _Part] = field(default_factory=dict)

    @property
    def signals(self) -> tuple[str, ...]:
        return (self.temperature, self.power) if self.power else (self.temperature,)

    def look(self, time: int, entity: str, values: dict[str, float]) -> Event | None:
        part = self._known.setdefault(entity, _Part())
        if self.power in values:
            part.draws(time, values[self.power])
        if self.temperature not in values:
            return None
        fresh = part.warms(time, values[self.temperature])
        moved = part.moved(time) if self.power else 0.0
        if moved is None or not fresh or len(part.warmth) < 2:
            return None
        now = part.warmth[-1][1]
        slope, rise, within = part.steepest(time, moved * max(0.0, now - COOLEST))
        said = part.condition.look(time, slope > self.slope, slope < CALM * self.slope, looks=1, enough=CALM_LOOKS)
        if not said:
            return None
        numbers = {"value": now, "rise": rise, "seconds": within / SECOND, "slope": slope, "power_moved": moved}
        since = part.condition.onset - within if said == "active" else part.condition.onset
        return event(time, entity, self.kind, said, since, **numbers, limit=self.slope, signal=self.temperature)
