"""Signals of the class custom: one series of another exporter that no mapping knows. One line per signal."""

from __future__ import annotations

from pipeline.signals.signal import Signal

SIGNALS: tuple[Signal, ...] = (
    Signal("custom.value", "", "gauge", "custom", "f8", "Value of the series as the exporter gives it; its name, labels and type are attributes", "OpenMetrics", "", interval=15.0),
)  # fmt: skip
