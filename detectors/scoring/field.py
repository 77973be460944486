"""Precision as the field would see it: recall where faults are many, false pages where there are none.

A suite has far more faults per day than a data hall, so its own precision says little. Of what a hall would page, the
share that is right is rate x recall / (rate x recall + false pages), all per 1,000 node-days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from detectors.scoring.figures import rate

FIELD_RATES = (6.5, 2.34)
"""Failures per 1,000 node-days of Meta's RSC-1 and RSC-2 (Kokolis et al., "Revisiting Reliability", 2024)."""


def at_field_rates(page_kinds: Mapping[str, Any], clean: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Precision at each field rate, with the interval of the page rate; None where one of both is not known.

    page_kinds: figures of the events whose kind must be paged: a ticket is no page, so what it finds does not count.
    clean:      results of runs without faults; their pages and node-days are added up.
    """
    days = [result["node_days"] for result in clean]
    false = sum(result["false"] for result in clean)
    recall = page_kinds["recall"]
    pages = None if None in days else rate(false, math.fsum(days))
    if recall is None or pages is None:
        return None
    return {
        "recall": recall,
        "events": page_kinds["events"],
        "found": page_kinds["found"],
        "false_pages": false,
        "node_days": math.fsum(days),
        "false_pages_per_1000_node_days": pages,
        "precision": [
            {
                "faults_per_1000_node_days": faults,
                "value": _precision(faults * recall, pages["value"]),
                "low": _precision(faults * recall, pages["high"]),
                "high": _precision(faults * recall, pages["low"]),
            }
            for faults in FIELD_RATES
        ],
    }


def _precision(right: float, false: float) -> float | None:
    return right / (right + false) if right + false else None
