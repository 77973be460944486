"""How probable the cause of an incident is: odds against the other causes that were weighed, calibrated.

The odds assume that all members are independent and all rates known, so that they are far too sure. So the share of
incidents that was right, with the same kind of evidence and margin, was counted on simulated faults
(docs/root_cause.md): that share is the confidence.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.incidents.cases import Case
from pipeline.incidents.factors import FACTOR_KINDS
from pipeline.incidents.likelihood import DEVICE_RATES
from pipeline.incidents.solver import SharedCause
from pipeline.model.topology import kind_of

NAMED, SHARED, ALONE = "named", "shared", "alone"
"""A finding above suspect names the cause, which explains others; only members are found; it explains only itself."""
_EDGES = (0.0, 5.0, 15.0)
"""Margins of log odds between the rows of the table. Chosen: so that each row has enough incidents to count."""
_SHARE_RIGHT: Mapping[str, tuple[float, ...]] = {
    NAMED: (0.35, 0.6, 0.75, 0.91),
    SHARED: (0.45, 0.5, 0.8, 0.96),
    f"{ALONE} watch": (0.85, 0.87, 0.93, 0.99),
    f"{ALONE} ticket": (0.7, 0.75, 0.85, 0.98),
    f"{ALONE} page": (0.5, 0.7, 0.8, 0.94),
}
"""Kind of evidence -> share that was right below, between and above _EDGES: of 719 incidents of seeds 0-9."""
_UNPLACED = 0.3
"""Most confidence of a ticket or page without topology: what its members share was not weighed. Of 404 such incidents
beside a fault of what a topology would have named, 37 were right; where faults are single, most do. Chosen."""
_NAMED_ODDS = 8.0
"""Log odds of a finding on the cause itself: one begins by chance on 1 in 3,000 such devices in an hour. Chosen."""
MOST_ALTERNATIVES = 4
"""Other causes that are kept with an incident: what a person reads. Chosen."""


@dataclass(frozen=True, slots=True)
class Assessment:
    """How sure a cause is.

    basis: kind of evidence. margin: log odds against the best other cause. others: causes with log odds, best first;
    None: separate faults. placed: whether the topology says what its members share with others.
    """

    basis: str
    margin: float
    others: tuple[tuple[str | None, float], ...]
    placed: bool = True

    @property
    def confidence(self) -> float:
        """Returns the calibrated probability that the cause is right, to two digits."""
        share = _SHARE_RIGHT[self.basis][bisect_right(_EDGES, self.margin)]
        return share if self.placed or self.basis == f"{ALONE} watch" else min(share, _UNPLACED)


def assess(
    case: Case,
    suspects: Mapping[str, str],
    own: Sequence[SharedCause],
    found: Sequence[SharedCause],
    placed: bool = True,
) -> Assessment:
    """Returns how sure the cause of a case is.

    suspects: entity of each condition -> its suspect. own: the cause weighed by the conditions of the case; found: all
    that was weighed above it.
    """
    cause = case.incident.cause
    named = [c for c in case.conditions.values() if suspects[c.entity] == cause]
    others: dict[str | None, float] = {}
    for shared in found:
        if shared.cause != cause:
            others[shared.cause] = max(shared.log_odds, others.get(shared.cause, -math.inf))
    score = max((shared.log_odds for shared in own), default=0.0)
    if len(named) == len(case.conditions):
        basis = f"{ALONE} {case.incident.severity}"
    else:
        firm = any(c.level != "suspect" for c in named)
        basis, score = (NAMED, score + _NAMED_ODDS) if firm else (SHARED, score)
        others[None] = 0.0
    best = sorted(others.items(), key=lambda o: (-o[1], o[0] or ""))[:MOST_ALTERNATIVES]
    # one device alone has no other explanation: as if nothing shared were likely
    margin = score - best[0][1] if best else _EDGES[-1]
    return Assessment(basis, margin, tuple(best), placed)


def make_explanation(case: Case, assessed: Assessment) -> dict[str, Any]:
    """Returns the `explanation` of an incident: evidence, prior, and other causes that share the rest."""
    kind, left = kind_of(case.incident.cause), 1 - assessed.confidence
    weights = [math.exp(max(-30.0, min(0.0, odds - assessed.others[0][1]))) for _, odds in assessed.others]
    known = FACTOR_KINDS.get(kind)
    return {
        "basis": assessed.basis.split()[0],
        "margin": round(assessed.margin, 1),
        "evidence": case.reason,
        "faults_per_day": known.per_day if known else DEVICE_RATES.get(kind),
        "alternatives": [
            {"cause": cause, "probability": round(left * weight / sum(weights), 3)}
            for (cause, _), weight in zip(assessed.others, weights, strict=True)
        ],
    }
