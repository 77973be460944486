"""Loops that hardly flow now: what their GPUs lose of their heat says nothing of plates and paste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.event_data import told
from pipeline.records import SECOND, Frame

KINDS = ("flow_collapse", "pressure_collapse")
_SETTLES = 300 * SECOND  # after it: dies, coolant and filters are where they go by then; chosen
_LASTS = 3600 * SECOND  # a collapse whose end no event told is over: GPUs without coolant are off long before; chosen


class Collapses:
    """Entity -> until when its collapse spoils what is measured below it; a part() of a detector."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}
        self._mask: tuple[object, NDArray[np.bool_]] | None = None

    def hear(self, frames: Mapping[str, Frame]) -> None:
        """Takes the events of an instant."""
        time = max((frame.time for frame in frames.values()), default=0)
        for said in told(frames, KINDS):
            # who dates an event ahead, or goes back with the clock, blinds for no longer than anybody else
            self._until[said.entity] = min(said.time, time) + (_LASTS if said.active else _SETTLES)
        if self._until and frames:
            self._until = {e: min(until, time + _LASTS) for e, until in self._until.items() if until >= time}

    def below(self, frame: Frame) -> NDArray[np.bool_] | None:
        """(N,) who is cooled by such a loop; None: nobody."""
        if not self._until:
            return None
        named = frozenset(self._until)
        key = (id(frame.topology), frame.topology.version, len(frame.entities), named)
        if self._mask is None or self._mask[0] != key:
            above = frame.topology.above
            self._mask = key, np.fromiter((not named.isdisjoint(above(e)) for e in frame.entities), bool)
        return self._mask[1]

    def snapshot(self) -> dict[str, Any]:
        return {"until": dict(self._until)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._until, self._mask = dict(state["until"]), None
