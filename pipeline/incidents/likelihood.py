"""How much more likely one fault is than independent ones, from rates per day: of the site where it has measured them.

One shared fault F with n affected and s silent members (section "Root cause" of docs/architecture.md):

    ln odds = ln P(F fails in T) + n ln((1 - MISS) / p) + s ln(MISS / (1 - p))

T is the time within which the members began, p the chance that a member begins by itself in T. The form is that of
maximum-posterior explanations: SCORE (Kompella et al., NSDI 2005) and Flock (Harsh et al., CoNEXT 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.incidents.cases import Case
from pipeline.model.entity_names import KINDS
from pipeline.model.records import SECOND
from pipeline.model.topology import kind_of

DAY = 86_400 * SECOND
WINDOW = 120 * SECOND
"""Onsets are known to two intervals of the slowest collectors (60 s): closer ones are taken as this far apart."""
MISS = 0.5
"""Chance that a member of a failed group shows nothing: one of the two line cards of a switch carries half of its
ports, and a device at rest gets neither hot nor slow. Assumed; nobody publishes it."""
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
SHARED_RATES = {
    "node": 8e-5,  # power 0.14, CPU, board and chassis 0.09 each per 1M GPU-hours (Llama 3, table 5), of 8 GPUs
    "rack": 8e-5,  # a leak 0.02 and a power shelf 0.01 per rack-year (assumed)
    "row": 3e-3,  # recirculation 0.5 per hall-month (assumed), five rows
    "cdu": 2.7e-4,  # loss of a pump 0.1 per year (assumed)
    "pdu": 5.5e-5,  # a trip 0.02 per year (assumed)
    "leaf": 2e-5,  # 0.051 % per month (HPN, SIGCOMM 2024), and 0.01 % gray (assumed)
    "rail": 2e-5,  # as a leaf
}
"""Faults per day of what members share. A tenth or ten times as many changes the answer by a third of a member."""
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


@dataclass(frozen=True, slots=True)
class GroupOdds:
    """Log odds of one shared fault.

    since:  onset of the first member that belongs to it; members before are others.
    unsure: how much lower they may be, since the rate is known from few conditions.
    """

    log_odds: float
    since: int
    unsure: float


@dataclass(frozen=True, slots=True)
class SharedCause:
    """A cause above several affected units, with its log odds against independent faults.

    cases: those that began in its time span, by id.   size: monitored units below it.
    safe:  log odds with the uncertainty of the rate, by which it is believed.
    """

    cause: str
    cases: Mapping[str, Case]
    units: tuple[str, ...]
    size: int
    span: int
    log_odds: float
    safe: float

    def describe(self) -> str:
        """Returns the evidence as a sentence."""
        words = KINDS.get(kind_of(self.units[0]), ("unit", "units"))[1]
        ratio = describe_odds(self.safe)
        return (
            f"{len(self.units)} of {self.size} {words} within {describe_span(self.span)}: "
            f"one shared fault is {ratio} as likely as separate ones"
        )


def weigh_group(kind: str, onsets: Sequence[int], silent: int, rate: Rate, others: Callable[[int], float]) -> GroupOdds:
    """Returns the log odds of one fault of an entity of `kind` against independent ones, over the best time span.

    onsets: of its affected members, ascending.   silent: monitored members without a condition.
    others: share of the members of comparable groups that began since a time: what has hit all of them is no fault of
    one.
    """
    began = np.array(onsets, np.int64)
    days = np.maximum(began[-1] - began, WINDOW) / DAY
    shared = -np.expm1(-SHARED_RATES.get(kind, LEAST_RATE) * days)
    alone = -np.expm1(-rate.per_day * days)
    shape = min(rate.shape, FRAILTY) if kind == "node" else rate.shape  # the parts of one node are frail together
    unsure = np.cumsum(np.log1p(np.arange(len(began)) / shape))[::-1]  # ln E[rate^n] / E[rate]^n
    odds = _log_odds(shared, np.arange(len(began), 0, -1), silent, alone)
    best = int(np.argmax(odds - unsure))
    since, found = int(began[best]), float(odds[best])
    if (share := others(min(since, int(began[-1]) - WINDOW))) > alone[best]:
        found = min(found, float(_log_odds(shared[best], len(began) - best, silent, share)))
    return GroupOdds(found, since, float(unsure[best]))


def _log_odds(shared: Any, affected: Any, silent: int, alone: Any) -> Any:
    """Returns the log odds of the formula above, of numbers or arrays.

    Silence never counts for a shared fault: a member may have had a condition that ended within the time.
    """
    by_chance = np.clip(alone, 1e-12, 1 - MISS)
    return np.log(shared) + affected * np.log((1 - MISS) / by_chance) + silent * np.log(MISS / (1 - by_chance))


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
