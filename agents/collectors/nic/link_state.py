"""link_state events: a port went from one state to another, as seen at two looks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.model.records import SECOND, Event

BURST = 20
"""Most events of one port in a burst; chosen: ten flaps are told one by one, then the counters tell how many."""
REFILL_S = 10
"""Seconds until one more may be sent; chosen: a port that flaps for ever sends 360 events an hour."""
MAX_REMEMBERED = 1024
"""Most ports that are remembered, with those that are gone; chosen: four times the most that are read."""


@dataclass(slots=True)
class _Port:
    state: str
    allowance: int = BURST
    filled: int = 0


class Edges:
    """Remembers the last state of each port; a state that could not be read is no change."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}
        self._untold: set[str] = set()  # ports that went while they had no allowance: nobody looks at them again

    def look(self, time: int, entity: str, state: str, up: bool) -> Event | None:
        """The event, if the port's state is another one than that told last."""
        port = self._ports.get(entity)
        if port is None:
            self._ports[entity] = _Port(state, filled=time)
            return None
        if not state or port.state == state or not self._may(port, time):
            return None
        data = {"state": "up" if up else "down", "from": port.state, "to": state}
        port.state = state
        return Event(time, entity, "link_state", data)

    def gone(self, time: int, entity: str) -> Event | None:
        """The event of a port that was taken out; that it comes back is a change too."""
        if entity not in self._ports:
            return None
        self._ports[entity] = self._ports.pop(entity)  # last in order, so that the first are those gone longest
        while len(self._ports) > MAX_REMEMBERED:
            del self._ports[next(iter(self._ports))]
        self._untold = (self._untold | {entity}) & self._ports.keys()
        return self._end(time, entity)

    def late(self, time: int, present: Iterable[str]) -> list[Event]:
        """Events of ports that went when they might not tell it, and are not among those that are there again."""
        if not self._untold:
            return []
        self._untold -= set(present)
        told = [self._end(time, entity) for entity in sorted(self._untold)]
        return [event for event in told if event is not None]

    def _end(self, time: int, entity: str) -> Event | None:
        event = self.look(time, entity, "gone", False)
        if self._ports[entity].state == "gone":
            self._untold.discard(entity)
        return event

    @staticmethod
    def _may(port: _Port, time: int) -> bool:
        """Takes one from the port's allowance, if any is left; a look that may not tell leaves it as it is."""
        grown = (time - port.filled) // (REFILL_S * SECOND)
        if grown:  # below 0: the clock was set back, and the time until then is not waited for
            port.allowance, port.filled = min(BURST, port.allowance + max(0, grown)), time
        if not port.allowance:
            return False
        port.allowance -= 1
        return True
