"""The page budget: a detector whose pages are wrong too often opens tickets instead, until there is room again.

What counts is stored (table wrong_pages): pages that a person marked as not a fault, and pages that ended by
themselves, without an action of a person and without a second family of detectors that saw harm. A detector is lowered
when so many of them, in the window, are more than its budget allows even with luck: the lower limit of a Poisson count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.sections import Budget
from pipeline.model.entity_names import pager_title
from pipeline.model.records import Finding

PAGES: Mapping[str, float] = {
    "link": 0.06,
    "straggler": 0.08,
    "sdc": 0.004,
    "memory": 0.03,
    "power": 0.03,
    "coolant": 0.05,
    "telemetry": 0.04,
}
"""False pages per 1,000 node-days that a family may cost: shares of the 0.3 at which nine in ten pages are right at
published fault rates (2.3 to 6.5 per 1,000 node-days: Kokolis et al., HPCA 2025)."""
OTHERS = 0.03
"""Of a family that is not in PAGES; chosen: the least of the hardware families."""
LOGGED = frozenset(
    "xid memory sdc sdc_replica telemetry telemetry_site coolant_leak coolant_edge thermal_edge".split()  # noqa: SIM905
)
"""Detectors of facts that a device logged or a bit-exact comparison showed (fatal XID, lost GPU, dead node, leak,
collapse of flow, wrong digest): never lowered, since each page is what happened, not an estimate."""
LEAST = 3
"""Wrong pages below which nothing is lowered: two may be one cause. Chosen."""
_FAMILIES = {"thermal": "coolant"}
_SURE = 1.645  # standard errors: 95 %, one-sided


def family_of(detector: str) -> str:
    """Returns the family whose budget a detector shares: its name before the first underscore."""
    first = detector.partition("_")[0]
    return _FAMILIES.get(first, first)


def poisson_lower(count: int) -> float:
    """Returns the mean that is exceeded with 95 % confidence after `count` events.

    Wilson and Hilferty (1931), PNAS 17, 684-688, for the chi-squared quantile; within 2 % from 3 events on.
    """
    if count == 0:
        return 0.0
    return float(count * max(1 - 1 / (9 * count) - _SURE / (3 * math.sqrt(count)), 0.0) ** 3)


@dataclass
class PageBudget:
    """Which detectors are lowered to tickets, from what the store has counted.

    lowered: by name, in force.   resets: detector -> when a person reset it (us).   counted: wrong pages in the window
    by detector.   node_days: of the window.
    """

    config: Budget = field(default_factory=Budget)
    lowered: frozenset[str] = frozenset()
    resets: dict[str, int] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    node_days: float = 0.0

    def pages_allowed(self, name: str) -> float:
        """Returns the budget of a detector or family, per 1,000 node-days."""
        family = family_of(name)
        return self.config.pages.get(name, self.config.pages.get(family, PAGES.get(family, OTHERS)))

    def review(self, counted: Mapping[str, int], node_days: float, now: int) -> list[Finding]:
        """Lowers and raises detectors; returns a ticket on each that changed, or the end of its ticket."""
        self.counted, self.node_days = dict(counted), node_days
        before, self.lowered = self.lowered, self._find_spent(counted)
        return [self._describe(name, now) for name in sorted(self.lowered ^ before)]

    def _describe(self, name: str, now: int) -> Finding:
        count, lowered = self.counted.get(name, 0), name in self.lowered
        facts: dict[str, Any] = {"wrong_pages": count, "allowed": self._pages_in_window(name)}
        facts |= {"clears": "room in its page budget", "holds" if lowered else "cleared": True}
        what = f"{count} wrong pages, its pages are tickets now" if lowered else "its pages are pages again"
        entity = f"detector:{name}"
        return Finding(now, now, entity, "page_budget", "ticket", float(count), pager_title(entity, what), facts, ())

    def _pages_in_window(self, name: str) -> float:
        return round(self.pages_allowed(name) * self.node_days / 1000, 2)

    def snapshot(self) -> str:
        """Returns its state as JSON."""
        return json.dumps({"lowered": sorted(self.lowered), "resets": self.resets})

    def restore(self, text: str) -> None:
        """Continues from a snapshot."""
        state = json.loads(text)
        self.lowered = frozenset(state["lowered"]) if self.config.enabled else frozenset()
        self.resets = {str(name): int(time) for name, time in state["resets"].items()}

    def _find_spent(self, counted: Mapping[str, int]) -> frozenset[str]:
        """Returns the detectors that are to be lowered: each for itself, then the worst of a family that spent its."""
        if not self.config.enabled:
            return frozenset()
        judged = {name: n for name, n in counted.items() if name not in LOGGED}
        found = {name for name, n in judged.items() if self._is_spent(n, self.pages_allowed(name))}
        for family in {family_of(name) for name in judged}:
            mine = sorted((n, name) for name, n in judged.items() if family_of(name) == family and name not in found)
            allowed = self.config.pages.get(family, PAGES.get(family, OTHERS))
            while mine and self._is_spent(sum(n for n, _ in mine), allowed):
                found.add(mine.pop()[1])
        return frozenset(found)

    def _is_spent(self, count: int, allowed: float) -> bool:
        return count >= LEAST and poisson_lower(count) > allowed * self.node_days / 1000

    def lowers(self, detector: str, level: str) -> bool:
        """Returns whether a finding of that level becomes a ticket."""
        return level == "page" and detector in self.lowered

    def list_rows(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Returns a row per detector, in the form of the API."""
        return [
            {
                "detector": name,
                "family": family_of(name),
                "budget": self.pages_allowed(name),
                "allowed": self._pages_in_window(name),
                "wrong_pages": self.counted.get(name, 0),
                "exempt": name in LOGGED,
                "lowered": name in self.lowered,
            }
            for name in names
        ]
