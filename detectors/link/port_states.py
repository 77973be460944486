"""Which ports are up, down or flapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.base.state import check_one_length, grown
from detectors.base.streams import LEARN
from detectors.link.counters import Floats, Places, Readings
from pipeline.model.records import SECOND, Event

DOWN, UP = 1, 2
UP_WORDS = frozenset({"up", "active", "1", "true"})
FASTEST = 1.0
"""Flaps a second beyond which a counter of transitions tells something else: a link trains for seconds. Chosen."""
_APART = 90 * SECOND  # three polls of 30 s, as fabrics are read; chosen
_MOST_FLAPS = 64  # kept per port; chosen
_FIELDS = ("state", "was_up", "down", "count", "counts")


class PortStates:
    """State, transitions and flaps of all ports."""

    def __init__(self) -> None:
        self.state = np.empty(0, np.int8)  # 0 unknown
        self.was_up = np.empty(0, np.bool_)
        self.down = np.empty(0, np.int64)  # since when it is down; 0: it is not
        self.count = np.empty(0, np.int64)  # readings, as far as they matter
        self.counts = np.empty(0, np.bool_)  # it has a counter of transitions
        self.flapped: dict[str, list[int]] = {}  # port -> when it came up again
        self.leaps: dict[int, tuple[float, float]] = {}  # port -> (moves, s) of this instant that no link can make
        self.readings, self.changes = Readings(), Readings()

    def look(self, state: Floats, changes: Floats, time: int, anew: Places) -> list[tuple[int, int]]:
        """Takes an instant; (port, times) of those that came up again since the last look."""
        self._lengthen(len(state))
        self._count(state)
        at, _, _ = self.readings.moved(state, time)
        moving, grew, seconds = self.changes.growth(changes, time, anew)
        self._note_counters(changes)
        if self.leaps or len(moving):
            odd = grew > 2 * FASTEST * np.maximum(seconds, 2.0)
            told = zip(moving[odd].tolist(), grew[odd].tolist(), seconds[odd].tolist(), strict=True)
            self.leaps = {i: (count, passed) for i, count, passed in told}
            grew = np.where(odd, 2.0, grew)  # once, for all that can be known
        return [] if not len(at) and not len(moving) else self._transitions(at, state, moving, grew, time)

    def _transitions(self, at: Places, state: Floats, moving: Places, grew: Floats, time: int) -> list[tuple[int, int]]:
        """Of n alternating moves, the number that went up follows from where they began and ended."""
        growth = dict(zip(moving.tolist(), grew.tolist(), strict=True))
        found = []
        for i in sorted({*at.tolist(), *growth}):
            old = int(self.state[i])
            new = old if np.isnan(state[i]) else UP if state[i] >= 1 else DOWN
            moves = max(int(growth.get(i, 0)), int(old > 0 and new != old))
            ups = (moves + 1) // 2 if new == UP and old != UP else moves // 2
            if ups and old and self.was_up[i]:
                found.append((i, ups))
            if new == UP:
                self.down[i] = 0
            elif new == DOWN and (ups or (old and new != old)):
                self.down[i] = time
            self.state[i] = new
            self.was_up[i] |= new == UP
        return found

    def hear(self, i: int, event: Event) -> int:
        """Takes a transition that an event tells of a port without a counter; times that it came up again: 0 or 1."""
        new = UP if str(event.data["state"]).lower() in UP_WORDS else DOWN
        if self.counts[i] or self.state[i] == new:
            return 0
        ups = int(new == UP and self.state[i] == DOWN and bool(self.was_up[i]))
        self.down[i] = event.time if new == DOWN else 0
        self.state[i] = new
        self.was_up[i] |= new == UP
        self.readings.last[i] = float(new == UP)
        return ups

    def flap(self, port: str, times: int, time: int) -> None:
        """Notes that it came up again."""
        self.flapped[port] = [*self.flapped.get(port, []), *[time] * min(times, _MOST_FLAPS)][-_MOST_FLAPS:]

    def known(self, i: int) -> bool:
        """Whether it has been seen for long enough: the first samples of a port may be its bring-up."""
        return bool(self.count[i] > LEARN)

    def lost(self) -> Places:
        """Ports that are down and had been up."""
        return np.flatnonzero((self.down > 0) & self.was_up & (self.count > LEARN))

    def burst(self, port: str, time: int, window: float, quiet: float) -> list[int]:
        """Flaps of the window (s), if the port still flaps; empty once it has been quiet for long."""
        kept = [t for t in self.flapped.get(port, []) if time - t <= window * SECOND]
        if kept:
            self.flapped[port] = kept
        else:
            self.flapped.pop(port, None)
        return kept if kept and time - kept[-1] <= quiet * SECOND else []

    def silent(self, i: int) -> bool:
        """Whether its state was not read in the newest frame."""
        return bool(self.readings.gone[i] != 0)

    def away(self, i: int, time: int) -> bool:
        """Whether its state was not read for longer than the far ends of cables are polled apart."""
        gone = int(self.readings.gone[i])
        return gone != 0 and time - gone > _APART

    def _count(self, state: Floats) -> None:
        young = np.flatnonzero(self.count[: len(state)] <= LEARN)
        if len(young):
            self.count[young] += np.isfinite(state[young])

    def _note_counters(self, changes: Floats) -> None:
        new = np.flatnonzero(~self.counts[: len(changes)] & np.isfinite(changes))
        self.counts[new] = True

    def _lengthen(self, size: int) -> None:
        if len(self.state) < size:
            for name in _FIELDS:
                setattr(self, name, grown(getattr(self, name), size, 0))

    def snapshot(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in _FIELDS}
        flapped = {port: list(times) for port, times in self.flapped.items()}
        return {**arrays, "flapped": flapped, "read": self.readings.snapshot(), "changed": self.changes.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_one_length(state)
        for name in _FIELDS:
            setattr(self, name, state[name])
        self.flapped = {port: list(times) for port, times in state["flapped"].items()}
        self.readings.restore(state["read"])
        self.changes.restore(state["changed"])


def began(times: list[int], quiet: float) -> int:
    """First flap after the last quiet spell (s)."""
    gap = quiet * SECOND
    return next((b for a, b in zip(times[-2::-1], times[:0:-1], strict=True) if b - a > gap), times[0])
