"""Whether the coolant still carries off what the GPUs draw: tells a flow that fell from a flow meter that lies.

Heat balance: kW = L/min * K / 15.1 for 25 % propylene glycol. Where less flows, what flows warms by more and carries
the same heat; where only the meter says so, the heat reckoned from it falls with it. What share of the GPUs' draw
a loop or branch takes is its own (0.75 to 0.95 for cold plates, the rest is air), so it is compared with its own past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.heat.coolant_loops import LEAST_DT, PG25, Loops
from pipeline.records import SECOND, Frame

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_EVERY = 30 * SECOND  # the water of a loop takes minutes to warm: less often than each frame is soon enough; chosen
_ALIKE = 0.5  # share of the flow's fall up to which the heat may have fallen too, and the flow is believed; chosen
_LEARN = 20  # samples before anything rests on it: the replay contract
_FOLLOWS = 1 / 240  # of a sample: two hours, in which a usual share changes; chosen
_SMOOTH = 0.15  # of a sample: three minutes; chosen
_CELLS = ("usual", "samples", "lost")


@dataclass
class Balance:
    """(N,) of the loops and branches; a part() of a detector. It learns only while the flow is as usual."""

    cells: Floats = field(default_factory=lambda: np.zeros((len(_CELLS), 0)))
    last: int = 0
    _key: tuple[int, ...] = ()
    _rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    _gpus: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def follow(self, frame: Frame, gpus: Frame | None, loops: Loops, calm: Bools) -> None:
        """One instant. calm: (N,) whose flow is as usual, and on whom nobody works."""
        if gpus is None or 0 <= frame.time - self.last < _EVERY:
            return
        self.last, n = frame.time, len(frame.entities)
        if n > self.cells.shape[1]:
            self.cells = np.hstack([self.cells, np.zeros((len(_CELLS), n - self.cells.shape[1]))])
        warmed = frame["coolant.return_temperature"] - frame["coolant.supply_temperature"]
        heat = frame["coolant.flow"] * np.where(warmed >= LEAST_DT, warmed, np.nan) / PG25
        share = heat / (self._drawn(frame, gpus, loops) / 1000)
        value = -np.log(np.where(share > 0, share, np.nan))
        usual, samples, lost = self.cells[:, :n]
        known = np.isfinite(value)
        learns = known & calm
        samples += learns
        usual += np.where(learns, np.maximum(1 / np.maximum(samples, 1), _FOLLOWS) * (value - usual), 0.0)
        lost += np.where(known & (samples >= _LEARN), _SMOOTH * (value - usual - lost), 0.0)

    def flows_less(self, i: int, fallen: float) -> bool:
        """Whether a fall of the flow by `fallen` (ln) is real: the heat did not fall with it."""
        if i >= self.cells.shape[1] or self.cells[1, i] < _LEARN:
            return False
        return bool(abs(self.cells[2, i]) <= _ALIKE * fallen)

    def _drawn(self, frame: Frame, gpus: Frame, loops: Loops) -> Floats:
        """(N,) W that the GPUs of each draw; NaN where there are none."""
        key = (id(gpus.topology), gpus.topology.version, len(gpus.entities), len(frame.entities))
        if key != self._key:
            mine = [loops.of(e, gpus) for e in frame.entities]
            self._rows = np.repeat(np.arange(len(mine)), [len(m) for m in mine])
            self._gpus = np.concatenate(mine) if mine else np.empty(0, np.int64)
            self._key = key
        power = gpus["gpu.power"][self._gpus]
        drawn = np.bincount(self._rows, np.where(power > 0, power, 0.0), minlength=len(frame.entities))
        return np.where(drawn > 0, drawn, np.nan)

    def forget(self, mask: Bools) -> None:
        self.cells[:, np.flatnonzero(mask[: self.cells.shape[1]])] = 0.0

    def snapshot(self) -> dict[str, Any]:
        return {"cells": self.cells.copy(), "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cells, self.last = state["cells"], state["last"]
