"""Error budgets and burn rates: the arithmetic of an objective, without a store.

An objective with target T over a window may lose the share 1 - T of its total: the error budget. The burn rate is how
fast that is used: 1 uses exactly the budget within the window. Alerts need a long and a short window above the same
rate, so that they begin soon and end soon (Google, Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate
Alerts", Table 5-8, whose numbers these are).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.model.records import SECOND

HOUR = 3600 * SECOND
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class BurnRule:
    """One pair of windows (us) and the burn rate above which both must be."""

    name: str
    rate: float
    long: int
    short: int


RULES: tuple[BurnRule, ...] = (
    BurnRule("fast", 14.4, HOUR, 5 * 60 * SECOND),
    BurnRule("medium", 6.0, 6 * HOUR, 30 * 60 * SECOND),
    BurnRule("slow", 1.0, 3 * DAY, 6 * HOUR),
)
"""Of a window of 30 days these use 2 %, 5 % and 10 % of the budget before they alert."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The total and the lost part of it, in the same unit: GPU-hours or node-hours.

    measured: share of the total whose loss can be measured.
    """

    total: float
    lost: float
    measured: float = 1.0

    @property
    def achieved(self) -> float | None:
        """The share that was not lost; None if there was nothing."""
        return None if self.total <= 0 else 1 - min(max(self.lost, 0.0), self.total) / self.total

    def burn(self, target: float) -> float | None:
        """The burn rate; None if there was nothing."""
        return None if self.achieved is None else (1 - self.achieved) / (1 - target)


@dataclass(frozen=True, slots=True)
class Standing:
    """An objective now. budget, left: in the unit of the usage; left is below 0 if the objective is missed.

    burns: rule -> (rate of the long window, of the short one).   alert: the rule that holds, fastest first; "" if none.
    """

    usage: Usage
    budget: float
    left: float
    burns: dict[str, tuple[float | None, float | None]]
    alert: str

    def as_json(self) -> dict[str, Any]:
        """Returns it in the form of the API."""
        share = None if self.budget <= 0 else round(self.left / self.budget, 4)
        achieved = self.usage.achieved
        return {
            "achieved": None if achieved is None else round(achieved, 6),
            "total_hours": round(self.usage.total, 3),
            "lost_hours": round(self.usage.lost, 3),
            "measured_share": round(self.usage.measured, 4),
            "budget_hours": round(self.budget, 3),
            "left_hours": round(self.left, 3),
            "left_share": share,
            "burn_rates": {name: [_round(long), _round(short)] for name, (long, short) in self.burns.items()},
            "alert": self.alert or None,
        }


def judge(target: float, window: int, now: int, measure: Callable[[int, int], Usage]) -> Standing:
    """Returns how an objective stands. measure: the usage between two times (us)."""
    usage = measure(now - window, now)
    budget = (1 - target) * usage.total
    burns: dict[str, tuple[float | None, float | None]] = {}
    alert = ""
    for rule in RULES:
        if rule.long > window:
            continue
        pair = tuple(measure(now - span, now).burn(target) for span in (rule.long, rule.short))
        burns[rule.name] = (pair[0], pair[1])
        alert = alert or (rule.name if all(burn is not None and burn > rule.rate for burn in pair) else "")
    return Standing(usage, budget, budget - usage.lost, burns, alert)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
