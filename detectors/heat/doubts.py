"""Cores that are warmer by what the memory on the same plate does not share: their sensor, not their cooling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.streams import Step
from pipeline.records import SECOND

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
_ALONE = 0.6  # share of a core's change that the memory beside it does not follow; they share the plate; chosen
_DOUBTED, _STAYS = 0.65, 0.45
"""The same of a mean, from which the core's sensor is doubted, and until which it stays so; chosen."""
_MEAN_S = 160.0  # of that mean: rounding makes 0.4 K of noise of six samples, and half of it of sixteen; chosen


@dataclass
class Doubts:
    """(N,) each; a part() of a detector.

    apart: K by which a core left its memory, a mean.   doubted: whether its sensor is.
    told:  when core and memory were compared last.
    """

    apart: Floats = field(default_factory=lambda: np.zeros(0))
    doubted: Bools = field(default_factory=lambda: np.zeros(0, bool))
    told: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def follow(self, parted: Step, seconds: float) -> None:
        """One instant. parted: stream of the core above its memory."""
        n = len(parted.on)
        if (more := n - len(self.apart)) > 0:
            for name in ("apart", "doubted", "told"):
                cells = getattr(self, name)
                setattr(self, name, np.append(cells, np.zeros(more, cells.dtype)))
        self.apart[:n] -= np.expm1(-seconds / _MEAN_S) * (parted.effect - self.apart[:n])

    def settle(self, known: Bools, parted: Step, warmer: Floats, step: Step, hold: float, time: int) -> Bools:
        """(N,) whose sensor is to blame. warmer: K that each core is warmer by; known: compared with its memory now.

        Whether it is the sensor is settled within `hold` s of the change; that holds until the memory follows, or has
        not been told for as long.
        """
        n = len(known)
        doubted, told, apart = self.doubted[:n], self.told[:n], self.apart[:n]
        # a core that idles is blamed by nobody meanwhile; and the clock may have gone back
        told[:] = np.where(known | ~step.judged, time, np.minimum(told, time))
        fresh = known & (apart >= _DOUBTED * warmer) & (step.held <= hold)
        stays = doubted & (~known | (apart >= _STAYS * warmer)) & (time - told <= hold * SECOND)
        doubted[:] = (fresh | stays) & step.on
        return np.asarray(doubted | (known & (parted.effect >= _ALONE * warmer)))

    def forget(self, mask: Bools) -> None:
        for cells in (self.apart, self.doubted, self.told):
            cells[: len(mask)][mask[: len(cells)]] = 0

    def snapshot(self) -> dict[str, Any]:
        return {"apart": self.apart.copy(), "doubted": self.doubted.copy(), "told": self.told.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.apart, self.doubted, self.told = state["apart"], state["doubted"], state["told"]
