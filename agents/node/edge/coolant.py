"""Edge rules for coolant: flow or pressure far below the usual value of the same sensor, and leak detectors.

A leak state is reported immediately: the controller of the leak detector has already debounced it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.node.edge.condition import CONFIRM_READINGS, Debouncer, build_event
from pipeline.model.records import SECOND, Event
from pipeline.model.signals import CATALOGUE

LEARN_READINGS = 30
"""Readings that make a usual value; chosen: half a minute at 1 s, longer than a pump takes to start."""
FOLLOW_US = 600 * SECOND
"""Time constant with which the usual value follows; chosen: a collapse takes seconds, a night set-back hours."""
JUMP_FACTOR = 2.0
"""Times the usual value; chosen: no set-point moves so far, but a pump that starts does."""
RECOVERED_FACTOR = 1.15
"""Times the threshold above which a collapse ends; chosen: ten times the noise of a flow meter (2 % of reading)."""
CLEAR_READINGS = 5
"""Readings in a row that end it; chosen: a pump that recovers oscillates for some seconds."""
NEW_LEVEL_US = 4 * 3600 * SECOND
"""A level that stays so long becomes the usual one; chosen: longer than an on-call repair, shorter than a night."""
ZERO_READINGS = 3
"""Readings of 0 in a row that decide, of a sensor that never changed; chosen: one more than otherwise, since 0 is
also what a broken reading shows."""
HOLD_FACTOR = 2
"""Times the usual number of repeats of the sensor; chosen, so that one wrong measurement of a controller that renews
its sensors every 5 to 10 s decides nothing."""
MAX_REPEATED = 15
"""Readings of the same low value that decide in any case; chosen: controllers renew a sensor within 10 s."""
KEPT_RUNS = 8
"""Numbers of repeats that are kept; chosen, so that an idle night is forgotten within a minute."""

LEAK_SIGNAL = "leak.state"
LEAK_STATES = CATALOGUE[LEAK_SIGNAL].states
LEAK_BAD = tuple(LEAK_STATES.index(name) for name in ("warning", "critical"))
LEAK_OK = LEAK_STATES.index("ok")


@dataclass(slots=True)
class _Sensor:
    """One sensor's usual value: the median of its first readings, then a slow average.

    high_count: readings in a row at twice the usual value.  low_since: time of the last reading that was not low.
    repeats: readings in a row with `last_value`; past_repeats: the same of earlier values.
    values_differ: whether the present low readings have different values.
    """

    usual: float = 0.0
    first_values: list[float] = field(default_factory=list)
    high_count: int = 0
    last_time: int = 0
    low_since: int = 0
    debouncer: Debouncer = field(default_factory=Debouncer)
    last_value: float | None = None
    repeats: int = 0
    past_repeats: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_RUNS))
    values_differ: bool = False

    @property
    def known(self) -> bool:
        """Whether the usual value is known."""
        return len(self.first_values) >= LEARN_READINGS

    def learn(self, time: int, value: float) -> None:
        """Updates the usual value. A lasting level of twice the usual is learnt again, as when a pump starts."""
        self.high_count = self.high_count + 1 if self.known and value > JUMP_FACTOR * self.usual else 0
        if self.high_count >= LEARN_READINGS:
            self.first_values, self.high_count = [], 0
        if not self.known:
            self.first_values.append(value)
            self.usual = sorted(self.first_values)[len(self.first_values) // 2]
        elif not self.high_count:
            self.usual += min(1.0, max(0, time - self.last_time) / FOLLOW_US) * (value - self.usual)

    def count_repeats(self, value: float, low: bool) -> None:
        """Counts readings with the same value; repeats of low values do not show how often the sensor is renewed."""
        was_low = self.debouncer.bad > 0
        if value == self.last_value:
            self.repeats += 1
        else:
            if self.repeats and not low and not was_low:
                self.past_repeats.append(self.repeats)
            self.repeats = 1
        self.values_differ = low and was_low and (self.values_differ or value != self.last_value)
        self.last_value = value

    def readings_needed(self, confirmed: bool) -> int:
        """Low readings that decide: those of two measurements. A repeated value may be one measurement, read twice."""
        if self.values_differ or confirmed:
            return CONFIRM_READINGS
        if not self.past_repeats:
            return ZERO_READINGS if self.last_value == 0 else CONFIRM_READINGS
        return min(MAX_REPEATED, HOLD_FACTOR * sorted(self.past_repeats)[(len(self.past_repeats) - 1) // 2])


@dataclass(slots=True)
class CollapseRule:
    """Event `kind`: two measurements in a row below `share` of the sensor's usual value.

    Two readings are two measurements if their values differ, or if a sensor of the other rule is low too (both rules
    share `low_signals`). Otherwise the value must hold twice as long as the sensor usually repeats a value; for a
    sensor that never changed, two readings decide, at 0 three.

    While a value is low, the usual value does not change, so that a slow collapse does not become normal. A sensor that
    is usually below `least` is idle. A missing reading neither begins nor ends anything.

    The event that begins a collapse lists in `others` the sensors of the other rule, as shares of their usual values
    (`usual` by entity and signal, shared by both rules): a flow that falls alone may be a broken meter.
    """

    kind: str
    signals: tuple[str, ...]
    share: float
    least: float
    low_signals: dict[str, set[str]] = field(default_factory=dict)
    usual: dict[tuple[str, str], float] = field(default_factory=dict)
    _known: dict[tuple[str, str], _Sensor] = field(default_factory=dict)

    def evaluate(self, time: int, entity: str, values: dict[str, float]) -> list[Event]:
        """See `EdgeRule.evaluate`."""
        found = (self._evaluate_sensor(time, entity, name, values) for name in self.signals if name in values)
        return [e for e in found if e is not None]

    def _evaluate_sensor(self, time: int, entity: str, signal: str, values: dict[str, float]) -> Event | None:
        value = values[signal]
        sensor = self._known.setdefault((entity, signal), _Sensor())
        limit = self.share * sensor.usual
        low = sensor.known and sensor.usual >= self.least and value < limit
        sensor.count_repeats(value, low)
        needed = sensor.readings_needed(self._is_confirmed(entity, signal, low))
        state = sensor.debouncer.update(time, low, value >= limit * RECOVERED_FACTOR, needed, CLEAR_READINGS)
        why = "recovered"
        if not low:
            sensor.low_since = time
            sensor.learn(time, value)
        elif time - sensor.low_since > NEW_LEVEL_US:
            sensor.usual, sensor.debouncer.bad = value, 0
            state, why = ("cleared", "new level") if sensor.debouncer.on else ("", "")
            sensor.debouncer.on = False
        sensor.last_time = time
        if sensor.known:
            self.usual[entity, signal] = sensor.usual
        if not state:
            return None
        numbers = {"value": value, "usual": limit / self.share, "share": self.share, "signal": signal}
        since = sensor.debouncer.onset
        more = {"why": why} if state == "cleared" else {"others": self._other_sensors(entity, values)}
        return build_event(time, entity, self.kind, state, since, **numbers, **more)

    def _other_sensors(self, entity: str, values: dict[str, float]) -> dict[str, float]:
        """The values of the other rule's sensors, as shares of their usual values."""
        usual = {name: self.usual.get((entity, name), 0.0) for name in values if name not in self.signals}
        return {name: round(values[name] / known, 3) for name, known in usual.items() if known > 0}

    def _is_confirmed(self, entity: str, signal: str, low: bool) -> bool:
        """Records whether this signal is low; whether another quantity of the same entity is low too."""
        signals = self.low_signals.setdefault(entity, set())
        (signals.add if low else signals.discard)(signal)
        return bool(signals - set(self.signals))


@dataclass(slots=True)
class LeakRule:
    """Event `leak`: a detector changed to warning or critical, from warning to critical, or back to ok.

    A detector that is unavailable, absent or not read is neither leaking nor ok. One reading begins the condition, as
    the next may be 10 s later; two readings end it.
    """

    kind: str = "leak"
    signals: tuple[str, ...] = (LEAK_SIGNAL,)
    _known: dict[str, tuple[Debouncer, int]] = field(default_factory=dict)

    def evaluate(self, time: int, entity: str, values: dict[str, float]) -> Event | None:
        """See `EdgeRule.evaluate`."""
        value = values.get(LEAK_SIGNAL, -1.0)
        if not 0 <= value < len(LEAK_STATES):
            return None
        leak = int(value)
        debouncer, worst = self._known.get(entity, (Debouncer(), LEAK_OK))
        worsens = debouncer.on and leak in LEAK_BAD and leak > worst
        state = debouncer.update(time, leak in LEAK_BAD, leak == LEAK_OK, begin_after=1)
        state = state or ("active" if worsens else "")
        if state:
            worst = leak if state == "active" else LEAK_OK
        self._known[entity] = (debouncer, worst)
        if not state:
            return None
        return build_event(time, entity, self.kind, state, debouncer.onset, leak=LEAK_STATES[leak], value=leak)
