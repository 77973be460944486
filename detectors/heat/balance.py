"""Whether the coolant still carries off what the GPUs draw: tells a flow that fell from a flow meter that lies.

Heat balance: kW = L/min * K / 15.1 for 25 % propylene glycol. Where less flows, what flows warms by more and carries
the same heat; where only the meter says so, the heat reckoned from it falls with it. What share of the GPUs' draw
a loop or branch takes is its own (0.75 to 0.95 for cold plates, the rest is air), so it is compared with its own past.
Idle GPUs, a return that is not measured or GPUs that tell no power leave it unknown: then the meter is not believed.
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
_SEEN = 0.8  # share of the fall that the samples with a known heat must show: five minutes of them at least; chosen
_LEARN = 20  # samples before anything rests on it: the replay contract
_FOLLOWS = 1 / 240  # of a sample: two hours, in which a usual share changes; chosen
_SMOOTH = 0.15  # of a sample: three minutes; chosen
_STEADY = 0.1  # ln by which the draw may be off its mean: water warms minutes after the GPUs; chosen
_DRAWS = 0.25  # of a sample: the two minutes of a loop's water; chosen
_CELLS = ("usual", "samples", "lost", "fallen", "drawn")


@dataclass
class Balance:
    """(N,) of the loops and branches; a part() of a detector. It learns only while the flow is as usual.

    usual, samples: -ln of the share.   drawn: ln W of late.   lost, fallen: ln by which heat and flow are below usual,
    smoothed over the same samples since the flow fell, so that what was known before it fell bears nothing out.
    """

    cells: Floats = field(default_factory=lambda: np.zeros((len(_CELLS), 0)))
    last: int = 0
    _key: tuple[int, ...] = ()
    _rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)
    _gpus: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    def follow(self, frame: Frame, gpus: Frame | None, loops: Loops, calm: Bools, fallen: Floats) -> None:
        """One instant. calm: (N,) whose flow is as usual, and on whom nobody works; fallen: ln, 0 whose is not."""
        if 0 <= frame.time - self.last < _EVERY:
            return
        self.last, n = frame.time, len(frame.entities)
        if n > self.cells.shape[1]:
            self.cells = np.hstack([self.cells, np.zeros((len(_CELLS), n - self.cells.shape[1]))])
        self.cells[2:4, np.flatnonzero(fallen == 0)] = 0.0
        if gpus is None:
            return
        usual, samples, lost, fell, drew = self.cells[:, :n]
        drawn = np.log(self._drawn(frame, gpus, loops))
        off = np.where(drew == 0, 0.0, drawn - drew)
        drew += np.where(np.isfinite(drawn), np.where(drew == 0, drawn, _DRAWS * off), 0.0)
        warmed = frame["coolant.return_temperature"] - frame["coolant.supply_temperature"]
        heat = frame["coolant.flow"] * np.where(warmed >= LEAST_DT, warmed, np.nan) / PG25
        value = drawn - np.log(1000 * np.where(heat > 0, heat, np.nan))
        known = np.isfinite(value) & (np.abs(off) <= _STEADY)
        learns = known & calm
        samples += learns
        usual += np.where(learns, np.maximum(1 / np.maximum(samples, 1), _FOLLOWS) * (value - usual), 0.0)
        told = known & (samples >= _LEARN) & (fallen != 0) & np.isfinite(fallen)
        lost += np.where(told, _SMOOTH * (value - usual - lost), 0.0)
        fell += np.where(told, _SMOOTH * (fallen - fell), 0.0)

    def flows_less(self, i: int, fallen: float) -> bool:
        """Whether a fall of the flow by `fallen` (ln) is real: the heat was seen since and did not fall with it."""
        if i >= self.cells.shape[1]:
            return False
        lost, fell = self.cells[2:4, i]
        return bool(fell >= _SEEN * fallen and abs(lost) <= _ALIKE * fell)

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
