"""docs/realism.md from its template: every number in it is one of the figures that are computed here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.realism.quantities import Compared
from benchmarks.realism.sample import (
    Sample,
    kolmogorov,
    kurtosis,
    median_phi,
    quantum,
    spread,
    spread_ratio,
    wasserstein,
)

TEMPLATE = Path(__file__).with_name("template.md")
CLOSE, OFF, WIDTH = 0.25, 1.0, 2.0
"""Moves of a quarter and of a whole real spread, and the factor between spreads, where verdicts change; chosen."""
FIGURES = {
    "gpu": "GPUs",
    "port": "Ports",
    "rank": "Training steps",
    "host": "Servers",
    "loop": "Coolant",
}
_NONE = "-"
_MARK = re.compile(r"\{\{([a-z0-9_]+)(?:\.([a-z0-9_]+))?\}\}")
_DISTANCES = (
    ("quantity", "title"),
    ("unit", "unit"),
    ("KS", "ks"),
    ("W1 / spread", "relative"),
    ("two real halves", "yardstick"),
    ("spread, simulated / real", "spread_ratio"),
    ("verdict", "verdict"),
)
_SHAPES = (
    ("quantity", "title"),
    ("lag-1 autocorrelation, real", "phi_real"),
    ("simulated", "phi_simulated"),
    ("excess kurtosis, real", "kurtosis_real"),
    ("simulated", "kurtosis_simulated"),
    ("step, simulated / real", "step_ratio"),
    ("share that meets the condition, simulated / real", "share_ratio"),
    ("values, real", "count_real"),
    ("simulated", "count_simulated"),
)


def figures_of(found: Compared) -> dict[str, str]:
    """Returns all fields of a quantity, as text."""
    quantity, real, made = found.quantity, found.real, found.simulated
    fields = {"title": quantity.title, "unit": quantity.unit, "source": quantity.source}
    fields |= _alone(real, "real")
    shares = found.shares or (math.nan, math.nan)
    fields |= {"share_ratio": number(shares[1] / shares[0]), "yardstick": number(yardstick(found))}
    if made is None:
        names = ("ks", "relative", "step_ratio", "spread_ratio")
        rest = dict.fromkeys([*names, *_alone(real, "simulated")], _NONE)
        return {**fields, **rest, "share_ratio": _NONE, "verdict": "not simulated"}
    fields |= _alone(made, "simulated")
    values = {
        "ks": kolmogorov(real, made),
        "relative": moved(found),
        "spread_ratio": spread_ratio(made, real),
        "step_ratio": quantum(made) / quantum(real),
    }
    return {**fields, **{name: number(float(value)) for name, value in values.items()}, "verdict": verdict(found)}


def verdict(found: Compared) -> str:
    """In a word: how far values must move, and whether they differ among themselves as much as real ones do."""
    if found.simulated is None:
        return "not simulated"
    if not found.quantity.judged:
        return "not judged"
    reach = moved(found)
    ratio = spread_ratio(found.simulated, found.real)
    if reach <= np.fmax(CLOSE, yardstick(found)) and 1 / WIDTH <= ratio <= WIDTH:
        return "close"
    return "off" if reach <= OFF else "far"


def moved(found: Compared) -> float:
    """By how many real spreads a value must move on average; NaN where nothing is simulated."""
    return wasserstein(found.real, found.simulated) / spread(found.real) if found.simulated else math.nan


def yardstick(found: Compared) -> float:
    """Distance of two halves of the real data in real spreads; NaN where there are none."""
    return wasserstein(*found.halves) / spread(found.real) if len(found.halves) == 2 else math.nan


def number(value: float) -> str:
    """Two significant digits below 10, none behind the point above; a dash where there is no value."""
    if not math.isfinite(value):
        return _NONE
    text = f"{value:.0f}" if abs(value) >= 9.95 else f"{float(f'{value:.2g}'):.10f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def page(compared: Sequence[Compared], settings: Mapping[str, str]) -> str:
    """Returns the whole text. Raises KeyError if the template names a missing value."""
    figures = {found.quantity.name: figures_of(found) for found in compared}
    blocks = {
        "distances": table(_DISTANCES, figures),
        "shapes": table(_SHAPES, figures),
        "verdicts": _count(figures),
        **settings,
    }

    def value(mark: re.Match[str]) -> str:
        name, field = mark.groups()
        return figures[name][field] if field else blocks[name]

    return _MARK.sub(value, TEMPLATE.read_text())


def table(columns: Sequence[tuple[str, str]], figures: Mapping[str, Mapping[str, str]]) -> str:
    """One line per quantity."""
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(fields[name] for _, name in columns) + " |" for fields in figures.values()]
    return "\n".join(lines)


def _alone(found: Sample, side: str) -> dict[str, str]:
    fields = {
        "phi": median_phi(found),
        "kurtosis": kurtosis(found.values),
    }
    return {f"{name}_{side}": number(value) for name, value in fields.items()} | {
        f"count_{side}": str(len(found.values))
    }


def _count(figures: Mapping[str, Mapping[str, str]]) -> str:
    """How many quantities got which verdict."""
    words = [fields["verdict"] for fields in figures.values()]
    return ", ".join(
        f"{words.count(word)} {word}"
        for word in ("close", "off", "far", "not judged", "not simulated")
        if word in words
    )
