"""What a GPU of a product ought to draw at its clock and activity: a straight line, refitted all the time for a day."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.cohorts import Key
from pipeline.records import SECOND, Frame

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
_DAY = 86_400.0  # s after which a sample counts 1/e
_READY = 300.0  # s of somebody's work before a line is believed; chosen
_OUTLIER = 0.25  # logarithm by which a sample counts as off its line at most: one that is broken bends no line; chosen
_IDLE = 0.15  # share of the power that no work explains: an H100 idles at 70 to 100 W of 700
_STIFF = 0.05  # relative spread of the work below which the usual slope counts for more than the fitted one; chosen
_MOST = 60 * SECOND  # a hole in the telemetry counts as so much
_SUMS = 6  # weight, x, y, xx, xy, seconds


class DrawFit:
    """Least squares of power on work (clock in GHz x activity) by product, in running sums with a day of memory."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        self._key: Key = ()
        self._kind = np.empty(0, np.int32)
        self._names: list[str] = []

    def expected(self, frame: Frame, work: Floats, power: Floats, inner: Bools, seconds: float) -> Floats:
        """(N,) W by the lines as they were, NaN without one; then learns from whose power is finite.

        inner: whose activity is that of the multiprocessors; utilisation says less, and has lines of its own.
        """
        kind = 2 * self._kinds(frame) + inner
        sums = np.array([self.sums.get(name, [0.0] * _SUMS) for name in self._names]).reshape(-1, _SUMS)
        level, slope = _lines(sums)
        line = level[kind] + slope[kind] * work
        line = np.where(line > 1, line, np.nan)
        told = np.isfinite(power) & np.isfinite(work)
        if told.any() and seconds > 0:
            y = np.where(np.isfinite(line), np.clip(power, line * np.exp(-_OUTLIER), line * np.exp(_OUTLIER)), power)
            self._learn(sums, kind[told], work[told], y[told], seconds)
        return line

    def _learn(self, sums: Floats, kind: NDArray[np.int32], x: Floats, y: Floats, seconds: float) -> None:
        count = np.bincount(kind, minlength=len(sums))
        seen = count > 0
        sums[seen, :5] *= np.exp(-seconds / _DAY)
        for k, column in enumerate((None, x, y, x * x, x * y)):
            sums[:, k] += seconds * (count if column is None else np.bincount(kind, column, len(sums)))
        sums[seen, 5] = np.minimum(sums[seen, 5] + seconds, _DAY)
        self.sums |= {self._names[k]: sums[k].tolist() for k in np.flatnonzero(seen).tolist()}

    def _kinds(self, frame: Frame) -> NDArray[np.int32]:
        """(N,) number of each GPU's product."""
        key = (id(frame.topology), frame.topology.version, len(frame.entities))
        if key != self._key:
            attributes, numbers = frame.topology.attributes, dict[str, int]()
            skus = [str(attributes.get(gpu, {}).get("sku", "")) for gpu in frame.entities]
            self._kind = np.array([numbers.setdefault(sku, len(numbers)) for sku in skus], np.int32)
            self._names = [f"{sku}|{what}" for sku in numbers for what in ("utilization", "sm_active")]
            self._key = key
        return self._kind

    def snapshot(self) -> dict[str, Any]:
        return {name: list(sums) for name, sums in self.sums.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: list(sums) for name, sums in state.items()}


def _lines(sums: Floats) -> tuple[Floats, Floats]:
    """(level, slope) of each; NaN where too little was seen."""
    ready = sums[:, 5] >= _READY
    weight, x, y, xx, xy, _ = np.where(ready[:, None], sums, np.nan).T
    x, y = x / weight, y / weight
    usual, stiff = (1 - _IDLE) * y / x, (_STIFF * x) ** 2
    slope = np.maximum(xy / weight - x * y + stiff * usual, 0.0) / (np.maximum(xx / weight - x * x, 0.0) + stiff)
    return y - slope * x, slope
