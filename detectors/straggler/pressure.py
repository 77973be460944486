"""Share of the time in which tasks of a node waited for something, from the counters of Linux's pressure stall
information, smoothed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.model.records import Frame

_SMOOTH = 0.3  # about 3 samples of memory; chosen


class Pressure:
    """One pressure counter of all nodes; arrays by place in the frame."""

    def __init__(self, signal: str) -> None:
        self.signal = signal
        self.last, self.at, self.share = np.empty(0), np.empty(0, np.int64), np.empty(0)
        self._nodes: dict[str, int] = {}

    def update(self, nodes: Frame) -> None:
        """Takes the counters of an instant."""
        size = len(nodes.entities)
        if self.signal not in nodes.values:
            return
        if (more := size - len(self.share)) > 0:
            self.last, self.share = (np.append(cells, np.full(more, np.nan)) for cells in (self.last, self.share))
            self.at = np.append(self.at, np.zeros(more, np.int64))
        if size != len(self._nodes):
            self._nodes = {e: i for i, e in enumerate(nodes.entities)}
        now = np.full(len(self.share), np.nan)
        now[:size] = nodes[self.signal]
        with np.errstate(divide="ignore", invalid="ignore"):
            grown = (now - self.last) / (nodes.time - self.at)
        grown[~((grown >= 0) & (grown <= 2))] = np.nan  # a counter that began anew, or time that went back
        grown = np.minimum(grown, 1.0)
        mean = self.share + _SMOOTH * (grown - self.share)
        self.share = np.where(np.isfinite(mean), mean, np.where(np.isfinite(grown), grown, self.share))
        known = np.isfinite(now)
        self.last[known], self.at[known] = now[known], nodes.time

    def share_of(self, node: str) -> float:
        """Share of a node; NaN where it is not known."""
        at = self._nodes.get(node, -1)
        return float(self.share[at]) if at >= 0 else float("nan")

    def median_share(self, nodes: Sequence[str]) -> float:
        """Median of some nodes; NaN without one."""
        shares = np.array([self.share_of(node) for node in nodes])
        shares = shares[np.isfinite(shares)]
        return float(np.median(shares)) if len(shares) else float("nan")

    def snapshot(self) -> dict[str, Any]:
        known: dict[str, NDArray[Any]] = {"last": self.last, "at": self.at, "share": self.share}
        return {**known, "nodes": dict(self._nodes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.last, self.at, self.share = state["last"], state["at"], state["share"]
        self._nodes = dict(state["nodes"])
