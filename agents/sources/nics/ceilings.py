"""Counters that stand at their ceiling, wrapped or began anew: told by the width that the source gives them.

Classic InfiniBand counters do not wrap but stop at their highest value (IBTA specification 16.1.3.5): who looks at
differences alone is blind from then on.
"""

from __future__ import annotations

from typing import Literal

from agents.sources.nics.rdma_table import Counter
from pipeline.model.records import Event

Turn = Literal["", "saturated", "wrapped", "reset"]


def turn(before: int, now: int, bits: int, saturates: bool) -> Turn:
    """What happened to a counter of `bits` between two looks.

    saturated: it stands at its ceiling. wrapped: it fell from the top tenth of its range to the lowest, and is one that
    does not saturate (agents/node/counter_generations.py draws the line there too). reset: it went back otherwise.
    """
    ceiling = (1 << bits) - 1
    if now == before == ceiling and saturates:
        return "saturated"
    if now >= before:
        return ""
    return "wrapped" if not saturates and now < 0.1 * ceiling and 0.9 * ceiling < before <= ceiling else "reset"


class Ceilings:
    """Remembers the last value of each counter; tells of each ceiling once, and of each wrap."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}
        self._told: set[tuple[str, str]] = set()

    def look(self, time: int, entity: str, counter: Counter, value: int) -> Event | None:
        """The event, if there is one to send. value: raw, as the device counts."""
        signal, bits = counter.signal, counter.bits
        key = (entity, signal)
        before = self._last.get(key)
        self._last[key] = value
        if before is None:
            return None
        found = turn(before, value, bits, counter.saturates)
        if found == "saturated" and key not in self._told:
            self._told.add(key)
            return Event(time, entity, "counter_saturated", {"signal": signal, "value": value, "bits": bits})
        if found == "wrapped":
            return Event(time, entity, "counter_wrapped", {"signal": signal, "before": before, "bits": bits})
        if found == "reset":
            self._told.discard(key)
        return None

    def forget(self, entity: str) -> None:
        """Lets go of a port that was taken out."""
        self._last = {key: value for key, value in self._last.items() if key[0] != entity}
        self._told = {key for key in self._told if key[0] != entity}
