"""The reliability plot of `confidence` as SVG: said against right, with the 95 % interval of each range."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SIDE, _EDGE = 360, 50


def reliability_svg(rows: Sequence[tuple[float, float, int]]) -> str:
    """Returns the plot. rows: mean confidence said, share that was right, incidents."""

    def x(value: float) -> float:
        return _EDGE + value * _SIDE

    def y(value: float) -> float:
        return _EDGE + (1 - value) * _SIDE

    marks = []
    for said, right, count in rows:
        low, high = wilson(right, count)
        marks.append(f'<line x1="{x(said):.1f}" x2="{x(said):.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}" class="bar"/>')
        marks.append(f'<circle cx="{x(said):.1f}" cy="{y(right):.1f}" r="5" class="dot"/>')
        marks.append(f'<text x="{x(said) - 8:.1f}" y="{y(right) + 16:.1f}" text-anchor="end">{count}</text>')
    ticks = [
        f'<text x="{x(v):.1f}" y="{_EDGE + _SIDE + 18}" text-anchor="middle">{v:.1f}</text>'
        f'<text x="{_EDGE - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.1f}</text>'
        for v in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    size = _SIDE + 2 * _EDGE
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif">
<style>
text{{fill:#666;font-size:12px}}.bar,.axis{{stroke:#888;stroke-width:2}}.dot{{fill:#2a78d6}}
.even{{stroke:#888;stroke-dasharray:4 4}}
</style>
<rect x="{_EDGE}" y="{_EDGE}" width="{_SIDE}" height="{_SIDE}" fill="none" class="axis"/>
<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" class="even"/>
{chr(10).join(ticks)}
{chr(10).join(marks)}
<text x="{x(0.5)}" y="{size - 10}" text-anchor="middle">confidence of the incident</text>
<text transform="translate(14 {y(0.5)}) rotate(-90)" text-anchor="middle">share with the right cause</text>
</svg>
"""


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share of so many."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)
