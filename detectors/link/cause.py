"""Corruption told from congestion: damaged packets come whatever the load is, packets without room with the load.

The idea is CorrOpt's (Zhuo et al., SIGCOMM 2017): corruption is stable and not tied to utilisation. The cut-offs are
chosen. Only ports whose packets are lost are followed, and for as long as that matters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from detectors.link.counters import Floats
from pipeline.records import SECOND

CORRUPTION, CONGESTION = 0.2, 0.5
"""Rank correlation of losses with utilisation below which it is corruption, and above which congestion; chosen."""
_WINDOW = 60 * SECOND  # of one point; chosen
_WINDOWS = 60  # points: an hour
_LEAST = 20  # points below which a correlation of 0.5 comes by chance more than once in 50; their number is chosen
_ENOUGH = 5.0  # errors a minute on the mean: with fewer, minutes with none tie the rate to the load. Chosen
_STEADY = 0.05  # load that varies by less than this share of its mean tells nothing; chosen


class Losses:
    """Errors and traffic per minute of the ports that have errors."""

    def __init__(self) -> None:
        self.followed: dict[str, dict[str, Any]] = {}

    def err(self, port: str, packets: bool, count: float, time: int) -> None:
        """Takes errors of a port, of whole packets or of what is below them, and follows it from now on."""
        fresh = {"since": time, "newest": time, "now": [0.0, 0.0], "read": None, "points": []}
        known = self.followed.setdefault(port, fresh)
        known["now"][packets] += count
        known["newest"] = time

    def take(self, places: Mapping[str, int], traffic: Floats, time: int) -> None:
        """Closes the minutes that are over; `traffic` counts bytes. Who has been quiet for an hour is forgotten."""
        for port in list(self.followed):
            known, i = self.followed[port], places.get(port, -1)
            if time - known["newest"] > _WINDOWS * _WINDOW or time < known["since"]:
                del self.followed[port]
            elif time - known["since"] >= _WINDOW and i >= 0 and np.isfinite(traffic[i]):
                bytes_read, before = float(traffic[i]), known["read"]
                seconds = (time - known["since"]) / SECOND
                if before is not None and bytes_read > before:
                    below, packets = known["now"]
                    load = (bytes_read - before) / seconds
                    # of packets the share that is lost: with more of them more are, whatever the reason
                    point = [below / seconds, packets / (bytes_read - before), load, below, packets]
                    known["points"] = [*known["points"], point][-_WINDOWS:]
                known |= {"since": time, "now": [0.0, 0.0], "read": bytes_read}

    def tied(self, port: str, packets: bool) -> float | None:
        """Rank correlation of the error rate of a port with its traffic over the last hour; None: not told yet."""
        points = np.array(self.followed.get(port, {}).get("points", []))
        if len(points) < _LEAST or points[:, 3 + int(packets)].mean() < _ENOUGH:
            return None
        errors, load = points[:, int(packets)], points[:, 2]
        if errors.min() == errors.max() or load.std() < _STEADY * load.mean():
            return None
        return float(np.corrcoef(_ranks(errors), _ranks(load))[0, 1])

    def snapshot(self) -> dict[str, Any]:
        return copy.deepcopy(self.followed)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.followed = copy.deepcopy(dict(state))


def _ranks(values: Floats) -> Floats:
    """Ranks from 0, ties share their mean (Spearman)."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return np.asarray((last - (count + 1) / 2)[place])
