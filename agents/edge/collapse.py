"""Flow and pressure that collapse: far below what the same sensor used to show."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.edge.told import Condition, event
from pipeline.records import SECOND, Event

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


@dataclass(slots=True)
class _Sensor:
    """One sensor's usual value: the median of its first looks, then what it shows, slowly."""

    usual: float = 0.0
    first: list[float] = field(default_factory=list)
    high: int = 0
    last: int = 0
    low_since: int = 0
    condition: Condition = field(default_factory=Condition)

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


@dataclass(slots=True)
class CollapseRule:
    """Event `kind`: two looks in a row below `share` of what the sensor usually shows.

    Below it the usual value stands still, so that a slow look at a collapse does not make it the new normal. A sensor
    that usually shows less than `least` is idle. No news is no look: it neither begins nor ends anything.
    """

    kind: str
    signals: tuple[str, ...]
    share: float
    least: float
    _known: dict[tuple[str, str], _Sensor] = field(default_factory=dict)

    def look(self, time: int, entity: str, values: dict[str, float]) -> list[Event]:
        found = (self._one(time, entity, name, values[name]) for name in self.signals if name in values)
        return [e for e in found if e is not None]

    def _one(self, time: int, entity: str, signal: str, value: float) -> Event | None:
        sensor = self._known.setdefault((entity, signal), _Sensor())
        limit = self.share * sensor.usual
        low = sensor.known and sensor.usual >= self.least and value < limit
        said = sensor.condition.look(time, low, value >= limit * RECOVERED, enough=WELL)
        why = "recovered"
        if not low:
            sensor.low_since = time
            sensor.learn(time, value)
        elif time - sensor.low_since > NEW_LEVEL:
            sensor.usual, sensor.condition.bad = value, 0
            said, why = ("cleared", "new level") if sensor.condition.on else ("", "")
            sensor.condition.on = False
        sensor.last = time
        if not said:
            return None
        numbers = {"value": value, "usual": limit / self.share, "share": self.share, "signal": signal}
        since = sensor.condition.onset
        return event(time, entity, self.kind, said, since, **numbers, **({"why": why} if said == "cleared" else {}))
