"""`/metrics`: the backend's counters in the Prometheus text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Mapping

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(counters: Mapping[str, float]) -> str:
    """One HELP and one TYPE line per family, then its samples. A family named `..._total` is a counter."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in counters.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    lines: list[str] = []
    for family, samples in sorted(families.items()):
        kind = "counter" if family.endswith("_total") else "gauge"
        lines += [f"# HELP {family} {_help(family)}", f"# TYPE {family} {kind}"]
        lines += [f"{name} {_number(value)}" for name, value in samples]
    return "\n".join(lines) + "\n"


def _help(family: str) -> str:
    """The family's name in words: fleetpulse_rows_total -> 'Rows, since the start.'"""
    words = family.removeprefix("fleetpulse_").removesuffix("_total").replace("_", " ")
    since = ", since the start." if family.endswith("_total") else ", now."
    return words[:1].upper() + words[1:] + since


def _number(value: float) -> str:
    """Whole numbers without a point, the rest as Python writes them, the infinities as Prometheus wants them."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
