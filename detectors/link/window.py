"""Errors of the last five minutes, for links that err slowly: so many in a window as chance would hardly make.

A CUSUM is the quickest on the mean (Moustakides, Ann. Stat. 14, 1986), but most likely to be in time for a given
deadline is the count within it (Neyman and Pearson, 1933; as a window that slides: Naus, J. Am. Stat. Assoc. 77, 1982).
At a BER of 1e-13 and 400 Gb/s the sum of `limit` 21 over links at 1e-15 needs eight errors in 300 s, the window six:
0.976 of such links are paged within 300 s instead of 0.946, and four errors of a fabric at 1e-16, 0.997.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.state import grown
from pipeline.records import SECOND

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

LENGTH = 300.0
"""s: within it a BER of 1e-13 is to be found. Chosen."""
CHANCE = 5e-9
"""Of so many errors in one window of a sound link. 10,000 links have 2.9 million windows a day, and one that slides
alarms at most as many times more often as there are errors in it: below 0.1 a day."""


@dataclass
class Window:
    """Errors of each port within the window; costs nothing where there are none.

    recent:  (N,) capped errors of the last LENGTH s.
    batches: what makes them: when a reading began, when it ended, its ports and their errors; oldest first.
    """

    recent: Floats = field(default_factory=lambda: np.empty(0))
    batches: list[tuple[int, int, Places, Floats]] = field(default_factory=list)

    def take(self, at: Places, errors: Floats, size: int, time: int, seconds: float) -> None:
        """Adds the errors of one reading that began `seconds` ago, and drops those that are too old."""
        self.recent = grown(self.recent, size, 0)
        began = time - int(seconds * SECOND)
        while self.batches and not time - LENGTH * SECOND <= self.batches[0][0] <= began:
            _, _, old, counted = self.batches.pop(0)
            self.recent[old] -= counted
        if len(at) and began >= time - LENGTH * SECOND:
            self.batches.append((began, time, at.copy(), errors.copy()))
            self.recent[at] += errors

    def beyond(self, at: Places, mean: Floats, bunched: float, least: float) -> Places:
        """Of the ports `at` those with more than `least` errors, and more than chance makes of `mean` in the window.

        bunched: of the window's negative binomial; 0: Poisson.
        """
        mine = self.recent[at]
        many = np.flatnonzero(mine > least)
        if not len(many):
            return at[:0]
        return at[many[at_least(mine[many], mean[many], bunched) < CHANCE]]

    def since(self, port: int) -> int:
        """When the first reading of the window began in which a port had errors; it must have some."""
        return min(began for began, _, at, _ in self.batches if port in at)

    def snapshot(self) -> dict[str, Any]:
        return {"recent": self.recent.copy(), "batches": [[b, t, a.copy(), n.copy()] for b, t, a, n in self.batches]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent = np.array(state["recent"])
        self.batches = [(int(b), int(t), np.array(a), np.array(n)) for b, t, a, n in state["batches"]]


def at_least(count: Floats, mean: Floats, bunched: float) -> Floats:
    """P(that many errors or more), term by term: Poisson, or negative binomial of variance mean * (1 + a * mean)."""
    size = np.inf if bunched < 1e-6 else 1 / bunched
    odds = mean if np.isinf(size) else bunched * mean / (1 + bunched * mean)
    term = np.exp(-mean) if np.isinf(size) else np.exp(-size * np.log1p(bunched * mean))
    below = np.zeros(len(count))
    for k in range(int(np.ceil(count.max(initial=0)))):
        below += np.where(k < count, term, 0.0)
        term = term * odds * (1.0 if np.isinf(size) else size + k) / (k + 1)
    return np.asarray(np.maximum(1.0 - below, 0.0))
