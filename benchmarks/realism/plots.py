"""Pictures. The committed ones show no real curve: only the simulated one, and its distance in real spreads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.realism.page import CLOSE, moved, yardstick
from benchmarks.realism.quantities import Compared
from benchmarks.realism.sample import PERCENTILES, gaps, quantiles

SIMULATED, REAL = "#2a6f97", "#c1121f"
_STYLE: Any = {"font.size": 8, "axes.titlesize": 8, "axes.grid": True, "grid.alpha": 0.3, "font.family": "DejaVu Sans"}
_FINE = np.linspace(0.1, 99.9, 500)
_DPI, _ROW, _WIDTH = 80, 1.9, 10.0  # dots and inches; chosen: a page of text is about as wide
_COLOURS = 48  # enough for smooth letters and lines; chosen


def overview(found: Sequence[Compared], to: Path) -> None:
    """Two quantities a row: simulated distribution function, and beside it how far it is from the real one."""
    rows = (len(found) + 1) // 2
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _ROW * rows))
        figure.subplots_adjust(0.05, 0.48 / _ROW / rows, 0.99, 1 - 0.25 / _ROW / rows, 0.35, 0.75)
        axes = figure.subplots(rows, 4, squeeze=False).reshape(-1, 2)
        for (left, right), one in zip(axes, found, strict=False):
            _panel(left, right, one)
        for left, right in axes[len(found) :]:
            left.set_axis_off()
            right.set_axis_off()
        _save(figure, to)


def overlay(found: Compared, to: Path) -> None:
    """Both curves, their densities and the gap: for engineers, not for the project."""
    real, made = found.real, found.simulated
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 3.2))
        figure.subplots_adjust(0.05, 0.15, 0.99, 0.92, 0.2)
        left, middle, right = figure.subplots(1, 3)
        sides = [("real", real, REAL)] + ([("simulated", made, SIMULATED)] if made else [])
        for name, one, colour in sides:
            left.plot(quantiles(one, _FINE), _FINE, color=colour, label=name)
        low, high = (np.min if k == 0 else np.max for k in (0, 1))
        edges = [quantiles(one, np.array([0.5, 99.5])) for _, one, _ in sides]
        span = (float(low([e[0] for e in edges])), float(high([e[1] for e in edges])))
        for _, one, colour in sides:
            weights = np.full(len(one.values), 1 / len(one.values))
            middle.hist(one.values, 60, range=span, weights=weights, color=colour, alpha=0.5)
        left.set_xlabel(found.quantity.unit)
        left.set_title(found.quantity.title)
        left.legend()
        if made:
            _gap(right, found)
        _save(figure, to)


def _panel(left: Any, right: Any, found: Compared) -> None:
    left.set_title(found.quantity.title, loc="left")
    if found.simulated is None:
        left.text(0, 0.5, "not simulated", transform=left.transAxes)
        left.set_axis_off()
        right.set_axis_off()
        return
    left.plot(quantiles(found.simulated, _FINE), _FINE, color=SIMULATED, linewidth=1.2)
    left.set_xlabel(f"simulated, {found.quantity.unit}")
    left.set_ylabel("%")
    _bars(right, found)


def _bars(axis: Any, found: Compared) -> None:
    """How far the simulated values are from the real ones, and halves of the real ones from each other."""
    bars = [("simulated", moved(found), SIMULATED), ("real halves", yardstick(found), "#888888")]
    known = [bar for bar in bars if np.isfinite(bar[1])]
    axis.axvspan(0, CLOSE, color="#2a9d8f", alpha=0.15, linewidth=0)
    for row, (name, size, colour) in enumerate(known):
        axis.barh(row, size, 0.4, color=colour)
        axis.text(0.01, row - 0.6, name, transform=axis.get_yaxis_transform(), va="top")
    axis.set_yticks([])
    axis.set_xlim(0, max(1.2, *(1.1 * size for _, size, _ in known)))
    axis.set_ylim(1.4, -0.8)
    axis.set_xlabel("W1 / real spread")


def _gap(axis: Any, found: Compared) -> None:
    """(simulated - real quantile) / real spread by percentile; linear up to one spread, then by powers of ten."""
    apart = gaps(found.real, found.simulated) if found.simulated else np.empty(0)
    axis.axhspan(-0.25, 0.25, color="#2a9d8f", alpha=0.15, linewidth=0)
    axis.plot(PERCENTILES, apart, color="#444444", marker="o", markersize=2, linewidth=1)
    axis.set_yscale("symlog", linthresh=1.0)
    axis.yaxis.set_major_formatter("{x:g}")
    reach = max(1.2, 1.2 * float(np.max(np.abs(apart))))
    axis.set_ylim(-reach, reach)
    axis.set_xlabel("percentile")
    axis.set_ylabel("gap, real spreads")


def _save(figure: Figure, to: Path) -> None:
    """In few colours and without date or version: small, and the same figures give the same bytes."""
    canvas: Any = FigureCanvasAgg(figure)
    figure.set_dpi(_DPI)
    canvas.draw()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(_COLOURS)
    to.parent.mkdir(parents=True, exist_ok=True)
    picture.save(to, optimize=True)
