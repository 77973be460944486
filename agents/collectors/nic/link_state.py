"""link_state events: a port changed its state between two reads. A token bucket per port limits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.model.records import SECOND, Event

MAX_BURST = 20
"""Most events of one port in a burst. Chosen: ten flaps are reported one by one, then the counters give the number."""
REFILL_S = 10
"""Seconds per further event. Chosen: a port that flaps continuously sends 360 events an hour."""
MAX_REMEMBERED = 1024
"""Most ports that are remembered, including removed ones. Chosen: four times the most that are read."""


@dataclass(slots=True)
class _Port:
    state: str
    tokens: int = MAX_BURST
    refilled: int = 0


class LinkStateEvents:
    """Last state of each port. A state that could not be read is not a change."""

    def __init__(self) -> None:
        self._ports: dict[str, _Port] = {}
        self._unreported: set[str] = set()  # ports that were removed while they had no token; they are not read again

    def update(self, time: int, entity: str, state: str, up: bool) -> Event | None:
        """Returns the event, if the state of the port differs from the last reported one."""
        port = self._ports.get(entity)
        if port is None:
            self._ports[entity] = _Port(state, refilled=time)
            return None
        if not state or port.state == state or not self._take_token(port, time):
            return None
        data = {"state": "up" if up else "down", "from": port.state, "to": state}
        port.state = state
        return Event(time, entity, "link_state", data)

    def port_removed(self, time: int, entity: str) -> Event | None:
        """Returns the event of a removed port. Its return will be a change too."""
        if entity not in self._ports:
            return None
        self._ports[entity] = self._ports.pop(
            entity
        )  # moved to the end, so that the first ones were removed longest ago
        while len(self._ports) > MAX_REMEMBERED:
            del self._ports[next(iter(self._ports))]
        self._unreported = (self._unreported | {entity}) & self._ports.keys()
        return self._removal_event(time, entity)

    def pending_removals(self, time: int, present: Iterable[str]) -> list[Event]:
        """Returns events of ports that were removed while they had no token and that did not come back."""
        if not self._unreported:
            return []
        self._unreported -= set(present)
        reported_values = [self._removal_event(time, entity) for entity in sorted(self._unreported)]
        return [event for event in reported_values if event is not None]

    def _removal_event(self, time: int, entity: str) -> Event | None:
        event = self.update(time, entity, "gone", False)
        if self._ports[entity].state == "gone":
            self._unreported.discard(entity)
        return event

    @staticmethod
    def _take_token(port: _Port, time: int) -> bool:
        """Takes a token of the port, if there is one."""
        grown = (time - port.refilled) // (REFILL_S * SECOND)
        if grown:  # below 0: the clock was set back; do not wait until it has caught up
            port.tokens, port.refilled = min(MAX_BURST, port.tokens + max(0, grown)), time
        if not port.tokens:
            return False
        port.tokens -= 1
        return True
