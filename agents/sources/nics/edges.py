"""link_state events: a port went from one state to another, as seen at two looks."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.records import SECOND, Event

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
        return self.look(time, entity, "gone", False)

    @staticmethod
    def _may(port: _Port, time: int) -> bool:
        """Takes one from the port's allowance, if any is left."""
        grown = max(0, time - port.filled) // (REFILL_S * SECOND)
        if grown:
            port.allowance, port.filled = min(BURST, port.allowance + grown), time
        port.allowance -= port.allowance > 0
        return port.allowance > 0
