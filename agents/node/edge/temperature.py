"""Edge rule for temperatures that rise fast although the power does not: the heat is no longer removed.

The rise that the power explains is subtracted first. A part at temperature T above a coolant of at least COOLEST_C is
at most (T - COOLEST_C) warmer through its power, so a power change by a share p explains at most p * (T - COOLEST_C),
whatever the thermal resistance. NVML rounds to 1 K, so the difference of two readings has an error below ROUNDING_K.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from agents.node.edge.condition import Debouncer, build_event
from pipeline.model.records import SECOND, Event

ROUNDING_K = 1.0
"""K; half a kelvin at each end: nvmlDeviceGetTemperature returns whole degrees."""
MIN_SPAN, MAX_SPAN = 2 * SECOND, 15 * SECOND
"""Between the two readings compared. At 1 kW without flow a plate warms by 2.3 K/s, a margin of 27 K lasts 12 s."""
MIN_INTERVAL = SECOND * 9 // 10
"""Readings closer together are skipped, so that the history reaches far enough; chosen: below 1 s."""
POWER_HISTORY = 60 * SECOND
"""How long past power still warms: three to five times the 10-20 s by which temperature lags it."""
POWER_KNOWN = 30 * SECOND
"""Power that must be known before a rise is called unexplained; chosen: half of the history."""
POWER_TAU = 2 * SECOND
"""Time constant of the power's filter: it shows 39 % of a step after one reading and 63 % after two, when the median
shows the first warm reading; at least the lag of the part between die and plate, which responds within a second."""
COOLEST_C = 15.0
"""Degrees Celsius; chosen: no coolant or inlet air of a data hall is colder."""
CALM_SHARE = 0.2
"""Share of the slope limit below which the rise is over; chosen."""
CALM_READINGS = 10
"""Readings in a row that end it; chosen."""
MEDIAN_READINGS = 3
"""Readings whose median is used, so that a single wrong one, high or low, has no effect."""


@dataclass(slots=True)
class _PartHistory:
    """The history of one part: at most 60 s of power and 15 s of temperature, at one reading a second.

    raw: (time, temperature) of the last readings.  medians: of temperature.  power: filtered.
    """

    raw: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEDIAN_READINGS))
    medians: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_SPAN // SECOND + 1))
    power: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=POWER_HISTORY // SECOND + 1))
    debouncer: Debouncer = field(default_factory=Debouncer)

    def add_temperature(self, time: int, value: float) -> bool:
        """Adds a reading; whether there is a new median. A gap, or a jump of the clock, clears the history."""
        since = time - self.raw[-1][0] if self.raw else 0
        if self.raw and 0 <= since < MIN_INTERVAL:
            return False
        if not 0 <= since <= MAX_SPAN:
            self.raw.clear()
            self.medians.clear()
        self.raw.append((time, value))
        if len(self.raw) < MEDIAN_READINGS:
            return False
        self.medians.append((time, sorted(warm for _, warm in self.raw)[MEDIAN_READINGS // 2]))
        return True

    def add_power(self, time: int, value: float) -> None:
        """Adds a reading of power, filtered with a short lag."""
        if self.power:
            before, smooth = self.power[-1]
            if 0 <= time - before < MIN_INTERVAL:
                return
            if not 0 <= time - before <= POWER_KNOWN:
                self.power.clear()
            else:
                value = smooth + (1 - math.exp((before - time) / POWER_TAU)) * (value - smooth)
        self.power.append((time, value))

    def power_change(self, time: int) -> float | None:
        """Share by which the power changed recently; None if it is not known for long enough."""
        recent = [(t, p) for t, p in self.power if time - t <= POWER_HISTORY]
        if not recent or recent[-1][0] - recent[0][0] < POWER_KNOWN or time - recent[-1][0] > POWER_KNOWN:
            return None
        highest, lowest = max(p for _, p in recent), min(p for _, p in recent)
        return (highest - lowest) / highest if highest > 0 else 0.0

    def steepest_rise(self, time: int, explained: float) -> tuple[float, float, int]:
        """(K/s unexplained, K risen, us between) of the pair of readings with the steepest rise."""
        now = self.medians[-1][1]
        best = (-1.0, 0.0, 0)
        for then, value in self.medians:
            if MIN_SPAN <= time - then <= MAX_SPAN:
                slope = (now - value - ROUNDING_K - explained) / ((time - then) / SECOND)
                best = max(best, (slope, now - value, time - then))
        return best


@dataclass(slots=True)
class RiseRule:
    """Event `temperature_rise`: more than `slope` K/s that the power does not explain, by the median of 3 readings.

    power: the signal that may explain it; "" if none does, as for coolant.
    """

    temperature: str
    power: str
    slope: float
    kind: str = "temperature_rise"
    _known: dict[str, _PartHistory] = field(default_factory=dict)

    @property
    def signals(self) -> tuple[str, ...]:
        """See `EdgeRule.signals`."""
        return (self.temperature, self.power) if self.power else (self.temperature,)

    def evaluate(self, time: int, entity: str, values: dict[str, float]) -> Event | None:
        """See `EdgeRule.evaluate`."""
        part = self._known.setdefault(entity, _PartHistory())
        if self.power in values:
            part.add_power(time, values[self.power])
        if self.temperature not in values:
            return None
        fresh = part.add_temperature(time, values[self.temperature])
        moved = part.power_change(time) if self.power else 0.0
        if moved is None or not fresh or len(part.medians) < 2:
            return None
        now = part.medians[-1][1]
        slope, rise, within = part.steepest_rise(time, moved * max(0.0, now - COOLEST_C))
        rises, calm = slope > self.slope, slope < CALM_SHARE * self.slope
        state = part.debouncer.update(time, rises, calm, begin_after=1, end_after=CALM_READINGS)
        if not state:
            return None
        numbers = {"value": now, "rise": rise, "seconds": within / SECOND, "slope": slope, "power_moved": moved}
        since = part.debouncer.onset - within if state == "active" else part.debouncer.onset
        return build_event(time, entity, self.kind, state, since, **numbers, limit=self.slope, signal=self.temperature)
