"""Share of the time in which tasks of a node wait for something, from Linux's pressure stall information, smoothed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import State, memory, notes
from detectors.base.streams import Floats
from pipeline.model.records import Frame

CPU, IO = "node.cpu_pressure", "node.io_pressure"
PRESSED, TIMES = 0.10, 3.0
"""Least share of the time in which tasks wait for a processor, and times that of the job's other nodes, that explain
slowness. The kernel's own averages are of 10 s; oomd's default acts on several times that share of memory. Chosen."""
_SMOOTH = 0.3  # about 3 samples of memory; chosen


@dataclass
class Pressure(State):
    """One pressure counter (`signal`) of all nodes, by column of the frame. last, at: newest reading and its time.
    _asked: nodes that were asked for last, and their columns.

    A kernel without counters (RHEL 9 has them off): of more runnable tasks than processors, the rest wait.
    """

    signal: str
    last: Floats = memory(np.nan)
    at: NDArray[np.int64] = memory(0, np.int64)
    share: Floats = memory(np.nan)
    _nodes: dict[str, int] = notes()
    _asked: tuple[Any, Any, Any] = field(default=(None, None, None), init=False, repr=False)

    def update(self, nodes: Frame) -> None:
        """Adds the counters of an instant."""
        size = len(nodes.entities)
        self.grow(size)
        if size != len(self._nodes):
            self._nodes = {e: i for i, e in enumerate(nodes.entities)}
        now = np.append(nodes[self.signal], np.full(len(self.share) - size, np.nan))
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

    def shares_of(self, nodes: Sequence[str]) -> Floats:
        """Returns (len(nodes),) shares; NaN where they are unknown. nodes: a list that is never changed later."""
        if self._asked[0] is not nodes or self._asked[1] is not self._nodes:
            self._asked = nodes, self._nodes, np.array([self._nodes.get(node, -1) for node in nodes], np.int64)
        return np.asarray(np.append(self.share, np.nan)[self._asked[2]])

    def median_share(self, nodes: Sequence[str]) -> float:
        """Returns the median of some nodes; NaN if all are unknown."""
        known = [at for node in nodes if (at := self._nodes.get(node, -1)) >= 0]
        shares = [share for share in self.share[known].tolist() if math.isfinite(share)]
        return statistics.median(shares) if shares else float("nan")  # of a few, ten times as fast as in numpy
