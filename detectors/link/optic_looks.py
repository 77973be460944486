"""What the last two days of all optical ports look like at the end of an hour: levels, changes, peers, candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detectors.base.findings import Compared
from detectors.base.statistics import grouped_mad, grouped_median
from detectors.link.optic_history import HOURS, OpticHistory
from detectors.link.steps_and_trends import Trend, row_median, trend

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_RECENT, _PAST = 3, 12  # h that make the present; h before them from which a past can be told. Chosen
_COHORT = 8  # ports below which a median says little: the guilty one would be half of it
_DECADE = 1.0  # above peers or past: what the sound ports of a cohort differ by is less; chosen
_NORMAL = 1.4826
_OUTLIER = 3.0  # standard deviations of the cohort; chosen: beyond them is 1 in 740 of normal ports
_SURE = 6.0  # standard deviations that a rise must have over what it wanders; chosen


@dataclass(frozen=True)
class Looks:
    """One hour's look. log10 of raw BER, degrees C and dBm; NaN where nothing was measured.

    series: (N, 48) log10 of the raw BER, less what all of its cohort did.
    recent: (N,) median of the last three hours.  past: (N,) that of the hours before.
    centre, spread, size: (N,) of the cohort's recent values.
    newest, change: of `heat` and `light`: now, and harm against the own past less that of the cohort.
    """

    series: Floats
    raw: NDArray[np.float32]
    recent: Floats
    past: Floats
    centre: Floats
    spread: Floats
    size: NDArray[np.int64]
    newest: Mapping[str, Floats]
    change: Mapping[str, Floats]

    @classmethod
    def of(cls, history: OpticHistory, groups: NDArray[np.int32]) -> Looks:
        raw = history.of("ber")[: len(groups)]
        recent, past = row_median(raw[:, -_RECENT:]), _past(raw)
        centre, size = grouped_median(recent, groups)
        spread, _ = grouped_mad(recent, groups)
        newest, change = {}, {}
        for kind, sign in (("heat", 1.0), ("light", -1.0)):
            hours = history.of(kind)[: len(groups)]
            newest[kind] = row_median(hours[:, -_RECENT:])
            moved = sign * (newest[kind] - _past(hours))
            common, peers = grouped_median(moved, groups)
            change[kind] = moved - np.where((peers >= _COHORT) & np.isfinite(common), common, 0.0)
        return cls(_without_common(raw, groups), raw, recent, past, centre, _NORMAL * spread, size, newest, change)

    def suspects(self, high: float, limit: float, horizon: float, slope: float, hours: int) -> Bools:
        """(N,) ports worth the full look: high, or halves that differ by most of what would cross the limit in time."""
        half = hours // 2
        late, early = row_median(self.series[:, -half:]), row_median(self.series[:, -2 * half : -half])
        speed = (late - early) / half * 24
        wanted = np.maximum(slope, (limit - self.recent) / horizon)
        rises = (speed > 0.6 * wanted) & (self.recent < limit)  # NaN: no
        return np.asarray(rises | (self._high_hours(high) >= _RECENT))

    def is_high(self, i: int, high: float, limit: float) -> bool:
        """High for three hours, and far from its peers; without peers, from its own past.

        A link that works beyond the limit has a stronger code, and where its peers differ by much it is like some.
        """
        spread = self.spread[i] if self.size[i] >= _COHORT else 0.0
        far = self.above(i) >= max(_DECADE, _OUTLIER * spread)
        return bool(self._high_hours(high)[i] >= _RECENT and far and self.recent[i] < limit)

    def above(self, i: int) -> float:
        """Decades above its peers; without peers, above its own past. NaN: neither is known."""
        other = self.centre[i] if self.size[i] >= _COHORT else self.past[i]
        return float(self.recent[i] - other)

    def high_since(self, i: int, high: float) -> int:
        """Place of the first of the last hours that are high."""
        low = np.flatnonzero(~(self.raw[i] > np.log10(high)))
        return int(low[-1]) + 1 if len(low) else 0

    def _high_hours(self, high: float) -> NDArray[np.int64]:
        """(N,) how many of the last three hours are high."""
        return np.asarray((self.raw[:, -_RECENT:] > np.log10(high)).sum(axis=1))

    def trend(self, i: int) -> Trend | None:
        return trend(self.series[i])

    def clear(self, found: Trend) -> bool:
        """Whether it has risen by more than it wanders."""
        return found.slope * found.hours / 24 > _SURE * found.spread

    def hot(self, limit: float, rise: float) -> Bools:
        """(N,) hotter than modules may be, or than it was while its peers are as they were."""
        return np.asarray((self.newest["heat"] > limit) | (self.change["heat"] >= rise))

    def dark(self, loss: float) -> Bools:
        """(N,) has lost light while its peers have not."""
        return np.asarray(self.change["light"] >= loss)

    def among(self, i: int) -> str:
        """Whom a port is compared with, in words."""
        if self.size[i] >= _COHORT:
            return f"{self.size[i] - 1} ports alike: {10 ** self.centre[i]:.1e}"
        return f"its own past: {10 ** self.past[i]:.1e}" if np.isfinite(self.past[i]) else "nothing to compare it with"

    def compared(self, i: int, cohort: str) -> Compared:
        alike = bool(self.size[i] >= _COHORT)
        other = float(self.centre[i] if alike else self.past[i])
        spread, peers = (float(self.spread[i]), int(self.size[i]) - 1) if alike else (None, 0)
        return Compared(float(self.recent[i]), other, spread, cohort, peers, self.above(i), "decade")

    def module(self, i: int) -> dict[str, Any]:
        """What the module says beside it: heat and loss of light point to the cause."""
        facts = {
            "module_degrees": float(self.newest["heat"][i]),
            "module_warmer_k": float(self.change["heat"][i]),
            "light_dbm": float(self.newest["light"][i]),
            "light_lost_db": float(self.change["light"][i]),
        }
        return {name: round(value, 2) for name, value in facts.items() if np.isfinite(value)}


def _past(hours: NDArray[np.float32]) -> Floats:
    """(N,) median of the hours before the present; NaN where they are too few."""
    before = hours[:, : HOURS - _RECENT]
    enough = np.isfinite(before).sum(axis=1) >= _PAST
    return np.where(enough, row_median(before), np.nan)


def _without_common(raw: NDArray[np.float32], groups: NDArray[np.int32]) -> Floats:
    """(N, 48) less the median of what each cohort did in that hour, departures from each port's own median."""
    series = raw.astype(np.float64)
    own = series - row_median(raw)[:, None]
    for hour in np.flatnonzero(np.isfinite(own).any(axis=0)).tolist():
        common, size = grouped_median(own[:, hour], groups)
        series[:, hour] -= np.where((size >= _COHORT) & np.isfinite(common), common, 0.0)
    return series
