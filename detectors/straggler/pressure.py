"""Share of the time in which tasks of a node wait for something, from Linux's pressure stall information, smoothed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.streams import Floats
from pipeline.model.records import Frame

CPU, IO = "node.cpu_pressure", "node.io_pressure"
_SMOOTH = 0.3  # about 3 samples of memory; chosen


@dataclass
class Pressure(State):
    """One pressure counter (`signal`) of all nodes, by column of the frame. last, at: newest reading and its time.

    A kernel without counters (RHEL 9 has them off): of more runnable tasks than processors, the rest wait.
    """

    signal: str
    last: Floats = memory(np.nan)
    at: NDArray[np.int64] = memory(0, np.int64)
    share: Floats = memory(np.nan)
    _nodes: dict[str, int] = notes()

    def update(self, nodes: Frame) -> None:
        """Adds the counters of an instant."""
        size = len(nodes.entities)
        self.grow(size)
        if size != len(self._nodes):
            self._nodes = {e: i for i, e in enumerate(nodes.entities)}
        now = np.full(len(self.share), np.nan)
        now[:size] = nodes[self.signal]
        with np.errstate(divide="ignore", invalid="ignore"):
            growth = (now - self.last) / (nodes.time - self.at)
        growth[~((growth >= 0) & (growth <= 2))] = np.nan  # the counter was reset, or time went back
        growth = np.minimum(growth, 1.0)
        if self.signal == CPU and "node.load1" in nodes.values:
            with np.errstate(divide="ignore", invalid="ignore"):
                queue = np.maximum(1 - nodes["node.cpu_count"] / nodes["node.load1"], 0.0)
            growth[:size] = np.where(np.isnan(self.last[:size]), queue, growth[:size])
        mean = self.share + _SMOOTH * (growth - self.share)
        self.share = np.where(np.isfinite(mean), mean, np.where(np.isfinite(growth), growth, self.share))
        known = np.isfinite(now)
        self.last[known], self.at[known] = now[known], nodes.time

    def share_of(self, node: str) -> float:
        """Returns the share of a node; NaN where it is unknown."""
        at = self._nodes.get(node, -1)
        return float(self.share[at]) if at >= 0 else float("nan")

    def median_share(self, nodes: Sequence[str]) -> float:
        """Returns the median of some nodes; NaN if all are unknown."""
        known = [at for node in nodes if (at := self._nodes.get(node, -1)) >= 0]
        shares = [share for share in self.share[known].tolist() if math.isfinite(share)]
        return statistics.median(shares) if shares else float("nan")  # of a few, ten times as fast as in numpy
