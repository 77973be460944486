"""How warm a cohort of GPUs is for its load, against its usual: what moves them all is no instrument's fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.method.cohorts import Index
from detectors.telemetry import instrument_kernel
from detectors.telemetry.instruments import RHYTHM, Bools, Cells, Floats, Shift
from pipeline.records import Frame

ODD_K = 3.0
"""Shift from which a cohort is another than before: three roundings; chosen."""
_USUAL_K_PER_W = 0.035
"""Thermal resistance of a liquid-cooled GPU until the cohort's own is known; chosen between the 0.03 and 0.04 of cold
plates."""
_K_PER_W = (0.02, 0.1)
"""Least and most of it: good cold plates, small heat sinks; what goes beyond is no resistance; chosen."""
K_ERROR = 0.2  # share of the resistance that is not known; chosen
_PRIOR_W2 = 2500.0  # variance of the load, 50 W, that this is worth; chosen
_GAIN = 0.005  # of the moments: 200 readings, an hour and a half; chosen
_LEAST = 4  # GPUs that tell; fewer say little of a loop; chosen
_SETTLES = 900 // RHYTHM  # readings after which a cohort that moved has settled: smoothing and heat; chosen
_LIFT = 6.0 * 3600 / RHYTHM  # readings after which a cohort that moved is as it is now; chosen
_NUMBERS = (_GAIN, _USUAL_K_PER_W, _PRIOR_W2, *_K_PER_W, ODD_K, K_ERROR, _LIFT)


class Climate:
    """State per cohort: shifts of temperature and power, and how the one follows the other.

    shift: K that temperatures moved and load does not explain; NaN where nobody knows.
    load:  K of it that load explains.   calm: whether the cohort is, and has been for a while, as it usually is.
    """

    def __init__(self) -> None:
        self.moved = {name: Shift() for name in ("heat", "power")}
        self.moments = Cells(heat=np.nan, power=np.nan, both=0.0, square=0.0, odd=0.0, since=float(_SETTLES))
        self.shift: Floats = np.empty(0)
        self.load: Floats = np.empty(0)
        self.calm: Bools = np.empty(0, bool)

    def step(self, heat: Floats, power: Floats) -> None:
        """Takes a reading: middle temperature and power of each cohort."""
        c, size = self.moments.grow(len(heat)), len(heat)
        frozen = (c["odd"] > 0) & (c["odd"] < _LIFT)
        moved = self.moved["heat"].step(heat, frozen), self.moved["power"].step(power, frozen)
        smooth = (self.moved["heat"].cells["now"][:size], self.moved["power"].cells["now"][:size])  # heat lags less
        self.load, self.shift = np.empty(size), np.empty(size)
        state = tuple(c[name] for name in ("heat", "power", "both", "square", "odd", "since"))
        instrument_kernel.climate(smooth, moved, state, _NUMBERS, self.load, self.shift)
        self.calm = c["since"] >= _SETTLES

    def snapshot(self) -> dict[str, Any]:
        return {"moments": self.moments.snapshot(), **{name: each.snapshot() for name, each in self.moved.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.moments.restore(state["moments"])
        for name, each in self.moved.items():
            each.restore(state[name])


class LoopMeans:
    """Mean temperature and power of the GPUs of each loop."""

    def __init__(self) -> None:
        self._index = Index("cdu")

    def of(self, frame: Frame, gpus: Frame | None) -> tuple[Floats, Floats]:
        """(loops,) each; NaN where too few tell."""
        size = len(frame.entities)
        if gpus is None or not gpus.values:
            return np.full(size, np.nan), np.full(size, np.nan)
        heat, power, at = gpus["gpu.temperature"], gpus["gpu.power"], self._index.of(gpus, frame)
        told = (at >= 0) & ~np.isnan(heat) & ~np.isnan(power)
        count = np.bincount(at[told], minlength=size)
        enough = np.where(count >= _LEAST, count, np.nan)
        heats = np.bincount(at[told], heat[told], size)
        powers = np.bincount(at[told], power[told], size)
        return np.asarray(heats / enough), np.asarray(powers / enough)
