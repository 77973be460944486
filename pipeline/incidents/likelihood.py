"""How often conditions begin by chance, measured at the site; how likely one fault is of two conditions of a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.model.records import SECOND

DAY = 86_400 * SECOND
WINDOW = 120 * SECOND
"""Onsets are known to two intervals of the slowest collectors (60 s): closer ones are taken as this far apart."""
MISS = 0.5
"""Chance that a member of a failed group shows nothing: one of the two line cards of a switch carries half of its
ports, and a device at rest gets neither hot nor slow. Assumed; not published."""
SHIPPED_RATE = 0.1
"""Conditions per node-day and family before the site has measured its own: three times the 262 false tickets per 1,000
node-days that the detectors raised on a fleet of other physics, over eight families. It counts as one condition."""
LEAST_RATE = 1e-3
"""Conditions per node-day and family that stay possible at the quietest site: real faults alone are 2.3 to 6.5 per
1,000 node-days (Kokolis et al., HPCA 2025), over several families."""
HALF_LIFE = 7 * DAY
"""Time after which a condition counts half: a week has all shifts of a site. Chosen."""
LONGEST_STEP = 600 * SECOND
"""Time between two instants that counts as observed at most; a longer one is a gap. Chosen."""
FRAILTY = 0.2
"""Gamma shape of the rates of single devices: the worst 5 % have 44 % of all faults (Kokolis et al., HPCA 2025). Two
independent conditions meet on one device 1 + 1/shape times as often as if all were alike."""
DEVICE_RATES = {
    "gpu": 5e-4,  # 19.7 per 1M GPU-hours (Llama 3, table 5)
    "port": 1e-2,  # flap episodes per link-day (assumed), optics 0.5 % and hard failures 0.057 % per month (HPN)
    "node": 4e-3,  # 2.3 to 6.5 per 1,000 node-days (Kokolis et al.)
}
"""Faults per day of one device."""
_OTHER_DEVICE = 1e-3  # per day: as a node's part; chosen


@dataclass(frozen=True, slots=True)
class Rate:
    """Conditions per day and unit. shape: conditions that it rests on: the shape of the Gamma distribution of rates."""

    per_day: float
    shape: float


@dataclass(slots=True)
class BaseRates:
    """Conditions that began with a cause of their own, by family and kind of unit, and the days observed.

    Both are forgotten exponentially, so that a month of trouble does not stay the site's rate.
    """

    counts: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    days: float = 0.0
    time: int = 0

    def advance(self, time: int) -> None:
        """Adds the time since the previous instant to the days observed."""
        if self.time and time > self.time:
            passed = min(time - self.time, LONGEST_STEP)
            self.days = self.days * 0.5 ** (passed / HALF_LIFE) + passed / DAY
        self.time = max(self.time, time)

    def count(self, family: str, kinds: Sequence[str]) -> None:
        """Counts one condition for each kind of unit that it is about or below."""
        for kind in kinds:
            self.counts[family, kind] = self._count(family, kind) + 1, self.time

    def _count(self, family: str, kind: str) -> float:
        number, time = self.counts.get((family, kind), (0.0, self.time))
        return float(number * 0.5 ** (max(0, self.time - time) / HALF_LIFE))

    def rate(self, family: str, kind: str, number: Mapping[str, int], own: int) -> Rate:
        """Returns how often a condition of a family begins on a unit of a kind.

        number: of units at the site, by kind.   own: counted conditions that are weighed now, which are left out.
        """
        units = max(1, number.get(kind, 1))
        nodes_each = max(1, number.get("node", 1)) / units
        shape = 1 + max(0.0, self._count(family, kind) - own)
        measured = shape / (1 / (SHIPPED_RATE * nodes_each) + units * self.days)
        return Rate(max(LEAST_RATE * nodes_each, measured), shape)

    def copy(self) -> BaseRates:
        """Returns an independent copy."""
        return BaseRates(dict(self.counts), self.days, self.time)

    def as_json(self) -> dict[str, Any]:
        """Returns all state as plain data."""
        return {"days": self.days, "time": self.time, "counts": [[*k, *v] for k, v in sorted(self.counts.items())]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> BaseRates:
        """Restores the state of `as_json`; None: a snapshot from before rates were measured."""
        if data is None:
            return cls()
        counts = {(family, kind): (number, time) for family, kind, number, time in data["counts"]}
        return cls(counts, data["days"], data["time"])


def weigh_pair(kind: str, apart: int, first: Rate, second: Rate) -> float:
    """Returns the log odds of one fault of a device of `kind` against two independent ones, `apart` us from each
    other."""
    days = max(apart, WINDOW) / DAY
    one = DEVICE_RATES.get(kind, _OTHER_DEVICE) * (1 - MISS) ** 2
    return math.log(one / ((1 + 1 / FRAILTY) * first.per_day * second.per_day * days))


def describe_odds(log_odds: float) -> str:
    """Returns the odds in words: `40 times`, `over a million times`."""
    if log_odds > math.log(1e6):
        return "over a million times"
    ratio = math.exp(log_odds)
    return f"{ratio:.1f} times" if ratio < 10 else f"{float(f'{ratio:.2g}'):,.0f} times"


def describe_span(span: int) -> str:
    """Returns a time span in words, at least one second."""
    return f"{max(1, round(span / SECOND))} s"
