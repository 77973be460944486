"""Number formats, the same for the page and for comparisons, so that a page never changes by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def number(value: float | None) -> str:
    """Returns at least three digits, so that seconds are integers and rates are not 0."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def interval(rate: Mapping[str, float] | None) -> str:
    """Returns the count per 1,000 node-days with its exact 95 % interval."""
    return "-" if rate is None else f"{rate['value']:.2f} ({rate['low']:.2f} to {rate['high']:.2f})"


def bounds(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"
