"""Leaks: what a leak detector says counts at once, since its controller has debounced it already."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.edge.told import Condition, event
from pipeline.records import Event
from pipeline.signals import CATALOGUE

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
